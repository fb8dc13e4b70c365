"""The lines of the contract about the cost: what the releases cost, and that batches are drawn as the event says.

If noise is correlated over the steps, one example moves C G, where G holds the sums of the steps. The cost must cover
the largest move over all signs of the gradients and all sets of steps in which one example may take part.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import jax
import numpy as np
from dp_accounting import (
    DpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SampledWithReplacementDpEvent,
)
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from scipy import linalg, special, stats

from dpx.accounting.flat_event import from_event
from dpx.accounting.groups import GroupGaussianDpEvent
from dpx.audit.contract.draws import reduced_chi_square_quantile
from dpx.audit.contract.subject import NotChecked, Violation
from dpx.audit.contract.trial import MechanismUnderTest, names_of_special_events
from dpx.sampling.batch import Draw
from dpx.sampling.schemes import FixedOrder, FullBatch, Sampling, ShuffledEpochs
from dpx.sampling.varying import CyclicPoissonSampling, RandomAllocationDpEvent
from dpx.states.reading import release_state
from dpx.states.record import identity_of

RUN_LENGTHS = (0, 1, 2, 5, 12, 100, 1_001, 10_007, 50_021)  # numbers of steps
LONGEST_WITHOUT_SCHEDULE = 1_000_003  # the event of a schedule has as many parts as steps
MUST = 12  # steps that a mechanism must allow; it may refuse longer runs
TAKEN = 4  # steps after which the state's record is read
OF_SAMPLINGS = (  # events that assume a certain sampling
    GroupGaussianDpEvent,
    PoissonSampledDpEvent,
    RandomAllocationDpEvent,
    SampledWithReplacementDpEvent,
    SampledWithoutReplacementDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
_PROBABILITY = "sampling_probability"


def check_cost(trial: MechanismUnderTest) -> str:
    """Checks that event and state count every release, at the noise multiplier that the mechanism used."""
    release = release_state(trial.state_after(TAKEN))
    if int(release.step) != TAKEN:
        raise Violation(f"the state counts {int(release.step)} releases after {TAKEN}")
    used = trial.multipliers[:TAKEN]
    precision = float(release.precision[0]) - float(release.precision[1])
    if (used > 0).all() and not math.isclose(precision, float(np.sum(used**-2.0)), rel_tol=1e-5):
        raise Violation(f"the state records other noise multipliers than {used.tolist()}, which the cost counts")
    return check_counted_releases(trial)


def check_counted_releases(trial: MechanismUnderTest) -> str:
    """Describes what the events of runs of many lengths count. Raises Violation if they count too few releases."""
    mechanism = trial.mechanism
    own, more, last = "", False, 0
    all_steps = RUN_LENGTHS if callable(mechanism.noise_multiplier) else (*RUN_LENGTHS, LONGEST_WITHOUT_SCHEDULE)
    for steps in all_steps:
        try:
            event = trial.event(steps)
        except ValueError as error:
            if steps > MUST:
                break
            raise NotChecked(f"{steps} steps have no event: {error}") from None
        last, expected = steps, mechanism.sampling.event(trial.multipliers[:steps])
        if mechanism.correlated is None and _are_equal(event, expected):
            continue  # nothing is missing, and reading each release of a long schedule takes seconds
        name = names_of_special_events(event, mechanism.sampling)
        if name or mechanism.correlated is not None:
            _require_plausible_event(event, trial.multipliers[:steps], mechanism.sampling)
            own = own or name
        else:
            more |= _require_all_releases_counted(expected, event, steps)
    if mechanism.correlated is not None:
        return require_costed_sensitivity(trial)
    if own:
        raise NotChecked(f"{own} is not an event of the sampling, so its own proof and tests must say that it is true")
    extra = "; the cost counts more releases" if more else ""
    tried = ", ".join(str(steps) for steps in all_steps if steps <= last)
    return f"{tried} steps cost what the multipliers and the sampling of the mechanism say{extra}"


def _are_equal(event: DpEvent, expected: DpEvent) -> bool:
    try:
        return bool(event == expected)
    except ValueError:  # raised by numpy for events that hold arrays
        return False


def _require_all_releases_counted(expected: DpEvent, event: DpEvent, steps: int) -> bool:
    """Whether the event has more releases than expected. Raises Violation if it lacks one."""
    wanted, offered = from_event(expected).event_counts, from_event(event).event_counts
    if missing := _find_missing_release(wanted, offered):
        raise Violation(f"{steps} steps do not count {missing}, of noise multiplier and sampling of the mechanism")
    return sum(offered.values()) > sum(wanted.values())


def _require_plausible_event(event: DpEvent, multipliers: np.ndarray, sampling: Sampling) -> None:
    """Raises Violation if an event assumes a sampling that does not draw the batches, or counts too little.

    A special event, such as error feedback's, needs a proof, which cannot be checked here. But it must have the right
    sampling, at least its rate, all releases, and no more noise than the mechanism's largest multiplier.
    """
    steps, parts, drawn = len(multipliers), list(_releases_of(event)), list(_releases_of(sampling.event(np.ones(1))))
    foreign = {type(part).__name__ for part in parts if isinstance(part, OF_SAMPLINGS)}
    if foreign := foreign.difference(type(part).__name__ for part in drawn):
        words = f"{', '.join(sorted(foreign))}, which is not of the sampling that draws, {sampling}"
        raise Violation(f"{steps} steps count {words}")
    rate = max((getattr(part, _PROBABILITY) for part in drawn if hasattr(part, _PROBABILITY)), default=1.0)
    for part in parts:
        if getattr(part, _PROBABILITY, 1.0) < rate * (1 - 1e-6):
            raise Violation(f"{steps} steps count {part}, of a lower rate than the sampling that draws, {sampling}")
        if identity_of(getattr(part, "sampling", sampling)) != identity_of(sampling):
            raise Violation(f"{steps} steps count {part}, of another sampling than the one that draws, {sampling}")
        noise = getattr(part, "noise_multiplier", 0.0)
        if isinstance(noise, int | float) and noise > multipliers.max(initial=0) * (1 + 1e-6):
            raise Violation(f"{steps} steps count {part}, of more noise than the largest multiplier of the mechanism")
    if (flat := from_event(event)).all_costed_by_dpx and (most := flat.release_count.most) < steps:
        raise Violation(f"{steps} steps are counted as {most} releases of noisy numbers")


def _releases_of(event: DpEvent) -> Iterator[DpEvent]:
    """Yields the releases of an event, and the events inside their sampling."""
    for release in from_event(event).event_counts:
        while release is not None:
            yield release
            release = getattr(release, "event", None)


def _find_missing_release(expected: dict[DpEvent, int], counted: dict[DpEvent, int]) -> DpEvent | None:
    """Returns a release that is expected more often than the event counts it, or None. Values may differ by 1e-6.

    Equal events are counted together. The rest are compared in sorted order.
    """
    wanted = _sorted_counts({event: count - counted.get(event, 0) for event, count in expected.items()})
    offered = _sorted_counts({event: count - expected.get(event, 0) for event, count in counted.items()})
    place, left = 0, offered[0][1] if offered else 0
    for event, count in wanted:
        while count > 0:
            while place < len(offered) and (left == 0 or not same_event(event, offered[place][0])):
                place += 1
                left = offered[place][1] if place < len(offered) else 0
            if place == len(offered):
                return event
            used = min(count, left)
            count, left = count - used, left - used
    return None


def _sorted_counts(counts: dict[DpEvent, int]) -> list[tuple[DpEvent, int]]:
    """The events with positive counts, sorted by type and then by the numbers in them."""

    def sort_key(event):
        parts = [getattr(event, field.name) for field in attrs.fields(type(event))]
        inner = [sort_key(part) for part in parts if isinstance(part, DpEvent)]
        return type(event).__name__, [part for part in parts if isinstance(part, int | float | tuple)], inner

    return sorted(((event, count) for event, count in counts.items() if count > 0), key=lambda item: sort_key(item[0]))


def same_event(one: Any, other: Any) -> bool:
    """Whether two events, or parts of them, are equal up to 1e-6 in their numbers."""
    if isinstance(one, DpEvent):
        names = [field.name for field in attrs.fields(type(one))]
        return type(one) is type(other) and all(same_event(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_event, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


SHORT, MOST_PATTERNS = 10, 4096  # steps of a run whose patterns are all tried, and how many at most
COST_SLACK = 1e-3  # relative slack, because costs are rounded


def require_costed_sensitivity(trial: MechanismUnderTest) -> str:
    """Checks that the cost of a short run covers the largest move over all patterns of participation."""
    mechanism, shown = trial.mechanism, 0.0
    tried = 0
    for steps in range(1, SHORT + 1):
        largest = 0.0
        matrix = np.asarray(linalg.toeplitz(mechanism.correlated.column(steps), np.zeros(steps)))
        for pattern in itertools.islice(participation_patterns(mechanism.sampling, steps), MOST_PATTERNS):
            signs = np.array([(1, *rest) for rest in itertools.product((1, -1), repeat=len(pattern) - 1)])
            largest = max(largest, float(np.linalg.norm(signs @ matrix.T[list(pattern)], axis=1).max()))
            tried += len(signs)
        counted = from_event(trial.event(steps)).losses("zero_out")
        moved = trial.multiplier(0) / min(loss.noise_multiplier for loss in counted)
        if not moved >= largest * (1 - COST_SLACK):
            words = f"an example moves C G by {largest:.6g} clip norms in {steps} steps"
            raise Violation(f"{words}, and {moved:.6g} are paid for")
        turns = math.ceil(steps / getattr(mechanism.sampling, "bands", steps))
        if sum(counted.values()) < turns:
            raise Violation(f"{steps} steps are counted as {sum(counted.values())} turns, and are {turns}")
        shown = max(shown, largest / moved)
    return f"{tried} patterns and signs of up to {SHORT} steps move C G by at most {shown:.4g} of what the cost counts"


def participation_patterns(sampling: Sampling, steps: int) -> Iterator[tuple[int, ...]]:
    """Yields the sets of steps in which one example may take part; for cyclic sampling, those of one coin."""
    if isinstance(sampling, CyclicPoissonSampling):
        yield from ((step,) for step in range(steps))
    elif isinstance(sampling, FixedOrder):
        apart = sampling.steps_per_epoch
        yield from (tuple(range(first, steps, apart)) for first in range(min(apart, steps)))
    elif isinstance(sampling, ShuffledEpochs):
        apart = sampling.steps_per_epoch
        epochs = (range(start, min(start + apart, steps)) for start in range(0, steps, apart))
        yield from itertools.product(*epochs)
    elif isinstance(sampling, FullBatch):
        yield tuple(range(steps))


DRAWN = 64  # batches drawn to test the sampling
DRAWN_CUT = 1024  # more if batches may be truncated, because few are, and only these show which rows are left
EXAMPLES = 200_000  # no batches are drawn from a larger dataset
FAR = 10.0  # standard deviations of a sum of squares, whose tails are heavier than normal
BATCH_RATE = 1e-6  # false-alarm rate of each test of the batches


def check_sampling(trial: MechanismUnderTest) -> str:
    """Checks that the batches have the distribution that the event assumes."""
    record = trial.mechanism.sampling
    releases = from_event(record.event(np.ones(1))).event_counts
    if (count := sum(releases.values())) != 1 or record.examples > EXAMPLES:
        raise NotChecked(f"no batches are drawn of {record.examples} examples with {count} events a step")
    key = jax.random.key(trial.seed + 1)
    batches = [_drawn_examples(record.draw(key, step)) for step in range(DRAWN)]
    if any(len(np.unique(batch)) < len(batch) for batch in batches):
        raise Violation("a batch holds an example twice")
    (event,) = releases
    _require_sensitivity_of_relation(event, record)
    if isinstance(event, PoissonSampledDpEvent):
        rate, bands = float(event.sampling_probability), record.group_count
        if bands > 1:
            count = _require_cyclic(lambda step: record.draw(key, step), record.examples, bands, rate)
            return f"{count} batches are drawn as the event says: each example in the steps of one of {bands} groups"
        if (rates := getattr(record, "rates", None)) is not None and rates.min() < rates.max():
            _require_weighted_poisson(batches, rates, rate)
            return f"{DRAWN} batches are drawn as the weights say, at rates of at most that of the event"
        _require_poisson(batches, record.examples, rate)
        return f"{DRAWN} batches are drawn as the event says: each example at rate {rate:.4g}"
    if isinstance(event, SampledWithoutReplacementDpEvent):
        _require_uniform_subsets(batches, record.examples, event)
        return f"{DRAWN} batches are subsets of {event.sample_size} examples, as the event says"
    if isinstance(event, TruncatedSubsampledGaussianDpEvent):
        batches += [_drawn_examples(record.draw(key, step)) for step in range(DRAWN, DRAWN_CUT)]
        _require_truncated_poisson(batches, record.examples, event)
        return f"{DRAWN_CUT} batches are cut at random to {event.truncated_batch_size} rows, as the event says"
    if isinstance(event, RandomAllocationDpEvent):
        _require_random_allocation(lambda step: record.draw(key, step), record.examples, event.steps_per_epoch)
        return f"in {DRAWN} batches of each of two epochs, the examples take part once an epoch, as the event says"
    _require_participations_counted(batches, record)
    return f"in {DRAWN} batches, no example takes part more often than the event counts"


def _drawn_examples(draw: Draw) -> np.ndarray:
    """The examples that take part, int (count,)."""
    indices, included = draw
    return np.asarray(indices)[np.asarray(included)]


def _require_sensitivity_of_relation(event: DpEvent, record: Sampling):
    """Raises Violation if the event for noise multiplier 1 has more than 1, or 1/2 if an example is replaced."""
    inner = getattr(event, "event", event)
    most = 0.5 if record.relation == "replace_one" else 1.0
    stated = getattr(inner, "noise_multiplier", 0.0)
    if isinstance(inner, RandomAllocationDpEvent):
        stated = max(sigma for sigma, _ in inner.noise_multiplier)
    if stated > most:
        words = f"at most {most:g} is true under the relation {record.relation!r}"
        raise Violation(f"the event of noise multiplier 1 has {stated:g}, and {words}")


def _require_poisson(batches: list[np.ndarray], examples: int, rate: float):
    """Checks that batch sizes, and overlaps of successive batches, fit independent coins at this rate."""
    if rate == 1:
        return
    sizes = np.array([len(batch) for batch in batches])
    shared = np.array([len(np.intersect1d(a, b)) for a, b in zip(batches[:-1:2], batches[1::2], strict=True)])
    for words, counts, probability in (("examples", sizes, rate), ("examples shared with the next", shared, rate**2)):
        total, trials = counts.sum(), examples * len(counts)
        _require_binomial(total, trials, probability, f"{words} in {len(counts)} batches; rate {rate:.4g}")
    _require_equal_rates(np.bincount(np.concatenate(batches), minlength=examples), len(batches), rate)
    _require_variance(sizes, examples * rate * (1 - rate))


def _require_cyclic(draw: Callable[[int], Draw], examples: int, bands: int, rate: float) -> int:
    """Checks that each example is drawn in one group of steps only, by coins of this rate. Returns the batch count."""
    turns = max(2, DRAWN // bands // 2 * 2)
    batches = [_drawn_examples(draw(step)) for step in range(turns * bands)]
    taken = np.array([np.bincount(np.concatenate(batches[g::bands]), minlength=examples) for g in range(bands)])
    if ((taken > 0).sum(axis=0) > 1).any():
        raise Violation("an example takes part in the steps of two groups, and the cost counts those of one")
    if rate == 1:
        return len(batches)
    pairs = [(first + g, first + g + bands) for first in range(0, len(batches), 2 * bands) for g in range(bands)]
    shared = sum(len(np.intersect1d(batches[one], batches[other])) for one, other in pairs)
    counts, words = taken.sum(axis=0), f"in {turns} turns of {bands} groups; rate {rate:.4g}"
    _require_binomial(int(counts.sum()), examples * turns, rate, f"examples {words}")
    _require_binomial(shared, examples * turns // 2, rate**2, f"examples shared with the next turn {words}")
    _require_equal_rates(counts, turns, rate)
    return len(batches)


def _require_equal_rates(taken: np.ndarray, trials: int, rate: float):
    """Checks that all examples take part about equally often, int (examples,), in this many independent trials."""
    variance = trials * rate * (1 - rate)
    scatter = float(((taken - trials * rate) ** 2).sum()) / variance
    if scatter > len(taken) + FAR * math.sqrt(len(taken) * (2 + 1 / variance)):
        raise Violation(
            f"some examples take part more often than others: {scatter / len(taken):.3g} times the variance"
        )


def _require_weighted_poisson(batches: list[np.ndarray], rates: np.ndarray, stated: float):
    """Checks that counts of low-rate and high-rate examples, and overlaps of batches, fit independent coins."""
    if rates.max() > stated * (1 + 1e-12):
        raise Violation(f"an example takes part at rate {rates.max():.6g}, and {stated:.6g} is paid for")
    taken = np.bincount(np.concatenate(batches), minlength=len(rates))
    pairs = list(zip(batches[:-1:2], batches[1::2], strict=True))
    for number, group in enumerate(np.array_split(np.argsort(rates, kind="stable"), 4), start=1):
        q, words = rates[group], f"of quarter {number} of the rates"
        _require_counts_fit_rates(int(taken[group].sum()), np.tile(q, len(batches)), f"examples {words}")
        inside = np.isin(np.arange(len(rates)), group)
        shared = sum(int(inside[np.intersect1d(a, b)].sum()) for a, b in pairs)
        _require_counts_fit_rates(shared, np.tile(q**2, len(pairs)), f"examples {words} shared with the next")
    sizes = np.array([len(batch) for batch in batches])
    variance = float((rates * (1 - rates)).sum())
    if variance > 0:
        _require_variance(sizes, variance)


def _require_counts_fit_rates(count: int, rates: np.ndarray, words: str):
    """Tests a count of independent coins by Bernstein's inequality."""
    mean, variance, log = rates.sum(), float((rates * (1 - rates)).sum()), math.log(2 / BATCH_RATE)
    if abs(count - mean) > log / 3 + math.sqrt(log**2 / 9 + 2 * log * variance) + 1e-9 * mean:
        raise Violation(f"batches hold {count} {words}, where coins of the stated rates hold {mean:.1f}")


def _require_binomial(count: int, trials: int, probability: float, words: str):
    if min(special.bdtr(count, trials, probability), special.bdtrc(count - 1, trials, probability)) < BATCH_RATE / 2:
        raise Violation(f"{count} {words} says {trials * probability:.1f}")


def _require_variance(sizes: np.ndarray, variance: float):
    ratio = sizes.var(ddof=1) / variance  # as the binomial's, by a normal approximation with slack for its tails
    low, high = (reduced_chi_square_quantile(p, len(sizes) - 1) for p in (BATCH_RATE / 10, 1 - BATCH_RATE / 10))
    if not low * 0.9 <= ratio <= high * (1.1 + 3 / variance):
        raise Violation(f"the variance of the sizes of batches is {ratio:.3g} times that of independent examples")


def _require_truncated_poisson(batches: list[np.ndarray], examples: int, event: TruncatedSubsampledGaussianDpEvent):
    """Checks that sizes fit coins at this rate, cut at the most rows. Examples are uniformly random for any sizes."""
    rate, most = event.sampling_probability, event.truncated_batch_size
    sizes = np.array([len(batch) for batch in batches])
    if sizes.max() > most or examples != event.dataset_size:
        raise Violation(f"batches of up to {sizes.max()} of {examples} examples do not fit {event}")
    for quantile in (0.25, 0.5, 0.75, 1.0):
        limit = min(most, int(stats.binom.ppf(min(quantile, 0.999), examples, rate))) - 1
        words = f"of {len(sizes)} batches have at most {limit} examples; rate {rate:.4g}"
        _require_binomial(int((sizes <= limit).sum()), len(sizes), special.bdtr(limit, examples, rate), words)
    low = sum(int((batch < examples // 2).sum()) for batch in batches)
    shared = sum(len(np.intersect1d(a, b)) for a, b in zip(batches[:-1:2], batches[1::2], strict=True))
    overlap = float(sizes[:-1:2] @ sizes[1::2]) / examples
    for words, count, mean, trials in (
        ("of the first half of the data", low, sizes.sum() * (examples // 2) / examples, sizes.sum()),
        ("shared with the next", shared, overlap, sizes[::2].sum()),
    ):  # given the sizes, the variance is at most a binomial's (Hoeffding)
        if abs(count - mean) > math.sqrt(trials * math.log(2 / BATCH_RATE) / 2):
            raise Violation(f"batches hold {count} examples {words}, where independent random ones hold {mean:.1f}")


def _require_uniform_subsets(batches: list[np.ndarray], examples: int, event: SampledWithoutReplacementDpEvent):
    sizes = {len(batch) for batch in batches}
    if sizes != {event.sample_size} or examples != event.source_dataset_size:
        raise Violation(f"batches of {sorted(sizes)} of {examples} examples do not fit {event}")
    shared = sum(len(np.intersect1d(a, b)) for a, b in zip(batches[:-1:2], batches[1::2], strict=True))
    mean = len(batches) // 2 * event.sample_size**2 / examples
    trials = len(batches) // 2 * event.sample_size  # the variance is at most a binomial's (Hoeffding)
    if abs(shared - mean) > math.sqrt(trials * math.log(2 / BATCH_RATE) / 2):
        raise Violation(f"batches share {shared} examples with the next, where independent subsets share {mean:.1f}")


def _require_random_allocation(draw: Callable[[int], Draw], examples: int, steps: int):
    """Checks that examples join one random batch an epoch, and that batch sizes vary as if they were independent."""
    number = min(steps, DRAWN)
    epochs = [[_drawn_examples(draw(epoch * steps + place)) for place in range(number)] for epoch in (0, 1)]
    for taken in (np.bincount(np.concatenate(batches), minlength=examples) for batches in epochs):
        if taken.max() > 1 or (number == steps and taken.min() < 1):
            raise Violation(
                f"an example is in {taken.max()} of {number} steps of an epoch, another one in {taken.min()}"
            )
    sizes = np.array([len(batch) for batches in epochs for batch in batches])
    again = sum(len(np.intersect1d(*pair)) for pair in zip(*epochs, strict=True))
    for words, count, trials, rate in (
        ("examples", int(sizes.sum()), 2 * examples, number / steps),
        ("examples in the step of the epoch before", again, examples, number / steps**2),
    ):
        _require_binomial(count, trials, rate, f"{words}; random allocation")
    if steps > 1:
        _require_variance(sizes, examples / steps * (1 - 1 / steps))


def _require_participations_counted(batches: list[np.ndarray], record: Sampling):
    """Checks that no example takes part in more steps than the event of all steps has Gaussian releases."""
    taken = np.bincount(np.concatenate(batches), minlength=record.examples).max()
    counted = sum(from_event(record.event(np.ones(len(batches)))).counts.values())
    if taken > counted:
        raise Violation(f"an example takes part in {taken} of {len(batches)} steps, and {counted} are paid for")

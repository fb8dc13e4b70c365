"""The lines of the contract about the bill: what the releases cost, and that the batches are drawn as it says."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import dp_accounting
import jax
import numpy as np
from dp_accounting import DpEvent
from scipy import special

from dpx.accounting.releases import count_releases
from dpx.audit.contract.draws import chi_square_over_freedom
from dpx.audit.contract.report import Broken, NotChecked
from dpx.audit.contract.trial import Trial, own_event
from dpx.sampling.events import RandomAllocationDpEvent
from dpx.states.reading import release_state

BILLED = (0, 1, 2, 5, 12, 100, 1_001, 10_007, 50_021)  # numbers of steps
BILLED_WITHOUT_SCHEDULE = 1_000_003  # the event of a schedule has as many parts as steps
MUST = 12  # steps; a longer run may be refused
TAKEN = 4  # steps of the state whose record is read
DRAWN = 64  # batches that are drawn to see the sampling
EXAMPLES = 200_000  # a larger data set is not drawn from
RATE = 1e-6  # of false alarms, of each test of the batches


def cost(trial: Trial) -> str:
    """The event bills every release with the noise multiplier that the mechanism used, and the state counts them."""
    mechanism = trial.mechanism
    release = release_state(trial.state(TAKEN))
    if int(release.step) != TAKEN:
        raise Broken(f"the state counts {int(release.step)} releases after {TAKEN}")
    used = trial.multipliers[:TAKEN]
    precision = float(release.precision[0]) - float(release.precision[1])
    if (used > 0).all() and not math.isclose(precision, float(np.sum(used**-2.0)), rel_tol=1e-5):
        raise Broken(f"the state records other noise multipliers than {used.tolist()}, which are billed")
    name = own_event(trial.event(1), mechanism.sampling)
    if name:
        raise NotChecked(f"{name} is not an event of the sampling, so its own proof and tests must say that it is true")
    more, last = False, 0
    all_steps = BILLED if callable(mechanism.noise_multiplier) else (*BILLED, BILLED_WITHOUT_SCHEDULE)
    for steps in all_steps:
        expected = count_releases(mechanism.sampling.event(trial.multipliers[:steps])).counts
        try:
            billed = count_releases(trial.event(steps)).counts
        except ValueError as error:
            if steps > MUST:
                break
            raise NotChecked(f"{steps} steps have no event: {error}") from None
        missing = _missing(expected, billed)
        if missing:
            raise Broken(f"{steps} steps do not bill {missing}, of noise multiplier and sampling of the mechanism")
        more, last = more | (sum(billed.values()) > sum(expected.values())), steps
    extra = "; more releases are billed" if more else ""
    tried = ", ".join(str(steps) for steps in all_steps if steps <= last)
    return f"{tried} steps bill the multipliers and the sampling that the mechanism states{extra}"


def _missing(expected: dict[DpEvent, int], billed: dict[DpEvent, int]) -> DpEvent | None:
    """A release that is expected more often than it is billed, or None; numbers may differ by 1e-6.

    Equal events are counted together. Those that are left over are compared in the order of their numbers.
    """
    wanted = _in_order({event: count - billed.get(event, 0) for event, count in expected.items()})
    offered = _in_order({event: count - expected.get(event, 0) for event, count in billed.items()})
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


def _in_order(counts: dict[DpEvent, int]) -> list[tuple[DpEvent, int]]:
    """The events of positive counts, by their types and then by their numbers."""

    def order(event):
        parts = [getattr(event, field.name) for field in attrs.fields(type(event))]
        inner = [order(part) for part in parts if isinstance(part, DpEvent)]
        return type(event).__name__, [part for part in parts if isinstance(part, int | float | tuple)], inner

    return sorted(((event, count) for event, count in counts.items() if count > 0), key=lambda item: order(item[0]))


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


def sampling(trial: Trial) -> str:
    """The batches that the sampling draws have the distribution of the event that bills them."""
    record = trial.mechanism.sampling
    releases = count_releases(record.event(np.ones(1))).counts
    if (count := sum(releases.values())) != 1 or record.examples > EXAMPLES:
        raise NotChecked(f"no batches are drawn of {record.examples} examples with {count} events a step")
    key = jax.random.key(trial.seed + 1)
    batches = [_examples(record.draw(key, step)) for step in range(DRAWN)]
    if any(len(np.unique(batch)) < len(batch) for batch in batches):
        raise Broken("a batch holds an example twice")
    (event,) = releases
    _require_relation(event, record)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        _require_poisson(batches, record.examples, float(event.sampling_probability))
        return f"{DRAWN} batches are drawn as the event says: each example at rate {event.sampling_probability:.4g}"
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        _require_subsets(batches, record.examples, event)
        return f"{DRAWN} batches are subsets of {event.sample_size} examples, as the event says"
    if isinstance(event, RandomAllocationDpEvent):
        _require_allocated(lambda step: record.draw(key, step), record.examples, event.steps_per_epoch)
        return f"in {DRAWN} batches of each of two epochs, the examples take part once an epoch, as the event says"
    _require_counted(batches, record)
    return f"in {DRAWN} batches, no example takes part more often than the event bills"


def _examples(draw: Any) -> np.ndarray:
    """The examples that take part, int (count,)."""
    indices, included = draw
    return np.asarray(indices)[np.asarray(included)]


def _require_relation(event: Any, record: Any):
    """Raises Broken if the event of noise multiplier 1 has more than 1, or 1/2 where an example is exchanged."""
    inner = getattr(event, "event", event)
    most = 0.5 if record.relation == "replace_one" else 1.0
    billed = getattr(inner, "noise_multiplier", 0.0)
    if isinstance(inner, RandomAllocationDpEvent):
        billed = max(sigma for sigma, _ in inner.noise_multiplier)
    if billed > most:
        words = f"at most {most:g} is true under the relation {record.relation!r}"
        raise Broken(f"the event of noise multiplier 1 has {billed:g}, and {words}")


def _require_poisson(batches: list[np.ndarray], examples: int, rate: float):
    """Sizes of batches, and of the overlap of each with the next one, as of independent coins at this rate."""
    if rate == 1:
        return
    sizes = np.array([len(batch) for batch in batches])
    shared = np.array([len(np.intersect1d(a, b)) for a, b in zip(batches[:-1:2], batches[1::2], strict=True)])
    for words, counts, probability in (("examples", sizes, rate), ("examples shared with the next", shared, rate**2)):
        total, trials = counts.sum(), examples * len(counts)
        _require_binomial(total, trials, probability, f"{words} in {len(counts)} batches; rate {rate:.4g}")
    _require_spread(sizes, examples * rate * (1 - rate))


def _require_binomial(count: int, trials: int, probability: float, words: str):
    if min(special.bdtr(count, trials, probability), special.bdtrc(count - 1, trials, probability)) < RATE / 2:
        raise Broken(f"{count} {words} says {trials * probability:.1f}")


def _require_spread(sizes: np.ndarray, variance: float):
    ratio = sizes.var(ddof=1) / variance  # as the binomial's, by a normal approximation with slack for its tails
    low, high = (chi_square_over_freedom(p, len(sizes) - 1) for p in (RATE / 10, 1 - RATE / 10))
    if not low * 0.9 <= ratio <= high * (1.1 + 3 / variance):
        raise Broken(f"the variance of the sizes of batches is {ratio:.3g} times that of independent examples")


def _require_subsets(batches: list[np.ndarray], examples: int, event: Any):
    sizes = {len(batch) for batch in batches}
    if sizes != {event.sample_size} or examples != event.source_dataset_size:
        raise Broken(f"batches of {sorted(sizes)} of {examples} examples do not fit {event}")
    shared = sum(len(np.intersect1d(a, b)) for a, b in zip(batches[:-1:2], batches[1::2], strict=True))
    mean = len(batches) // 2 * event.sample_size**2 / examples
    trials = len(batches) // 2 * event.sample_size  # of variance at most that of a binomial (Hoeffding)
    if abs(shared - mean) > math.sqrt(trials * math.log(2 / RATE) / 2):
        raise Broken(f"batches share {shared} examples with the next, where independent subsets share {mean:.1f}")


def _require_allocated(draw: Callable[[int], Any], examples: int, steps: int):
    """Once an epoch, in batches whose sizes vary as those of independent examples, and other ones in the next epoch."""
    number = min(steps, DRAWN)
    epochs = [[_examples(draw(epoch * steps + place)) for place in range(number)] for epoch in (0, 1)]
    for taken in (np.bincount(np.concatenate(batches), minlength=examples) for batches in epochs):
        if taken.max() > 1 or (number == steps and taken.min() < 1):
            raise Broken(f"an example is in {taken.max()} of {number} steps of an epoch, another one in {taken.min()}")
    sizes = np.array([len(batch) for batches in epochs for batch in batches])
    again = sum(len(np.intersect1d(*pair)) for pair in zip(*epochs, strict=True))
    for words, count, trials, rate in (
        ("examples", int(sizes.sum()), 2 * examples, number / steps),
        ("examples in the step of the epoch before", again, examples, number / steps**2),
    ):
        _require_binomial(count, trials, rate, f"{words}; random allocation")
    if steps > 1:
        _require_spread(sizes, examples / steps * (1 - 1 / steps))


def _require_counted(batches: list[np.ndarray], record: Any):
    """Every example takes part in at most as many steps as there are Gaussian releases in the event of all steps."""
    taken = np.bincount(np.concatenate(batches), minlength=record.examples).max()
    billed = sum(count_releases(record.event(np.ones(len(batches)))).counts.values())
    if taken > billed:
        raise Broken(f"an example takes part in {taken} of {len(batches)} steps, and {billed} are billed")

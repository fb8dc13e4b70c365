"""What the arithmetic of the noise adds to a bill: its lemmas and its theorem, against laws that are enumerated."""

import math
import re
import time

import dp_accounting
import jax
import numpy as np
import pytest
from scipy import special, stats

import dpx
from dpx import accounting, reports
from dpx.accounting import arithmetic
from dpx.accounting.arithmetic import NormalSamplerError, RunProfile, finite_precision_cost
from dpx.accounting.cost import profile_of_run
from dpx.accounting.flat_event import from_event
from dpx.accounting.profiles import GaussianProfile
from dpx.accounting.selection import trials_quantile
from dpx.keys.noise import CHUNK_NUMBERS, count_normal_pairs, count_numbers_with_cost
from dpx.papers.dice_sgd.cost import ErrorFeedbackDpEvent
from dpx.sums.rounding import ETA

BITS = 17
COARSE = NormalSamplerError(evaluation=0.0, digits=((0, 2.0**-18, 2.0**-18),), pairs=1)  # 2^17 radii times 2^17 angles
WIDTH = 106  # the largest integer that the coarse sampler reaches, in size
SHIFT = 1.5  # of the first number of a pair, in deviations
R = 16
SAMPLING = dpx.PoissonSampling(examples=60_000, batch_size=600)


def law_of_coarse_pairs(shift: float) -> np.ndarray:
    """P~ of k = floor(R (shift + r cos u) + 1/2) and the same with sin, float64 (2 WIDTH + 1, 2 WIDTH + 1).

    Along a ray, every integer is left at a known r, so that the radii between two such r are counted.
    """
    angles, radii = 2**BITS, 2.0**BITS
    total = np.zeros((2 * WIDTH + 1) ** 2)
    borders = np.arange(-WIDTH, WIDTH + 1)[:, None] - 0.5
    for first in range(0, angles // 2, 2**13):  # the other half is the mirror image
        u = 2 * np.pi * (np.arange(first, first + 2**13) + 0.5) / angles
        left = np.concatenate([(borders / R - shift) / np.cos(u), borders / R / np.sin(u)])
        left = np.sort(np.where((left > 0) & (left < 6), left, 0.0), axis=0)  # (4 WIDTH + 2, rays), rising
        larger = np.exp(-(left**2) / 2)
        counts = np.diff(np.ceil(radii * larger[::-1] - 0.5), axis=0)[::-1]  # of (i + 1/2) / radii within
        middle = (left[:-1] + left[1:]) / 2
        numbers = [np.floor(R * z + 0.5).astype(np.int64) for z in (shift + middle * np.cos(u), middle * np.sin(u))]
        inside = counts > 0
        cells = ((numbers[0] + WIDTH) * (2 * WIDTH + 1) + numbers[1] + WIDTH)[inside]
        total += np.bincount(cells, counts[inside], len(total))
    half = total.reshape(2 * WIDTH + 1, -1)
    return (half + half[:, ::-1]) / (angles * radii)


def law_of_exact_pairs(shift: float) -> np.ndarray:
    ends = (np.arange(-WIDTH, WIDTH + 2) - 0.5) / R
    first, second = (np.diff(special.ndtr(ends - moved)) for moved in (shift, 0.0))
    return first[:, None] * second


@pytest.fixture(scope="module")
def coarse():
    laws = {shift: law_of_coarse_pairs(shift) for shift in (0.0, SHIFT)}
    assert all(abs(law.sum() - 1) < 1e-12 for law in laws.values())
    return laws


@pytest.mark.parametrize("shift", [0.0, SHIFT])
@pytest.mark.long
def test_a_cell_of_a_lattice_has_nearly_its_probability(coarse, shift):
    """Lemma 1, where the only error is the lattice."""
    numbers = np.arange(-WIDTH, WIDTH + 1) / R
    nearest = [np.maximum(np.abs(numbers - moved) - 0.5 / R, 0) for moved in (shift, 0.0)]
    largest_p = np.exp(-(nearest[0][:, None] ** 2 + nearest[1] ** 2) / 2)
    allowed = COARSE.largest_probability_changes()[np.minimum(-np.log2(largest_p), 101).astype(int)]
    good = allowed <= 0.14
    exact = law_of_exact_pairs(shift)
    change = np.abs(coarse[shift] / exact - 1)
    assert good.sum() > 5000 and exact[good].sum() > 0.99
    assert (change[good] <= allowed[good]).all() and change[good].max() > 1e-3
    assert (change[~good] > 0.5).any()  # farther out, the lattice is seen


@pytest.mark.parametrize("deviation", [16.0, 24.0, 31.999])
def test_the_worst_errors_attain_lemma_1(deviation):
    """Every point near a cell falls into it, or every point near its borders falls out."""
    error, starts = 1e-6, np.arange(0, 12.02, 1 / 64)
    ends = starts + 1 / deviation
    share = special.ndtr(-starts) - special.ndtr(-ends)
    larger = special.ndtr(error - starts) - special.ndtr(-error - ends)
    smaller = special.ndtr(-starts - error) - special.ndtr(error - ends)
    at_most = NormalSamplerError(evaluation=error).largest_probability_changes()[0]
    for changed in (larger, smaller):
        change = np.abs(np.multiply.outer(changed / share, changed / share) - 1)
        assert change.max() <= at_most
    assert (deviation < 31) or np.abs((larger / share) ** 2 - 1).max() > 0.93 * at_most


@pytest.mark.parametrize("normals", [NormalSamplerError(), COARSE], ids=["the program's", "coarse"])
def test_the_change_of_a_cell_is_that_of_its_worst_point(normals):
    """Also just above the p from which there are more digits, where the error is the largest."""
    bits = np.concatenate([np.linspace(1, 101.9, 5000), *(level - np.geomspace(1e-9, 1, 50) for level in (32, 64))])
    p = 2.0**-bits
    worst = 136 * normals.error(p / 3)
    at_border = 136 * np.array([normals.error(np.array([2.0**-level]))[0] for level, *_ in normals.digits[1:]])
    changes = normals.largest_probability_changes()
    assert (worst <= changes[np.floor(bits).astype(int)] * (1 + 1e-9)).all()
    for (level, *_), most in zip(normals.digits[1:], at_border, strict=True):
        assert (changes[level:] >= most).all()
    assert (np.diff(changes) >= 0).all()


@pytest.mark.parametrize("delta", [0.5, 1e-3, 1e-9])
def test_far_is_at_least_the_probability_of_a_bad_pair(delta):
    """Of one pair of a release that is moved, by Marcum's Q, at every shift; and always for two data sets alike."""
    added = finite_precision_cost(1, 1.0, delta, NormalSamplerError(pairs=1))
    for shift in np.linspace(0, 13, 53):
        bad = stats.ncx2.sf(added.radius**2, 2, shift**2) if shift else math.exp(-(added.radius**2) / 2)
        own = added.tail / 8
        far = (added.delta(60.0, 0.0, float(shift)) - added.tail - own) / math.exp(added.loss) - own
        assert far >= bad or added.delta(60.0, 0.0, float(shift)) == 1.0


def test_far_of_what_is_not_known_has_the_loss_of_the_other_data_set():
    added = finite_precision_cost(10**9, 1e9, 1e-9)
    own, more = added.tail / 8, added.loss + 4.0 * added.slope
    far = (added.delta(4.0, 0.0, math.inf) - added.tail - own) / math.exp(added.loss) - own
    assert more > 0.01 and far == pytest.approx(added.tail * math.exp(4.0 + more), rel=1e-6)


class OneChange(NormalSamplerError):
    """Every pair is off by one share, in either direction."""

    def largest_probability_changes(self):
        return np.full(102, self.evaluation)


@pytest.mark.parametrize(("change", "pairs"), [(1e-3, 1000), (1e-2, 50), (1e-6, 10**10), (0.1, 5)])
def test_the_loss_of_many_pairs_is_bounded_closely(change, pairs):
    """Lemma 2, of pairs whose law is (1 + c) / 2 and (1 - c) / 2 where 1 / 2 each is exact: a binomial loss."""
    added = finite_precision_cost(1, 1.0, 1e-9, OneChange(evaluation=change, pairs=pairs))
    own = added.tail / 8
    assert 0 < own < 1e-9
    up, down = math.log1p(change), math.log1p(-change)

    def probability_of_loss(above: float, sign: int) -> float:
        """Of sign (k up + (pairs - k) down) above a number; for 1 under the program's law, for -1 under the exact."""
        least = (above - sign * pairs * down) / (sign * (up - down))
        if sign > 0:
            return float(stats.binom.sf(math.floor(least), pairs, (1 + change) / 2))
        return float(stats.binom.cdf(math.ceil(least) - 1, pairs, 0.5))

    for sign in (1, -1):
        assert probability_of_loss(added.loss, sign) <= own
    if pairs * change**2 < 0.1 and pairs > 500:
        assert probability_of_loss(added.loss / 1.3, 1) > own


def test_the_program_of_a_coarse_sampler_is_as_private_as_the_theorem_says(coarse):
    """Its delta is far above that of exact noise, because its noise ends at 4.9 deviations."""
    run = RunProfile(GaussianProfile(SHIFT), 1, 1.0, SHIFT, COARSE)
    for first, second in ((0.0, SHIFT), (SHIFT, 0.0)):
        for epsilon in (0.0, 0.5, 2.0, 4.0, 7.0, 9.0):
            found = np.maximum(coarse[first] - math.exp(epsilon) * coarse[second], 0).sum()
            assert found <= run.delta(epsilon) <= (0.8 if epsilon >= 2 else 1)
    assert run.delta(4.0) < 0.26 and found > 100 * GaussianProfile(SHIFT).delta(9.0)
    finer = RunProfile(GaussianProfile(SHIFT), 1, 1.0, SHIFT, NormalSamplerError(pairs=1))
    assert finer.delta(2.0) == pytest.approx(GaussianProfile(SHIFT).delta(2.0), rel=1e-5)


def test_a_shifted_tail_is_bounded():
    """`far`: of one pair that is moved, and of many that share the shift."""
    added = finite_precision_cost(1, 1.0)
    for shift in (0.3, 1.0, 3.0):
        far = (added.delta(600.0, 0.0, shift) - added.delta(0.0, 0.0, math.inf)) / math.exp(added.loss) + added.tail
        alone = stats.ncx2.sf(added.radius**2, 2, shift**2)
        for sharing in (1, 10**4, added.pairs):
            each = stats.ncx2.sf(added.radius**2, 2, shift**2 / sharing) if sharing < added.pairs else alone * 0
            rest = (added.pairs - sharing) * math.exp(-(added.radius**2) / 2)
            assert sharing * each + rest <= far
    assert added.delta(600.0, 0.0, 12.0) == 1.0  # beyond the support of the noise


def test_two_rare_pairs_of_a_release_are_billed():
    """They share a word, so they are not independent; and neither may an output be likely for one data set alone."""
    pairs = 2**40  # more than any release has, so that it counts
    added = finite_precision_cost(1000, 1000.0, 1e-9, NormalSamplerError(pairs=pairs))
    assert added.tail >= 1000 * math.comb(pairs, 2) * 2.0**-128 > 1e-12
    added = finite_precision_cost(10, 10.0, 1e-12, NormalSamplerError(pairs=2**30))
    added = added._replace(tail=1e-40, radius=20.0)  # nothing else is likely
    for shift in (0.3, 1.0, 3.0, 5.0):
        far = added.delta(600.0, 0.0, shift) / math.exp(added.loss)
        for sharing in (1, 2, 2**20):  # two of them meet in one release
            moved = stats.ncx2.sf(2 * 64 * math.log(2), 2, shift**2 / sharing)
            both = math.comb(sharing, 2) * moved**2 + sharing * moved * 2.0**-64 * (2**30 - sharing)
            assert 10 * both <= far
    assert added.delta(600.0, 0.0, 8.6) == 1.0


def test_the_lattice_of_p_moves_a_normal_by_no_more():
    """By sqrt(-2 log(p - d)) - sqrt(-2 log p), without the cancellation, where p has the fewest digits."""
    p = 2.0**-31.9
    farther = -2 * math.log1p(-(2.0**-65) / p)
    moved = farther / (math.sqrt(-2 * math.log(p) + farther) + math.sqrt(-2 * math.log(p)))
    assert moved <= NormalSamplerError(evaluation=0.0).error(np.array([p]))[0] <= 1.01 * moved


def test_every_pair_of_a_release_is_counted():
    """The stream draws pairs in two halves of a chunk, so the last chunk has pairs of which one number is used."""
    half = CHUNK_NUMBERS // 2
    for size in (1, 2, 3, 1001, 2 * half - 1, 2 * half, 2 * half + 1, 3 * half, 3 * half + 5, 4 * half, 10**6 + 7):
        own = max(1, min(CHUNK_NUMBERS, size + 1) // 2)
        place = np.arange(size)
        touched = np.unique(place // (2 * own) * own + place % own).size
        assert (
            touched == count_normal_pairs(size)
            and count_numbers_with_cost([(size,)]) == count_numbers_with_cost([(size - 1,), ()]) == size
        )
    large = [(2**30, 3), (half + 1,), (2 * half,), ()]
    assert (
        0 <= count_normal_pairs(count_numbers_with_cost(large)) - (3 * 2**29 + 2 * half + 1) <= 1
        and count_normal_pairs(2**32) == 2**31
    )


STATED = {  # numbers of one release, releases, delta: what is added to epsilon 2 and to delta at noise multiplier 1
    (2**32, 100, 1e-5): (3.3e-5, 4.6e-15),
    (2**32, 10_000, 1e-5): (3.1e-4, 1.2e-13),
    (2**32, 10_000, 1e-6): (3.2e-4, 8.6e-15),
    (2**32, 100, 1e-9): (3.6e-5, 6.2e-18),
    (10**8, 10_000, 1e-5): (4.9e-5, 1.1e-14),
    (2**32, 100_000, 1e-12): (1.0e-3, 6.2e-15),
    (10**9, 100_000, 1e-12): (5.2e-4, 4.0e-16),
}


@pytest.mark.parametrize("case", STATED)
def test_the_stated_additions(case):
    numbers, releases, delta = case
    sampler = NormalSamplerError(pairs=count_normal_pairs(numbers))
    added = finite_precision_cost(releases, float(releases), delta, sampler)
    found = added.epsilon(2.0), added.delta(2.0, 0.0, 1.0)
    assert found == pytest.approx(STATED[case], rel=0.05)
    assert found[1] < 0.01 * delta and found[0] < 1.1e-3


def test_additions_grow_with_the_releases_and_take_no_time():
    counts = np.unique(np.geomspace(1, 1e8, 60).astype(np.int64)).tolist()
    for delta in (1e-3, 1e-5, 1e-9):
        profiles = [RunProfile(GaussianProfile(1.0), count, float(count), 1.0) for count in counts]
        spent = np.array([profile.epsilon(delta) for profile in profiles])
        assert (spent[1:] >= spent[:-1]).all() and spent[30] < 10
        assert profiles[0].epsilon(delta) > GaussianProfile(1.0).epsilon(delta)
    for epsilon in (0.0, 1e-6, 1.0, 3.0):
        deltas = [profile.delta(epsilon) for profile in profiles]
        assert (np.diff(deltas) >= -1e-12).all() and deltas[0] > GaussianProfile(1.0).delta(epsilon)
        for count, delta in zip(counts[20:40], deltas[20:40], strict=True):
            both = 2 * finite_precision_cost(count, float(count)).loss
            beyond = max(0.0, math.exp(both) - math.exp(epsilon))  # where exact arithmetic has no epsilon left
            assert delta >= GaussianProfile(1.0).delta(max(epsilon - both, 0.0)) + beyond
    profile = RunProfile(GaussianProfile(1.0), 777, 777.0, 1.0)
    profile.epsilon(1e-5)
    start = time.perf_counter()
    for _ in range(100):
        profile.epsilon_with_rounding(1e-5)
    exact = time.perf_counter()
    for _ in range(100):
        GaussianProfile(1.0).epsilon(1e-5)
    assert (exact - start) / 100 < 1e-3 + 5 * (time.perf_counter() - exact) / 100


def test_epsilon_and_delta_answer_one_another():
    for shift, mus in ((1.0, (0.1, 1.0, 4.0)), (math.inf, (0.1, 1.0))):
        for exact in map(GaussianProfile, mus):
            run = RunProfile(exact, 1000, 1000.0, shift)
            for delta in (1e-2, 1e-5):
                answer = run.epsilon_with_rounding(delta)
                assert run.delta(answer.epsilon) == pytest.approx(delta, rel=0.2) and answer.of_epsilon > 0
                assert answer.of_delta < 0.1 * delta
    for delta in (1e-11, 1e-13):  # the best p0 of a usual delta costs more than such a delta
        run = RunProfile(GaussianProfile(1 / 0.3), 1, 1.0, 1 / 0.3)
        assert run.delta(run.epsilon(delta)) / delta == pytest.approx(1.0, rel=0.01)
    for mu, delta in ((1.0, 0.0035), (3.0, 0.01)):  # where the first bound of epsilon leaves half of delta or less
        run = RunProfile(GaussianProfile(mu), 2, 2.0, 6.27)
        assert run.epsilon(delta) == pytest.approx(run.exact.epsilon(delta), rel=1e-5)
    most = RunProfile(GaussianProfile(1.0), 2**53, 2.0**53, 1.0)  # whose arithmetic has no bound that float64 holds
    assert most.epsilon(1e-5) == math.inf and most.delta(1e3) == 1.0
    none = RunProfile(GaussianProfile(1.0), 0, 0.0)
    assert none.epsilon(1e-5) == GaussianProfile(1.0).epsilon(1e-5) and none.delta(1.0) == GaussianProfile(1.0).delta(1)
    assert RunProfile(GaussianProfile(1.0), 10, 10.0, 1.0).epsilon(1e-25) == math.inf  # below what 128 bits allow
    assert RunProfile(GaussianProfile(0.0), 10, 10.0, 1.0).epsilon(1e-7) == pytest.approx(1e-5, rel=0.5)
    assert RunProfile(GaussianProfile(0.0), 10, 10.0, 1.0).epsilon(0.1) == 0.0


def test_releases_are_counted_in_every_event():
    gaussian, poisson = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent
    two = poisson(0.1, dp_accounting.ComposedDpEvent([gaussian(2.0), gaussian(5.0)]))
    event = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(two, 7), gaussian(0.5)])
    assert from_event(event).release_count == (15, 15.0) and from_event(event).largest_shift("zero_out") == 2.0
    assert from_event(event).largest_shift("replace_one") == 4.0
    assert from_event(gaussian(0.0)).largest_shift("zero_out") == math.inf
    assert from_event(dp_accounting.NoOpDpEvent()).release_count == (0, 0.0)
    feedback = ErrorFeedbackDpEvent(4.0, 1.0, 2e3, 60, 60, SAMPLING)
    flat = from_event(feedback)
    assert flat.release_count == (60, 60.0) and flat.largest_shift("zero_out") == math.inf
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(10, 2, gaussian(3.0))
    assert from_event(fixed).release_count == (1, 1.0) and from_event(fixed).largest_shift("replace_one") == 1 / 3
    of_two = dp_accounting.SampledWithoutReplacementDpEvent(10, 2, dp_accounting.ComposedDpEvent([gaussian(3.0)]))
    assert from_event(of_two).largest_shift("replace_one") == math.inf
    search = accounting.best_of(event, gaussian(3.0), trials=10, score_on="public", distribution="geometric").event
    assert from_event(search).release_count == (15 * trials_quantile(10, 1.0), 150.0)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
def test_most_trials(shape):
    mean = 6.0
    most = trials_quantile(mean, shape)
    laws = {math.inf: stats.poisson(mean), 1.0: stats.geom(1 / mean)}
    if shape in laws:
        assert laws[shape].sf(most) <= 1e-20 < laws[shape].sf(most // 2)
    assert 6 < most < 1500 and trials_quantile(1.0, 1.0) == 1


def mechanism(noise=1.1, seed=1, sampling=SAMPLING):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=jax.random.key(seed))


def test_every_bill_of_a_run_has_the_addition():
    """One number for one run, above that of its event."""
    made = mechanism()
    spent = dpx.epsilon(made, 200, delta=1e-5)
    exact = accounting.event_epsilon(made.event(200), delta=1e-5)
    added = finite_precision_cost(200, 200.0, 1e-5).epsilon(exact)
    assert spent == pytest.approx(exact + added, abs=2e-5) and spent >= exact + added > exact + 3e-5
    numbers: dict = dict(examples=60_000, batch_size=600, noise_multiplier=np.float32(1.1).item())
    assert accounting.dp_sgd_epsilon(**numbers, steps=200, delta=1e-5) == spent
    assert dpx.compose_runs((made, 200), shared_batches=False).epsilon(delta=1e-5) == spent
    report = dpx.privacy_report(made, 200, delta=1e-5)
    assert report.spent == spent and report.arithmetic["epsilon"] == pytest.approx(added, rel=1e-3)
    assert reports.curves.epsilon_over_steps(made, 200, delta=1e-5, points=2).epsilon[-1] == spent
    delta = accounting.delta(made, 200, epsilon=1.0)
    assert delta == reports.curves.delta_over_epsilon(made, 200, epsilons=[1.0]).delta[0]
    assert delta > accounting.event_delta(made.event(200), epsilon=1.0) + 1e-11
    assert dpx.compose_runs((made, 200), shared_batches=False).delta(epsilon=1.0) == delta
    advantage = reports.attack_bounds(made, 200, delta=1e-5).advantage
    assert advantage == pytest.approx(accounting.delta(made, 200, epsilon=0.0), rel=1e-3)
    assert accounting.max_steps(made, epsilon=exact + added / 2, delta=1e-5) == 199
    shared = dpx.compose_runs((made, 200), (mechanism(seed=2), 200), shared_batches=True)
    assert shared.together == 2
    assert shared.epsilon(delta=1e-5) > profile_of_run(shared.event, relation="zero_out").epsilon(1e-5) + 1e-6
    assert dpx.compose_runs(shared, (mechanism(seed=3), 9), shared_batches=False).together == 2


@pytest.mark.long
def test_calibration_keeps_the_budget_with_the_addition():
    for steps, epsilon in ((50, 2.0), (5000, 0.5)):
        budget = dpx.Budget(epsilon=epsilon, delta=1e-5, steps=steps)
        assert 0.999 * epsilon < dpx.epsilon(mechanism(budget), steps, delta=1e-5) <= epsilon
    found = accounting.calibrate_schedule(np.ones(30), sampling_rate=0.01, epsilon=1.0, delta=1e-5)
    assert found.interval.upper <= 1.0
    again = accounting.schedule_epsilon(np.full(30, found.scale), sampling_rate=0.01, delta=1e-5)
    assert again.upper == pytest.approx(found.interval.upper, rel=1e-9)
    (planned,) = reports.plan_noise(examples=1000, epsilon=1.0, delta=1e-5, epochs=3, batch_sizes=[100]).runs
    numbers: dict = dict(examples=1000, batch_size=100, noise_multiplier=planned.noise_multiplier)
    assert accounting.dp_sgd_epsilon(**numbers, steps=planned.steps, delta=1e-5) <= 1.0


def test_it_is_printed():
    made = mechanism()
    text = " ".join(str(dpx.privacy_report(made, 100, delta=1e-5)).split())
    words = re.search(
        r"this epsilon includes (\S+), and delta includes (\S+), because computer noise takes finitely many values",
        text,
    )
    assert words is not None
    answer = profile_of_run(made.event(100), relation="zero_out").epsilon_with_rounding(1e-5)
    assert answer.of_epsilon <= float(words[1]) < 1.1 * answer.of_epsilon
    assert answer.of_delta <= float(words[2]) < 1.1 * answer.of_delta
    line = re.search(r"(?s)rounding: eta = (\S+) of the clip.* (\S+) of epsilon in the first step\n\)", str(made))
    assert line is not None and float(line[1]) == pytest.approx(ETA, rel=1e-3)
    assert float(line[2]) == pytest.approx(finite_precision_cost(1, 1.0).epsilon(0.0), rel=0.05)
    assert arithmetic.LARGEST_RELEASE == 2**32


@pytest.mark.parametrize("records", [1, 5])
def test_a_delta_near_the_smallest_float_has_no_bill(records):
    """And no OverflowError: no noise of finitely many values has a smaller delta than its pairs of the largest size."""
    for delta in (1e-290, 1e-300):
        found = accounting.schedule_epsilon([2.0], sampling_rate=0.01, delta=delta, records=records, accountant="rdp")
        assert found.upper == math.inf

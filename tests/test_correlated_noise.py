"""Correlated noise as a mechanism: its covariance over steps, its bill, and what is refused with it."""

import importlib

import attrs
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import pld
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import linalg, stats

import dpx
from dpx import accounting, coordinates, keys, mechanisms, methods, strategies
from dpx.accounting.flat_event import from_event
from dpx.accounting.gdp import epsilon as gaussian_epsilon
from dpx.audit.contract.cost import require_costed_sensitivity
from dpx.audit.contract.noise import require_noise_covariance
from dpx.audit.contract.subject import Violation
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.keys.noise import GRID
from dpx.papers.correlated_noise.cost import CorrelatedGaussianDpEvent, CyclicBandedDpEvent, rounding_shift_bound
from dpx.sums.rounding import ETA, as_float64, released_minus_total, split_float64
from tests.devices import on_eight_devices

module = importlib.import_module("dpx.papers.correlated_noise.mechanism")

KEY = keys.secret_key(2**100 + 1)
EPOCHS = dpx.ShuffledEpochs(examples=20, batch_size=5)
PARAMS = {"kernel": jnp.zeros((40, 50)), "bias": jnp.zeros(3)}
LAMBDA, BISR = strategies.lambda_cgd(correlation=0.9), strategies.banded_inverse_square_root(coefficients=4)
BANDS = strategies.Strategy(coefficients=(1.0, 0.6, 0.3, -0.2))
ORDER = dpx.sampling.FixedOrder(examples=20, batch_size=5)
CYCLIC = dpx.sampling.CyclicPoissonSampling(examples=20, batch_size=5, bands=4)
BOTH = pytest.mark.parametrize("strategy", [LAMBDA, BISR], ids=["lambda", "bisr"])
ALL = pytest.mark.parametrize("strategy", [LAMBDA, BISR, BANDS], ids=["lambda", "bisr", "bands"])


def made(strategy=LAMBDA, *, clip_norm=0.5, noise_multiplier=2.0, sampling=ORDER, key=KEY):
    return mechanisms.correlated_noise(
        strategy=strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key
    )


def run(mechanism, steps, params=PARAMS, grads=None):
    """The releases of zero gradients, or of `grads`, by step."""
    size = mechanism.sampling.divisor
    grads = jax.tree.map(lambda p: jnp.zeros((size, *p.shape)), params) if grads is None else grads
    update, state, found = jax.jit(mechanism.update), mechanism.init(params), []
    everyone = jnp.ones(size, bool)
    for _ in range(steps):
        updates, state = update(grads, state, params, included=everyone)
        found.append(updates)
    return found, state


@pytest.mark.long
@ALL
def test_the_noise_is_the_weighted_sum_of_the_normals_of_the_steps(strategy):
    """The rounding of every step is a part of the noise that is correlated."""
    deviation = 2.0 * 0.5 * (1 + ETA)
    grid = 2.0 ** (np.floor(np.log2(deviation)) - GRID)
    found, _ = run(made(strategy), 9)
    normals = [keys.normals_of_release(stream_of(strategy), step, PARAMS) for step in range(9)]
    inverse = strategy.inverse_column(9)
    for step in range(9):
        off = grid / 2 * np.abs(inverse[: step + 1]).sum()
        for name in PARAMS:
            expected = sum(inverse[j] * np.asarray(normals[step - j][name], np.float64) for j in range(step + 1))
            released = np.asarray(found[step][name], np.float64) * 5
            assert np.abs(released - deviation * expected).max() <= off + 1e-5
            assert np.allclose(released / grid, np.round(released / grid), atol=1e-3)


@ALL
def test_the_covariance_over_steps_is_that_of_the_strategy(strategy):
    """C^-1 C^-T for a long time after the memory is full."""
    steps, params = 11, {"w": jnp.zeros(40_000)}
    found, _ = run(made(strategy), steps, params)
    rows = np.stack([np.asarray(update["w"], np.float64) for update in found]) * 5 / (2.0 * 0.5 * (1 + ETA))
    expected = strategy.covariance(steps)
    assert np.abs(rows @ rows.T / 40_000 - expected).max() < 5 * np.sqrt(2) * expected.max() / 200
    fresh = np.linalg.solve(np.linalg.cholesky(expected), rows)
    assert np.abs(fresh @ fresh.T / 40_000 - np.eye(steps)).max() < 5 * np.sqrt(2) / 200
    assert abs(stats.kurtosis(fresh.reshape(-1))) < 5 * np.sqrt(24 / fresh.size)


def test_the_identity_is_dp_sgd_bit_for_bit():
    both = dict(clip_norm=0.5, noise_multiplier=2.0, sampling=EPOCHS, key=KEY)
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), (5, *p.shape)), PARAMS)
    mine, theirs = mechanisms.correlated_noise(strategy=strategies.identity(), **both), dpx.dp_sgd(**both)
    for one, other in zip(run(mine, 3, grads=grads)[0], run(theirs, 3, grads=grads)[0], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert dpx.epsilon(mine, 8, delta=1e-5) == dpx.epsilon(theirs, 8, delta=1e-5)
    poisson = dpx.PoissonSampling(examples=100, batch_size=5)
    mechanisms.correlated_noise(strategy=strategies.identity(), **both | {"sampling": poisson})


@ALL
@pytest.mark.long_cases("bisr")
def test_the_sum_is_clipped_and_released_with_the_noise(strategy):
    """Data of one step are in the release of that step alone: what is fed back is noise."""
    grads = jax.tree.map(lambda p: jnp.full((5, *p.shape), 3.0), PARAMS)
    mechanism = made(strategy, noise_multiplier=1e-3)
    (with_data, _), (without, _) = run(mechanism, 6, grads=grads), run(mechanism, 6)
    for one, other in zip(with_data, without, strict=True):
        assert optax.tree.norm(optax.tree.sub(one, other)) == pytest.approx(0.5, rel=1e-2)


def stream_of(strategy, key=KEY):
    return module._noise_key_of_strategy(key, strategy)


@ALL
@pytest.mark.long_cases("bisr")
def test_a_step_releases_the_sum_in_the_basis_of_c_with_fresh_noise(strategy, monkeypatch):
    """The proof for the bits: `keys.release` gets (C S)_t minus a function of earlier releases, but for rounding."""
    given, released, fresh = [], [], keys.release

    def release(key, step, total, deviation):
        given.append(sum(np.asarray(part["w"], np.float64) for part in total))
        result = fresh(key, step, total, deviation)
        released.append(np.asarray(result["w"], np.float64))
        return result

    def release_and_noise(key, step, total, parts, deviation):
        result = release(key, step, total(parts), deviation)
        with jax.enable_x64(True):
            return result, released_minus_total(result, total(parts))

    monkeypatch.setattr(keys, "release", release)
    monkeypatch.setattr(keys, "release_and_noise", release_and_noise)
    mechanism, params, rng, sums = made(strategy), {"w": jnp.zeros(50)}, np.random.default_rng(0), []
    state = mechanism.init(params)
    for _ in range(9):
        total = {"w": jnp.asarray(rng.normal(size=50) * 3, jnp.float32)}
        state = mechanism.release((total,), state, params)[1]
        sums.append(np.asarray(total["w"], np.float64))
    column = strategy.column(9)
    for step in range(9):
        basis = sum(column[j] * sums[step - j] for j in range(step + 1))
        public = sum(column[j] * released[step - j] for j in range(1, step + 1))
        assert np.abs(given[step] - (basis - public)).max() < 2e-12


@ALL
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_rounding_of_the_memory_moves_less_than_is_billed(strategy, scale):
    """Two neighbors with equal releases: what they hand to `keys.release` differs by C (S - S'), but for rounding."""
    weights, banded = module._weights_of_past(strategy), strategy.bands is not None
    rng, numbers, steps = np.random.default_rng(1), 2000, 12
    sums = rng.normal(size=(steps, numbers)).astype(np.float32) * np.float32(scale / 40)
    other = sums.copy()
    other[2] += rng.normal(size=numbers).astype(np.float32) / np.float32(50)  # about one clip norm of 1
    releases, given = [], ([], [])
    states = [module._initial_state({"w": jnp.zeros(numbers)}, len(weights)) for _ in range(2)]
    for step in range(steps):
        handed = []
        with jax.enable_x64(True):
            for world, rows in enumerate((sums, other)):
                exact = {"w": jnp.asarray(rows[step], jnp.float64)}
                back = module._weighted_past_noise(states[world], weights)
                handed.append((exact, as_float64(split_float64(jax.tree.map(jnp.add, exact, back)))))
                given[world].append(np.asarray(handed[-1][1]["w"]))
            releases.append(np.float32(given[0][-1] + rng.normal(size=numbers)))
            for world, (exact, total) in enumerate(handed):
                before = split_float64(exact if banded else total)
                noise = released_minus_total({"w": jnp.asarray(releases[-1])}, before)
                record = states[world].inner._replace(step=jnp.int32(step + 1))
                states[world] = module._store_step_noise(states[world], noise, record)
    column, inverse = strategy.column(steps), strategy.inverse_column(steps)
    moved = [
        sum(column[j] * (other[t - j].astype(np.float64) - sums[t - j]) for j in range(t + 1)) for t in range(steps)
    ]
    found = np.linalg.norm(np.array(given[1]) - np.array(given[0]) - np.array(moved))
    billed = rounding_shift_bound(column, inverse, banded=banded, terms=len(weights), steps=steps, noise_multiplier=1.0)
    assert 0 < found <= billed


@BOTH
def test_the_bill_is_that_of_one_gaussian_times_the_sensitivity(strategy):
    for steps in (1, 4, 5, 12):
        moved = strategies.sensitivity(strategy, steps=steps, participations=-(-steps // 4), separation=4)
        event = made(strategy).event(steps)
        noise = event.noise_multiplier
        assert event == CorrelatedGaussianDpEvent(noise, moved, steps, (1.0,), strategy.inverse_coefficients)
        assert 2.0 * (1 - 2e-6) < noise < 2.0
        exact = gaussian_epsilon(moved / 2.0, delta=1e-5)
        assert accounting.event_epsilon(event, delta=1e-5, relation="zero_out") == pytest.approx(exact, rel=1e-4)
        assert exact <= dpx.epsilon(made(strategy), steps, delta=1e-5) <= exact * 1.001
    assert dpx.epsilon(made(strategy, sampling=EPOCHS), 12, delta=1e-5) > dpx.epsilon(made(strategy), 12, delta=1e-5)


@ALL
def test_the_best_attack_on_a_run_reaches_the_bill_and_not_more(strategy):
    """An example of one direction in every epoch moves the run by the billed number of deviations, in all."""
    steps, mechanism, moved = 10, made(strategy, noise_multiplier=1e-3), []
    for present in (0.0, 1.0):
        update, state, found = jax.jit(mechanism.update), mechanism.init(PARAMS), []
        for step in range(steps):
            size = present * 3.0 if step % 4 == 0 else 0.0
            grads = jax.tree.map(lambda p, size=size: jnp.zeros((5, *p.shape)).at[0].set(size), PARAMS)
            updates, state = update(grads, state, PARAMS, included=jnp.ones(5, bool))
            found.append(float(updates["kernel"][0, 0]))
        moved.append(np.array(found))
    shift = (moved[1] - moved[0]) * 5 * np.sqrt(optax.tree.size(PARAMS))  # in the direction of the example
    distance = np.sqrt(shift @ np.linalg.solve(strategy.covariance(steps), shift)) / (1e-3 * 0.5)
    event = mechanism.event(steps)
    assert distance == pytest.approx(event.sensitivity / event.noise_multiplier, rel=5e-3)


def test_the_steps_of_shuffled_epochs_and_full_batches_may_be_neighbors():
    full = dpx.sampling.FullBatch(examples=5)
    moved = strategies.sensitivity(LAMBDA, steps=12, participations=12, separation=1)
    assert made(sampling=full).event(12).sensitivity == pytest.approx(moved)
    moved = strategies.shuffled_sensitivity(LAMBDA, steps=12, steps_per_epoch=4)
    assert made(sampling=EPOCHS).event(12).sensitivity == pytest.approx(moved)
    assert made(sampling=EPOCHS).event(12).sensitivity > 1.1 * made().event(12).sensitivity


def test_no_other_relation_is_billed():
    for relation in ("replace_one", "add_or_remove"):
        with pytest.raises(ValueError, match="zero_out|add_or_remove"):
            dpx.epsilon(made(sampling=EPOCHS), 4, delta=1e-5, relation=relation)
        with pytest.raises(ValueError, match='only under relation "zero_out"'):
            accounting.event_epsilon(made().event(4), delta=1e-5, relation=relation)


def test_a_budget_is_met():
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=40)
    mechanism = made(noise_multiplier=budget)
    assert 1.99 < dpx.epsilon(mechanism, 40, delta=1e-5) <= 2.0
    assert mechanism.budget == budget


@ALL
@pytest.mark.long_cases("bisr", "lambda")
def test_a_resumed_run_has_the_same_noise_and_bill(strategy):
    mechanism = made(strategy)
    (found, state), (_, third) = run(mechanism, 6), run(mechanism, 3)
    stored = jax.tree.map(np.asarray, third)
    again, everyone = made(strategy), jnp.ones(5, bool)
    grads = jax.tree.map(lambda p: jnp.zeros((5, *p.shape)), PARAMS)
    for expected in found[3:]:
        updates, stored = jax.jit(again.update)(grads, stored, PARAMS, included=everyone)
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
    assert dpx.epsilon(again, state, delta=1e-5) == pytest.approx(dpx.epsilon(again, 6, delta=1e-5), rel=1e-4)
    others = [
        made(strategies.lambda_cgd(correlation=0.5)),
        made(strategies.Strategy(coefficients=(1.0, 0.6, 0.3, 0.1))),
    ]
    for other in [*others, dpx.dp_sgd(clip_norm=0.5, noise_multiplier=2.0, sampling=ORDER, key=KEY)]:
        with pytest.raises(ValueError, match="another kind of event"):
            dpx.epsilon(other, state, delta=1e-5)


def test_the_past_noise_is_not_public():
    state = run(made(BANDS), 3)[1]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(state.unreleased_noise.high))
    assert dpx.publishable_state(state).unreleased_noise is None
    assert dpx.publishable_state(state).inner.step == 3


def test_runs_of_one_key_with_other_strategies_have_independent_noise():
    """Else the difference of their releases would have less noise than either: at step 0, none."""
    params, kinds = {"w": jnp.zeros(20_000)}, (BANDS, LAMBDA, BISR, strategies.identity())
    first = [np.asarray(run(made(strategy), 1, params)[0][0]["w"]) for strategy in kinds]
    assert np.abs(np.corrcoef(first) - np.eye(4)).max() < 5 / np.sqrt(20_000)
    with pytest.raises(ValueError, match="key"):
        dpx.compose_runs((made(LAMBDA), 4), (made(BISR), 4), shared_batches=False)


def test_leaves_of_one_shape_have_independent_noise():
    params = {name: jnp.zeros((100, 100)) for name in "abcdef"}
    found, _ = run(made(BANDS), 5, params)
    rows = np.stack([np.ravel(found[4][name]) for name in params])
    assert np.abs(np.corrcoef(rows) - np.eye(6)).max() < 5 / 100


@pytest.mark.parametrize("strategy", [LAMBDA, BANDS], ids=["lambda", "bands"])
@pytest.mark.long_cases("lambda")
def test_what_is_fixed_is_allowed(strategy):
    """Layers that are frozen, one projection for the whole run, normalized gradients, and transforms behind."""
    grads = jax.tree.map(lambda p: jnp.ones((5, *p.shape)), PARAMS)
    mechanism = made(strategy)
    layers = dpx.in_coordinates(mechanism, coordinates.trainable(mask={"kernel": True, "bias": False}))
    found = run(layers, 6, grads=grads)[0]
    assert not np.any(found[1]["bias"]) and np.any(found[1]["kernel"])
    whole = dpx.chain(mechanisms.normalized(mechanism), optax.sgd(0.1, momentum=0.9))
    once = coordinates.random_projection(kind="countsketch", reduction_rate=0.5, every=None, key=KEY)
    for allowed in (layers, whole, dpx.in_coordinates(mechanism, once)):
        assert dpx.epsilon(allowed, 3, delta=1e-5) == dpx.epsilon(mechanism, 3, delta=1e-5)


@pytest.mark.long
def test_noise_cancels_in_layers_and_in_one_projection():
    """Prefix sums of what is released have the covariance of C^-1 there too: far less noise than without."""
    params, steps = {"kernel": jnp.zeros((40, 50)), "bias": jnp.zeros(3)}, 12
    for inner in (
        coordinates.trainable(mask={"kernel": True, "bias": False}),
        coordinates.random_projection(kind="subset", reduction_rate=0.5, every=None, key=KEY),
    ):
        found = [
            sum(np.asarray(u["kernel"]) for u in run(dpx.in_coordinates(made(strategy), inner), steps, params)[0])
            for strategy in (LAMBDA, strategies.identity())
        ]
        ratio = np.std(found[0]) / np.std(found[1])
        exact = np.linalg.norm(np.cumsum(LAMBDA.inverse_column(steps))) / np.sqrt(steps)
        assert ratio == pytest.approx(exact, rel=0.1) and ratio < 0.5


CUT = strategies.optimized(bands=3, steps=30)


@pytest.mark.parametrize(
    "strategy, groups", [(BANDS, 4), (CUT, 3), (CUT, 5)], ids=["bands", "optimized", "more groups"]
)
def test_the_bill_of_cyclic_sampling(strategy, groups):
    """One Poisson-sampled Gaussian for each turn of the groups, by the norm of c; for bits, all releases count."""
    sampling = dpx.sampling.CyclicPoissonSampling(examples=200, batch_size=5, bands=groups)
    mechanism, norm = made(strategy, sampling=sampling), np.linalg.norm(strategy.coefficients)
    for steps in (1, groups, groups + 1, 40):
        event, turns = mechanism.event(steps), -(-steps // groups)
        turn = event.event if turns > 1 else event
        assert isinstance(turn, CyclicBandedDpEvent) and (turns == 1 or event.count == turns)
        assert turn.sampling_probability == pytest.approx(groups * 5 / 200)
        assert 2.0 / norm * (1 - 4e-6) < turn.noise_multiplier < 2.0 / norm
        assert from_event(event).release_count.most == turns * groups >= steps
        exact = strategies.cyclic_poisson_event(
            strategy, examples=200, batch_size=5, groups=groups, steps=steps, noise_multiplier=2.0 / norm
        )
        expected = accounting.event_epsilon(exact, delta=1e-5, relation="zero_out")
        assert expected <= accounting.event_epsilon(event, delta=1e-5, relation="zero_out") <= expected * (1 + 1e-5)
        assert expected <= dpx.epsilon(mechanism, steps, delta=1e-5) <= expected * 1.002


SPARSE = dpx.sampling.CyclicPoissonSampling(examples=60_000, batch_size=256, bands=4)


@pytest.mark.parametrize("sampling", [ORDER, EPOCHS, dpx.sampling.FullBatch(examples=5), SPARSE])
def test_the_largest_shift_of_a_release_is_that_of_an_example(sampling):
    """Given the earlier releases, an example moves a sum by a row of C G: never by more than is billed for the bits."""
    event = made(BANDS, noise_multiplier=0.5, sampling=sampling).event(12)
    columns = linalg.toeplitz(BANDS.column(12), np.zeros(12))
    apart = {id(ORDER): 4, id(SPARSE): 4}.get(id(sampling), 1)
    patterns = [np.arange(first, 12, apart) for first in range(apart)]
    moved = max(np.abs(columns[:, steps]).sum(1).max() for steps in patterns) / 0.5
    run = np.linalg.norm(BANDS.coefficients) / 0.5 if sampling is SPARSE else event.sensitivity / 0.5
    assert run * (1 + 1e-5) > from_event(event).largest_shift("zero_out") > run >= moved


def test_a_large_epsilon_has_a_bill_for_the_bits():
    """The probability that a pair of normals is bad for the other data set needs no factor of e^epsilon."""
    cyclic = made(BANDS, noise_multiplier=0.35, sampling=SPARSE)
    for mechanism, steps in ((cyclic, 1000), (made(noise_multiplier=0.7), 8)):
        exact = accounting.event_epsilon(mechanism.event(steps), delta=1e-5, relation="zero_out")
        assert 30 < exact < dpx.epsilon(mechanism, steps, delta=1e-5) < 1.001 * exact


def test_the_methods_are_the_mechanism_with_their_strategies():
    given = dict(clip_norm=0.5, noise_multiplier=2.0, key=KEY)
    rates = tuple(np.linspace(1, 0.1, 12))
    workload = strategies.Workload(momentum=0.9, learning_rates=rates)
    for options, strategy in (
        ({}, strategies.optimized(bands=3, steps=12)),
        ({"momentum": 0.9, "learning_rates": rates}, strategies.optimized(bands=3, steps=12, workload=workload)),
    ):
        method = methods.band_mf_sgd(bands=3, steps=12, sampling=CYCLIC, **given, **options)
        expected = made(strategy, sampling=CYCLIC)
        assert method.event(12) == expected.event(12) and str(method) == str(expected)
        for one, other in zip(run(method, 4)[0], run(expected, 4)[0], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)
    assert methods.lambda_cgd(correlation=0.9, sampling=ORDER, **given).event(9) == made(LAMBDA).event(9)
    short = methods.band_mf_sgd(bands=3, steps=2, sampling=CYCLIC, **given)  # more bands than steps serve nothing
    assert short.event(1).coefficients == strategies.optimized(bands=2, steps=2).coefficients


FULL = dpx.sampling.FullBatch(examples=10)
THREE = dpx.sampling.CyclicPoissonSampling(examples=100, batch_size=20, bands=3)


@pytest.mark.parametrize(
    ("sampling", "noise", "steps", "share", "runs"),
    [(FULL, 9.0, 6, 0.85, 20_000), (ORDER, 2.5, 6, 0.85, 8000), (THREE, 1.4, 9, 0.64, 20_000)],
    ids=["full", "order", "cyclic"],
)
@pytest.mark.long_cases("cyclic", "full", "order")
def test_the_best_attacks_come_near_the_bill(sampling, noise, steps, share, runs):
    """`gaussian_epsilon` is near the bill where the run is one Gaussian; groups taken for one have 0.62."""
    strategy = strategies.Strategy(coefficients=(1.0, 0.8, 0.5))

    def make(key):
        return made(strategy, noise_multiplier=noise, sampling=sampling, key=key)

    bound = dpx.audit.lower_bound(make, steps=steps, delta=1e-3, key=keys.secret_key(5**40), runs=runs)
    assert share * bound.cost < bound.gaussian_epsilon < 1.05 * bound.cost and not bound.exceeds_cost
    assert bound.epsilon > 0.4 * bound.cost


@pytest.mark.long
def test_an_attack_refutes_the_bill_of_one_step():
    """As if one example moved C G by one clip norm: the attack whitens the noise of all steps."""

    def make(key):
        mechanism = made(BANDS, noise_multiplier=2.5, sampling=FULL, key=key)
        return mechanism.replace(event=lambda steps: dp_accounting.GaussianDpEvent(2.5))

    bound = dpx.audit.lower_bound(make, steps=6, delta=1e-3, key=keys.secret_key(5**40), runs=10_000)
    assert bound.exceeds_cost


# Settings in jax_privacy's docstrings and tests (execution_plan.py, 2026): bands or coefficients, steps, rate of a
# group's coins, epsilon, delta. It calibrates by dp-accounting's PLDs, for ceil(steps / bands) Poisson-sampled
# Gaussians, and the deviation of z is noise multiplier * clip norm * norm of a column.
PEER = {
    "docstring, one band": (1, 1000, 0.1, 1.0, 1e-5),
    "docstring, coefficients": ((1.0, 0.5, 0.2), 1000, 0.4, 1.0, 1e-5),
    "test of the calibration": (10, 20, 1.0, 1.0, 1e-6),
}


@pytest.mark.parametrize("name", PEER)
def test_calibrations_are_those_of_a_peer(name):
    """Up to its discretization, whose losses are rounded up in steps of 1e-4, and what the bits cost here."""
    bands, steps, rate, epsilon, delta = PEER[name]
    strategy = strategies.optimized(bands=bands, steps=steps) if isinstance(bands, int) else None
    strategy = strategy or strategies.Strategy(coefficients=bands)
    groups, turns = strategy.bands, -(-steps // strategy.bands)

    def event(noise):
        sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(sampled, turns)

    sampling = dpx.sampling.CyclicPoissonSampling(examples=1000 * groups, batch_size=1000 * rate, bands=groups)
    budget = dpx.Budget(epsilon=epsilon, delta=delta, steps=steps)
    mine = made(strategy, noise_multiplier=budget, sampling=sampling).noise_multiplier
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    theirs = accountant.compose(event(mine / np.linalg.norm(strategy.coefficients))).get_epsilon(delta)
    assert theirs == pytest.approx(epsilon, rel=2e-3)


TINY = {"w": jnp.zeros(3)}


def on_trial(mechanism):
    return MechanismUnderTest(mechanism, TINY, draws=500, seed=3)


@ALL
@pytest.mark.long_cases("lambda", "bisr")
def test_the_contract_sees_the_covariance_over_steps(strategy):
    mechanism = made(strategy)
    assert "covariance C^-1 C^-T" in require_noise_covariance(on_trial(mechanism))
    other = strategies.Strategy(coefficients=(1.0, 0.6, 0.3, -0.1))
    with pytest.raises(Violation, match="is not C\\^-1 z for the stated C"):
        require_noise_covariance(on_trial(mechanism.replace(correlated=other)))


@pytest.mark.parametrize("strategy", [LAMBDA, BISR, BANDS, strategies.banded_square_root(bands=2)])
@pytest.mark.parametrize("sampling", [ORDER, EPOCHS, CYCLIC, dpx.sampling.FullBatch(examples=5)])
def test_the_contract_tries_all_patterns_of_steps(strategy, sampling):
    """Brute force over the patterns and signs of up to 10 steps; a bill below them is Broken."""
    if strategy.bands is None and sampling is CYCLIC:
        return
    mechanism = made(strategy, sampling=sampling)
    assert "patterns and signs" in require_costed_sensitivity(on_trial(mechanism))

    def less(steps):
        event = mechanism.event(steps)
        change = {"noise_multiplier": 1.01 * max(1.0, float(ratio)) * mechanism.event(1).noise_multiplier}
        if hasattr(event, "count"):
            return attrs.evolve(event, event=attrs.evolve(event.event, **change))
        return attrs.evolve(event, **change)

    ratio = found_share(mechanism)
    with pytest.raises(Violation, match="are paid for"):
        require_costed_sensitivity(on_trial(mechanism.replace(event=less)))
    if sampling is CYCLIC:
        one_turn = mechanism.replace(event=lambda steps: mechanism.event(1))
        with pytest.raises(Violation, match="turns"):
            require_costed_sensitivity(on_trial(one_turn))


def found_share(mechanism):
    """What is billed over what brute force finds: 1 where the bound is exact."""
    words = require_costed_sensitivity(on_trial(mechanism)).split()
    return 1 / float(words[words.index("most") + 1])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: made((1, -0.5)), "dpx.strategies.Strategy"),
        (lambda: made(LAMBDA, sampling=CYCLIC), "at most 4 bands"),
        (lambda: made(strategies.banded_square_root(bands=5), sampling=CYCLIC), "at most 4 bands"),
        (lambda: made(noise_multiplier=lambda step: 1.0 + step), "got a schedule"),
        (lambda: made(clip_norm=lambda step: 1.0), "got a schedule"),
        (lambda: made(clip_norm={"kernel": 1.0, "bias": 1.0}), "clip_norm must be a finite number"),
        (lambda: made(noise_multiplier=0.0), "above 0"),
        (lambda: made(sampling=dpx.PoissonSampling(examples=20, batch_size=5)), "FixedOrder"),
        (lambda: made(sampling=dpx.sampling.RandomAllocation(examples=20, steps_per_epoch=4)), "FixedOrder"),
        (lambda: made(sampling=dpx.sampling.FixedSizeSampling(examples=20, batch_size=5)), "FixedOrder"),
        (lambda: dpx.in_coordinates(made(), coordinates.random_freeze(freeze_rate=0.5, every=2, key=KEY)), "fixed"),
        (
            lambda: dpx.in_coordinates(
                dpx.chain(mechanisms.normalized(made()), optax.sgd(0.1)),
                coordinates.random_projection(kind="countsketch", reduction_rate=0.5, key=KEY),
            ),
            "fixed",
        ),
        (lambda: dpx.in_coordinates(made(), coordinates.importance_mask(keep=0.5, warmup=2)), "fixed"),
        (
            lambda: mechanisms.clip_then_project(made(), kind="countsketch", reduction_rate=0.5),
            "must not wrap correlated noise",
        ),
        (
            lambda: dpx.compose_runs((made(), 4), (made(key=keys.secret_key(3**60)), 4), shared_batches=True),
            "one Gaussian a step",
        ),
        (lambda: dpx.epsilon(made(), 4, delta=1e-5, relation="add_or_remove"), "add_or_remove"),
    ],
)
def test_what_has_no_proof_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def bits(strategy, place=lambda tree: tree, share=1.0):
    """Of six releases of one sum, in hexadecimal. place: puts a tree of one matrix on devices.

    share: the part of the past noise that a device has, from the first step on. The memory may differ in its last bits,
    2^-52 of a number, because one program fuses a product and a sum.
    """
    mechanism = made(strategy)
    sums = place({"w": jnp.asarray(np.random.default_rng(3).normal(size=(16, 40)), jnp.float32)})
    state, found, step = mechanism.init(sums), [], jax.jit(lambda state, sums: mechanism.release((sums,), state, sums))
    for _ in range(6):
        require_share(state, share)
        released, state = step(state, sums)
        found.append(released)
    require_share(state, share)
    return "".join(np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(found))


def require_share(state, share):
    for rows in jax.tree.leaves(state.unreleased_noise):
        assert rows.addressable_shards[0].data.size == share * rows.size


def print_on_eight_devices():
    assert len(jax.devices()) == 8
    for axis, kind in ((AxisType.Auto, BISR), (AxisType.Explicit, BANDS)):
        rows = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(axis,)), PartitionSpec("data"))
        print(bits(kind, lambda tree, rows=rows: jax.device_put(tree, rows), 1 / 8))


def test_the_same_noise_on_eight_devices():
    """The released numbers bit for bit; and the memory is sharded like the parameters, from the first step on."""
    printed = on_eight_devices("from tests import test_correlated_noise as t; t.print_on_eight_devices()")
    assert printed.split() == [bits(BISR), bits(BANDS)]


TRAINED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import dpx
from tests.test_correlated_noise import BANDS, made, require_share
def loss(params, example):
    return jnp.sum(jnp.tanh(example["x"] @ params["w"] + params["b"]) - example["y"])
params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32), "b": jnp.ones(16)}
batch = {"x": jnp.asarray(np.random.default_rng(2).normal(size=(24, 8)), jnp.float32), "y": jnp.ones(24)}
included = np.arange(24) % 5 != 0
mechanism = made(BANDS)
def run(params, batch):
    optimizer = dpx.chain(mechanism, optax.sgd(0.1))
    step, state = jax.jit(dpx.private_updates(loss, optimizer), donate_argnums=2), optimizer.init(params)
    for _ in range(5):
        updates, state, _ = step(params, dpx.Batch(batch, included), state)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state
one = run(params, batch)
splits = {"w": P(None, "data"), "b": P("data")}
for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, splits)
    require_share(mechanism.init(placed), 1 / 8)
    after, state = run(placed, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), after, one[0])
    require_share(state.inner, 1 / 8)
print("the same on 8 devices")
"""


@pytest.mark.long
def test_training_on_eight_devices():
    assert "the same on 8 devices" in on_eight_devices(TRAINED)

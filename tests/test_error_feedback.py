"""DiceSGD against its paper's algorithms in NumPy, and the secrecy of its error."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import keys
from dpx.papers.dice_sgd.cost import ERROR
from dpx.states.record import ReleaseState
from dpx.sums.rounding import ETA, FloatPair
from examples import loop
from examples.config import Config

POISSON = dpx.PoissonSampling(examples=100, batch_size=8)
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}
ROWS, STEPS = 7, 12


def dice(**changes) -> dpx.Mechanism:
    options = dict(clip_norm=0.7, feedback_norm=0.1, outer_clip_norm=math.inf, noise_multiplier=0.0, sampling=POISSON)
    return dpx.methods.dice_sgd(**(options | dict(key=jax.random.key(3)) | changes))


def two_numbers(error, low=None) -> FloatPair:
    """The error of a state, float32 arrays of one shape."""
    return FloatPair(jnp.asarray(error), jnp.zeros_like(error) if low is None else jnp.asarray(low))


def exactly(error: FloatPair) -> np.ndarray:
    """Its numbers, float64."""
    return np.asarray(error.high, np.float64) + np.asarray(error.low, np.float64)


def after_steps(steps: int) -> ReleaseState:
    return ReleaseState.empty_record()._replace(step=jnp.int32(steps))


def gradients(seed: int, scale: float = 2.0):
    """(STEPS, ROWS, 8): of examples that do not average out."""
    rng = np.random.default_rng(seed)
    return scale * (rng.normal(size=(STEPS, ROWS, 8)) * rng.lognormal(size=(STEPS, ROWS, 1)) + 0.3)


def run(mechanism: dpx.Mechanism, grads: np.ndarray, params=None):
    """The updates of every step, (STEPS, 8), and the last state."""
    params = jnp.zeros(8) if params is None else params
    state, updates = mechanism.init(params), []
    update = jax.jit(mechanism.update)
    for rows in grads:
        one, state = update(jnp.asarray(rows, jnp.float32), state, params, included=jnp.ones(ROWS, bool))
        updates.append(np.asarray(one, np.float64))
    return np.array(updates), state


# Oracles: the paper's pseudo-code, where the norm that enters the error is bounded too


def clip(v, bound):
    return v * min(1, bound / np.linalg.norm(v)) if np.any(v) else v


def algorithm_2(grads, noise, *, outer=math.inf, reset_every=None, bound=clip, bound_error=clip):
    """v = (1/B) sum clip(g, C1) + clip(e, C2); e <- e + (1/B) sum clip(g, Cmax) - v; gives v + w."""
    error, out = np.zeros(8), []
    for t, rows in enumerate(grads):
        if reset_every and t % reset_every == 0:
            error = np.zeros(8)
        v = sum(bound(g, 0.7) for g in rows) / 8 + bound_error(error, 0.1)
        out.append(v + noise[t])
        error = error + sum(clip(g, outer) for g in rows) / 8 - v
    return np.array(out), error


def noise_of(deviation):
    """The noise a run with this key draws, (STEPS, 8)."""
    stream = keys.stream(jax.random.key(3), "noise")
    scale = deviation * (1 + ETA + ERROR)
    return np.array([scale * keys.normals_of_release(stream, t, jnp.zeros(8)) for t in range(STEPS)])


@pytest.mark.parametrize("options", [{}, {"outer": 1.5}, {"outer": 1.5, "reset_every": 5}], ids=str)
def test_algorithm_2(options, ungridded):
    made = dice(
        noise_multiplier=2.0, outer_clip_norm=options.get("outer", math.inf), reset_every=options.get("reset_every")
    )
    expected, error = algorithm_2(gradients(0), noise_of(2 * 0.7 / 8), **options)
    found, state = run(made, gradients(0))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(exactly(state.unreleased_error), error, rtol=2e-5, atol=2e-5)


def test_algorithm_3(promoting, ungridded):
    """Adam: both moments of the noisy query; the error of the query before noise and moments."""
    made = dice(noise_multiplier=1.0, outer_clip_norm=2.0)
    queries, _ = algorithm_2(gradients(1), noise_of(0.7 / 8), outer=2.0)
    first, second, expected = 0.0, 0.0, []
    for t, query in enumerate(queries, 1):
        first, second = 0.9 * first + 0.1 * query, 0.999 * second + 0.001 * query**2
        expected.append(first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8))
    found, _ = run(dpx.chain(made, optax.scale_by_adam()), gradients(1))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("outer", [math.inf, 1.5])
def test_algorithm_4(outer):
    """Automatic: gradients and error normalized, the error smoothly."""
    expected, error = algorithm_2(
        gradients(2),
        np.zeros(STEPS),
        outer=outer,
        bound=lambda g, c: c * g / (np.linalg.norm(g) + 0.05),
        bound_error=lambda e, c: c * e / (np.linalg.norm(e) + c),
    )
    found, state = run(dice(stability=0.05, outer_clip_norm=outer), gradients(2))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(exactly(state.unreleased_error), error, rtol=2e-5, atol=2e-5)


@pytest.mark.long
def test_fixed_point_without_bias():
    """The paper's Appendix B.1 with C = 1: SGD's optimum is 0, clipped SGD ends near 1/2, DiceSGD at 0."""
    slope = 3.0  # C': one example at 3 whose gradients are clipped, three at -1
    centres = jnp.array([-1.0, -1.0, -1.0, 3.0])

    def ends(mechanism, learning_rate=0.05):
        @jax.jit
        def step(carry, _):
            x, state = carry
            grads = jnp.clip(x - centres, -slope, slope)
            update, state = mechanism.update(grads, state, x)
            return (x - learning_rate * update, state), None

        x = jnp.float32(2.0)
        (x, _), _ = jax.lax.scan(step, (x, mechanism.init(x)), length=3000)
        return float(x)

    sampling = dpx.FullBatch(examples=4)
    shared = dict(clip_norm=1.0, noise_multiplier=0.0, sampling=sampling, key=jax.random.key(0))
    assert abs(ends(dpx.dp_sgd(**shared))) > 0.3
    for options in (
        {"outer_clip_norm": math.inf},
        {"outer_clip_norm": 4.0},
        {"outer_clip_norm": math.inf, "stability": 0.05},
    ):
        assert abs(ends(dpx.methods.dice_sgd(feedback_norm=1.5, **options, **shared))) < 1e-3, options
    assert (
        abs(ends(dpx.methods.dice_sgd(feedback_norm=1.5, outer_clip_norm=1.2, **shared))) > 0.1
    )  # too little is remembered
    assert abs(ends(dpx.methods.dice_sgd(feedback_norm=0.05, outer_clip_norm=math.inf, **shared))) > 0.1  # C2 < C1


# How far one example, and a moved error, can move things


@pytest.mark.parametrize("stability", [None, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("outer", [0.7, 0.8, 2.0])
def test_one_example_moves_the_error_by_what_is_billed(outer, stability):
    made = dice(outer_clip_norm=outer, stability=stability)
    error_shift = made.event(3).error_shift
    sizes = jnp.concatenate([jnp.geomspace(1e-6, 1e4, 3000), jnp.array([0.0, 0.7, outer, 1e18])])
    released, withheld = jax.vmap(lambda n: made.clip_factors(n, None))(sizes)
    moved = np.abs(np.asarray(withheld * sizes, np.float64)).max()
    assert moved <= 0.7 * error_shift * (1 + 1e-6) + 1e-12
    assert moved >= 0.7 * error_shift * 0.999
    assert np.all(np.asarray(released * sizes) <= 0.7 * (1 + 1e-6))


@pytest.mark.parametrize("stability", [None, 0.05])
def test_feeding_back_is_firmly_non_expansive(stability):
    """S^2 + F^2 <= D^2 for any two errors, near and far, small and large."""
    made = dice(stability=stability, feedback_norm=0.3)
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-4, 3, (4000, 1))
    one = (rng.normal(size=(4000, 8)) * sizes).astype(np.float32)
    near = rng.random((4000, 1)) < 0.5
    other = np.where(near, one + 0.1 * sizes * rng.normal(size=one.shape), rng.normal(size=one.shape) * sizes)
    other = other.astype(np.float32)
    zero = jnp.zeros(8)

    @jax.jit
    @jax.vmap
    def feed(error):
        state = made.init(zero)._replace(release=after_steps(1), unreleased_error=two_numbers(error))
        update, state = made.release((zero, zero), state, zero)
        return update, state.unreleased_error.high

    fed, left = (np.asarray(a, np.float64) - np.asarray(b) for a, b in zip(feed(one), feed(other), strict=True))
    moved = ((one.astype(np.float64) - other) ** 2).sum(1)
    slack = 1e-5 * np.maximum((one**2).sum(1), (other**2).sum(1))
    assert np.all((fed**2).sum(1) + (left**2).sum(1) <= moved + slack)
    np.testing.assert_allclose(feed(one)[0] + feed(one)[1], one, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"stability": 0.05}, {"outer_clip_norm": 0.9}, {"reset_every": 2}], ids=str)
def test_huge_gradients_stay_finite(options):
    """No finite or non-finite example makes a release non-finite, now or later, or moves it by more than billed."""
    made = dice(**options)
    state = made.init(jnp.zeros(8))
    update = jax.jit(made.update)
    for value in (3e38, 1e18, -1e18, math.inf, math.nan, 1e15, 1e19, 0.0, 0.1, 0.1):
        rows = jnp.full((200, 8), value).at[0].set(0.1)
        released, state = update(rows, state, jnp.zeros(8), included=jnp.ones(200, bool))
        assert np.linalg.norm(released) <= (200 * 0.7 / 8 + 0.1) * (1 + 1e-5)
        assert np.all(np.isfinite(exactly(state.unreleased_error)))
    # After very many steps: its norm would be inf in float32.
    overflowing = state._replace(unreleased_error=two_numbers(jnp.full(8, 1e25)))
    for _ in range(2):
        released, overflowing = update(rows, overflowing, jnp.zeros(8), included=jnp.ones(200, bool))
        assert np.all(np.isfinite(released)) and np.all(np.isfinite(exactly(overflowing.unreleased_error)))


def test_reset_forgets():
    made = dice(reset_every=3)
    state = made.init(jnp.zeros(8))._replace(unreleased_error=two_numbers(jnp.ones(8)))
    for step, fed in ((0, False), (1, True), (2, True), (3, False), (4, True)):
        at = state._replace(release=after_steps(step))
        released, after = made.update(jnp.zeros((1, 8)), at, jnp.zeros(8), included=jnp.ones(1, bool))
        assert bool(np.any(released)) == fed
        assert np.any(exactly(after.unreleased_error)) == fed


# Secrecy and paths


def test_the_error_is_in_the_unreleased_field_only():
    made = dpx.chain(dice(), optax.sgd(0.1, momentum=0.9))
    _, state = run(made, gradients(4))
    assert np.any(exactly(state.inner.unreleased_error))
    shown = dpx.publishable_state(state)
    assert shown.inner.unreleased_error is None
    assert dpx.accounting.steps_taken(shown) == STEPS
    # other errors with the same releases: nothing else tells them apart
    other = state._replace(inner=state.inner._replace(unreleased_error=two_numbers(jnp.ones(8))))
    jax.tree.map(np.testing.assert_array_equal, dpx.publishable_state(other), shown)
    inside = dpx.publishable_state(types.MappingProxyType({"optimizer": [state], "epoch": 3}))
    assert inside["epoch"] == 3 and inside["optimizer"][0].inner.unreleased_error is None
    with pytest.raises(ValueError, match="state must be NamedTuples"):
        dpx.publishable_state({"optimizer": types.SimpleNamespace(state=state)})


def test_equal_bounds_are_equal_after_rounding():
    """Nothing is withheld, so nothing is fed back, and the bill is DP-SGD's."""
    made = dice(clip_norm=0.1, outer_clip_norm=0.1)  # float32(0.1) is above 0.1
    assert made.event(3).error_shift == 0


OF_ERRORS = ("Error feedback is one event", "covers the rounding of the error", "reset_every=5")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [("dice_sgd", {"outer_clip_norm": 1.5, "reset_every": 5}, OF_ERRORS), ("dp_sgd", {}, ())],
    ids=["dice_sgd", "dp_sgd"],
)
@pytest.mark.long
def test_checkpoints_say_that_they_are_sensitive(tmp_path, undrawn, method, options, words):
    """The trainer: the method and its options, the mark on the checkpoints, and nothing of the error elsewhere."""
    shared = dict(dataset="digits", seed=3, model="linear", noise_multiplier=4.0, batch_size=100, epochs=0.5)
    config = Config(method=method, method_options=options, **shared)
    result = loop.run(config, output_dir=tmp_path, progress=False)
    assert 0 < result.epsilon < math.inf
    assert "`unreleased_*`" in (tmp_path / "checkpoints" / "SENSITIVE").read_text()
    again = loop.run(config, output_dir=tmp_path, resume=True, progress=False)  # the mark does not disturb orbax
    assert again.steps == result.steps and again.accuracy == result.accuracy
    report = (tmp_path / "privacy_report.md").read_text()
    assert all(word in report for word in words)


def test_low_precision_parameters_keep_an_error_of_two_float32_numbers():
    made = dice()
    params = jnp.zeros(8, jnp.bfloat16)
    grads = jnp.ones((3, 8), jnp.bfloat16)
    updates, state = made.update(grads, made.init(params), params, included=jnp.ones(3, bool))
    assert updates.dtype == jnp.bfloat16
    assert [part.dtype for part in state.unreleased_error] == [jnp.float32, jnp.float32]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"clip_norm": {"w": 1.0}}, "clip_norm"),
        ({"outer_clip_norm": -math.inf}, "outer_clip_norm"),
        ({"noise_multiplier": lambda step: 1.0}, "noise_multiplier"),
    ],
)
def test_bad_configuration(changes, match):
    with pytest.raises(ValueError, match=match):
        dice(**changes)
    with pytest.raises(TypeError):
        dpx.methods.dice_sgd(clip_norm=1.0)  # type: ignore

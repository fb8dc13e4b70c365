"""The error of error feedback is computed as exactly as `dpx.papers.dice_sgd.cost` says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.papers.dice_sgd.cost import ERROR, covers_rounding
from dpx.states.record import ReleaseState
from dpx.sums.rounding import FloatPair, as_float64, norm_of_pair, split_float64

UNIT = 2.0**-53  # v of the proof
SIZE = 1000
RNG = np.random.default_rng(0)


def dice(**changes) -> dpx.Mechanism:
    options = dict(clip_norm=1.0, feedback_norm=1.0, outer_clip_norm=2.0, noise_multiplier=0.0)
    sampling = dpx.PoissonSampling(examples=100_000, batch_size=1024)
    return dpx.methods.dice_sgd(**(options | changes), sampling=sampling, key=jax.random.key(3))


def number(total: FloatPair) -> np.ndarray:
    return np.asarray(total.high, np.longdouble) + np.asarray(total.low, np.longdouble)


def pair(exact: np.ndarray) -> FloatPair:
    high = exact.astype(np.float32)
    return FloatPair(jnp.asarray(high), jnp.asarray((exact - high).astype(np.float32)))


def state_of(made: dpx.Mechanism, error: FloatPair):
    state = made.init(jnp.zeros(error.high.shape))
    return state._replace(release=ReleaseState.empty_record()._replace(step=jnp.int32(1)), unreleased_error=error)


def fed_back(error: np.ndarray, feedback_norm: float, stability: float | None) -> np.ndarray:
    """In extended precision."""
    size = np.sqrt(np.sum(error**2))
    return error * (
        feedback_norm / max(size, feedback_norm) if stability is None else feedback_norm / (size + feedback_norm)
    )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm((found - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64)))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("stability", [None, 0.1])
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_many_steps_are_as_exact_as_two_numbers(stability, x64, compiled):
    """An error that grows: each step adds at most 107 v of it. One float32 number is off by 2^-24 at every step."""
    steps = 100 if compiled else 3
    with jax.enable_x64(x64):
        made = dice(feedback_norm=0.02, stability=stability)
        release = jax.jit(made.release) if compiled else made.release
        zero = jnp.zeros(SIZE, jnp.float32)
        state = state_of(made, FloatPair(zero, zero))
        withheld = (RNG.standard_normal((steps, SIZE)) + 0.5).astype(np.float32)
        expected = np.zeros(SIZE, np.longdouble)
        for row in withheld:
            _, state = release((zero, jnp.asarray(row)), state, zero)
            expected = expected - fed_back(expected, float(np.float32(0.02)), stability) + row / np.longdouble(1024)
        assert [part.dtype for part in state.unreleased_error] == [jnp.float32, jnp.float32]
    assert relative(number(state.unreleased_error), expected) < 107 * UNIT * steps


def step_of(made: dpx.Mechanism):
    """(error) -> the sum that the noise is added to, and the next error, where gradients are 0; compiled."""

    def step(error):
        seen, zero = [], jnp.zeros(error.high.shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dpx.keys, "release", lambda key, step, total, deviation: seen.append(total) or total.high)
            _, state = made.release((zero, zero), state_of(made, error), zero)
        return seen[0], state.unreleased_error

    return jax.jit(step)


def of_norm(size: float, direction: np.ndarray) -> np.ndarray:
    return direction * (size / np.linalg.norm(direction))


@pytest.mark.parametrize("stability", [None, 0.1])
@pytest.mark.parametrize("size", [1.5e5, 3e16], ids=["large", "beyond what is remembered"])
def test_a_step_is_as_exact_as_is_proved(size, stability):
    """What is released and what is kept, each against extended precision, where B C2 = 2^20 C1."""
    step = step_of(dice(feedback_norm=2.0**10, stability=stability))
    for spread in (0, 3):
        error = pair(of_norm(size, RNG.standard_normal(SIZE) * 10.0 ** RNG.uniform(-spread, spread, SIZE)))
        released, kept = map(number, step(error))
        exact = number(error)
        exact = exact * min(1, 1e15 / np.sqrt(np.sum(exact**2)))
        fed = fed_back(exact, 2.0**10, stability)
        assert relative(released / 1024, fed) < 72 * UNIT
        assert np.linalg.norm((kept - (exact - fed)).astype(np.float64)) < 107 * UNIT * size


@pytest.mark.parametrize("stability", [None, 0.1])
@pytest.mark.parametrize("moved", [2.0**-50, 2.0**-30, 2.0**-26])
def test_a_small_move_of_the_error_stays_small(stability, moved):
    """Errors that differ by less than float32 sees, where B C2 = 2^20 C1: S^2 + F^2 <= D^2, but for 316 v of the error.

    With an error of float32, the release moved by 2^-23 of B C2, and so by an eighth of the clip norm."""
    step, size = step_of(dice(feedback_norm=2.0**10, stability=stability)), 1.5e5
    for _ in range(5):
        one = of_norm(size, RNG.standard_normal(SIZE))
        errors = pair(one), pair(one + of_norm(moved * size, RNG.standard_normal(SIZE)))
        distance = np.linalg.norm((number(errors[0]) - number(errors[1])).astype(np.float64))
        (sums, kept), (other_sums, other_kept) = map(step, errors)
        shift, left = (number(sums) - number(other_sums)) / 1024, number(kept) - number(other_kept)
        assert np.linalg.norm(np.concatenate([shift, left]).astype(np.float64)) <= distance + 316 * UNIT * size


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 250, 4096, 100_003])
def test_the_norm_has_short_sums(size):
    """Squares that one long sum loses, one after another: 1 + n 2^-54."""
    small, one = np.full(size, 2.0**-27, np.float32), np.ones(1, np.float32)
    trees = ({"a": small, "b": one}, {"a": one, "b": small}, {"a": np.concatenate([one, small])})
    find = jax.jit(lambda total: norm_of_pair(total).astype(jnp.float64))
    for tree in trees:
        with jax.enable_x64(True):
            found = np.asarray(find(FloatPair(tree, jax.tree.map(np.zeros_like, tree))))
        exact = math.sqrt(1 + size * 2.0**-54)
        assert abs(found - exact) <= 32 * UNIT * exact


def test_halves_are_the_number():
    exact = RNG.standard_normal(1000) * 10.0 ** RNG.integers(-20, 20, 1000)
    with jax.enable_x64(True):
        total = jax.jit(split_float64)(jnp.asarray(exact))
        assert [part.dtype for part in total] == [jnp.float32, jnp.float32]
        again = np.asarray(jax.jit(as_float64)(total))
    assert np.all(np.abs(again - exact) <= 32 * UNIT * np.abs(exact)) and np.any(again != exact)
    np.testing.assert_array_equal(total.high, exact.astype(np.float32))


@pytest.mark.parametrize("shift", [1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("steps", [2, 10, 300, 3000])
def test_what_the_conditions_leave(steps, shift):
    """The recursion of the proof, for as many rows as the conditions allow: 3/4 of ERROR."""
    rows = min(2.0**29 / steps**2, 2.0**29 * min(1, shift) / math.sqrt(steps))
    largest = steps * rows * shift
    moves, grows, x = 144 * UNIT * largest + 68 * UNIT * rows, 214 * UNIT * largest, 0.0
    for _ in range(steps):
        x = math.hypot(moves, grows + x)
    assert x <= 0.75 * shift * ERROR


def test_which_runs_are_covered():
    """Both conditions, the growth of the error, and the bill of an infinite outer norm."""
    run = functools.partial(covers_rounding, reset_every=None, feedback_shift=0.0, batch_size=1000.0, examples=1000)
    assert run(steps=732, error_shift=0.5) and not run(steps=733, error_shift=0.5)  # R^2 n = 2^29
    assert run(steps=10_000, reset_every=700, error_shift=0.5)
    assert run(steps=268_000, error_shift=0.5, feedback_shift=2000.0)  # 2 R n = 2^29
    assert not run(steps=269_000, error_shift=0.5, feedback_shift=2000.0)
    assert not run(steps=268_000, error_shift=0.5, feedback_shift=1999.0)
    assert run(steps=700, error_shift=1e-4) and not run(steps=700, error_shift=1e-5)
    assert run(steps=10**9, error_shift=0.0)
    assert run(steps=10**9, error_shift=math.inf) and not run(steps=10**12, error_shift=math.inf)
    assert not run(steps=700, error_shift=0.5, examples=10**6)  # a Poisson batch has more rows

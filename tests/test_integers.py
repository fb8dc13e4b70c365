"""The noise in integers of 32 bits: its errors against extended precision, and its law against that of float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx import keys
from dpx.accounting.arithmetic import INTEGERS, NORMALS
from dpx.keys import integer_normals, noise, normals
from dpx.sums.rounding import FloatPair
from dpx.xla.place import enabling_float64, tracing_for_place
from tests.problems import dp_sgd, on_a_cpu
from tests.test_noise import KEY, LONG, RARE, chosen_words, uniform_numbers, words_at_random

PI = LONG("3.14159265358979323846264338327950288")
UNIT = 2.0**-45


def drawn(words, rare, second, scale):
    return integer_normals.normal_from_polar(integer_normals.polar_radius(words, rare, scale), words, second)


def value(limbs) -> np.ndarray:
    return sum(np.asarray(limb).astype(LONG) * LONG(2) ** (-15 * place) for place, limb in enumerate(limbs, start=1))


def chosen(count: int) -> np.ndarray:
    """Blocks at random, with p near 1, below 2^-32 and below 2^-64, and those of test_noise.py."""
    words, rng = words_at_random(4 * count), np.random.default_rng(1)
    shifts = rng.integers(0, 32, 4 * count, dtype=np.uint32)
    words[0] = np.where(np.arange(4 * count) < count, ~(words[0] >> shifts), words[0])
    words[0, 2 * count :] = 0
    words[1, 2 * count : 3 * count] >>= shifts[:count]
    words[1, 3 * count :] = 0
    words[3, 3 * count :] >>= shifts[:count]
    return np.concatenate([words, chosen_words()], axis=1)


def exact(words: np.ndarray, rare: int = RARE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """r, and the sine and the cosine, of x86's 64 bits of mantissa; 1 - p is exact."""
    assert np.finfo(LONG).nmant >= 63
    numbers = uniform_numbers(words, rare)
    p, theta = (np.array([LONG(top) / LONG(2) ** bits for top, bits in side]) for side in zip(*numbers, strict=True))
    rest = np.array([LONG(2**bits - top) / LONG(2) ** bits for (top, bits), _ in numbers])
    logarithm = np.where(rest < 0.5, np.log1p(-np.minimum(rest, 0.5)), np.log(p))
    turn = 2 * PI * (theta - np.round(theta * 4) / 4)
    sine, cosine, quarter = np.sin(turn), np.cos(turn), np.round(theta * 4).astype(int) % 4
    sines = [np.choose((quarter + more) % 4, [sine, cosine, -sine, -cosine]) for more in (0, 1)]
    return np.sqrt(-2 * logarithm), *sines


@pytest.mark.parametrize("rare", [RARE, 5])
def test_normals_against_extended_precision(rare, count=10_000):
    words = chosen(count)
    radius, *sines = exact(words, rare)
    for second, wanted in zip((False, True), sines, strict=True):
        high, low = jax.jit(drawn)(list(words), np.uint32(rare), np.full(words.shape[1], second), np.uint32(2**23))
        found = (np.asarray(high).astype(np.int32) * LONG(2) ** 32 + np.asarray(low)) / LONG(2) ** 53 / 16
        error = np.abs(found - radius * wanted)
        # What a border of a cell sees on average counts there, near p = 1, and not the digits, which `digits` has.
        digits = np.where(words[0] > 0, 2.0**-65 / (np.exp(-(radius**2) / 2) * np.maximum(radius, 1e-30)), 0)
        bound = integer_normals.EVALUATION + radius * integer_normals.SLOPE + 2.0**-55 / radius + digits
        assert (error <= bound).all(), np.max(error / bound)
        assert (error > bound / 100).any()  # the bound is not far away


def test_the_root_and_its_inverse_are_as_near_as_the_proof_says():
    """All heads of 16 bits, with both ends of the rest: Newton's last step is linear between them."""
    heads = np.arange(2**14, 2**16, dtype=np.uint32) << 16
    for rest in (0, 0xFFFF):
        found = (
            np.asarray(jax.jit(integer_normals.fixed_point_inverse_root)(heads | np.uint32(rest))).astype(LONG)
            * 2.0**-29
        )
        root = np.sqrt((heads | np.uint32(rest)).astype(LONG) * LONG(2) ** -32)
        assert np.abs(found * root - 1).max() < 2.0**-24
    high = np.concatenate([heads, heads | 0xFFFF, words_at_random(100_000)[0] | np.uint32(2**30)])
    low = np.random.default_rng(1).integers(0, 2**32, len(high), dtype=np.uint32)
    exact = np.sqrt((high.astype(LONG) * 2**32 + low) * LONG(2) ** -64)
    found = value(integer_normals.limbs(jax.jit(integer_normals._fixed_point_root)(high, low)))
    assert np.abs(found - exact).max() < 2.0**-44.3


def test_sines_and_products_are_as_near_as_the_proof_says():
    words = chosen(20_000)
    _, *sines = exact(words)
    for second, wanted in zip((False, True), sines, strict=True):
        part, negative = jax.jit(integer_normals.sine_or_cosine)(list(words), np.full(words.shape[1], second))
        assert np.abs(np.where(negative, -1, 1) * value(integer_normals.limbs(part)) - wanted).max() < 4 * UNIT
    rng = np.random.default_rng(0)
    x, y = (tuple(rng.integers(0, 2**15, (3, 50_000), dtype=np.uint32)) for _ in range(2))
    x[0][:100] = x[1][:100] = x[2][:100] = y[0][:100] = y[1][:100] = y[2][:100] = 2**15 - 1
    for made, wanted, most in (
        (integer_normals.fraction_product(x, y), value(x) * value(y), 1.0001),
        (integer_normals.two_limb_product(x, y[:2]), value(x) * value(y[:2]), 2.0001),
        (integer_normals.fraction_square(x), value(x) ** 2, 3.0001),
    ):
        below = (wanted - value(integer_normals.limbs(made))) / UNIT
        assert -1e-3 <= below.min() and below.max() <= most


@pytest.mark.parametrize("deviation", [1.0, np.nextafter(np.float32(2), np.float32(1)), 1.3, 3e-12, 5e9])
def test_the_released_integers_are_those_of_float64(deviation, count=20_000):
    """Where no exact number is within 2^-36 of a border, which 100,000 numbers have with a probability of 10^-5."""
    words, rng = chosen(count), np.random.default_rng(2)
    size, deviation = words.shape[1], np.float32(deviation)
    second = np.arange(size) % 2 == 1
    scales = rng.choice([0, 1e-38, 1e-30, 1e-3, 1, 30, 1e6], size)
    high = (rng.normal(size=size) * scales).astype(np.float32) * deviation
    high[:50], high[50:100] = -0.0, -np.float32(1e-42)
    low = (high * np.float32(2.0**-25) * rng.uniform(-1, 1, size)).astype(np.float32)
    bits = int(deviation.view(np.uint32))
    scale, exponent = np.uint32(bits & 0x7FFFFF | 0x800000), np.int32((bits >> 23) - 127 - noise.GRID)

    def of_integers(words, second, high, low):
        made = drawn(list(words), np.uint32(RARE), second, scale)
        return integer_normals.round_to_grid(high, low, made, exponent), integer_normals.round_to_grid(
            high, None, made, exponent
        )

    def of_float64(words, second, high, low):
        with jax.enable_x64(True):
            made = normals.normal_from_polar(*normals.radius_and_angle(tuple(words), jnp.uint32(RARE)), second)
        return noise.round_to_grid(high, low, made, deviation), noise.round_to_grid(high, None, made, deviation)

    found = jax.jit(of_integers)(words, second, high, low)
    with jax.enable_x64(True):
        wanted = jax.jit(of_float64)(*map(jnp.asarray, (words, second, high, low)))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(other).view(np.uint32))
    assert len(np.unique(np.asarray(found[0]))) > 10_000


def test_a_sum_is_rounded_down_from_a_half_exactly():
    """Ties, numbers just below an integer, and both signs, without noise: the nearest integer, never -0."""
    exponent, parts = np.int32(-7), itertools.product((-3, -1, 0, 2, 2**20), (0, 0.5, -(2.0**-24), 2.0**-24, 0.25))
    high = np.array([whole + part for whole, part in parts], np.float32)
    low = high * np.float32(2.0**-26)
    found = np.asarray(
        integer_normals.round_to_grid(high * np.float32(2.0**-7), low * np.float32(2.0**-7), None, exponent)
    )
    wanted = [math.floor(float(a) + float(b) + 0.5) * 2.0**-7 for a, b in zip(high, low, strict=True)]
    np.testing.assert_array_equal(found, wanted)
    assert not np.signbit(found[found == 0]).any()


@pytest.mark.parametrize("shapes", [[()], [(784, 128), (128,)], [(5,)] * 6, [(600_000,), (7, 3)], [(0, 3), (4,)]])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.long_cases("2-shapes2", "2-shapes3", "1-shapes0", "1-shapes2", "1-shapes4", "1-shapes1")
def test_a_release_for_a_tpu_has_the_bits_of_a_cpu(shapes, devices):
    tree = [jax.random.normal(jax.random.key(1), shape) for shape in shapes]
    wanted = keys.release(KEY, 7, tree, 0.3)
    with tracing_for_place(platform="tpu", devices=devices):
        found = keys.release(KEY, 7, tree, 0.3)
        silent = keys.release(KEY, 7, tree, 0.0)
    for sums, one, other, same in zip(tree, found, wanted, silent, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(same, sums)


@on_a_cpu
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 4])
def test_blocks_of_large_leaves_have_the_bits_of_a_cpu(devices, monkeypatch):
    """Of one axis, with and without a rest; seen as the devices times the rest, or not; and small leaves at once."""
    for name, size in (("FLAT", 1), ("SMALL_LEAF", 20), ("LEAF_BLOCK", 120)):
        monkeypatch.setattr(noise, name, size)
    shapes = [(7, 2), (13, 30), (4, 64, 9), (), (0, 4), (1203,)]
    high = [jax.random.normal(jax.random.key(number), shape) for number, shape in enumerate(shapes)]
    total = FloatPair(high, [leaf * 2.0**-26 for leaf in high])
    wanted = keys.release(KEY, 7, total, 0.3)
    with tracing_for_place(platform="tpu", devices=devices):
        found = keys.release(KEY, 7, total, 0.3)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_small_leaves_of_several_streams_have_the_bits_of_a_cpu(monkeypatch):
    for name in ("FLAT", "ONE_STREAM"):
        monkeypatch.setattr(noise, name, 30)
    leaves = [jnp.zeros((7, 3)), jnp.zeros(23)]
    wanted = keys.release(KEY, 7, leaves, 0.3)
    with tracing_for_place(platform="tpu"):
        found = keys.release(KEY, 7, leaves, 0.3)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_float64_is_refused_for_a_tpu():
    with (
        tracing_for_place(platform="tpu"),
        pytest.raises(ValueError, match="error feedback must be computed in IEEE's float64"),
    ):
        enabling_float64("error feedback")


def test_what_is_billed_for_the_integers_is_above_their_errors():
    """The proof's bound, which the test against extended precision compares, is within that of the theorem."""
    p = np.concatenate([2.0 ** -np.linspace(0.73, 31.9, 200), 2.0 ** -np.linspace(32.1, 101, 200)])
    radius = np.sqrt(-2 * np.log(p))
    digits = np.where(p > 2.0**-32, 2.0**-64 / (p * radius), 0.0)
    assert (INTEGERS.error(p) >= integer_normals.EVALUATION + radius * integer_normals.SLOPE + digits).all()
    assert (INTEGERS.error(p) > NORMALS.error(p)).all()


def trained(mechanism: dpx.Mechanism, platform: str, steps: int = 3):
    params = {"w": jnp.zeros(10)}
    with tracing_for_place(platform=platform):
        state = mechanism.init(params)
        for _ in range(steps):
            _, state = mechanism.update({"w": jnp.ones((8, 10))}, state, params, included=np.ones(8, bool))
    return state


def test_a_run_on_a_tpu_costs_what_its_noise_costs_wherever_it_is_asked():
    mechanism = dp_sgd()
    on_a_cpu, on_a_tpu = (trained(mechanism, platform) for platform in ("cpu", "tpu"))
    of_each = [dpx.epsilon(mechanism, state, delta=1e-5) for state in (on_a_cpu, on_a_tpu)]
    assert of_each[0] < of_each[1] < of_each[0] + 1e-2
    planned = dpx.epsilon(mechanism, 3, delta=1e-5)
    with tracing_for_place(platform="tpu"):  # a plan that is made there is for that noise
        assert dpx.epsilon(mechanism, 3, delta=1e-5) > planned
    again = dp_sgd(key=jax.random.key(1))
    seconds = [(again, trained(again, platform)) for platform in ("cpu", "tpu")]
    both = [dpx.compose_runs((mechanism, on_a_cpu), second, shared_batches=False) for second in seconds]
    assert both[0].epsilon(delta=1e-5) < both[1].epsilon(delta=1e-5)
    reports = [dpx.privacy_report(mechanism, state, delta=1e-5) for state in (on_a_cpu, on_a_tpu)]
    assert [any("on a TPU" in caveat for caveat in report.caveats) for report in reports] == [False, True]
    assert reports[1].spent == of_each[1]
    for one, other in zip(jax.tree.leaves(on_a_cpu), jax.tree.leaves(on_a_tpu), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape

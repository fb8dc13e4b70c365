"""The noisy release: its law against extended precision, the grid, and the attacks on floating-point noise."""

import contextlib
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks import exact
from dpx import keys
from dpx.keys import noise, normals
from dpx.keys.streams import threefry4x32
from dpx.sums.rounding import FloatPair
from dpx.xla.place import has_fast_math_flag, tracing_for_place
from tests.problems import on_a_cpu

KEY, LONG = jax.random.key(3), np.longdouble
TOP = 2**32 - 1
RARE = 0x9ABCDEF0  # the word that the rarest pairs of a release have in common


def words_at_random(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (4, count), dtype=np.uint32)


def chosen_words() -> np.ndarray:
    """Blocks at every edge: p near 0 and 1, at both sides of a = 0 and of a power of two; angles near all axes."""
    radii = [(0, 0, 0), (0, 0, 16), (0, 1, 0), (0, TOP, TOP), (1, 0, 0), (1, 1, 1), (TOP, TOP, TOP), (TOP, 0, 0)]
    radii += [(0, 0, TOP), (0, 0, 2**20), (2**31, 0, 0), (2**31 - 1, TOP, TOP), (2**30, 0, 0), (3037000499, 2**31, 0)]
    radii += [(3037000500, 0, 0)]
    turns = [(eighth * 2**29 + more) % 2**32 for eighth, more in itertools.product(range(8), (-1, 0, 1))]
    blocks = [(a, b, c, d | low) for (a, b, d), c, low in itertools.product(radii, turns, (0, 15))]
    return np.array(blocks, np.uint32).T


def computed(words: np.ndarray, rare: int = RARE) -> np.ndarray:
    """The two normals of every block, float64 (2, count)."""

    def both(words):
        with jax.enable_x64(True):
            polar = normals.radius_and_angle(tuple(words), jnp.uint32(rare))
            rows = jax.lax.broadcasted_iota(jnp.uint32, (2, words.shape[1]), 0)
            return normals.normal_from_polar(*(jnp.stack([x, x]) for x in polar), rows > 0)

    with jax.enable_x64(True):
        return np.asarray(jax.jit(both)(jnp.asarray(words)))


def uniform_numbers(words: np.ndarray, rare: int = RARE) -> list[tuple]:
    """(numerator, bits) of p and of theta for every block, as Python's integers: numerator / 2^bits."""
    found = []
    for a, b, c, d in words.T.tolist():
        if a:
            found.append(((2 * (a * 2**32 + b) + 1, 65), (2 * (c * 2**32 + d) + 1, 65)))
        elif not b:
            found.append(((2 * (d // 16 * 2**32 + rare) + 1, 125), (2 * (c * 2**4 + d % 16) + 1, 37)))
        else:
            found.append(((2 * (b * 2**28 + d // 16) + 1, 93), (2 * (c * 2**4 + d % 16) + 1, 37)))
    return found


def test_normals_of_chosen_blocks_against_fifty_digits():
    words = chosen_words()
    found = computed(words)
    with mpmath.workdps(50):
        for place, (p, theta) in enumerate(uniform_numbers(words)):
            p, theta = (mpmath.mpf(top) / mpmath.mpf(2) ** bits for top, bits in (p, theta))
            radius = mpmath.sqrt(-2 * mpmath.log(p))
            exact = radius * mpmath.sin(2 * mpmath.pi * theta), radius * mpmath.cos(2 * mpmath.pi * theta)
            for one, other in zip(exact, found[:, place].tolist(), strict=True):
                assert abs(one - other) < normals.EVALUATION / 2


@pytest.mark.parametrize("tail", [False, True])
def test_normals_of_random_blocks_against_extended_precision(tail):
    """100,000 blocks; x86's 64 bits of mantissa. The bound is 2^-45 deviations."""
    assert np.finfo(LONG).nmant >= 63
    words = words_at_random(50_000, seed=tail)
    if tail:
        words[0] = 0
        words[1] = np.maximum(words[1] >> np.random.default_rng(2).integers(0, 32, 50_000, dtype=np.uint32), 1)
    a, b, c, d = words.astype(LONG)
    if tail:
        p, theta = (b * 2**28 + np.floor(d / 16) + 0.5) / LONG(2) ** 92, (c * 16 + d % 16 + 0.5) / LONG(2) ** 36
    else:
        p, theta = (a * 2**32 + b) / LONG(2) ** 64, (c * 2**32 + d) / LONG(2) ** 64
    radius = np.sqrt(-2 * np.log(p))
    turn = 2 * LONG("3.14159265358979323846264338327950288") * (theta - np.round(theta * 4) / 4)
    sine, cosine, quarter = np.sin(turn), np.cos(turn), np.round(theta * 4).astype(int) % 4
    sines = np.choose(quarter, [sine, cosine, -sine, -cosine]), np.choose(quarter, [cosine, -sine, -cosine, sine])
    worst = max(np.abs(radius * exact - found).max() for exact, found in zip(sines, computed(words), strict=True))
    assert worst < normals.EVALUATION / 2, worst


def test_the_support_reaches_beyond_thirteen_deviations():
    largest = np.abs(computed(np.array([[0, 0, 2**30, 0], [0, 0, 0, 0]], np.uint32).T, rare=0))
    assert 13.16 < largest.max() < 13.17
    assert np.isfinite(computed(chosen_words(), rare=TOP)).all()


def test_the_digits_of_p_and_theta_are_different_bits():
    """So both are uniform and independent: each block, with e if p is below 2^-64, has a rectangle of its own, and
    their areas add up to 1. From the rectangle, the words can be read again, so no two of them have one."""
    for words, rare in ((words_at_random(500), 5), (chosen_words(), 0), (chosen_words(), TOP)):
        for (a, b, c, d), (p, theta) in zip(words.T.tolist(), uniform_numbers(words, rare), strict=True):
            bits = 128 if a or b else 160
            assert p[1] + theta[1] == bits + 2  # the area is 2^-bits, twice half a digit on each side
            (p, of_p), (theta, of_theta) = p, theta
            digits = f"{p >> 1:0{of_p - 1}b}", f"{theta >> 1:0{of_theta - 1}b}"
            found = [int(word, 2) for word in (digits[0][:32], digits[0][32:64], digits[1][:32])]
            last = digits[1][32:] if a else digits[0][64:92] + digits[1][32:]
            assert (found, int(last, 2)) == ([a, b, c], d) and (a or b or int(digits[0][92:], 2) == rare)


def test_only_the_rarest_pairs_read_the_word_of_the_release():
    words = np.concatenate([words_at_random(1000), chosen_words()], axis=1)
    words[0, :500] = 0
    one, other = computed(words, rare=0), computed(words, rare=TOP)
    rarest = (words[0] == 0) & (words[1] == 0)
    np.testing.assert_array_equal(one[:, ~rarest], other[:, ~rarest])
    small = rarest & (words[3] < 2**12)  # a p of so few digits that e moves it
    assert small.sum() > 20 and (one[:, small] != other[:, small]).all()


def test_every_release_has_a_word_of_its_own():
    words = keys.key_words(KEY)
    found = {int(noise.rare_tail_word(words, jnp.int32(step))) for step in range(20)}
    blocks = {int(threefry4x32(words, [jnp.array([word], jnp.uint32) for word in (8, 1, 0, 3)])[0][0])}
    assert len(found) == 20 and blocks == {int(noise.rare_tail_word(words, jnp.int32(7)))}
    assert found.isdisjoint(int(keys.key_words(keys.fold_in(KEY, step))[0]) for step in range(21))


@pytest.mark.parametrize("size", [1, 37, 3 * noise.CHUNK_NUMBERS])
def test_the_loop_reads_the_word_of_the_release(monkeypatch, size):
    """The lanes behind a chunk's pairs make it, in every chunk: seen in place of the normals."""
    monkeypatch.setattr(noise, "radius_and_angle", lambda words, rare: (jnp.broadcast_to(rare, words[0].shape),) * 2)
    monkeypatch.setattr(noise, "normal_from_polar", lambda rare, theta, second: rare.astype(jnp.float64))
    words, positions = keys.key_words(KEY), noise.stream_positions_of_leaves([(size,)])
    high = noise.concatenate_into_rows([jnp.zeros(size)], positions)
    found = noise.noisy_in_chunks(words, jnp.int32(7), jnp.float32(1), high, None, True)
    assert set(np.unique(found)) == {np.float32(noise.rare_tail_word(words, jnp.int32(7)))}


def test_two_normals_of_a_block_are_those_of_the_release():
    """The stream, from the cipher up: place, chunk and row of a number, at the borders of a chunk."""
    size, half = 20_000, noise.CHUNK_NUMBERS // 2
    found = np.asarray(keys.normals_of_release(KEY, 7, jnp.zeros(size)))
    words = keys.key_words(KEY)
    for place in (0, half - 1, half, 2 * half - 1, 2 * half, size - 1):
        chunk, within = divmod(place, 2 * half)
        block = [jnp.array([word], jnp.uint32) for word in (8, chunk * half + within % half, 0, 0)]
        pair = computed(np.asarray(threefry4x32(words, block)))
        assert found[place] == np.float32(pair[within // half, 0])


def integers(total, deviation, *, key=KEY, step=0) -> tuple[np.ndarray, float]:
    """The released integers k of float32 sums, and gamma."""
    gamma = exact.cell(deviation)
    released = np.asarray(keys.release(key, step, total, deviation), np.float64) / gamma
    np.testing.assert_array_equal(released, np.round(released))
    return released.astype(np.int64), gamma


@pytest.mark.parametrize("deviation", [1.0, np.nextafter(np.float32(1), np.float32(0)), 0.7, 3e-12, 5e9])
def test_a_release_is_the_sum_and_the_noise_rounded_to_the_grid(deviation):
    total = jax.random.normal(jax.random.key(1), (3000,)) * np.float32(deviation) * 30
    found, gamma = integers(total, deviation)
    exact = np.asarray(total, np.float64) + float(np.float32(deviation)) * np.asarray(
        keys.normals_of_release(KEY, 0, total), np.float64
    )
    assert np.abs(found - exact / gamma).max() <= 0.5 + 1e-4  # normals_of_release is float32
    assert 16 <= float(np.float32(deviation)) / gamma < 32


@pytest.mark.parametrize("multiple", [1, -7, 2**12, -(2**20)])
def test_a_sum_moved_by_whole_cells_moves_the_integers_by_as_many(multiple):
    """Also at negative sums and large ones: the law is that of S + noise, wherever the grid is."""
    total = np.round(np.random.default_rng(0).normal(size=2000) * 2**6).astype(np.float32) * np.float32(2.0**-6)
    found, gamma = integers(jnp.asarray(total), 1.0)
    moved, _ = integers(jnp.asarray(total + np.float32(multiple * gamma)), 1.0)
    np.testing.assert_array_equal(moved, found + multiple)


def test_no_sign_of_zero_and_no_denormal_shows():
    size = 4000
    sums = [np.full(size, value, np.float32) for value in (0.0, -0.0, 1e-45, -1e-45, 1e-40)]
    released = [np.asarray(keys.release(KEY, 0, jnp.asarray(total), 1.0)) for total in sums]
    for other in released[1:]:
        np.testing.assert_array_equal(released[0].view(np.uint32), other.view(np.uint32))
    assert (released[0] == 0).any() and not np.signbit(released[0][released[0] == 0]).any()


def test_the_low_part_of_a_total_counts():
    high, low = np.full(1000, 2.0**16, np.float32), np.full(1000, 0.03, np.float32)
    found, gamma = integers(noise.FloatPair(jnp.asarray(high), jnp.asarray(low)), 1.0)
    near, _ = integers(jnp.full(1000, 0.03, jnp.float32), 1.0)
    np.testing.assert_array_equal(found, near + int(2**16 / gamma))


def test_a_deviation_of_zero_adds_nothing():
    total = jax.random.normal(jax.random.key(1), (100,))
    np.testing.assert_array_equal(keys.release(KEY, 0, total, 0.0), total)


@pytest.mark.parametrize("fraction", exact.FRACTIONS)
def test_the_released_integers_have_the_law_of_rounded_normals(fraction, draws=400_000):
    """With false alarms of 1e-6; benchmarks/results/exact.md has 10^7 draws of each."""
    assert exact.chi_square(fraction, draws, KEY) > 1e-6
    assert exact.chi_square(fraction, draws, KEY, of=fraction + 0.5) < 1e-6  # the test can fail


@contextlib.contextmanager
def on_another_platform():
    jax.clear_caches()
    with mock.patch("jax.lax.platform_dependent", lambda *given, default, **_: default(*given)):
        yield
    jax.clear_caches()


WAYS = (lambda: tracing_for_place(devices=8), on_another_platform)


def test_the_same_integers_on_several_devices_and_elsewhere():
    tree = [jax.random.normal(KEY, shape) for shape in ((100, 300), (), (129, 3, 5), (0, 2), (7,))]
    made = keys.release(KEY, 7, tree, 0.3)
    for way in WAYS:
        with way():
            same = keys.release(KEY, 7, tree, 0.3)
        for one, other in zip(made, same, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_release_and_its_rest_are_those_of_a_release():
    """Bit for bit by chunks, on several devices and elsewhere; the rest is the noise with its rounding."""
    tree = [jax.random.normal(KEY, shape) for shape in ((100, 300), (), (0, 2), (7,))]

    def total(parts):
        return noise.FloatPair(parts, jax.tree.map(lambda x: x * np.float32(2.0**-30), parts))

    made = keys.release(KEY, 7, total(tree), 0.3)
    for way in (contextlib.nullcontext, *WAYS):
        with way():
            released, rest = keys.release_and_noise(KEY, 7, total, tree, 0.3)
        for same, one, *numbers, high, low in zip(released, made, *total(tree), *rest, strict=True):
            np.testing.assert_array_equal(same, one)
            exact = np.float64(one) - (np.float64(numbers[0]) + np.float64(numbers[1]))
            np.testing.assert_array_equal(high, np.float32(exact))
            np.testing.assert_array_equal(low, np.float32(exact - np.float32(exact)))


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.long_cases("False")
def test_the_same_integers_under_jit_and_with_64_bit_numbers(setting):
    total = jax.random.normal(KEY, (5000,))
    expected = keys.release(KEY, 3, total, 0.5)
    with jax.enable_x64(setting):
        jax.clear_caches()
        for made in (jax.jit(keys.release)(KEY, 3, total, 0.5), keys.release(KEY, jnp.int32(3), total, 0.5)):
            np.testing.assert_array_equal(made, expected)
        rows = jax.vmap(lambda step: keys.release(KEY, step, total, 0.5))(jnp.arange(3, 5))
        np.testing.assert_array_equal(rows[0], expected)


# The attacks.


CASES = [(*case, 1000) for case in itertools.product(exact.MULTIPLIERS, exact.BATCHES)]


@pytest.mark.parametrize(("multiplier", "batch", "size"), [*CASES, (5.0, 64, 1_000_000)])
@pytest.mark.long_cases("0.5-8192", "5.0-1-", "5.0-64-1000000", "50.0-64")
def test_the_support_tells_nothing(multiplier, batch, size):
    """The attacker knows the sum with and without an example: both make as many of the released numbers possible."""
    before, after = exact.shares(multiplier, batch, size, exact.float32_normals(), KEY)
    assert before[0] == 1 and before[1] < 0.9  # noise in float32 tells it with certainty
    assert after[0] < 1 and abs(after[0] - after[1]) <= 6 * math.sqrt(0.5 / size)


def lowest_bits(released: np.ndarray) -> np.ndarray:
    """By the precision attack (Haney et al. 2022): the place of the lowest set bit of each float; 99 for zero."""
    top, exponents = np.frexp(released.astype(np.float64))
    whole = (np.abs(top) * 2.0**53).astype(np.int64)
    return np.where(whole == 0, 99, np.log2(np.maximum(whole & -whole, 1)).astype(int) + exponents - 53)


@pytest.mark.parametrize("multiplier", [0.5, 5.0, 50.0])
@pytest.mark.long_cases("0.5", "50")
def test_the_precision_tells_nothing(multiplier, size=200_000):
    """Noise in floating point has fewer low bits on a large sum than on a small one; the grid is the same for both."""
    large = 2.0**12 * multiplier
    of_old = [lowest_bits(np.float32(s) + np.float32(multiplier) * exact.float32_normals()[::37]) for s in (0.0, large)]
    assert abs(of_old[0].min() - of_old[1].min()) > 4
    gamma = exact.cell(multiplier)
    made = [np.asarray(keys.release(KEY, 0, jnp.full(size, s, jnp.float32), multiplier)) for s in (0.0, large)]
    for released in made:
        assert lowest_bits(released).min() == math.log2(gamma)
    np.testing.assert_array_equal(made[1] - np.float32(large), made[0])


@on_a_cpu
@pytest.mark.parametrize(
    ("flags_of_xla", "on"),
    [
        ("", False),
        ("--xla_cpu_enable_fast_math=true", True),
        ("--xla_cpu_enable_fast_math", True),
        ("--xla_dump_to=/tmp/x --xla_cpu_enable_fast_math=1", True),
        ("--xla_cpu_enable_fast_math=true --xla_cpu_enable_fast_math=false", False),
        ("--xla_cpu_enable_fast_math=False", False),
        ("--xla_cpu_enable_fast_min_max=true", False),
    ],
)
def test_a_release_under_fast_math_is_refused(monkeypatch, flags_of_xla, on):
    assert has_fast_math_flag(flags_of_xla.split()) is on
    monkeypatch.setenv("XLA_FLAGS", flags_of_xla)
    with pytest.raises(ValueError, match="xla_cpu_enable_fast_math") if on else contextlib.nullcontext():
        keys.release(KEY, 0, jnp.ones(3), 1.0)


@on_a_cpu
def test_fast_math_in_a_file_of_flags_is_refused(monkeypatch, tmp_path):
    (tmp_path / "flags").write_text("--xla_dump_to=/tmp/x\n--xla_cpu_enable_fast_math=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with pytest.raises(ValueError, match="xla_cpu_enable_fast_math"):
        keys.release(KEY, 0, jnp.ones(3), 1.0)


def test_devices_of_a_shard_map_have_keys_of_their_own():
    """With one key, all of them would draw one noise. A sum over them is one release."""
    mesh = jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))

    def program(release):
        how = {"mesh": mesh, "in_specs": PartitionSpec("one"), "out_specs": PartitionSpec("one")}
        return jax.eval_shape(jax.shard_map(release, **how), jnp.zeros(4))

    with pytest.raises(ValueError, match="must each have a key of their own"):
        program(lambda sums: keys.release(KEY, 0, sums, 1.0))
    program(lambda sums: keys.release(keys.fold_in(KEY, jax.lax.axis_index("one")), 0, sums, 1.0))
    program(lambda sums: 0 * sums + keys.release(KEY, 0, jax.lax.psum(sums, "one"), 1.0))
    with pytest.raises(ValueError, match="must each have a key of their own"):
        program(lambda sums: keys.release_and_noise(KEY, 0, FloatPair, sums, 1.0)[0])
    for checked in (True, False):
        how = {"mesh": mesh, "in_specs": PartitionSpec("one"), "out_specs": PartitionSpec("one"), "check_vma": checked}
        found = jax.shard_map(lambda x: jnp.tile(x, 1 + len(noise.untracked_mapped_axes())), **how)
        assert jax.eval_shape(found, jnp.zeros(4)).shape == ((4,) if checked else (8,))

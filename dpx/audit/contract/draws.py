"""Draws the noise of a step under many keys, and tests that the draws are independent normals.

For other keys, the mechanism is built again, or the keys in its program are replaced. The program of an update holds
the mechanism's keys as constants. Each is replaced by a function of itself and a new key, so equal keys stay equal. But
keys derived from one another become independent, so only a mechanism that is built again shows that its noise shares a
key with something else.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy import special

from dpx.audit.contract import inputs
from dpx.audit.contract.subject import SMALL, Release, ReleaseFunction, Violation
from dpx.audit.stand_ins import without_grid
from dpx.keys import is_key
from dpx.mechanism import Mechanism
from dpx.states.reading import publishable_state
from dpx.states.record import ReleaseState
from dpx.values import Tree, map_nodes_of_type, unflatten_vectors
from dpx.xla.jaxprs import inputs_read

SHARED_KEY_RATE = 1e-6  # false-alarm rate of the test of the noise against the coordinates
TOGETHER = 500  # draws in memory at once
FULLY = (0, 1, 4)  # steps whose noise is drawn `count` times; other steps have AT_LEAST draws
AT_LEAST = 500  # may not exceed TOGETHER
SOON = 1000  # steps whose noise is checked before any slow test


class NoiseDraws:
    """Draws of the public values of a step of an empty batch, which are its noise.

    traced: the release. count: int, draws at the steps FULLY; others have AT_LEAST. seed: for the keys.
        rebuild: (key) -> the mechanism with this key, or None. has_keys: whether the step reads a key at all.
    """

    def __init__(self, traced: ReleaseFunction, count: int, seed: int, rebuild: Callable | None):
        subject = traced.subject
        self.traced, self.subject, self.count, self.rebuild = traced, subject, count, rebuild
        self.keys = jax.random.split(jax.random.key(seed), count)
        self.words = np.asarray(jax.random.key_data(self.keys))
        self._found: dict[tuple[int, bool], np.ndarray] = {}
        grads = inputs.normal_gradients(subject.params, 0, rows=1)
        assert len(subject.step_counter_mask)  # known before anything is traced

        def empty_step(mechanism, state, step, params):
            state = subject.state_at_step(state, step)
            updates, after = mechanism.update(grads, state, params, included=jnp.zeros(1, bool))
            return inputs.wide_floats((updates, publishable_state(after)))

        arguments = subject.state_after(0), np.int32(0), subject.params
        # Without the grid, because numbers on it repeat by chance.
        run, self.has_keys = as_function_of_key(without_grid(empty_step), subject.mechanism, rebuild, arguments)
        program = jax.vmap(lambda words, *given: run(jax.random.wrap_key_data(words), given), (0, None, 0, None))
        self.program = jax.jit(program)

    def __call__(self, step: int, *, others: bool = False) -> np.ndarray:
        """The public floats of empty steps from the state of this step, float64 (count, o).

        others: whether to use the other parameter values, with AT_LEAST draws.
        """
        if (step, others) not in self._found:
            count = self.count if step in FULLY and not others else AT_LEAST
            steps, params = np.full(count, step), self.subject.others if others else self.subject.params
            state = self.subject.state_after(step)
            self._found[step, others] = self.public_floats_of_empty_steps(self.words[:count], state, steps, params)
        return self._found[step, others]

    def public_floats_of_empty_steps(
        self, words: np.ndarray, state: Tree, steps: np.ndarray, params: Tree = None
    ) -> np.ndarray:
        """The public floats of empty steps, float64 (count, o). words: key data, uint32 (count, 2). steps: (count,)."""
        count, found = len(steps), []
        places = np.arange(-(-count // TOGETHER) * TOGETHER) % count  # the last part is filled up
        for part in places.reshape(-1, TOGETHER):
            steps_of_part = np.asarray(steps, np.int32)[part]
            given = state, steps_of_part, self.subject.params if params is None else params
            found.append(np.asarray(self.program(words[part], *given), np.float64))
        return np.concatenate(found)[:count]

    @functools.cached_property
    def noise_maps(self) -> Callable | None:
        """(keys, state) -> how noise moves the public floats, (count, o, m), and their values without it, (count, o).

        For noise that is not dpx's, how the sums move them, (count, o, k). None without random coordinates.
        """
        traced, state = self.traced, self.subject.state_after(0)
        zeros = jnp.zeros(traced.numbers), jnp.zeros(traced.normals)
        vector = zeros[1] if traced.normals else zeros[0]

        def floats(mechanism, state, vector):
            both = (zeros[0], vector) if traced.normals else (vector, zeros[1])
            return traced.public_outputs(*both, state, self.subject.params, mechanism)[0]

        def moved_by_noise(mechanism, state):
            return jax.jvp(lambda v: floats(mechanism, state, v), (vector,), (vector,))[1]

        given = self.subject.mechanism, self.rebuild
        if not as_function_of_key(moved_by_noise, *given, (state,))[1]:
            return None
        return _noise_maps_by_key(as_function_of_key(floats, *given, (state, vector))[0], vector)


def _noise_maps_by_key(run: Callable, vector: jax.Array) -> Callable:
    def of_key(key, state):
        def floats(vector):
            found = run(key, (state, vector))
            return found, found

        return jax.jacfwd(floats, has_aux=True)(vector)

    return jax.jit(lambda keys, state: jax.lax.map(lambda key: of_key(key, state), keys, batch_size=TOGETHER))


def find_noise_fault(traced: ReleaseFunction) -> str:
    """Describes an obvious fault in noise that is not dpx's, from a program of the release alone; "" if none is found.

    It finds nothing if steps differ by more than their noise, or if only a state changes the noise.
    """
    subject = traced.subject
    sums = [np.zeros(traced.numbers, np.float32), inputs.oscillating_values(traced.numbers, 1.0)]

    def at_step(step):
        state = map_nodes_of_type(lambda node: node._replace(step=step), subject.state_after(0), ReleaseState)
        run = without_grid(subject.mechanism.release)
        both = [run(unflatten_vectors(each, traced.shapes_of_sums), state, subject.params)[0] for each in sums]
        return [inputs.wide_floats(updates) for updates in both]

    # This level keeps the program fast even if jax is told not to optimize.
    program = jax.jit(jax.vmap(at_step), compiler_options={"xla_backend_optimization_level": 1})
    found = program(np.arange(SOON, dtype=np.int32))
    noise, moved = (np.asarray(each, np.float64) for each in found)
    change = moved - noise
    alike = np.abs(change - change[0]).max() <= 1e-3 * (np.abs(change[0]).max() + np.abs(noise).max())
    noise = noise[:, np.abs(change[0]) > 0]
    if callable(subject.mechanism.noise_multiplier) or not np.isfinite(noise).all() or not alike or not noise.size:
        return ""
    if not noise.any():
        return "a step of an empty batch has no noise"
    values = min(len(np.unique(column)) for column in noise.T)
    if 1 < values < SOON / 2:
        return f"the noise is not Gaussian, or repeats: at {SOON} steps it has {values} values"
    centered = np.abs(noise - np.median(noise, 0))
    first, second = (np.median(half, 0) for half in np.split(centered, 2))
    if values == 1 or abs(np.log(first / second).mean()) > 0.2:
        return ""
    far = float((centered > special.ndtri(0.75) * noise.std(0)).mean())
    # Hoeffding's inequality holds for each column, so also for their mean, even if columns are dependent. The second
    # term allows for the median and the deviation, which are estimated from the draws.
    if abs(far - 0.5) > math.sqrt(math.log(2 / SHARED_KEY_RATE) / (2 * SOON)) + 0.01:
        return f"the noise is not Gaussian: {far:.1%} of it is far from 0, where a Gaussian has 50%"
    return ""


def whitened_draws(draws: NoiseDraws, step: int, release: Release) -> np.ndarray:
    """The whitened draws of a step, float64 (count, r): standard normals if the noise is what the trace says."""
    rows = release.affine.copy()
    if rows[: release.updates].all():
        rows[release.updates :] = False
    rows &= np.abs(release.noise).max(1, initial=0) > 0
    if not rows.any():
        return np.zeros((len(draws(step)), 0))
    found = draws(step)[:, rows]
    maps = draws.noise_maps
    if maps is None:
        left, sizes, _ = np.linalg.svd(release.noise[rows], full_matrices=False)
        large = sizes > SMALL * sizes[0]
        return (found - release.offset[rows]) @ (left[:, large] / sizes[large])
    keys = draws.keys[: len(found)]
    noise, offset = (np.asarray(a, np.float64) for a in maps(keys, draws.subject.state_after(step)))
    return solve_for_normals(found - offset[:, rows], noise[:, rows])


def solve_for_normals(change: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """Solves change[i] = maps[i] @ normals[i], of shapes (count, o) and (count, o, m), for normals in r directions.

    Raises Violation if the normals are correlated with an entry of the maps, because then noise and maps share a key.
    """
    left, sizes, right = np.linalg.svd(maps, full_matrices=False)
    large = sizes > SMALL * sizes[:, :1]
    standard = np.einsum("no,nor->nr", change, left) / np.where(large, sizes, np.inf)
    normals = np.einsum("nr,nrm->nm", standard, right)
    standard = standard[:, : int(large.sum(1).min())]
    entries = maps.reshape(len(maps), -1)
    entries = entries[:, entries.std(0) > SMALL * np.abs(entries).max()]
    scaled = [(a - a.mean(0)) / np.maximum(a.std(0), 1e-30) for a in (normals, entries)]
    correlation = np.abs(scaled[0].T @ scaled[1]).max(initial=0) / math.sqrt(len(maps))
    if correlation > 1 - special.ndtri(SHARED_KEY_RATE / max(2 * normals.shape[1] * entries.shape[1], 1)):
        raise Violation("the noise is correlated with the random coordinates, so it shares their key")
    return standard


def whitened_by_sample_covariance(draws: NoiseDraws, step: int, release: Release) -> np.ndarray:
    """Draws of noise that is not dpx's, along directions where their deviation is 1; float64 (count, r)."""
    found = draws(step)[:, : release.updates]
    maps = draws.noise_maps
    if maps is None:
        return _decorrelated(found)
    own = np.asarray(maps(draws.keys[: len(found)], draws.subject.state_after(step))[0], np.float64)
    standard = solve_for_normals(found - found.mean(0), own[:, : release.updates])
    return standard / standard.std(0)


def _decorrelated(draws: np.ndarray) -> np.ndarray:
    """Transforms draws, float64 (count, o), to uncorrelated directions of deviation 1, near the axes if possible."""
    draws = draws[:, draws.std(0) > 0] - draws.mean(0)[draws.std(0) > 0]
    if not draws.shape[1]:
        raise Violation("a step of an empty batch has no noise")
    values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(draws, rowvar=False)))
    large = values > 1e-8 * values[-1]
    uncorrelated = draws @ (vectors[:, large] / np.sqrt(values[large]))
    return uncorrelated @ vectors.T if large.all() else uncorrelated


def measured_release(release: Release, draws: NoiseDraws, step: int, *, others: bool = False) -> Release:
    """Measures a release whose noise is known only from draws of the updates, because it is not dpx's.

    The noise map is a root of the sample covariance. If the coordinates depend on the key, it is the map from sums to
    updates, times the deviation of the draws in these units. The sizes have a relative error of about sqrt(2 / count),
    so the tolerance is 6 times that, plus a term for the number of updates.
    """
    found = draws(step, others=others)[:, : release.updates]
    if not np.isfinite(found).all():
        raise Violation(f"the noise is not finite at step {step}")
    state, params = draws.subject.state_after(step), draws.subject.others if others else draws.subject.params
    traced = draws.traced
    _, _, (by_sums, _) = traced.derivatives_at(
        [(inputs.oscillating_values(traced.numbers, 1.0), np.zeros(0, np.float32))], state, params
    )
    data = by_sums[0].astype(np.float64)[: release.updates]
    maps = draws.noise_maps
    if maps is None:
        values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(found, rowvar=False)))
        large = values > 1e-8 * max(values[-1], 1e-30)
        noise = vectors[:, large] * np.sqrt(values[large])
    else:
        own = np.asarray(maps(draws.keys[: len(found)], state)[0], np.float64)[:, : release.updates]
        noise = data * solve_for_normals(found - found.mean(0), own).std(0).min()
    exchange, *_ = np.linalg.lstsq(noise, data, rcond=SMALL)
    uncovered = np.abs(noise @ exchange - data).max(initial=0) / max(np.abs(data).max(initial=0), 1e-30)
    padded = np.zeros((len(release.offset), noise.shape[1]))
    padded[: release.updates] = noise
    tolerance = 6 * math.sqrt(2 / len(found)) + 2 * release.updates / len(found)
    return release._replace(noise=padded, exchange=exchange, uncovered=float(uncovered), tolerance=tolerance)


def reduced_chi_square_quantile(probability: float, freedom: int) -> float:
    """The quantile of a chi-square variable divided by its degrees of freedom."""
    return 2 * float(special.gammaincinv(freedom / 2, probability)) / freedom


WithKey = Callable[[jax.Array, tuple], jax.Array]  # (key, arguments) -> an array


def as_function_of_key(
    function: Callable, mechanism: Mechanism, rebuild: Callable | None, arguments: tuple
) -> tuple[WithKey, bool]:
    """Returns `function(mechanism, *arguments)` as a function of (key, arguments), and whether it reads the key.

    function: returns an array. rebuild: (key) -> the mechanism with this key, or None. arguments: sample pytrees.
    """

    def of_built(key, arguments):
        assert rebuild is not None
        return function(rebuild(key), *arguments)

    run = of_built if rebuild is not None else _with_key_argument(function, mechanism, arguments)
    closed = jax.make_jaxpr(run)(jax.random.key(0), arguments)

    def replay(key, arguments):
        with jax.enable_x64(True):  # otherwise jax.vmap would not follow what the program computes in float64
            return core.jaxpr_as_fun(closed)(key, *jax.tree.leaves(arguments))[0]

    return replay, inputs_read(closed.jaxpr)[0]


def _with_key_argument(function: Callable, mechanism: Mechanism, arguments: tuple) -> WithKey:
    closed = jax.make_jaxpr(lambda *given: function(mechanism, *given))(*arguments)
    words = [np.asarray(jax.random.key_data(leaf)).tobytes() if is_key(leaf) else b"" for leaf in closed.consts]
    marks = [np.uint32(zlib.crc32(of_key)) for of_key in words]

    def run(key, arguments):
        constants = [_replace_if_key(key, leaf, mark) for leaf, mark in zip(closed.consts, marks, strict=True)]
        given = [_replace_if_key(key, leaf) for leaf in jax.tree.leaves(arguments)]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, constants))(*given)[0]

    return run


def _replace_if_key(key: jax.Array, leaf: Any, mark: Any = None) -> Any:
    """Returns `leaf`, or if it is a key, another key made from `key`. mark: its fingerprint, or None in a state."""
    if not is_key(leaf):
        return leaf
    if mark is None:
        mark = jax.random.bits(leaf, (), jnp.uint32)
    seed = jax.random.bits(jax.random.fold_in(key, mark), (), jnp.uint32)
    return jax.random.key(seed, impl=str(jax.random.key_impl(leaf)))


RATE = 4e-6  # false-alarm rate of each of the first five tests of draws
PATTERN_RATE = 1e-6  # false-alarm rate of the test of signs and sizes
MOST_COINS = 120  # limit on the coins whose triples are all compared
WIDTH = 1e-6  # width of a bin of log |z|; two independent normals share one with probability below WIDTH
COLUMNS = 4  # two rows that agree in this many columns repeat each other
PLACES = 5  # and so do two columns that agree in this many places, at one distance between the rows


def require_standard_normals(draws: np.ndarray):
    """Raises Violation unless the columns of `draws`, float64 (count, columns), are independent standard normals."""
    if not np.isfinite(draws).all():
        raise Violation("a draw of the noise is not finite")
    count, columns = draws.shape
    means = np.abs(draws.mean(0)) * math.sqrt(count)
    if means.max() > -special.ndtri(RATE / (2 * columns)):
        raise Violation(f"the mean of the noise is {means.max() / math.sqrt(count):.3g} standard deviations from 0")
    low, high = (reduced_chi_square_quantile(p, count - 1) for p in (RATE / (2 * columns), 1 - RATE / (2 * columns)))
    variances = draws.var(0, ddof=1)
    if variances.min() < low or variances.max() > high:
        worst = math.sqrt(variances.min() if variances.min() < low else variances.max())
        raise Violation(f"the noise is drawn at {worst:.4g} times its stated size in some direction")
    if columns > 1:
        correlations = np.corrcoef(draws, rowvar=False) - np.eye(columns)
        most = np.abs(np.arctanh(np.clip(correlations, -1 + 1e-12, 1 - 1e-12))).max() * math.sqrt(count - 3)
        if most > -special.ndtri(RATE / (columns * (columns - 1))):
            raise Violation(f"noise of two coordinates or steps has the correlation {np.abs(correlations).max():.3g}")
    ordered = np.sort(draws.ravel())
    distance = np.abs(special.ndtr(ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    if distance > math.sqrt(math.log(2 / RATE) / (2 * len(ordered))) + 0.5 / len(ordered):
        raise Violation(f"the noise is not normal: its distribution function is {distance:.2g} away")
    largest, expected = np.abs(ordered[[0, -1]]).max(), special.ndtri((1 + RATE ** (1 / len(ordered))) / 2)
    if largest < expected:
        raise Violation(f"the tail of the noise is cut: of {len(ordered)} draws, the largest is {largest:.3g}")


def require_independent_columns(draws: np.ndarray, *, triples: bool = False):
    """Raises Violation if the signs and sizes of two columns of `draws`, float64 (count, columns), are dependent.

    triples: whether to test triples of MOST_COINS coins too. Each column of independent standard normals gives two
        independent fair coins: its sign, and whether |z| is above the median. A product of two or three coins is a fair
        coin too, so by Hoeffding's inequality its mean over n draws is above t with probability at most exp(-n t^2 /
        2). The limit is a union bound over all products and both sides. Correlations miss such patterns: z and z with a
        random sign are uncorrelated.
    """
    count, columns = draws.shape
    coins = np.concatenate([draws > 0, np.abs(draws) > special.ndtri(0.75)], axis=1).astype(np.float32) * 2 - 1
    some = coins[:, np.linspace(0, 2 * columns - 1, min(2 * columns, MOST_COINS)).astype(int)]
    tested = math.comb(2 * columns, 2) + math.comb(some.shape[1], 3)
    limit = math.sqrt(2 * math.log(2 * max(tested, 1) / PATTERN_RATE) / count)
    pairs = np.abs(coins.T @ coins) / count
    np.fill_diagonal(pairs, 0)
    if pairs.max(initial=0) > limit:
        raise Violation(f"signs and sizes of noise at two places are dependent, at {pairs.max():.3g} of 1")
    for number, coin in enumerate(some.T) if triples else ():
        before = some[:, :number]
        products = np.abs((before * coin[:, None]).T @ before) / count
        np.fill_diagonal(products, 0)
        if products.max(initial=0) > limit:
            raise Violation(f"signs and sizes of noise at three places are dependent, at {products.max():.3g} of 1")


def require_no_repeated_noise(noise: np.ndarray, words: str):
    """Raises Violation with these words if two rows or columns of `noise`, float64 (rows, columns), repeat.

    Signs do not count. Two rows repeat each other if COLUMNS of their numbers are equal. Two columns, or a column and
    itself, repeat if PLACES of their numbers are equal at one distance between the rows. Zeros do not count.

    The density of log |z| is below 1/2, so two independent normals share a bin of WIDTH with probability below WIDTH
    (given all others, and with the 2^22 sizes that float32 normals have). For 4,000 rows and 100 columns, the union
    bounds are 8e6 pairs of rows x 4e6 sets of columns x WIDTH^4 = 3e-11, and 8e7 pairs of columns at a distance x 9e15
    sets of places x WIDTH^5 = 7e-7. With 1,000 columns and 1,600 rows they are 5e-8 and 3e-7.
    """
    noise = np.where(np.isfinite(noise), noise, 0)
    rows, columns = noise.shape
    with np.errstate(divide="ignore"):
        bins = np.round(np.log(np.abs(noise)) / WIDTH)
    same = [_positions_of_equals(column) for column in bins.T]
    pairs = np.concatenate([one * rows + other for one, other in same])
    if _count_of_most_frequent(pairs) >= COLUMNS:
        raise Violation(words)
    first, second = _positions_of_equals(bins.ravel())
    distances, places = second // columns - first // columns, (first % columns) * columns + second % columns
    if _count_of_most_frequent(distances * columns**2 + places) >= PLACES:
        raise Violation(words)


def _positions_of_equals(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions in `bins`, float64 (n,), of pairs of equal finite numbers that are adjacent when sorted."""
    order = np.argsort(bins, kind="stable")
    equal = (bins[order][1:] == bins[order][:-1]) & np.isfinite(bins[order][1:])
    return order[:-1][equal], order[1:][equal]


def _count_of_most_frequent(numbers: np.ndarray) -> int:
    """How often the most frequent number occurs."""
    return int(np.unique(numbers, return_counts=True)[1].max(initial=0))

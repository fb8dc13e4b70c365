"""How the data and the noise enter a release: the derivatives of all that it makes public.

A release is a function F(s, n) of the sums s and of the standard normals n of `keys.release`, here without its grid. If
it is private in the way of a Gaussian mechanism, F(s, n) = G(s + D n) for some G, and a change z of the sums can be
made up for by the change -X z of the noise, where X = D^-1. So |X z| is the size of z in units of the noise, whatever G
is: a mask, a scale, a projection that is undone, or an optimizer. One release is then the Gaussian mechanism with the
noise multiplier 1 / max |X z|, where z runs through what one example can add to the sums.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.report import NotChecked
from dpx.audit.contract.subject import Subject
from dpx.audit.stand_ins import drawing
from dpx.states.public import publishable_state
from dpx.trees import Tree, split

LOST = 1e-2  # a derivative below this share of its value is mostly rounding, as that of Adam's first step
NEARBY, NEAR = 4, 2.0**-20  # points beside each, whose numbers differ by at most this share
ROUGH = 2e-6  # a derivative whose direction changes more than this from there is rounding too: a difference of others
POINTS = 8  # at random, at which derivatives are taken; a coordinate without slope at all of them would be missed
MOST = 2**22  # numbers of the derivatives that are made in one call
SMALL = 1e-5  # of singular values, relative to the largest, because the derivatives are float32


class Release(NamedTuple):
    """A release at one step. o public floats leave it, of which the updates are the first; k sums, m normals.

    offset: float64 (o,), what leaves if sums and noise are zero. noise: float64 (o, m), how the noise moves it.
    affine: bool (o,), where that is true for any sums and noise. updates: how many of the o are updates.
    exchange: X, float64 (m, k). uncovered: the largest part, relative to 1, of a row that X does not explain.
    flat: whether the derivatives are all 0, as behind a sign.
    seen: bool, one for each factor, whether its sum moves anything that leaves.
    tolerance: relative error of the sizes, because derivatives are float32, or because the noise was measured.
    """

    offset: np.ndarray
    noise: np.ndarray
    affine: np.ndarray
    updates: int
    exchange: np.ndarray
    uncovered: float
    flat: bool
    seen: tuple[bool, ...]
    tolerance: float = 1e-5

    @property
    def linear(self) -> bool:
        """Whether all updates are linear functions of the noise."""
        return bool(self.affine[: self.updates].all())

    def size(self, sums: Tree) -> np.ndarray:
        """The sizes of changes of the sums, with the rows on axis 0, in units of the noise; float64 (rows,)."""
        return np.linalg.norm(inputs.flattened(sums, 1) @ self.exchange.T, axis=1)

    def size_of_update(self, change: Tree) -> float:
        """The size of a change of the updates in units of the noise; inf if the noise cannot make such a change."""
        change, noise = inputs.flattened(change), self.noise[: self.updates]
        needed, *_ = np.linalg.lstsq(noise, change, rcond=SMALL)
        missing = np.abs(noise @ needed - change).max(initial=0)
        return np.inf if missing > 1e-3 * np.abs(change).max(initial=0) else float(np.linalg.norm(needed))


class Traced:
    """The release of a mechanism as a function of its sums and its noise."""

    def __init__(self, subject: Subject):
        self.subject, self.sums_like = subject, subject.sums_like
        self.drawn: list[Tree] = []

        def record(key, step, tree):
            self.drawn.append(jax.eval_shape(lambda t: jax.tree.map(lambda x: jnp.zeros(x.shape), t), tree))
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)

        with drawing(record):
            like = jax.eval_shape(self._run, self.sums_like, subject.state(0), subject.params)
        self.updates = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(like[0]))
        self.numbers = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(self.sums_like))
        self.normals = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(self.drawn))
        # Many points in one call, because a call takes longer than a point.
        floats = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(like))
        size = floats * (self.numbers + self.normals)
        self.together = int(max(2, min((2 + POINTS) * (1 + NEARBY), MOST // max(size, 1))))
        self._together = jax.jit(lambda points, *given: jax.lax.map(lambda one: self._program(*one, *given), points))

    def _run(self, sums, state, params, mechanism=None):
        updates, after = (mechanism or self.subject.mechanism).release(sums, state, params)
        return updates, inputs.readable(publishable_state(after))

    def public(
        self, sums: jax.Array, normals: jax.Array, state: Tree, params: Tree, mechanism: Any = None
    ) -> tuple[jax.Array, Tree]:
        """All public floats that leave, float32 (o,), the updates first; and the other public leaves.

        mechanism: the same one with another key; by default the one on trial.
        """
        noise, calls = split(normals, self.drawn), iter(range(len(self.drawn)))

        def draw(key, step, tree):
            if (call := next(calls, None)) is None:
                raise NotChecked("its coordinates draw with `keys.normal_like` too, now more often than before")
            return jax.tree.map(lambda _, n: n, tree, noise[call])

        with drawing(draw):
            leaves = jax.tree.leaves(self._run(split(sums, self.sums_like), state, params, mechanism))
        return inputs.public_floats(leaves), [leaf for leaf in leaves if not inputs.is_float(leaf)]

    def _program(self, sums, normals, state, params):
        """The public floats, the others, and the derivatives by sums and by noise, float32 (o, k) and (o, m)."""

        def floats(sums, normals):
            found, others = self.public(sums, normals, state, params)
            return found, (found, others)

        derivatives, (found, others) = jax.jacfwd(floats, (0, 1), has_aux=True)(sums, normals)
        return found, others, derivatives

    def program(self, points: Sequence[Sequence[np.ndarray]], state: Tree, params: Tree) -> tuple:
        """`_program` at up to `together` points, sums and normals each; the points are on axis 0 of the results."""
        filled = [*points, *[points[0]] * (self.together - len(points))]
        found = self._together(tuple(map(np.stack, zip(*filled, strict=True))), state, params)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(points)], found)

    def _slopes(self, points: Sequence[Sequence[np.ndarray]], *given: Tree) -> Iterator[tuple]:
        """At each point the public floats, and their derivatives by sums and noise: float64 (o,), (o, k) and (o, m)."""
        for start in range(0, len(points), self.together):
            found, _, slopes = self.program(points[start : start + self.together], *given)
            yield from zip(*(part.astype(np.float64) for part in (found, *slopes)), strict=True)

    def at(self, state: Tree, params: Tree) -> Release:
        """The release after this state."""
        points = [(np.zeros(self.numbers, np.float32), np.zeros(self.normals, np.float32)), *self._somewhere()]
        every = self._slopes([near for one in points for near in (one, *_nearby(*one))], state, params)
        first, first_sums, first_noise = origin = next(every)
        affine, data, noise = np.ones(len(first), bool), [], []
        # A transform that cuts has no slope at some points, so the derivatives of several points are joined.
        every = itertools.chain([origin], every)
        for sums, normals in points:
            found, by_sums, by_noise = next(every)
            predicted = first + first_noise @ normals + first_sums @ sums
            scale = _sizes(by_sums, by_noise)  # NaN behind a root of 0
            with np.errstate(invalid="ignore"):
                affine &= np.abs(predicted - found) <= 1e-4 * (scale + np.abs(found))
                affine &= np.abs(first_noise - by_noise).max(1, initial=0) <= 1e-4 * scale
                usable = np.isfinite(scale) & (scale > LOST * np.abs(found))
                own = by_sums / scale[:, None], by_noise / scale[:, None]
                for _, *slopes in itertools.islice(every, NEARBY):
                    for part, of_own in zip(slopes, own, strict=True):
                        change = np.abs(part / _sizes(*slopes)[:, None] - of_own).max(1, initial=0)
                        usable &= change <= ROUGH * np.abs(of_own).max(1, initial=0)
            data.append(own[0][usable])
            noise.append(own[1][usable])
        data, noise = np.concatenate(data), np.concatenate(noise)
        exchange, uncovered, flat = np.zeros((self.normals, self.numbers)), 0.0, not len(data)
        if not flat:
            exchange, *_ = np.linalg.lstsq(noise, data, rcond=SMALL)
            uncovered = float(np.abs(noise @ exchange - data).max(initial=0))
        moved = split(np.abs(data).max(0, initial=0), self.sums_like)
        seen = tuple(flat or any(np.any(leaf > 0) for leaf in jax.tree.leaves(tree)) for tree in moved)
        return Release(first, first_noise, affine, self.updates, exchange, uncovered, flat, seen)

    def _somewhere(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Sums and normals at which the derivatives are taken: waves, and some at random."""
        random = np.random.default_rng(0)
        waves = inputs.waves(self.numbers, 1.0), inputs.waves(self.normals, 0.7, 2.0)
        draws = [random.normal(size=(2, max(self.numbers, self.normals))).astype(np.float32) for _ in range(POINTS)]
        return [waves, *((sums[: self.numbers], normals[: self.normals]) for sums, normals in draws)]


def _sizes(by_sums: np.ndarray, by_noise: np.ndarray) -> np.ndarray:
    """The sizes of the derivatives of each public float, float64 (o,)."""
    return np.abs(by_sums).max(1, initial=0) + np.abs(by_noise).max(1, initial=0)


def _nearby(*point: np.ndarray) -> list[list[np.ndarray]]:
    """Points so near that only rounding differs. Every number changes apart, because rounding shows in differences."""
    random = np.random.default_rng(1)
    return [[x * (1 + random.uniform(-NEAR, NEAR, x.shape)).astype(np.float32) for x in point] for _ in range(NEARBY)]

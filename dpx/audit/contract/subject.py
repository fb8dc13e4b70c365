"""The mechanism that is checked: the paths to its private gradient, and its release as a function of data and noise.

A release is a function F(s, n) of the sums s and the standard normals n of `keys.release`, here without its grid. If it
is private as a Gaussian mechanism is, F(s, n) = G(s + D n) for some G, and the change -X z of the noise, X = D^-1,
offsets a change z of the sums. So |X z| is the size of z in units of the noise, whatever G is: a mask, a scale, a
projection that is undone, or an optimizer. So one release is the Gaussian mechanism with the noise multiplier 1 / max
|X z|, over all z that one example can add to the sums.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.audit.contract import inputs
from dpx.audit.stand_ins import drawing_normals_by, with_quick_noise
from dpx.gradients import private_updates
from dpx.gradients.clipped_gradients import sum_gradients
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch
from dpx.states.reading import publishable_state
from dpx.sums.clipped_sum import sum_contributions
from dpx.values import Tree, unflatten_vectors

STEPS = (0, 1, 2, 3, 4, 7, 9, 50)  # steps at which lines that depend on the step are checked
COUNTED = (0, 4, 50)  # a leaf that equals the step number at all of these is its counter
AT_STEPS = f"at steps {', '.join(map(str, STEPS))}"


class Violation(AssertionError):
    """Raised if a line of the contract does not hold. The message says where."""


class NotChecked(Exception):
    """Raised if a line of the contract cannot be checked. The message says why."""


class AuditProblem(NamedTuple):
    """Data, and the paths from it to a private gradient.

    name: in words. rows: pytree with inputs.ROWS examples on axis 0. hostile: the same with more rows, of all sizes.
        paths: by name, (rows, state, included) -> (updates, state); the first is `Mechanism.update`. sums: by name,
        (rows, state) -> the sums of each row alone, with the rows on axis 0.
    """

    name: str
    rows: Tree
    hostile: Tree
    paths: dict[str, Callable]
    sums: dict[str, Callable]


class Subject:
    """The mechanism under test, parameters for it, and the programs compiled for their shapes.

    params: pytree of float32 arrays. others: arrays like `params` with extreme values. problems: a problem whose data
        are gradients, then one with the user's loss and examples, if given.
    """

    def __init__(self, mechanism: Mechanism, params: Tree, loss: Callable | None = None, examples: Tree = None):
        self.mechanism = mechanism
        self.params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        self.others = inputs.extreme_values_like(self.params, first=2)
        self.problems = [audit_problem_of_gradients(mechanism, self.params, self.compile_over_rows)]
        if loss is not None:
            self.problems.append(audit_problem_of_loss(mechanism, self.params, loss, examples, self.compile_over_rows))
        self.sums = jax.jit(lambda *rows: sum_contributions(mechanism, *rows)[0])
        self._states: dict[int, Tree] = {}

    def compile_over_rows(self, of_one: Callable) -> Callable:
        """Compiles `of_one(row, state)`, vectorized over the rows on axis 0."""
        return jax.jit(jax.vmap(of_one, (0, None)))

    def update(self, grads: Tree, state: Tree, included: np.ndarray) -> tuple[Tree, Tree]:
        """Runs `Mechanism.update`, compiled."""
        return next(iter(self.problems[0].paths.values()))(grads, state, included)

    def state_after(self, step: int) -> Tree:
        """The state after `step` releases. Beyond the last of STEPS, only the counters are set to `step`."""
        if step not in self._states:
            if step > STEPS[-1]:
                self._states[step] = self.state_at_step(self.state_after(STEPS[-1]), step)
            elif step == 0:
                self._states[0] = jax.jit(self.mechanism.init)(self.params)
            else:
                grads = inputs.normal_gradients(self.params, 100 + step)
                self._states[step] = self.update(grads, self.state_after(step - 1), all_included())[1]
        return self._states[step]

    @functools.cached_property
    def step_counter_mask(self) -> list[bool]:
        """For each leaf of a state, whether it counts the steps, like one in the ReleaseState or in Adam's state."""
        states = [jax.tree.leaves(self.state_after(step)) for step in COUNTED]

        def counts(values):
            whole = all(jnp.issubdtype(v.dtype, jnp.integer) and v.shape == () for v in values)
            return whole and all(int(v) == step for v, step in zip(values, COUNTED, strict=True))

        return [counts(values) for values in zip(*states, strict=True)]

    def state_at_step(self, state: Tree, step: jax.typing.ArrayLike) -> Tree:
        """Returns `state` with all counters set to `step`, an int32 scalar."""
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, self.step_counter_mask, strict=True)
        return structure.unflatten([jnp.asarray(step, v.dtype) if counts else v for v, counts in pairs])

    def sums_of_each_row(self, rows: Tree, state: Tree) -> tuple[Tree, ...]:
        """The sums of each row of gradients alone, on the stacked path."""
        return next(iter(self.problems[0].sums.values()))(rows, state)

    @functools.cached_property
    def shapes_of_sums(self) -> tuple[Tree, ...]:
        """The shapes and dtypes of the sums, one for each factor."""
        return jax.eval_shape(
            self.sums, inputs.normal_gradients(self.params, 0, rows=1), self.state_after(0), jnp.ones(1, bool)
        )

    @functools.cached_property
    def program_of_update(self) -> core.ClosedJaxpr:
        """The closed jaxpr of `Mechanism.update` on a batch of float32 gradients."""
        return self.trace_update()

    def trace_update(self, dtype: Any = jnp.float32, state: Tree = None) -> core.ClosedJaxpr:
        """The closed jaxpr of `Mechanism.update` on gradients of this dtype, traced anew. state: None is the first."""
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((inputs.ROWS, *p.shape), dtype), self.params)

        def update(grads, state, included):
            return self.mechanism.update(grads, state, self.params, included=included)

        return jax.make_jaxpr(update)(grads, self.state_after(0) if state is None else state, all_included())


def all_included() -> np.ndarray:
    return np.ones(inputs.ROWS, bool)


def all_but_one(*missing: int) -> np.ndarray:
    return np.array([row not in missing for row in range(inputs.ROWS)])


def audit_problem_of_gradients(mechanism: Mechanism, params: Tree, compile_over_rows: Callable) -> AuditProblem:
    """Builds the problem whose data are gradients, for `Mechanism.update` and `private_updates` of a loss with them.

    compile_over_rows: `Subject.compile_over_rows`.
    """

    def stacked(grads, state, included):
        return mechanism.update(grads, state, params, included=included)

    def alone(grad, state):
        grads = jax.tree.map(lambda g: g[None], grad)
        return sum_contributions(mechanism, grads, state, jnp.ones(1, bool))[0]

    def in_microbatches(grads, state, included):
        step = private_updates(inputs.linear_loss, mechanism, microbatch_size=4)
        return step(params, Batch(grads, included), state)[:2]

    def by_ghost_norms(grads, state, included):
        step = private_updates(inputs.matrix_product_loss, mechanism, norms="ghost", microbatch_size=4)
        return step(params, Batch(inputs.matrix_product_examples(params, grads), included), state)[:2]

    paths, sums = {"update": stacked}, {"update": compile_over_rows(alone)}
    if mechanism.supports_ghost_norms:
        of_row = sum_gradients(inputs.matrix_product_loss, mechanism, microbatch_size=1, norms="ghost", has_aux=False)

        def ghost_alone(grad, state):
            row = inputs.matrix_product_examples(params, jax.tree.map(lambda g: g[None], grad))
            return of_row(params, state, (row,), jnp.ones(1, bool))[0]

        paths["ghost norms"], sums["ghost norms"] = by_ghost_norms, compile_over_rows(ghost_alone)
    else:
        paths["microbatches"] = in_microbatches
    rows, (extreme, _, _) = inputs.normal_gradients(params, 2, 3.0), inputs.hostile_gradients(params)
    programs: dict[str, Callable] = {name: jax.jit(with_quick_noise(path)) for name, path in paths.items()}
    return AuditProblem("gradients", rows, extreme, programs, sums)


def audit_problem_of_loss(
    mechanism: Mechanism, params: Tree, loss: Callable, examples: Tree, compile_over_rows: Callable
) -> AuditProblem:
    """The examples of a loss as the data: `Mechanism.update` of its stacked gradients, and `private_updates`."""

    def stacked(rows, state, included):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
        return mechanism.update(grads, state, params, included=included)

    def of_private_updates(**options):
        step = private_updates(loss, mechanism, **options)
        return lambda rows, state, included: step(params, Batch(rows, included), state)[:2]

    def alone(**options):
        of_row = sum_gradients(loss, mechanism, microbatch_size=1, has_aux=False, **options)

        def of_one(row, state):
            return of_row(params, state, (jax.tree.map(lambda x: x[None], row),), jnp.ones(1, bool))[0]

        return compile_over_rows(of_one)

    paths = {
        "update": stacked,
        "private_updates": of_private_updates(),
        "microbatches": of_private_updates(microbatch_size=4),
    }
    sums = {"private_updates": alone(norms="auto")}
    if mechanism.supports_ghost_norms:
        paths["ghost norms"], sums["ghost norms"] = of_private_updates(norms="ghost"), alone(norms="ghost")
    size = len(jax.tree.leaves(examples)[0])
    rows = inputs.take_rows(examples, np.arange(inputs.ROWS) % size)
    programs: dict[str, Callable] = {name: jax.jit(with_quick_noise(path)) for name, path in paths.items()}
    return AuditProblem("loss", rows, inputs.hostile_examples(rows), programs, sums)


LOST = 1e-2  # a derivative below this share of its value is mostly rounding, as in Adam's first step
NEARBY, NEAR = 4, 2.0**-20  # points beside each, whose numbers differ by at most this share
ROUGH = 2e-6  # a derivative whose direction changes more than this from there is rounding too: a difference of others
POINTS = 8  # random points for derivatives; a coordinate whose slope is zero at all of them would be missed
MOST = 2**22  # derivative values computed in one call
SMALL = 1e-5  # smallest singular value to keep, relative to the largest, because the derivatives are float32


class Release(NamedTuple):
    """A release at one step: a function of k sum coordinates and m normals to o public floats, the updates first.

    offset: float64 (o,), the public floats if sums and noise are zero. noise: float64 (o, m), how noise moves them.
    affine: bool (o,), where they are affine in sums and noise. updates: how many of the o are updates.
    exchange: X, float64 (m, k). uncovered: the largest part, relative to 1, of a row that X does not explain.
    flat: whether all derivatives are 0, as after a sign. seen: for each factor, whether its sum moves anything public.
        tolerance: relative error of the sizes, because derivatives are float32 or the noise was measured.
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
    def is_linear(self) -> bool:
        """Whether all updates are linear functions of the noise."""
        return bool(self.affine[: self.updates].all())

    def change_of_sums_in_noise(self, sums: Tree) -> np.ndarray:
        """How large changes of the sums are in units of the noise, with rows on axis 0; float64 (rows,)."""
        return np.linalg.norm(inputs.flattened_leaves(sums, 1) @ self.exchange.T, axis=1)

    def change_of_update_in_noise(self, change: Tree) -> float:
        """How large a change of the updates is in units of the noise; inf if no noise can cause it."""
        change, noise = inputs.flattened_leaves(change), self.noise[: self.updates]
        needed, *_ = np.linalg.lstsq(noise, change, rcond=SMALL)
        missing = np.abs(noise @ needed - change).max(initial=0)
        return np.inf if missing > 1e-3 * np.abs(change).max(initial=0) else float(np.linalg.norm(needed))


class ReleaseFunction:
    """The release of a mechanism as a function of its sums and its noise."""

    def __init__(self, subject: Subject):
        self.subject, self.shapes_of_sums = subject, subject.shapes_of_sums
        self.drawn: list[Tree] = []

        def record(key, step, tree):
            self.drawn.append(jax.eval_shape(lambda t: jax.tree.map(lambda x: jnp.zeros(x.shape), t), tree))
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)

        with drawing_normals_by(record):
            like = jax.eval_shape(self._run, self.shapes_of_sums, subject.state_after(0), subject.params)
        self.updates = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(like[0]))
        self.numbers = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(self.shapes_of_sums))
        self.normals = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(self.drawn))
        # Many points in one call, because the call itself takes longer than a point.
        floats = sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(like))
        size = floats * (self.numbers + self.normals)
        self.together = int(max(2, min((2 + POINTS) * (1 + NEARBY), MOST // max(size, 1))))
        self._together = jax.jit(
            lambda points, *given: jax.lax.map(lambda one: self._floats_and_derivatives(*one, *given), points)
        )

    def _run(self, sums, state, params, mechanism=None):
        updates, after = (mechanism or self.subject.mechanism).release(sums, state, params)
        return updates, inputs.keys_as_bits(publishable_state(after))

    def public_outputs(
        self, sums: jax.Array, normals: jax.Array, state: Tree, params: Tree, mechanism: Mechanism | None = None
    ) -> tuple[jax.Array, Tree]:
        """Returns all public floats, float32 (o,), the updates first, and the other public leaves.

        mechanism: the same one with another key; None is the one under test.
        """
        noise, calls = unflatten_vectors(normals, self.drawn), iter(range(len(self.drawn)))

        def draw(key, step, tree):
            if (call := next(calls, None)) is None:
                raise NotChecked("its coordinates draw with `keys.normals_of_release` too, now more often than before")
            return jax.tree.map(lambda _, n: n, tree, noise[call])

        with drawing_normals_by(draw):
            leaves = jax.tree.leaves(self._run(unflatten_vectors(sums, self.shapes_of_sums), state, params, mechanism))
        return inputs.wide_floats(leaves), [leaf for leaf in leaves if not inputs.is_wide_float(leaf)]

    def _floats_and_derivatives(self, sums, normals, state, params):
        """The public floats, the other outputs, and the derivatives by sums and by noise, float32 (o, k) and (o, m)."""

        def floats(sums, normals):
            found, others = self.public_outputs(sums, normals, state, params)
            return found, (found, others)

        derivatives, (found, others) = jax.jacfwd(floats, (0, 1), has_aux=True)(sums, normals)
        return found, others, derivatives

    def derivatives_at(self, points: Sequence[Sequence[np.ndarray]], state: Tree, params: Tree) -> tuple:
        """`_floats_and_derivatives` at up to `together` points (sums, normals), which are on axis 0 of the results."""
        filled = [*points, *[points[0]] * (self.together - len(points))]
        found = self._together(tuple(map(np.stack, zip(*filled, strict=True))), state, params)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(points)], found)

    def _point_slopes(self, points: Sequence[Sequence[np.ndarray]], *given: Tree) -> Iterator[tuple]:
        """Yields for each point the o public floats, and their derivatives by k sums, (o, k), and m normals, (o, m)."""
        for start in range(0, len(points), self.together):
            found, _, slopes = self.derivatives_at(points[start : start + self.together], *given)
            yield from zip(*(part.astype(np.float64) for part in (found, *slopes)), strict=True)

    def release_at(self, state: Tree, params: Tree) -> Release:
        """The release after this state."""
        points = [(np.zeros(self.numbers, np.float32), np.zeros(self.normals, np.float32)), *self._derivative_points()]
        tried = [near for one in points for near in (one, *_rounding_neighbors(*one))]
        every = self._point_slopes(tried, state, params)
        first, first_sums, first_noise = origin = next(every)
        affine, data, noise = np.ones(len(first), bool), [], []
        # A transform that clips has zero slope at some points, so the derivatives at several points are joined.
        every = itertools.chain([origin], every)
        for sums, normals in points:
            found, by_sums, by_noise = next(every)
            predicted = first + first_noise @ normals + first_sums @ sums
            scale = _derivative_magnitudes(by_sums, by_noise)  # NaN behind a root of 0
            with np.errstate(invalid="ignore"):
                affine &= np.abs(predicted - found) <= 1e-4 * (scale + np.abs(found))
                affine &= np.abs(first_noise - by_noise).max(1, initial=0) <= 1e-4 * scale
                usable = np.isfinite(scale) & (scale > LOST * np.abs(found))
                own = by_sums / scale[:, None], by_noise / scale[:, None]
                for _, *slopes in itertools.islice(every, NEARBY):
                    for part, of_own in zip(slopes, own, strict=True):
                        change = np.abs(part / _derivative_magnitudes(*slopes)[:, None] - of_own).max(1, initial=0)
                        usable &= change <= ROUGH * np.abs(of_own).max(1, initial=0)
            data.append(own[0][usable])
            noise.append(own[1][usable])
        data, noise = np.concatenate(data), np.concatenate(noise)
        exchange, uncovered, flat = np.zeros((self.normals, self.numbers)), 0.0, not len(data)
        if not flat:
            exchange, *_ = np.linalg.lstsq(noise, data, rcond=SMALL)
            uncovered = float(np.abs(noise @ exchange - data).max(initial=0))
        moved = unflatten_vectors(np.abs(data).max(0, initial=0), self.shapes_of_sums)
        seen = tuple(flat or any(np.any(leaf > 0) for leaf in jax.tree.leaves(tree)) for tree in moved)
        return Release(first, first_noise, affine, self.updates, exchange, uncovered, flat, seen)

    def _derivative_points(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Sums and normals at which the derivatives are taken: oscillating values and random ones."""
        random = np.random.default_rng(0)
        waves = inputs.oscillating_values(self.numbers, 1.0), inputs.oscillating_values(self.normals, 0.7, 2.0)
        draws = [random.normal(size=(2, max(self.numbers, self.normals))).astype(np.float32) for _ in range(POINTS)]
        return [waves, *((sums[: self.numbers], normals[: self.normals]) for sums, normals in draws)]


def _derivative_magnitudes(by_sums: np.ndarray, by_noise: np.ndarray) -> np.ndarray:
    """The sizes of the derivatives of each public float, float64 (o,)."""
    return np.abs(by_sums).max(1, initial=0) + np.abs(by_noise).max(1, initial=0)


def _rounding_neighbors(*point: np.ndarray) -> list[list[np.ndarray]]:
    """Points so near that results differ only by rounding. Each coordinate changes by its own random share."""
    random = np.random.default_rng(1)
    return [[x * (1 + random.uniform(-NEAR, NEAR, x.shape)).astype(np.float32) for x in point] for _ in range(NEARBY)]


def numbers_as_text(values: Sequence[float]) -> str:
    """Formats the numbers, or only one if all are equal."""
    words = [f"{value:.4g}" for value in values]
    return words[0] if len(set(words)) == 1 else ", ".join(words)

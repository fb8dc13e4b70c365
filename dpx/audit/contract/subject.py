"""A mechanism on trial: the ways to its private gradient, compiled once for all lines of the contract."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.contract import inputs as inputs
from dpx.audit.stand_ins import with_quick_noise
from dpx.contributions import sum_contributions
from dpx.gradients import private_updates
from dpx.gradients.sums import sum_gradients
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch
from dpx.trees import Tree

STEPS = (0, 1, 2, 3, 4, 7, 9, 50)  # the lines that depend on the step are checked at these
COUNTED = (0, 4, 50)  # at these, what equals the number of the step is its counter
AT_STEPS = f"at steps {', '.join(map(str, STEPS))}"


class Problem(NamedTuple):
    """Data, and the ways to a private gradient of it.

    name: in words. rows: pytree, with inputs.ROWS examples on axis 0. hostile: the same with more rows, of all sizes.
    paths: by name, (rows, state, included) -> (updates, state). The first one is `Mechanism.update`.
    sums: by name, (rows, state) -> the sums of every row alone, with the rows on axis 0.
    """

    name: str
    rows: Tree
    hostile: Tree
    paths: dict[str, Callable]
    sums: dict[str, Callable]


class Subject:
    """The mechanism, the shapes of its parameters, and what was compiled for them.

    params: pytree of float32 arrays. others: the same with other values.
    problems: gradients as data first; then the examples of a user's loss, if any.
    """

    def __init__(self, mechanism: Mechanism, params: Tree, loss: Callable | None = None, examples: Tree = None):
        self.mechanism = mechanism
        self.params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        self.others = inputs.other_values(self.params, first=2)
        self.problems = [of_gradients(mechanism, self.params)]
        if loss is not None:
            self.problems.append(of_loss(mechanism, self.params, loss, examples))
        self.sums = jax.jit(lambda *rows: sum_contributions(mechanism, *rows)[0])
        self._states: dict[int, Tree] = {}

    def update(self, grads: Tree, state: Tree, included: Any) -> tuple[Tree, Tree]:
        """`Mechanism.update`, compiled."""
        return next(iter(self.problems[0].paths.values()))(grads, state, included)

    def state(self, step: int) -> Tree:
        """The state after `step` releases of some gradients; beyond the last of STEPS, with its counters set."""
        if step not in self._states:
            if step > STEPS[-1]:
                self._states[step] = self.at_step(self.state(STEPS[-1]), step)
            elif step == 0:
                self._states[0] = jax.jit(self.mechanism.init)(self.params)
            else:
                grads = inputs.gradients(self.params, 100 + step)
                self._states[step] = self.update(grads, self.state(step - 1), everyone())[1]
        return self._states[step]

    @functools.cached_property
    def counters(self) -> list[bool]:
        """For each leaf of a state, whether it counts the steps, such as that of the ReleaseState, or of Adam."""
        states = [jax.tree.leaves(self.state(step)) for step in COUNTED]

        def counts(values):
            whole = all(jnp.issubdtype(v.dtype, jnp.integer) and v.shape == () for v in values)
            return whole and all(int(v) == step for v, step in zip(values, COUNTED, strict=True))

        return [counts(values) for values in zip(*states, strict=True)]

    def at_step(self, state: Tree, step: Any) -> Tree:
        """`state` with all counters at `step`, int32 ()."""
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, self.counters, strict=True)
        return structure.unflatten([jnp.asarray(step, v.dtype) if counts else v for v, counts in pairs])

    def alone(self, rows: Tree, state: Tree) -> tuple[Tree, ...]:
        """The sums of every row of gradients alone, on the stacked path."""
        return next(iter(self.problems[0].sums.values()))(rows, state)

    @functools.cached_property
    def sums_like(self) -> tuple[Tree, ...]:
        """The shapes and dtypes of the sums, one for each factor."""
        return jax.eval_shape(self.sums, inputs.gradients(self.params, 0, rows=1), self.state(0), jnp.ones(1, bool))

    @functools.cached_property
    def traced_once(self) -> Any:
        """The closed jaxpr of `Mechanism.update` on a batch of float32 gradients."""
        return self.trace()

    def trace(self, dtype: Any = jnp.float32, state: Tree = None) -> Any:
        """The closed jaxpr of `Mechanism.update` on a batch of gradients of this dtype, traced anew.

        state: of the mechanism; by default the first one.
        """
        grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((inputs.ROWS, *p.shape), dtype), self.params)

        def update(grads, state, included):
            return self.mechanism.update(grads, state, self.params, included=included)

        return jax.make_jaxpr(update)(grads, self.state(0) if state is None else state, everyone())


def everyone() -> np.ndarray:
    return np.ones(inputs.ROWS, bool)


def all_but(*missing: int) -> np.ndarray:
    return np.array([row not in missing for row in range(inputs.ROWS)])


def of_each_row(of_one: Callable) -> Callable:
    """`of_one(row, state)` for the rows on axis 0, compiled."""
    return jax.jit(jax.vmap(of_one, (0, None)))


def of_gradients(mechanism: Mechanism, params: Tree) -> Problem:
    """Gradients as the data: `Mechanism.update`, and `private_updates` of a loss that has them as gradients."""

    def stacked(grads, state, included):
        return mechanism.update(grads, state, params, included=included)

    def alone(grad, state):
        grads = jax.tree.map(lambda g: g[None], grad)
        return sum_contributions(mechanism, grads, state, jnp.ones(1, bool))[0]

    def in_microbatches(grads, state, included):
        step = private_updates(inputs.linear_loss, mechanism, microbatch_size=4)
        return step(params, Batch(grads, included), state)[:2]

    def by_ghost_norms(grads, state, included):
        step = private_updates(inputs.product_loss, mechanism, norms="ghost", microbatch_size=4)
        return step(params, Batch(inputs.product_examples(params, grads), included), state)[:2]

    paths, sums = {"update": stacked}, {"update": of_each_row(alone)}
    if mechanism.supports_ghost_norms:
        of_row = sum_gradients(inputs.product_loss, mechanism, microbatch_size=1, norms="ghost", has_aux=False)

        def ghost_alone(grad, state):
            row = inputs.product_examples(params, jax.tree.map(lambda g: g[None], grad))
            return of_row(params, state, (row,), jnp.ones(1, bool))[0]

        paths["ghost norms"], sums["ghost norms"] = by_ghost_norms, of_each_row(ghost_alone)
    else:
        paths["microbatches"] = in_microbatches
    rows, (extreme, _, _) = inputs.gradients(params, 2, 3.0), inputs.hostile(params)
    programs: dict[str, Callable] = {name: jax.jit(with_quick_noise(path)) for name, path in paths.items()}
    return Problem("gradients", rows, extreme, programs, sums)


def of_loss(mechanism: Mechanism, params: Tree, loss: Callable, examples: Tree) -> Problem:
    """The examples of a loss: its stacked gradients, and what `private_updates` makes of it."""

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

        return of_each_row(of_one)

    paths = {
        "update": stacked,
        "private_updates": of_private_updates(),
        "microbatches": of_private_updates(microbatch_size=4),
    }
    sums = {"private_updates": alone(norms="auto")}
    if mechanism.supports_ghost_norms:
        paths["ghost norms"], sums["ghost norms"] = of_private_updates(norms="ghost"), alone(norms="ghost")
    size = len(jax.tree.leaves(examples)[0])
    rows = inputs.take(examples, np.arange(inputs.ROWS) % size)
    programs: dict[str, Callable] = {name: jax.jit(with_quick_noise(path)) for name, path in paths.items()}
    return Problem("loss", rows, inputs.hostile_examples(rows), programs, sums)

"""Many runs of a mechanism on one example, the canary, which takes part in one world and does not in the other."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx._draws import coins
from dpx.batches import Tree
from dpx.sampling import FixedSizeSampling, FullBatch, PoissonSampling, ShuffledEpochs


class Attack(NamedTuple):
    """What is audited, and what the adversary sees.

    make: (key) -> the mechanism of one run.
    params: the parameters, which do not move.
    steps: int, releases of a run.
    canary: (step, state, params) -> the gradient of the canary at a step, like `params`.
    instead: None if the canary is absent in the other world; or a function like `canary`, of the example in its place.
    others: None, or gradients of other examples, which take part at every step in both worlds; rows on axis 0.
    takes_part: (key, steps) -> bool (steps,), when the canary takes part.
    observe: (updates, state before, state after, canary) -> float32 (features,), what is read of a release. A canary
        that takes part must move it by an amount that the states before determine.
    """

    make: Callable[[jax.Array], Any]
    params: Tree
    steps: int
    canary: Callable[[jax.Array, Tree, Tree], Tree]
    instead: Callable[[jax.Array, Tree, Tree], Tree] | None
    others: Tree | None
    takes_part: Callable[[jax.Array, int], jax.Array]
    observe: Callable[[Tree, Tree, Tree, Tree], jax.Array]


def takes_part(sampling: Any) -> Callable[..., Any]:
    """When one example takes part in the batches of a sampling: a function (key, steps) -> bool (steps,).

    Raises ValueError for a sampling that is unknown here, and no function.
    """

    def poisson(key, steps):
        return jax.vmap(lambda step: coins(jax.random.fold_in(key, step), 1, sampling.probability)[0])(
            jnp.arange(steps)
        )

    def fixed_size(key, steps):
        return jax.random.randint(key, (steps,), 0, sampling.examples) < sampling.batch_size

    def shuffled(key, steps):
        period = sampling.steps_per_epoch
        places = jax.random.randint(key, (-(-steps // period), 1), 0, sampling.examples) // sampling.batch_size
        return (jnp.arange(period)[None] == places).reshape(-1)[:steps]

    known = {
        PoissonSampling: poisson,
        FixedSizeSampling: fixed_size,
        ShuffledEpochs: shuffled,
        FullBatch: lambda key, steps: jnp.ones(steps, bool),
    }
    if type(sampling) in known:
        return known[type(sampling)]
    if callable(sampling):
        return sampling
    raise ValueError(
        "sampling_truth must be a sampling record of dpx, or a function (key, steps) -> bool (steps,) that says when "
        f"the canary takes part; got {sampling!r}"
    )


def observe_canary(updates: Tree, before: Tree, after: Tree, canary: Tree) -> jax.Array:
    """The inner product of the released update and the canary's gradient, float32 (1,)."""
    del before, after
    products = jax.tree.map(lambda u, c: jnp.vdot(u.astype(jnp.float32), c), updates, canary)
    return jnp.stack([sum(jax.tree.leaves(products))])


def release_counts(
    attack: Attack, key: jax.Array, present: jax.Array, always: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many canaries each release of one run seems to hold, and how far one canary moves what is observed.

    key: (), of the run. present: bool (), the world. always: bool (), the canary takes part at every step.
    Returns float32 (steps, features) twice. A count is the observation divided by the move, so one canary adds 1 to it.
    The move is the difference of two releases with the same noise, so that it is no function of the noise.
    """
    mechanism = attack.make(keys.stream(key, "audited mechanism"))
    taken = attack.takes_part(keys.stream(key, "audited batches"), attack.steps).astype(bool) | always

    def step(state, inputs):
        number, taken = inputs
        canary = attack.canary(number, state, attack.params)

        def release(gradient, included):
            rows, counts = _batch(gradient, included, attack.others)
            updates, after = mechanism.update(rows, state, attack.params, included=counts)
            return attack.observe(updates, state, after, canary), after

        with_canary, without = release(canary, True), release(canary, False)
        other = without if attack.instead is None else release(attack.instead(number, state, attack.params), True)
        move = with_canary[0] - other[0]
        chosen = jax.tree.map(lambda a, b: jnp.where(present, a, b), with_canary, other)
        observed, state = jax.tree.map(lambda a, b: jnp.where(taken, a, b), chosen, without)
        return state, (jnp.where(move == 0, 0.0, observed / jnp.where(move == 0, 1.0, move)), jnp.abs(move))

    _, observed = jax.lax.scan(step, mechanism.init(attack.params), (jnp.arange(attack.steps), taken))
    return observed


def _batch(gradient: Tree, included: bool, others: Tree | None) -> tuple[Tree, jax.Array]:
    """The canary and the other examples as one batch, and which of its rows count."""
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gradient)
    if others is None:
        return rows, jnp.array([included])
    rows = jax.tree.map(lambda row, more: jnp.concatenate([row, more.astype(row.dtype)]), rows, others)
    size = len(jax.tree.leaves(rows)[0])
    return rows, jnp.arange(size) >= (0 if included else 1)


class Counts(NamedTuple):
    """Of many runs: what `release_counts` returns for each, float32 (runs, steps, features) twice."""

    counts: np.ndarray
    moves: np.ndarray


def simulator(attack: Attack, chunk: int) -> Callable[..., Iterator[Counts]]:
    """A function (key, runs, present, always) that yields `Counts` of chunks of runs, together at least `runs`.

    Each run has a key of its own. Both worlds are one compiled program.
    """

    @jax.jit
    def many(run_keys, present, always):
        return jax.vmap(lambda key: release_counts(attack, key, present, always))(run_keys)

    def simulate(key: jax.Array, runs: int, *, present: bool, always: bool = False) -> Iterator[Counts]:
        for number in range(-(-runs // chunk)):
            run_keys = jax.random.split(jax.random.fold_in(key, number), chunk)
            yield Counts(*map(np.asarray, many(run_keys, jnp.bool_(present), jnp.bool_(always))))

    return simulate

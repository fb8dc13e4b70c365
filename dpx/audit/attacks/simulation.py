"""Many runs of a mechanism on one example, the canary, which takes part in one world and does not in the other."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.audit.stand_ins import without_grid
from dpx.sampling.allocation import RandomAllocation
from dpx.sampling.cyclic import CyclicPoissonSampling
from dpx.sampling.draws import coins
from dpx.sampling.poisson import PoissonSampling
from dpx.sampling.schemes import FixedOrder, FixedSizeSampling, FullBatch, ShuffledEpochs
from dpx.states.public import publishable_state
from dpx.trees import Tree, described, require_arrays


class Attack(NamedTuple):
    """What is audited, and what the adversary sees.

    make: (key) -> the mechanism of one run.
    params: the parameters, which do not move.
    steps: int, releases of a run.
    canary: (step, state, params) -> the gradient of the canary at a step, like `params`.
    instead: None if the canary is absent in the other world; or a function like `canary`, of the example in its place.
    others: None, or gradients of other examples, which take part at every step in both worlds; rows on axis 0.
    takes_part: (key, steps) -> bool (steps,), when the canary takes part.
    observe: (updates, state before, state after, canary) -> float32 (features,), what is read of a release.

    The states that the functions are given have None in place of what is not public (`dpx.publishable_state`).
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

    def poisson_of_rate(key, steps, rate):
        return jax.vmap(lambda step: coins(keys.fold_in(key, step), 1, rate)[0])(jnp.arange(steps))

    def poisson(key, steps):
        return poisson_of_rate(key, steps, sampling.participation)

    def fixed_size(key, steps):
        return jax.random.randint(keys.public(key), (steps,), 0, sampling.examples) < sampling.batch_size

    def shuffled(key, steps):
        period = sampling.steps_per_epoch
        places = jax.random.randint(keys.public(key), (-(-steps // period), 1), 0, sampling.examples)
        places //= sampling.batch_size
        return (jnp.arange(period)[None] == places).reshape(-1)[:steps]

    def allocated(key, steps):
        period = sampling.steps_per_epoch
        places = jax.random.randint(keys.public(key), (-(-steps // period), 1), 0, period)
        return (jnp.arange(period)[None] == places).reshape(-1)[:steps]

    def cyclic(key, steps):
        group = jax.random.randint(keys.public(key), (), 0, sampling.bands)
        return poisson_of_rate(key, steps, sampling.probability) & (jnp.arange(steps) % sampling.bands == group)

    known = {
        PoissonSampling: poisson,
        FixedSizeSampling: fixed_size,
        ShuffledEpochs: shuffled,
        RandomAllocation: allocated,
        CyclicPoissonSampling: cyclic,
        FixedOrder: lambda key, steps: jnp.arange(steps) % sampling.steps_per_epoch == 0,
        FullBatch: lambda key, steps: jnp.ones(steps, bool),
    }
    if type(sampling) in known:
        return known[type(sampling)]
    if callable(sampling):
        return sampling
    raise ValueError(
        "sampling_truth must be a sampling record of dpx, or a function (key, steps) -> bool (steps,) that says when "
        f"the canary takes part; got {described(sampling)}"
    )


def observe_canary(updates: Tree, before: Tree, after: Tree, canary: Tree) -> jax.Array:
    """The inner product of the released update and the canary's gradient, float32 (1,).

    updates: the release of a step. before, after: the public states around it. canary: its gradient, like `updates`.
    """
    require_arrays((updates, canary))
    products = jax.tree.map(lambda u, c: jnp.vdot(u.astype(jnp.float32), c), updates, canary)
    return jnp.stack([sum(jax.tree.leaves(products))])


class Observed(NamedTuple):
    """What the adversary has of many runs. All of it is computed from released values and from keys of its own.

    observed: float32 (runs, steps, features), of each release.
    moves: float32 (runs, noises, steps, features), how far one canary moves what is observed of a release, under each
        of some noises that are not the run's.
    """

    observed: np.ndarray
    moves: np.ndarray


def observed_run(
    attack: Attack, key: jax.Array, present: jax.Array, always: jax.Array, noises: int
) -> tuple[jax.Array, jax.Array]:
    """The two arrays of `Observed` for one run, float32 (steps, features) and float32 (noises, steps, features).

    key: (), of the run. present: bool (), the world. always: bool (), the canary takes part at every step.

    A move must not be computed with the run's own noise, because it can tell that noise, and so the data, where a
    release is not linear. So the adversary makes the mechanism again, with another key, and lets it release from the
    public part of the state, with and without the canary. Thus a score is a function of released values for every
    mechanism, and that makes a bound on it a proof.
    """
    mechanism = attack.make(keys.stream(key, "audited mechanism"))
    others = jax.random.split(keys.public(keys.stream(key, "noises of the adversary")), noises)
    taken = attack.takes_part(keys.stream(key, "audited batches"), attack.steps).astype(bool) | always

    replaced = attack.instead is not None

    def step(state, inputs):
        number, taken = inputs
        before = publishable_state(state)
        canary = attack.canary(number, before, attack.params)
        other = canary if attack.instead is None else attack.instead(number, before, attack.params)

        def observe(mechanism, state, gradient, included):
            rows, counts = _batch(gradient, included, attack.others)
            updates, after = mechanism.update(rows, state, attack.params, included=counts)
            return attack.observe(updates, before, publishable_state(after), canary), after

        @without_grid
        def move(key):
            again = attack.make(key)
            # The public state is known. Its private parts have None there, and take the values of a new run.
            parts = before, again.init(attack.params)
            known = jax.tree.map(lambda a, b: b if a is None else a, *parts, is_leaf=lambda part: part is None)
            return observe(again, known, canary, True)[0] - observe(again, known, other, replaced)[0]

        chosen = jax.tree.map(lambda a, b: jnp.where(present, a, b), canary, other)
        observed, state = observe(mechanism, state, chosen, taken & (present | replaced))
        return state, (observed, jax.vmap(move)(others) if noises else jnp.zeros((0, *observed.shape)))

    _, (observed, moves) = jax.lax.scan(step, mechanism.init(attack.params), (jnp.arange(attack.steps), taken))
    return observed, jnp.moveaxis(moves, 1, 0)


def _batch(gradient: Tree, included: Any, others: Tree | None) -> tuple[Tree, jax.Array]:
    """The canary and the other examples as one batch, and which of its rows count."""
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gradient)
    if others is None:
        return rows, jnp.array([included])
    rows = jax.tree.map(lambda row, more: jnp.concatenate([row, more.astype(row.dtype)]), rows, others)
    size = len(jax.tree.leaves(rows)[0])
    return rows, (jnp.arange(size) > 0) | included


def simulator(attack: Attack, chunk: int) -> Callable[..., Iterator[Observed]]:
    """A function (key, runs, present, always, noises) that yields `Observed` of chunks, together at least `runs` runs.

    Each run has a key of its own. Both worlds are one compiled program.
    """

    @functools.partial(jax.jit, static_argnums=3)
    def many(run_keys, present, always, noises):
        return jax.vmap(lambda key: observed_run(attack, key, present, always, noises))(run_keys)

    def simulate(key: jax.Array, runs: int, *, present: bool, always: bool, noises: int) -> Iterator[Observed]:
        for number in range(-(-runs // chunk)):
            run_keys = jax.random.split(keys.public(keys.fold_in(key, number)), chunk)
            yield Observed(*map(np.asarray, many(run_keys, jnp.bool_(present), jnp.bool_(always), noises)))

    return simulate

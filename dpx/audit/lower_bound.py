"""A lower bound on the epsilon of a mechanism from many cheap runs of a worst case, with and without a canary."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx._numbers import require_whole
from dpx.accounting import checks
from dpx.accounting.bill import epsilon as bill_of
from dpx.audit import lower_bound_statistic
from dpx.audit.lower_bound_runs import Attack, Counts, observe_canary, simulator, takes_part
from dpx.audit.lower_bound_scores import LowerBound, lower_bound_from_scores, require_confidence
from dpx.batches import Tree
from dpx.sampling import ShuffledEpochs

_LARGE_NORM = 1e6  # of the default canary, so that every usual clip norm is reached
_PILOT_SHARE, _LEAST_PILOT_RUNS, _MOST_PILOT_RUNS = 4, 1000, 40_000
_MOST_NUMBERS_AT_ONCE = 4_000_000  # releases in one call of the compiled program
_LEAST_RUNS = 100


def lower_bound(
    make: Callable[[jax.Array], Any],
    *,
    steps: int,
    delta: float,
    key: jax.Array,
    runs: int = 100_000,
    params: Tree | None = None,
    canary: Any = None,
    instead: Any = None,
    others: Tree | None = None,
    sampling_truth: Any = None,
    observe: Callable[..., jax.Array] = observe_canary,
    confidence: float = 0.95,
) -> LowerBound:
    """A lower bound on the epsilon of `steps` releases of a mechanism, beside its bill.

    The score of a run is that of `canary_scores`, whose arguments these are; `lower_bound_from_scores` makes the bound.

    delta: in (0, 1). confidence: in (0, 1).

    `epsilon` is a proof, up to its confidence. A bound above the bill proves that the bill is wrong. One below proves
    nothing, because another attack may be better. `gaussian_epsilon` is a hypothesis. `bill` is `dpx.epsilon` of
    the mechanism, or None if it has no event. Raises ValueError as `canary_scores` does, and for a wrong delta or
    confidence.
    """
    delta = checks.require_delta(delta)
    require_confidence(confidence)
    scores = canary_scores(
        make,
        steps=steps,
        key=key,
        runs=runs,
        params=params,
        canary=canary,
        instead=instead,
        others=others,
        sampling_truth=sampling_truth,
        observe=observe,
    )
    mechanism = make(key)
    stated = hasattr(mechanism, "event") and hasattr(mechanism, "sampling")
    bill = bill_of(mechanism, steps, delta=delta) if stated else None
    return lower_bound_from_scores(*scores, delta=delta, confidence=confidence, bill=bill)


def canary_scores(
    make: Callable[[jax.Array], Any],
    *,
    steps: int,
    key: jax.Array,
    runs: int = 100_000,
    params: Tree | None = None,
    canary: Any = None,
    instead: Any = None,
    others: Tree | None = None,
    sampling_truth: Any = None,
    observe: Callable[..., jax.Array] = observe_canary,
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of `runs` runs with the canary, and of as many without it, float64 (runs,) each.

    A white-box attack: the adversary sees every release of the mechanism's own `update`, and chooses the canary's
    gradient at every step. The score is the likelihood ratio that pilot runs suggest (`lower_bound_statistic`).

    make: (key) -> the mechanism of one run, with `init` and `update`, and `sampling` unless `sampling_truth` is given.
        It is called inside of jit and vmap, with the key of each run.
    steps: int, at least 1. key: a PRNG key, (). runs: int, at least 100, in each world.
    params: pytree of a few coordinates, because time grows with them and a worst case needs few; default two.
    canary: its gradient, like `params`, or a function (step, state, params) of it; default a large constant one. The
        state is that before the release, and the gradient may depend on its public part alone.
    instead: the same for the example that has its place in the other world. Default None: nobody; and where the
        sampling's relation is "replace_one", the opposite gradient.
    others: gradients of other examples, with the rows on axis 0, which take part in every batch of both worlds.
    sampling_truth: how the batches are truly drawn, if that is not the mechanism's `sampling`: a record, or a function
        (key, steps) -> bool (steps,), when the canary takes part, under jit.
    observe: (updates, state before, state after, canary's gradient) -> float32 (features,), what is read of a release;
        default the inner product of the updates and the canary. It must read public parts of the states only. The proof
        needs that the noise does not change how far one canary moves it; that is so where a release is linear.

    Raises ValueError for numbers outside of these domains, for an unknown sampling, and for moves or observations that
    are not finite.
    """
    steps, runs = require_whole("steps", steps), require_whole("runs", runs, minimum=_LEAST_RUNS)
    keys.require(key)
    params = {"w": jnp.zeros(2)} if params is None else params
    truth = getattr(make(key), "sampling", None) if sampling_truth is None else sampling_truth
    canary, instead = _gradients(canary, instead, params, truth)
    attack = Attack(make, params, steps, canary, instead, others, takes_part(truth), observe)
    pilots = min(max(_LEAST_PILOT_RUNS, runs // _PILOT_SHARE), _MOST_PILOT_RUNS)
    simulate = simulator(attack, min(pilots, max(1, _MOST_NUMBERS_AT_ONCE // steps)))
    statistic = lower_bound_statistic.fit(
        _joined(simulate(keys.stream(key, "pilot without"), pilots, present=False)),
        _joined(simulate(keys.stream(key, "pilot with"), pilots, present=True, always=True)),
        _rates(attack, keys.stream(key, "pilot batches"), pilots),
        truth.steps_per_epoch if isinstance(truth, ShuffledEpochs) else 0,
    )

    def scores(world: str, present: bool) -> np.ndarray:
        found = simulate(keys.stream(key, world), runs, present=present)
        return np.concatenate([statistic.scores(_finite(chunk)) for chunk in found])[:runs]

    return scores("runs with", True), scores("runs without", False)


def _gradients(canary: Any, instead: Any, params: Tree, sampling: Any) -> tuple[Any, Any]:
    """The gradients of the canary and of what has its place, as functions; None where nobody has it."""
    if canary is None:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        canary = jax.tree.map(lambda p: jnp.full(p.shape, _LARGE_NORM / math.sqrt(size), jnp.float32), params)
    if instead is None and getattr(sampling, "relation", None) == "replace_one" and not callable(canary):
        instead = jax.tree.map(jnp.negative, canary)
    return _function("canary", canary, params), None if instead is None else _function("instead", instead, params)


def _function(name: str, gradient: Any, params: Tree) -> Callable[[jax.Array, Tree, Tree], Tree]:
    """`gradient` as a function. Raises ValueError for a gradient that is unlike the parameters."""
    if callable(gradient):
        return gradient
    expected, found = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, gradient))
    if jax.tree.structure(gradient) != jax.tree.structure(params) or found != expected:
        raise ValueError(f"{name} must be a gradient like params, of shapes {expected}, or a function of it")
    return lambda step, state, params: gradient


def _rates(attack: Attack, key: jax.Array, runs: int) -> np.ndarray:
    """How often the canary takes part at each step, float64 (steps,)."""
    taken = jax.jit(jax.vmap(lambda key: attack.takes_part(key, attack.steps)))(jax.random.split(key, runs))
    return np.asarray(taken, np.float64).mean(axis=0)


def _joined(chunks) -> Counts:
    return _finite(Counts(*map(np.concatenate, zip(*chunks, strict=True))))


def _finite(found: Counts) -> Counts:
    """`found`. Raises ValueError for a release that is not finite."""
    if not all(np.isfinite(part).all() for part in found):
        raise ValueError("observations of the releases must be finite, got some that are not; is the canary too large?")
    return found

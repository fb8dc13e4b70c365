"""A lower bound on the epsilon of a mechanism from many cheap runs of a worst case, with and without a canary."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx import keys
from dpx.accounting import checks
from dpx.accounting.bill import epsilon as bill_of
from dpx.audit.attacks.scores import LowerBound, lower_bound_from_scores
from dpx.audit.attacks.simulation import Attack, Observed, observe_canary, simulator, takes_part
from dpx.audit.attacks.statistic import fit, moves_of
from dpx.sampling.allocation import RandomAllocation
from dpx.sampling.cyclic import CyclicPoissonSampling
from dpx.sampling.schemes import ShuffledEpochs
from dpx.trees import Tree
from dpx.validation import require_open_fraction, require_whole

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

    `epsilon` is a proof, up to its confidence, for every mechanism, because the scores are computed from released
    values only. A bound above the bill proves that the bill is wrong, if `make` takes all of its randomness from its
    key, and the batches are drawn as `sampling_truth` says. One below proves nothing, because another attack may be
    better. `gaussian_epsilon` is a hypothesis. `bill` is `dpx.epsilon` of the mechanism, or None if it has no event.
    Raises ValueError as `canary_scores` does, for a wrong delta or confidence, and `instead` under another relation.
    """
    delta = checks.require_delta(delta)
    require_open_fraction("confidence", confidence)
    mechanism = make(keys.stream(key, "billed mechanism"))
    stated = hasattr(mechanism, "event") and hasattr(mechanism, "sampling")
    if stated and instead is not None and mechanism.sampling.relation != "replace_one":
        raise ValueError(
            f"instead must be None for a bill whose relation is {mechanism.sampling.relation!r}, because that bill is "
            "not for replacing an example; give lower_bound_from_scores the canary_scores, without this bill"
        )
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
    gradient at every step. The score is the likelihood ratio that pilot runs suggest (`lower_bound_statistic`). It
    depends on released values of its run, on pilot runs, and on keys of its own, but never on the noise of its run.

    make: (key) -> the mechanism of one run, with `init` and `update`, and `sampling` unless `sampling_truth` is given.
        It is called inside of jit and vmap, with the key of each run, and with keys of the adversary. All of its
        randomness must come from the key.
    steps: int, at least 1. key: a PRNG key, (). runs: int, at least 100, in each world.
    params: pytree of a few coordinates, because time grows with them and a worst case needs few; default two.
    canary: its gradient, like `params`, or a function (step, state, params) of it; default a large constant one. The
        state is the public part (`dpx.publishable_state`) of that before the release.
    instead: the same for the example that has its place in the other world. Default None: nobody; and where the
        relation of the mechanism's sampling is "replace_one", the opposite gradient.
    others: gradients of other examples, with the rows on axis 0, which take part in every batch of both worlds.
    sampling_truth: how the batches are truly drawn, if that is not the mechanism's `sampling`: a record, or a function
        (key, steps) -> bool (steps,), when the canary takes part, under jit.
    observe: (updates, state before, state after, canary's gradient) -> float32 (features,), what is read of a release;
        default the inner product of the updates and the canary. The states are their public parts.

    The adversary knows how far one canary moves what is observed, where that is a function of the public state. Where
    it depends on the noise or on other secrets of the key, the mean of pilot runs has its place. The bound is as valid
    then, but the attack is weaker, and a UserWarning says so.

    Raises ValueError for numbers outside of these domains, an unknown sampling, and moves or observations not finite.
    """
    steps, runs = require_whole("steps", steps), require_whole("runs", runs, minimum=_LEAST_RUNS)
    keys.require(key)
    params = {"w": jnp.zeros(2)} if params is None else params
    billed = getattr(make(keys.stream(key, "billed mechanism")), "sampling", None)
    truth = billed if sampling_truth is None else sampling_truth
    canary, instead = _gradients(canary, instead, params, truth if billed is None else billed)
    attack = Attack(make, params, steps, canary, instead, others, takes_part(truth), observe)
    once_an_epoch = isinstance(truth, ShuffledEpochs | RandomAllocation)
    groups = truth.bands if isinstance(truth, CyclicPoissonSampling) else 1
    return _scores(attack, key, runs, truth.steps_per_epoch if once_an_epoch else 0, groups)


def _scores(attack: Attack, key: jax.Array, runs: int, period: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """The scores with and without the canary, float64 (runs,) each. period: int, steps of an epoch, or 0. groups: int,
    of cyclic sampling, or 1."""
    pilots = min(max(_LEAST_PILOT_RUNS, runs // _PILOT_SHARE), _MOST_PILOT_RUNS)
    simulate = simulator(attack, min(pilots, max(1, _MOST_NUMBERS_AT_ONCE // attack.steps)))

    def pilot(world: str, present: bool, noises: int) -> Observed:
        chunks = simulate(keys.stream(key, world), pilots, present=present, always=present, noises=noises)
        return _finite(Observed(*map(np.concatenate, zip(*chunks, strict=True))))

    without = pilot("pilot without", False, 2)
    moves = moves_of(without)
    if moves.noisy.any():
        warnings.warn(
            f"with another key, the canary moves {moves.noisy.sum()} of {moves.noisy.size} observed numbers by other "
            "amounts. The bound is valid, but the attack may be weak, because it takes the mean amount. If optax "
            "transforms are behind the mechanism, audit it without them, because they change no epsilon",
            stacklevel=3,
        )
    noises = int(moves.known.any())
    with_ = pilot("pilot with", True, noises)
    batch_keys = jax.random.split(keys.public(keys.stream(key, "pilot batches")), pilots)
    taken = jax.jit(jax.vmap(lambda key: attack.takes_part(key, attack.steps)))(batch_keys)
    rates = np.asarray(taken, np.float64).mean(axis=0)  # how often the canary takes part at each step
    statistic = fit(moves.counts(without), moves.counts(with_), rates, period, groups)

    def scores(world: str, present: bool) -> np.ndarray:
        found = simulate(keys.stream(key, world), runs, present=present, always=False, noises=noises)
        return np.concatenate([statistic.scores(moves.counts(_finite(chunk))) for chunk in found])[:runs]

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


def _finite(found: Observed) -> Observed:
    """`found`. Raises ValueError for a release that is not finite."""
    if not all(np.isfinite(part).all() for part in found):
        raise ValueError("observations of the releases must be finite, got some that are not; is the canary too large?")
    return found

"""A lower bound on the epsilon of a mechanism from many cheap runs, with and without one example, the canary.

The score of a run is the log-likelihood ratio of its releases with and without the canary, if they are Gaussian.

Any score of released values that is fixed before the counted runs gives a valid bound; this one is near the best for
the methods of dpx. Pilot runs, which are not counted, give means and covariances. Dividing an observation by the move
of one canary estimates the number of canaries in a release. These counts are whitened in the order of the steps, with
the covariance of runs without the canary, which removes what earlier releases explain. Then z_t ~ N(0, 1) without the
canary and N(mu_t, 1) with the canary in the batch, so the log-likelihood ratio is

    sum_t ln(1 - q_t + q_t exp(a_t)),  a_t = mu_t z_t - mu_t^2 / 2,

where q_t is the probability that the canary takes part. If it takes part once an epoch, as in shuffled batches and with
random allocation, the score is the sum over epochs of ln mean_t exp(a_t).

If the noise of a step is correlated with earlier steps, a canary in step t moves z in the later steps too, by column t
of the whitening. In a fixed order, all its steps are known, and the score uses the sum of these columns. With cyclic
sampling, the steps of one group have separate coins. So a_t uses column t, the terms are summed over the steps of a
group, and the score is ln mean exp of these sums over the groups.

If a release is not linear, the move depends on the noise, which the adversary does not know. The mean move of the pilot
runs replaces it, which makes the attack weaker but no less valid.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpx import keys
from dpx.accounting import checks
from dpx.accounting.cost import epsilon as cost_of
from dpx.audit.attacks.scores import LowerBound, lower_bound_from_scores
from dpx.audit.stand_ins import without_grid
from dpx.mechanism.guards import require_key_used
from dpx.sampling.data import require_plain_arrays
from dpx.sampling.schemes import Sampling
from dpx.states.reading import publishable_state
from dpx.values import (
    Tree,
    described,
    explain_misuse,
    require_function,
    require_open_fraction,
    require_whole,
    warn_user,
)

OTHERWISE = "for a program of your own, compare its outputs by dpx.audit.lower_bound_from_scores"
_LARGE_NORM = 1e6  # norm of the default canary, above every usual clip norm
_PILOT_SHARE, _LEAST_PILOT_RUNS, _MOST_PILOT_RUNS = 4, 1000, 40_000
_MOST_NUMBERS_AT_ONCE = 4_000_000  # release values in one call of the compiled program
_LEAST_RUNS = 100
_SAME_MOVES = 1e-3  # relative; moves that differ by less count as equal
_REGULAR = 1e-6  # share of the variance, so that constant or equal features do no harm


Gradient = Callable[[jax.Array, Tree, Tree], Tree]  # (step, public state, parameters) -> gradient


class Attack(NamedTuple):
    """What is audited, and what the adversary sees.

    make: (key) -> the mechanism of one run. params: the parameters, which stay fixed. steps: int, releases in a run.
    canary: (step, state, params) -> the gradient of the canary at a step, like `params`.
    instead: a function like `canary` for the example that replaces it in the other world; None if nothing does.
    others: None, or gradients of other examples, which take part at every step in both worlds; rows on axis 0.
    takes_part: (key, steps) -> bool (steps,), when the canary takes part.
    observe: (updates, state before, state after, canary) -> float32 (features,), what the attack reads from a release.

    The functions get states with None in place of what is not public (`dpx.publishable_state`).
    """

    make: Callable[[jax.Array], Any]
    params: Tree
    steps: int
    canary: Gradient
    instead: Gradient | None
    others: Tree | None
    takes_part: Callable[[jax.Array, int], jax.Array]
    observe: Callable[[Tree, Tree, Tree, Tree], jax.Array]


def participation_function(sampling: Any) -> Callable[..., Any]:
    """Returns a function (key, steps) -> bool (steps,), which says when the canary takes part.

    sampling: a sampling, or already such a function. Raises ValueError for anything else.
    """
    if isinstance(sampling, Sampling):
        return sampling.takes_part
    if callable(sampling):
        return sampling
    raise ValueError(
        "sampling_truth must be a sampling record of dpx, or a function (key, steps) -> bool (steps,) that says when "
        f"the canary takes part; got {described(sampling)}"
    )


def observe_canary(updates: Tree, before: Tree, after: Tree, canary: Tree) -> jax.Array:
    """The inner product of the released update and the canary's gradient, float32 (1,).

    updates: the release of a step. before, after: the public states before and after it. canary: gradient like
        `updates`.
    """
    require_plain_arrays((updates, canary))
    products = jax.tree.map(lambda u, c: jnp.vdot(u.astype(jnp.float32), c), updates, canary)
    return jnp.stack([sum(jax.tree.leaves(products))])


class ObservedRuns(NamedTuple):
    """What the adversary knows about many runs, computed from released values and from the adversary's own keys.

    observed: float32 (runs, steps, features), the features of each release. moves: float32 (runs, noises, steps,
        features), how far one canary moves these features, under several draws of noise that are not the run's.
    """

    observed: np.ndarray
    moves: np.ndarray


def observed_run(
    attack: Attack, key: jax.Array, present: jax.Array, always: jax.Array, noises: int
) -> tuple[jax.Array, jax.Array]:
    """The two arrays of `ObservedRuns` for one run, float32 (steps, features) and float32 (noises, steps, features).

    key: scalar key of the run. present: scalar bool, whether the canary is in this world. always: scalar bool, whether
        it takes part at every step.

    Computing a move with the run's own noise could reveal that noise, and so the data, if a release is not linear. So
    the adversary makes the mechanism again with another key, and lets it release from the public part of the state,
    with and without the canary. Then a score is a function of released values for every mechanism, so its bound is
    a proof.
    """
    mechanism = attack.make(keys.stream(key, "audited mechanism"))
    others = jax.random.split(keys.public_key(keys.stream(key, "noises of the adversary")), noises)
    taken = attack.takes_part(keys.stream(key, "audited batches"), attack.steps).astype(bool) | always

    replaced = attack.instead is not None

    def step(state, inputs):
        number, taken = inputs
        before = publishable_state(state)
        canary = attack.canary(number, before, attack.params)
        other = canary if attack.instead is None else attack.instead(number, before, attack.params)

        def observe(mechanism, state, gradient, included):
            rows, counts = _batch_with_canary(gradient, included, attack.others)
            updates, after = mechanism.update(rows, state, attack.params, included=counts)
            return attack.observe(updates, before, publishable_state(after), canary), after

        @without_grid
        def move(key):
            again = attack.make(key)
            # The public state is known. Its private parts are None, so take the values of a new run.
            parts = before, again.init(attack.params)
            known = jax.tree.map(lambda a, b: b if a is None else a, *parts, is_leaf=lambda part: part is None)
            return observe(again, known, canary, True)[0] - observe(again, known, other, replaced)[0]

        chosen = jax.tree.map(lambda a, b: jnp.where(present, a, b), canary, other)
        observed, state = observe(mechanism, state, chosen, taken & (present | replaced))
        return state, (observed, jax.vmap(move)(others) if noises else jnp.zeros((0, *observed.shape)))

    _, (observed, moves) = jax.lax.scan(step, mechanism.init(attack.params), (jnp.arange(attack.steps), taken))
    return observed, jnp.moveaxis(moves, 1, 0)


def _batch_with_canary(gradient: Tree, included: jax.typing.ArrayLike, others: Tree | None) -> tuple[Tree, jax.Array]:
    """Returns a batch of the canary and the other examples, and which of its rows are included."""
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gradient)
    if others is None:
        return rows, jnp.array([included])
    rows = jax.tree.map(lambda row, more: jnp.concatenate([row, more.astype(row.dtype)]), rows, others)
    size = len(jax.tree.leaves(rows)[0])
    return rows, (jnp.arange(size) > 0) | included


def run_simulator(attack: Attack, chunk: int) -> Callable[..., Iterator[ObservedRuns]]:
    """Returns a function (key, runs, present, always, noises) that yields `ObservedRuns` in chunks, in total at least
    `runs` runs.

    Each run has its own key. Both worlds use the same compiled program.
    """

    @functools.partial(jax.jit, static_argnums=3)
    def simulate_chunk(run_keys, present, always, noises):
        return jax.vmap(lambda key: observed_run(attack, key, present, always, noises))(run_keys)

    def simulate(key: jax.Array, runs: int, *, present: bool, always: bool, noises: int) -> Iterator[ObservedRuns]:
        for number in range(-(-runs // chunk)):
            run_keys = jax.random.split(keys.public_key(keys.fold_in(key, number)), chunk)
            yield ObservedRuns(
                *map(np.asarray, simulate_chunk(run_keys, jnp.bool_(present), jnp.bool_(always), noises))
            )

    return simulate


class CanaryCounts(NamedTuple):
    """The estimated number of canaries in each release, and how far one canary moves it, float32 (runs, steps,
    features) each. Both are 0 where the canary does not move what is observed."""

    counts: np.ndarray
    moves: np.ndarray


class CanaryMoves(NamedTuple):
    """How far one canary moves the features of a release, according to pilot runs.

    mean: float64 (steps, features). known: bool (steps, features), False where every run uses the mean, because the
        noise changes the move or all runs have the same one. noisy: bool (steps, features), where noise changes it.
    """

    mean: np.ndarray
    known: np.ndarray
    noisy: np.ndarray

    def canary_counts(self, found: ObservedRuns) -> CanaryCounts:
        """Returns the `CanaryCounts` of the runs. If any moves are `known`, found.moves must hold one draw of each."""
        moves = np.where(self.known, found.moves[:, 0], self.mean) if self.known.any() else self.mean
        moves = np.broadcast_to(moves, found.observed.shape)
        counts = np.divide(found.observed, moves, out=np.zeros(moves.shape), where=moves != 0)
        return CanaryCounts(counts, np.abs(moves))


def estimate_canary_moves(pilot: ObservedRuns) -> CanaryMoves:
    """Estimates the moves from pilot runs, which hold the moves under two draws of the adversary's noise."""
    one, other = pilot.moves[:, 0].astype(np.float64), pilot.moves[:, 1]
    size = _SAME_MOVES * _root_mean_square(one)
    noisy = _root_mean_square(one - other) > size
    mean = pilot.moves.mean(axis=(0, 1), dtype=np.float64)
    return CanaryMoves(mean, ~noisy & (_root_mean_square(one - mean) > size), noisy)


def _root_mean_square(values: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(values**2, axis=0))


class PilotStatistic(NamedTuple):
    """The score that pilot runs suggest for `CanaryCounts`.

    center: float64 (steps * features,), the mean count without the canary.
    whitening: float64 (steps * features, steps * features), lower triangular.
    signal: float64 (steps, features), mu_t. rates: float64 (steps,), q_t.
    moves: float64 (steps, features), the mean move. gain: float, the precision of a count grows as move^(2 gain).
    period: int, steps in an epoch; 0 if the steps are independent. groups: int, groups of cyclic sampling, otherwise 1.
    columns: float64 (steps, steps, features), how a canary in one step moves the whitened counts; None without groups.
    """

    center: np.ndarray
    whitening: np.ndarray
    signal: np.ndarray
    moves: np.ndarray
    gain: float
    rates: np.ndarray
    period: int
    groups: int = 1
    columns: np.ndarray | None = None

    def scores(self, found: CanaryCounts) -> np.ndarray:
        """The score of each run, float64 (runs,)."""
        weights = _weights_by_move(found.moves, self.moves, self.gain)
        residuals = ((_flat_counts(found.counts) - self.center) * _flat_counts(weights)) @ self.whitening.T
        if self.columns is not None:
            return self._scores_by_group(residuals.reshape(found.counts.shape), self.columns)
        signal = self.signal * weights
        exponents = (residuals.reshape(signal.shape) * signal - signal**2 / 2).sum(axis=2)
        if self.period:
            missing = -exponents.shape[1] % self.period
            epochs = np.pad(exponents, ((0, 0), (0, missing)))  # no releases in the rest of the last epoch
            grouped = epochs.reshape(len(epochs), -1, self.period)
            return (special.logsumexp(grouped, axis=2) - np.log(self.period)).sum(axis=1)
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-self.rates), np.log(self.rates) + exponents).sum(axis=1)

    def _scores_by_group(self, residuals: np.ndarray, columns: np.ndarray) -> np.ndarray:
        exponents = np.einsum("nsf,tsf->nt", residuals, columns) - np.square(columns).sum(axis=(1, 2)) / 2
        coins = np.minimum(self.rates * self.groups, 1.0)
        with np.errstate(divide="ignore"):
            ratios = np.logaddexp(np.log1p(-coins), np.log(coins) + exponents)
        of_group = np.arange(len(coins)) % self.groups == np.arange(self.groups)[:, None]
        return special.logsumexp(ratios @ of_group.T, axis=1) - np.log(self.groups)


def fit_pilot_statistic(
    without: CanaryCounts, with_: CanaryCounts, rates: np.ndarray, period: int, groups: int = 1
) -> PilotStatistic:
    """Fits the statistic to pilot runs without the canary, and with the canary in every batch.

    rates: float64 (steps,). period, groups: int, as in `PilotStatistic`.
    """
    moves = without.moves.astype(np.float64).mean(axis=0)
    center = _flat_counts(without.counts).mean(axis=0)
    residuals = _flat_counts(without.counts) - center
    gain = _residual_decay_by_move(residuals, _flat_counts(_weights_by_move(without.moves, moves, 1.0)))
    residuals *= _flat_counts(_weights_by_move(without.moves, moves, gain))
    covariance = residuals.T @ residuals / len(residuals)
    scale = np.maximum(np.diag(covariance), 1e-30)
    whitening = np.linalg.inv(np.linalg.cholesky(covariance + _REGULAR * np.diag(scale)))
    own, one = whitening.reshape(*moves.shape, *moves.shape), (moves > 0).astype(np.float64)
    columns = None
    if groups > 1:
        later = np.subtract.outer(np.arange(len(rates)), np.arange(len(rates)))
        columns = np.einsum("sftg,tg->tsf", own, one) * ((later >= 0) & (later < groups)).T[..., None]
        signal = one
    elif not ((rates > 0) & (rates < 1)).any() and (rates < 1).any():  # the canary's steps are known
        signal, rates = np.einsum("sftg,tg,t->sf", own, one, rates), np.ones(len(rates))
    elif (rates < 1).any():  # each batch is guessed separately, and the canary adds 1 only to its own counts
        signal = np.einsum("tftg,tg->tf", own, one)
    else:
        shifts = (_flat_counts(with_.counts) - center) * _flat_counts(_weights_by_move(with_.moves, moves, gain))
        signal = (whitening @ shifts.mean(axis=0)).reshape(moves.shape)
    return PilotStatistic(center, whitening, signal, moves, gain, rates, period, groups, columns)


def _flat_counts(counts: np.ndarray) -> np.ndarray:
    return counts.reshape(len(counts), -1).astype(np.float64)


def _weights_by_move(moves: np.ndarray, mean: np.ndarray, gain: float) -> np.ndarray:
    """The weights of the counts, (move / mean move)^gain; 0 where the canary moves nothing."""
    moved = (moves > 0) & (mean > 0)
    return np.where(moved, np.divide(moves, mean, out=np.ones(moves.shape), where=moved) ** gain, 0.0)


def _residual_decay_by_move(residuals: np.ndarray, relative_moves: np.ndarray) -> float:
    """How fast the residuals shrink as the moves grow: the slope of -ln |residual| against ln move across runs.

    It is 0 if the moves hardly differ between runs, and at most 1, its value if the noise does not depend on the move.
    Each column is centered on its own mean, because scales differ between columns.
    """
    with np.errstate(divide="ignore"):
        sizes, moves = (np.ma.masked_invalid(np.log(np.abs(part))) for part in (residuals, relative_moves))
    moves = moves - moves.mean(axis=0)
    spread = float(np.mean(moves**2))
    if np.ma.count(moves) == 0 or spread < _SAME_MOVES**2:
        return 0.0
    return float(np.clip(-np.mean(moves * (sizes - sizes.mean(axis=0))) / spread, 0.0, 1.0))


@explain_misuse
def lower_bound(
    make: Callable[[jax.Array], Any],
    *,
    steps: int,
    delta: float,
    key: jax.Array,
    runs: int = 100_000,
    params: Tree | None = None,
    canary: Tree | Gradient | None = None,
    instead: Tree | Gradient | None = None,
    others: Tree | None = None,
    sampling_truth: Any = None,
    observe: Callable[..., jax.Array] = observe_canary,
    confidence: float = 0.95,
) -> LowerBound:
    """Computes a lower bound on the epsilon of `steps` releases of a mechanism, alongside its stated epsilon.

    The other arguments are those of `canary_scores`, which scores the runs. `lower_bound_from_scores` bounds epsilon.

    delta: in (0, 1). confidence: in (0, 1).

    `epsilon` is proved, up to its confidence, for every mechanism, because the scores are computed from released
    values only. A bound above `cost` proves that the stated epsilon is wrong, if all randomness of `make` comes from
    its key and the batches are drawn as `sampling_truth` says. A bound below it proves nothing, because another attack
    may be better. `gaussian_epsilon` is not proved. `cost` is `dpx.epsilon` of the mechanism, or None without an event.
    Raises ValueError as `canary_scores` does, if delta or confidence is invalid, and if the sampling's relation does
    not allow `instead`.
    """
    delta = checks.require_delta(delta)
    require_open_fraction("confidence", confidence)
    if not callable(make):
        raise ValueError(f"make must be a function from a key to a mechanism, got {described(make)}")
    try:
        mechanism = make(keys.stream(key, "billed mechanism"))
    except Exception as error:
        error.add_note(f"dpx: make was called with a key, and must give a mechanism; {OTHERWISE}")
        raise
    stated = hasattr(mechanism, "event") and hasattr(mechanism, "sampling")
    if stated and instead is not None and mechanism.sampling.relation != "replace_one":
        raise ValueError(
            f"instead must be None for a cost whose relation is {mechanism.sampling.relation!r}, because that cost "
            "does not cover replacing an example; pass canary_scores to lower_bound_from_scores, without this cost"
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
    cost = cost_of(mechanism, steps, delta=delta) if stated else None
    return lower_bound_from_scores(*scores, delta=delta, confidence=confidence, cost=cost)


@explain_misuse
def canary_scores(
    make: Callable[[jax.Array], Any],
    *,
    steps: int,
    key: jax.Array,
    runs: int = 100_000,
    params: Tree | None = None,
    canary: Tree | Gradient | None = None,
    instead: Tree | Gradient | None = None,
    others: Tree | None = None,
    sampling_truth: Any = None,
    observe: Callable[..., jax.Array] = observe_canary,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores `runs` runs with the canary and as many without it. Returns both, float64 (runs,) each.

    A white-box attack: the adversary sees every release of the mechanism's own `update`, and chooses the canary's
    gradient at every step. The score is the log-likelihood ratio that pilot runs suggest (`PilotStatistic`). It depends
    on released values of its run, on pilot runs, and on the adversary's own keys, but never on the noise of its run.

    make: (key) -> the mechanism of one run, with `init` and `update`, and `sampling` unless `sampling_truth` is given.
        It is called inside jit and vmap, with the key of each run, and with keys of the adversary. All of its
        randomness must come from the key.
    steps: int, at least 1. key: a scalar PRNG key. runs: int, at least 100, in each world.
    params: pytree of a few coordinates, because time grows with them and a worst case needs few; default two.
    canary: its gradient, like `params`, or a function (step, state, params) that returns it. The default is large and
        constant. The state is the public part (`dpx.publishable_state`) of the state before the release.
    instead: the same for the example that replaces it in the other world. None means that nothing does, or if the
        sampling's relation is "replace_one", the opposite gradient.
    others: gradients of other examples, with the rows on axis 0, which take part in every batch of both worlds.
    sampling_truth: how the batches are really drawn, if not by the mechanism's `sampling`: a sampling, or a function
        (key, steps) -> bool (steps,), traced under jit, which says when the canary takes part.
    observe: (updates, state before, state after, canary's gradient) -> float32 (features,), what the attack reads from
        a release; default the inner product of the updates and the canary. It gets the public parts of the states.

    The adversary knows how far one canary moves these features, if that is a function of the public state. If it
    depends on the noise or on other secrets of the key, the mean of pilot runs replaces it. The bound is still valid,
    but the attack is weaker, and a UserWarning says so.

    Raises ValueError for invalid numbers, an unknown sampling, and moves or observations that are not finite.
    """
    steps, runs = require_whole("steps", steps), require_whole("runs", runs, minimum=_LEAST_RUNS)
    keys.require_key(key)
    params = {"w": jnp.zeros(2)} if params is None else params
    require_key_used("make", require_function("make", make, "key"))
    if not hasattr(made := make(keys.stream(key, "billed mechanism")), "init"):
        raise ValueError(
            f"make must be a function from a key to a mechanism, got one to {described(made)}: {OTHERWISE}"
        )
    own_sampling = getattr(made, "sampling", None)
    truth = own_sampling if sampling_truth is None else sampling_truth
    canary, instead = _canary_gradients(canary, instead, params, truth if own_sampling is None else own_sampling)
    attack = Attack(make, params, steps, canary, instead, others, participation_function(truth), observe)
    period, groups = 0, 1
    if isinstance(truth, Sampling) and truth.one_key:  # its key decides the canary's step in an epoch
        period, groups = truth.steps_per_exact_epoch, truth.group_count
    return _scores_of_runs(attack, key, runs, period, groups)


def _scores_of_runs(
    attack: Attack, key: jax.Array, runs: int, period: int, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores with and without the canary, float64 (runs,) each. period, groups: int, as in
    `PilotStatistic`."""
    pilots = min(max(_LEAST_PILOT_RUNS, runs // _PILOT_SHARE), _MOST_PILOT_RUNS)
    simulate = run_simulator(attack, min(pilots, max(1, _MOST_NUMBERS_AT_ONCE // attack.steps)))

    def pilot_runs(world: str, present: bool, noises: int) -> ObservedRuns:
        chunks = simulate(keys.stream(key, world), pilots, present=present, always=present, noises=noises)
        return _require_finite(ObservedRuns(*map(np.concatenate, zip(*chunks, strict=True))))

    without = pilot_runs("pilot without", False, 2)
    moves = estimate_canary_moves(without)
    if moves.noisy.any():
        warn_user(
            f"with another key, the canary moves {moves.noisy.sum()} of {moves.noisy.size} observed numbers by "
            "different amounts. The bound is valid, but the attack may be weak, because it uses the mean amount. If "
            "optax transforms are behind the mechanism, audit it without them, because they do not change epsilon"
        )
    noises = int(moves.known.any())
    with_ = pilot_runs("pilot with", True, noises)
    batch_keys = jax.random.split(keys.public_key(keys.stream(key, "pilot batches")), pilots)
    taken = jax.jit(jax.vmap(lambda key: attack.takes_part(key, attack.steps)))(batch_keys)
    rates = np.asarray(taken, np.float64).mean(axis=0)  # how often the canary takes part at each step
    statistic = fit_pilot_statistic(moves.canary_counts(without), moves.canary_counts(with_), rates, period, groups)

    def scores(world: str, present: bool) -> np.ndarray:
        found = simulate(keys.stream(key, world), runs, present=present, always=False, noises=noises)
        return np.concatenate([statistic.scores(moves.canary_counts(_require_finite(chunk))) for chunk in found])[:runs]

    return scores("runs with", True), scores("runs without", False)


def _canary_gradients(canary: Any, instead: Any, params: Tree, sampling: Any) -> tuple[Any, Any]:
    """Returns the gradients of the canary and of its replacement (or None) as functions."""
    if canary is None:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        canary = jax.tree.map(lambda p: jnp.full(p.shape, _LARGE_NORM / math.sqrt(size), jnp.float32), params)
    if instead is None and getattr(sampling, "relation", None) == "replace_one" and not callable(canary):
        instead = jax.tree.map(jnp.negative, canary)
    other = None if instead is None else _as_gradient_function("instead", instead, params)
    return _as_gradient_function("canary", canary, params), other


def _as_gradient_function(name: str, gradient: Tree | Gradient, params: Tree) -> Gradient:
    """Returns `gradient` as a function. Raises ValueError if it does not match the parameters."""
    if callable(gradient):
        return gradient
    expected, found = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, gradient))
    if jax.tree.structure(gradient) != jax.tree.structure(params) or found != expected:
        raise ValueError(f"{name} must be a gradient like params, of shapes {expected}, or a function of it")
    return lambda step, state, params: gradient


def _require_finite(found: ObservedRuns) -> ObservedRuns:
    """Returns `found`. Raises ValueError if a release is not finite."""
    if not all(np.isfinite(part).all() for part in found):
        raise ValueError("observations of the releases must be finite, got some that are not; is the canary too large?")
    return found

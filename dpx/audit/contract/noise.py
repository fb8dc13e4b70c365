"""The line of the contract about noise: whether it is as large as the cost says, and independent standard normals.

For steps that no run of the check reaches, the counters are set. With larger parameters, one batch of many rows is
released: each row must contribute independently of the others, and the noise must not repeat. Noise that is correlated
over the steps (`Mechanism.correlated`) is C^-1 z in a run. So in the first steps of many runs, C times the released
noise must be independent standard normals, in units of the noise of the first step.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state as trace_state
from scipy import linalg, special

from dpx.audit.contract import inputs
from dpx.audit.contract.draws import (
    AT_LEAST,
    FULLY,
    TOGETHER,
    as_function_of_key,
    require_independent_columns,
    require_no_repeated_noise,
    require_standard_normals,
    whitened_by_sample_covariance,
    whitened_draws,
)
from dpx.audit.contract.subject import AT_STEPS, SMALL, STEPS, NotChecked, Release, Violation, numbers_as_text
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.audit.stand_ins import drawing_normals_by, without_grid
from dpx.mechanism import Mechanism
from dpx.schedules import value_at
from dpx.sums.clipped_sum import sum_contributions
from dpx.values import Tree, unflatten_vectors

FAR = (99, 1_000, 10_006, 50_020)  # steps beyond STEPS, the last ones of some runs that `check_cost` compares
WITH_OTHERS = (1, 50)  # steps at which the parameters have other values, too


def check_noise(trial: MechanismUnderTest) -> str:
    """Checks that in every direction, the noise is at least the stated multiple of what one example moves."""
    trial.require_noise()
    if trial.obvious_noise_fault:
        raise Violation(trial.obvious_noise_fault)
    more_words = [require_distinct_noise(trial)]
    used = [_multiplier_from_derivatives(trial, step) for step in STEPS]
    for step in WITH_OTHERS:
        _multiplier_from_derivatives(trial, step, others=True)
    for step in FAR:
        if _has_noise_at(trial, step):
            _multiplier_from_derivatives(trial, step)
    found, drawn, missing = [value for value in used if value is not None], _check_draws(trial), []
    more_words.append(require_noise_covers_rows(trial))
    if trial.mechanism.correlated is not None:
        more_words.append(require_noise_covariance(trial))
    if len(found) < len(used):
        missing.append("the line `secrecy` alone sees its size, because no derivative passes the update")
    elif not trial.has_stated_sensitivity:
        missing.append("its size is not compared, because the event counts more than a multiplier")
    if not drawn:
        missing.append("its draws are not tested, because no public value is linear in it; their keys differ by step")
    more_words = [words for words in (drawn, *more_words) if words]
    if missing:
        raise NotChecked("; ".join([*missing, *more_words]))
    stated = [trial.multiplier(step) for step in STEPS]
    more = any(value > 1.01 * least for value, least in zip(found, stated, strict=True))
    words = f"multiplier {numbers_as_text(found)} {AT_STEPS}; the cost counts {numbers_as_text(stated)}"
    return "; ".join([words, *["more noise than the cost counts"] * more, *more_words])


def _has_noise_at(trial: MechanismUnderTest, step: int) -> bool:
    """Whether a run may reach this step and has noise there."""
    try:
        trial.event(step + 1)
    except ValueError:
        return False
    return trial.multiplier(step) > 0


def _multiplier_from_derivatives(trial: MechanismUnderTest, step: int, *, others: bool = False) -> float | None:
    """The noise multiplier of the release; None if no derivative tells it. Raises Violation if it is too small."""
    release, stated = trial.release(step, others=others), trial.multiplier(step)
    if release.flat:
        return None
    where = f"step {step}{', with other values of the parameters' * others}"
    if release.uncovered > max(1e-3, release.tolerance):
        raise Violation(f"data moves a public value that no noise moves so, at {where}")
    sizes = [release.change_of_sums_in_noise(sums).max() for sums in trial.contributions_by_path(step).values()]
    used = 1 / max(*map(float, sizes), 1e-30)
    if trial.has_stated_sensitivity and not used >= stated * (1 - release.tolerance):
        raise Violation(f"the noise multiplier is {used:.6g} at {where}, and {stated:.6g} is paid for")
    return used


def _check_draws(trial: MechanismUnderTest) -> str:
    """Tests the draws; "" if there are none to test. A test fails for a sound mechanism with probability RATE."""
    if not trial.noise.has_keys:
        raise Violation("the step holds no PRNG key, so its noise is not secret, or it adds none")
    columns: dict[int, np.ndarray] = {}
    steps = STEPS if trial.noise.noise_maps is None else FULLY  # random coordinates take long
    for step in steps:
        standard = whitened_draws if trial.draws_noise_by_dpx else whitened_by_sample_covariance
        columns[step] = standard(trial.noise, step, trial.release(step))
    directions = max(found.shape[1] for found in columns.values())
    if not directions:
        return ""
    require_standard_normals(np.concatenate([columns[step] for step in FULLY], axis=1))
    together = np.concatenate([found[:AT_LEAST] for found in columns.values()], axis=1)
    require_standard_normals(together)
    require_independent_columns(together)
    require_independent_columns(columns[STEPS[0]][: 2 * AT_LEAST], triples=True)
    _require_noise_ignores_parameters(trial)
    return f"{trial.noise.count} draws of {directions} directions are independent standard normals"


def _require_noise_ignores_parameters(trial: MechanismUnderTest) -> None:
    """Raises Violation if the updates show that other values of the parameters change the noise."""
    step = WITH_OTHERS[0]
    releases = trial.release(step), trial.release(step, others=True)
    if not all(release.is_linear for release in releases):
        return
    own, other = (trial.noise(step, others=others)[:AT_LEAST, : releases[0].updates] for others in (False, True))
    own, other = own - own.mean(0), other - other.mean(0)
    sizes = np.linalg.norm(own, axis=0) * np.linalg.norm(other, axis=0)
    if ((own * other).sum(0) < 0.99 * sizes).any():
        raise Violation("the noise depends on the values of the parameters")


MANY_ROWS = 257
DTYPES = (np.float32, jnp.bfloat16, np.float16)
POSITIONS = (0, 15, 16, 31, 32, 64, 128, 200, 256)
SETS = 1 + len(POSITIONS)  # of rows, whose updates are computed at once
TURNED = 101  # every gradient is tried at a second position, this many rows further
LARGE = {  # shapes and dtypes
    "kernel": ((40, 30), np.float32), "again": ((40, 30), np.float32),
    "deep": [((4, 3, 10, 10), jnp.bfloat16), ((), np.float16)],
}  # fmt: skip
MANY = 1000  # size from which a leaf's deviation is known up to SLACK
SLACK = 0.17  # above 0.13, six standard deviations of the estimate from MANY values
REPEATED = 0.04  # share of a draw that may repeat; among 2,400 float32 normals, about 1 has the size of another
NORMAL_RATE = 1e-6  # false-alarm rate of the test of the distribution


class LargeBatchProbe:
    """The mechanism on a batch of MANY_ROWS gradients.

    Every second gradient is far above any clip norm, and some of them are 0 except in one leaf. silent: the update, or
    the released sums, of an empty batch, float64 (o,). changes: what each row of POSITIONS adds to `silent`, float64
    (positions, o).
    """

    def __init__(self, trial: MechanismUnderTest):
        self.trial = trial
        try:
            self._set_up(jax.tree.map(lambda leaf: np.empty(*leaf), LARGE, is_leaf=lambda one: isinstance(one, tuple)))
        except Exception:  # whatever a mechanism raises for parameters it was not built for
            leaves, structure = jax.tree.flatten(trial.params)
            self._set_up(structure.unflatten([np.empty(p.shape, DTYPES[n % 3]) for n, p in enumerate(leaves)]))

    def _set_up(self, like: Tree) -> None:
        mechanism, params = self.trial.mechanism, inputs.extreme_values_like(like)
        self.params, self.state = params, jax.jit(mechanism.init)(params)
        leaves, structure = jax.tree.flatten(inputs.normal_gradients(params, 31, 5e3, rows=MANY_ROWS))
        for place, leaf in enumerate(leaves):
            leaf[1::2] *= 1e-7
            for number, position in enumerate(POSITIONS[4:]):
                if number % (len(leaves) + 1) not in (place, len(leaves)):
                    leaf[position] = 0
        self.grads = jax.tree.map(lambda g, p: g.astype(p.dtype), structure.unflatten(leaves), params)
        # Two numbers of 16 bits may differ by this where a row adds little to much noise.
        spacings = [np.full(p.size, float(jnp.finfo(p.dtype).eps)) for p in jax.tree.leaves(params)]
        self.rounding = np.concatenate(spacings)

        @without_grid
        def step(grads, state, included):
            if self.trial.release(0).is_linear:
                return mechanism.update(grads, state, params, included=included)[0]
            return self.trial.released_sums(0, sum_contributions(mechanism, grads, state, included)[0])

        of_sets = jax.vmap(step, (None, None, 0))  # which writes every row in its coordinates once
        self.program = jax.jit(of_sets, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
        self.silent, *alone = self.run(self.grads, [], *([position] for position in POSITIONS))
        self.changes = np.stack(alone) - self.silent
        if not self.trial.release(0).is_linear:
            self.rounding = np.float64(1e-6)

    def run(self, grads: Tree, *sets: Sequence[int]) -> np.ndarray:
        """The updates, or the released sums, of up to SETS sets of rows; float64 (sets, o)."""
        included = np.zeros((SETS, MANY_ROWS), bool)
        for number, rows in enumerate(sets):
            included[number, list(rows)] = True
        return inputs.flattened_leaves(self.program(grads, self.state, included), 1)[: len(sets)]


large = functools.lru_cache(maxsize=1)(LargeBatchProbe)  # compiled once for a trial


def require_rows_alone(trial: MechanismUnderTest) -> str:
    """Raises Violation if a row's contribution depends on its position or on other rows. Returns words."""
    found = large(trial)
    rows = range(MANY_ROWS)
    everyone, *others = found.run(found.grads, rows, *([row for row in rows if row != one] for one in POSITIONS))
    turned = jax.tree.map(lambda g: np.roll(g, TURNED, axis=0), found.grads)
    elsewhere = found.run(turned, *([(position + TURNED) % MANY_ROWS] for position in POSITIONS)) - found.silent
    beside, size = everyone - np.stack(others), np.abs(everyone) + np.abs(found.silent)
    for position, change, *found_there in zip(POSITIONS, found.changes, beside, elsewhere, strict=True):
        largest = np.abs(change).max()
        for other, words in zip(found_there, ("beside other rows", "at another position"), strict=True):
            if not (np.abs(other - change) <= 1e-3 * largest + 8 * found.rounding * size).all():
                raise Violation(f"row {position} of {MANY_ROWS} does not add the same alone and {words}")
    return f"{len(POSITIONS)} of {MANY_ROWS} rows add the same alone, beside the others and at other positions"


def require_noise_covers_rows(trial: MechanismUnderTest) -> str:
    """Raises Violation if the noise of larger parameters misses what rows move, or repeats. Words; "" if not tried."""
    release = trial.release(0)
    if not release.is_linear:
        return ""
    found = large(trial)
    if ((np.abs(found.changes).max(0) > 0) & (found.silent == 0)).any():
        raise Violation("data moves an update that has no noise, in larger parameters")
    if not has_independent_noise(release):
        return ""
    _require_noise_scale(trial, found)
    exact = np.abs(found.silent[(found.rounding < 1e-6) & (found.silent != 0)])
    if len(exact) - len(np.unique(exact)) > REPEATED * len(exact) and len(exact) >= MANY:
        raise Violation(f"of {len(exact)} numbers of the noise, only {len(np.unique(exact))} have other sizes")
    return f"{len(exact)} numbers of one draw have other sizes"


def _require_noise_scale(trial: MechanismUnderTest, found: LargeBatchProbe) -> None:
    """Raises Violation if the noise is smaller than stated, or not normal, on the leaves of at least MANY numbers."""
    noise, changes = (unflatten_vectors(part, found.params) for part in (found.silent, found.changes))
    sizes, standard = np.zeros(len(POSITIONS)), []
    for drawn, moved in zip(*map(jax.tree.leaves, (noise, changes)), strict=True):
        if drawn.size >= MANY and np.count_nonzero(drawn) == drawn.size:
            deviation = np.sqrt(np.mean(drawn**2))
            sizes += (moved.reshape(len(moved), -1) ** 2).sum(1) / deviation**2
            standard.append(drawn.ravel() / deviation)
    used = 1 / max(float(np.sqrt(sizes.max())), 1e-30)
    if trial.costed_by_multiplier and not used >= trial.multiplier(0) * (1 - SLACK):
        raise Violation(
            f"the noise multiplier is {used:.3g} in larger parameters; {trial.multiplier(0):.6g} is paid for"
        )
    if standard:
        ordered = np.sort(np.concatenate(standard))
        distance = np.abs(special.ndtr(ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
        if distance > np.sqrt(np.log(2 / NORMAL_RATE) / (2 * len(ordered))) + 0.5 / len(ordered):
            raise Violation(f"the noise of larger parameters is not normal: its distribution is {distance:.2g} away")


IN_A_ROW = 1030  # steps from 0 on, for periods up to about 1,000
BLOCK = 30  # steps from each of STARTS on: counters of 8, 16 and 24 bits, and numbers of steps that a float rounds
STARTS = (2_000, 4_096, 10_000, 2**16, 10**5, 10**6, 2**24, 2**31 - 40)
NUMBERS = np.concatenate([np.arange(IN_A_ROW), *[np.arange(BLOCK) + start for start in STARTS]]).astype(np.int32)
LAST = 50  # the step from whose state the counters are set


def require_distinct_noise(trial: MechanismUnderTest) -> str:
    """Raises Violation if two of the steps in NUMBERS have the same noise. Words; "" if this cannot be seen."""
    seen = []
    if trial.draws_noise_by_dpx and _require_distinct_keys(trial):
        seen.append("keys")
    release = trial.release(LAST)
    if release.is_linear and has_independent_noise(release):
        _require_noise_never_repeats(trial, release)
        seen.append("noise")
    return f"other {' and '.join(seen)} at {len(NUMBERS)} steps up to 2^31" if seen else ""


def has_independent_noise(release: Release) -> bool:
    """Whether every update has its own noise: the covariance of the noise is diagonal."""
    noise = release.noise[: release.updates]
    covariance = noise @ noise.T
    sizes = np.sqrt(np.diag(covariance))
    others = np.abs(covariance - np.diag(sizes**2))
    return bool((others <= max(release.tolerance, 1e-4) * np.outer(sizes, sizes)).all()) and bool((sizes > 0).any())


def _require_noise_never_repeats(trial: MechanismUnderTest, release: Release) -> None:
    """Raises Violation if the noise repeats: from step to step, or from draw to draw under other keys."""
    draws, state = trial.noise, trial.state_after(LAST)
    words = np.repeat(draws.words[:1], len(NUMBERS), axis=0)
    found = draws.public_floats_of_empty_steps(words, state, NUMBERS)[:, : release.updates]
    found = found - release.offset[: release.updates]
    # A CPU's denormal numbers are 0. A GPU's have few bits, and repeat by chance, where a schedule ends near 0.
    found[np.abs(found) < np.finfo(np.float32).tiny] = 0
    schedule = trial.mechanism.noise_multiplier
    multipliers = np.ones(len(found))
    if callable(schedule):
        multipliers = jax.jit(jax.vmap(lambda step: value_at(schedule, step)))(NUMBERS)
    with np.errstate(divide="ignore", invalid="ignore"):
        standard = found / np.asarray(multipliers, np.float64)[:, None]
        ratios = found[:, :-1] / found[:, 1:]
    for noise in (standard, ratios):
        require_no_repeated_noise(noise, f"two of {len(NUMBERS)} steps up to 2^31 share noise")
    by_key = trial.noise(STEPS[0])[:, : release.updates] - trial.release(STEPS[0]).offset[: release.updates]
    require_no_repeated_noise(by_key, f"two of {trial.noise.count} keys share noise")


def _require_distinct_keys(trial: MechanismUnderTest) -> bool:
    """Whether all keys that draw normals are readable. Raises Violation if two draws share key and step."""
    zeros, state, elsewhere = inputs.zeros_like(trial.shapes_of_sums), trial.state_after(LAST), []

    def noise_at_step(step):
        drawn, here = [], trace_state(convention="flax")

        def record(key, step, tree):
            inside = trace_state(convention="flax") != here  # of a loop, or where only shapes are asked for
            words = jnp.append(jax.random.key_data(key), jnp.asarray(step).astype(jnp.uint32))
            (elsewhere if inside else drawn).append(words)
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)

        with drawing_normals_by(record):
            trial.mechanism.release(zeros, trial.state_at_step(state, step), trial.params)
        return drawn

    drawn = jax.jit(jax.vmap(noise_at_step))(NUMBERS)
    for words in map(np.asarray, drawn):
        if len(np.unique(words, axis=0)) < len(words):
            raise Violation(f"two of {len(NUMBERS)} steps up to 2^31 draw their noise from the same key and step")
    for one, other in itertools.combinations(map(np.asarray, drawn), 2):
        if (one == other).all(axis=-1).any():
            raise Violation("a release draws twice from one key and step, such as for its noise and for random signs")
    return not elsewhere


STEPS_OF_RUN, RUNS, DIRECTIONS = 9, 2000, 8


def require_noise_covariance(trial: MechanismUnderTest) -> str:
    """Checks that a run's first steps have noise of covariance C^-1 C^-T; "" if its draws cannot be whitened."""
    release = trial.release(0)
    if not release.is_linear or trial.noise.noise_maps is not None:
        return ""
    left, sizes, _ = np.linalg.svd(release.noise[: release.updates], full_matrices=False)
    large = np.flatnonzero(sizes > SMALL * sizes[0])[:DIRECTIONS]
    moved = _updates_of_runs(trial)[..., : release.updates] - release.offset[: release.updates]
    found = moved @ (left[:, large] / sizes[large])
    columns = trial.mechanism.correlated.column(STEPS_OF_RUN)
    fresh = np.einsum("ts,nsr->ntr", linalg.toeplitz(columns, np.zeros(STEPS_OF_RUN)), found)
    try:
        require_standard_normals(fresh.reshape(len(fresh), -1))
        # All directions together see smaller correlations.
        require_standard_normals(np.moveaxis(fresh, 1, 2).reshape(-1, STEPS_OF_RUN))
    except Violation as error:
        raise Violation(
            f"the noise of {STEPS_OF_RUN} steps is not C^-1 z for the stated C: of C times it, {error}"
        ) from None
    return f"{RUNS} runs of {STEPS_OF_RUN} steps have the covariance C^-1 C^-T of the stated C"


def _updates_of_runs(trial: MechanismUnderTest) -> np.ndarray:
    """The updates of the first steps of runs of empty batches, under other keys, float64 (runs, steps, o)."""
    grads = inputs.normal_gradients(trial.params, 0, rows=1)

    def run(mechanism: Mechanism, state: Tree, params: Tree) -> jax.Array:
        def step(state: Tree, _: None) -> tuple[Tree, jax.Array]:
            updates, state = mechanism.update(grads, state, params, included=jnp.zeros(1, bool))
            return state, inputs.wide_floats(updates)

        return jax.lax.scan(step, state, length=STEPS_OF_RUN)[1]

    arguments = trial.state_after(0), trial.params
    replay, _ = as_function_of_key(without_grid(run), trial.mechanism, trial.rebuild, arguments)
    program = jax.jit(jax.vmap(lambda words: replay(jax.random.wrap_key_data(words), arguments)))
    words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(trial.seed + 2), RUNS)))
    return np.concatenate([np.asarray(program(part), np.float64) for part in np.split(words, RUNS // TOGETHER)])

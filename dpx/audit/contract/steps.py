"""The noise at many numbers of steps, which no run of the check reaches step by step: the counters are set to them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.release import Release
from dpx.audit.contract.report import Broken
from dpx.audit.contract.standard import require_no_repeats
from dpx.audit.contract.subject import STEPS
from dpx.audit.contract.trial import Trial
from dpx.audit.stand_ins import drawing
from dpx.scalars import at

IN_A_ROW = 1030  # steps from 0 on, for periods up to about 1,000
BLOCK = 30  # steps from each of STARTS on: counters of 8, 16 and 24 bits, and numbers of steps that a float rounds
STARTS = (2_000, 4_096, 10_000, 2**16, 10**5, 10**6, 2**24, 2**31 - 40)
NUMBERS = np.concatenate([np.arange(IN_A_ROW), *[np.arange(BLOCK) + start for start in STARTS]]).astype(np.int32)
LAST = 50  # the step whose state has its counters set


def require_other_noise(trial: Trial) -> str:
    """Raises Broken if two of NUMBERS have the same noise. Words; "" if this cannot be seen."""
    seen = []
    if trial.draws_by_dpx and _require_other_keys(trial):
        seen.append("keys")
    release = trial.release(LAST)
    if release.linear and alone(release):
        _require_no_repeats(trial, release)
        seen.append("noise")
    return f"other {' and '.join(seen)} at {len(NUMBERS)} steps up to 2^31" if seen else ""


def alone(release: Release) -> bool:
    """Whether every update has noise of its own: the covariance of the noise has a diagonal alone."""
    noise = release.noise[: release.updates]
    covariance = noise @ noise.T
    sizes = np.sqrt(np.diag(covariance))
    others = np.abs(covariance - np.diag(sizes**2))
    return bool((others <= max(release.tolerance, 1e-4) * np.outer(sizes, sizes)).all()) and bool((sizes > 0).any())


def _require_no_repeats(trial: Trial, release: Release) -> None:
    """Raises Broken if the noise repeats: from step to step, or from draw to draw under other keys."""
    draws, state = trial.noise, trial.state(LAST)
    found = draws.of(np.repeat(draws.words[:1], len(NUMBERS), axis=0), state, NUMBERS)[:, : release.updates]
    found = found - release.offset[: release.updates]
    schedule = trial.mechanism.noise_multiplier
    multipliers = np.ones(len(found))
    if callable(schedule):
        multipliers = jax.jit(jax.vmap(lambda step: at(schedule, step)))(NUMBERS)
    with np.errstate(divide="ignore", invalid="ignore"):
        standard = found / np.asarray(multipliers, np.float64)[:, None]
        ratios = found[:, :-1] / found[:, 1:]
    for noise in (standard, ratios):
        require_no_repeats(noise, f"two of {len(NUMBERS)} steps up to 2^31 share noise")
    by_key = trial.noise(STEPS[0])[:, : release.updates] - trial.release(STEPS[0]).offset[: release.updates]
    require_no_repeats(by_key, f"two of {trial.noise.count} keys share noise")


def _require_other_keys(trial: Trial) -> bool:
    """Whether each step's keys of `keys.normal_like` can be read. Raises Broken if two draws share a key and a step."""
    zeros, state = inputs.zeros_like(trial.sums_like), trial.state(LAST)

    def drawn_at(step):
        drawn = []

        def record(key, step, tree):
            drawn.append(jnp.append(jax.random.key_data(key), jnp.asarray(step).astype(jnp.uint32)))
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), tree)

        with drawing(record):
            trial.mechanism.release(zeros, trial.at_step(state, step), trial.params)
        return drawn

    try:
        drawn = jax.jit(jax.vmap(drawn_at))(NUMBERS)
    except jax.errors.UnexpectedTracerError:  # drawn inside of a loop or a conditional
        return False
    for words in map(np.asarray, drawn):
        if len(np.unique(words, axis=0)) < len(words):
            raise Broken(f"two of {len(NUMBERS)} steps up to 2^31 draw their noise from the same key and the same step")
    for one, other in itertools.combinations(map(np.asarray, drawn), 2):
        if (one == other).all(axis=-1).any():
            raise Broken("a release draws twice from one key and one step, such as for its noise and for random signs")
    return True

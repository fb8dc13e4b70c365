"""The line of the contract about noise: its size against the bill, and that it is independent standard normals."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpx.audit import contract_inputs as inputs
from dpx.audit.contract_draws import chi_square_over_freedom, whitened, whitened_by_itself
from dpx.audit.contract_release import substituted
from dpx.audit.contract_report import Broken, NotChecked
from dpx.audit.contract_subject import STEPS
from dpx.audit.contract_trial import Trial

RATE = 1e-5  # of false alarms, of each of the tests of draws


def noise(trial: Trial) -> str:
    """The noise is at least the billed multiple of what one example moves, wherever that is, in every direction."""
    trial.require_noise()
    used = [_used(trial, step) for step in STEPS]
    found, drawn, missing = [value for value in used if value is not None], _draws(trial), []
    if len(found) < len(used):
        missing.append("`secrecy` alone sees its size, because no derivative passes the update")
    elif not trial.billed_by_multiplier:
        missing.append("its size is not compared, because the event bills more than a multiplier")
    if not drawn:
        missing.append("its draws are not tested, because no public value is linear in it; their keys differ by step")
    if missing:
        raise NotChecked("; ".join([*missing, drawn] if drawn else missing))
    billed = [trial.multiplier(step) for step in STEPS]
    more = any(value > 1.01 * least for value, least in zip(found, billed, strict=True))
    words = f"multiplier {_listed(found)} at steps {_listed(STEPS)}; billed {_listed(billed)}"
    return f"{words}{'; more noise than is billed' if more else ''}; {drawn}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _used(trial: Trial, step: int) -> float | None:
    """The noise multiplier of the release; None if no derivative can tell. Raises Broken if it is below the bill."""
    release, billed = trial.release(step), trial.multiplier(step)
    if release.flat:
        return None
    if release.uncovered > max(1e-3, release.tolerance):
        raise Broken(f"data moves a public value that no noise moves so, at step {step}")
    largest = max(float(release.size(sums).max()) for sums in trial.contributions(step).values())
    used = 1 / max(largest, 1e-30)
    if trial.billed_by_multiplier and not used >= billed * (1 - release.tolerance):
        raise Broken(f"the noise multiplier is {used:.6g} at step {step}, and {billed:.6g} is billed")
    return used


def _draws(trial: Trial) -> str:
    """Tests of the draws; "" if there is nothing to test. Each fails for a sound mechanism with probability RATE."""
    if not trial.noise.has_keys:
        raise Broken("the step holds no PRNG key, so that its noise is no secret, or there is none")
    columns, directions = [], 0
    for step in STEPS:
        release = trial.release(step)
        if trial.draws_by_dpx:
            columns.append(whitened(trial.traced, trial.noise, step, release))
        else:
            columns.append(whitened_by_itself(trial.traced, trial.noise, step, release))
        directions = max(directions, columns[-1].shape[1])
    if not directions:
        _require_other_keys(trial)
        return ""
    require_standard(np.concatenate(columns, axis=1))
    return f"{trial.noise.count} draws of {directions} directions are independent standard normals"


def _require_other_keys(trial: Trial) -> None:
    """Raises Broken if two draws of these steps have the same key and the same number of a step."""
    drawn = []

    def record(key, step, tree):
        drawn.append((*jax.random.key_data(key).tolist(), int(step)))
        return jax.tree.map(jnp.zeros_like, tree)

    zeros = inputs.zeros_like(trial.sums_like)
    with substituted(record), jax.disable_jit():
        for step in STEPS:
            trial.mechanism.release(zeros, trial.state(step), trial.params)
    if len(set(drawn)) < len(drawn):
        raise Broken(f"the noise of the steps {_listed(STEPS)} comes from the same key and the same step")


def require_standard(draws: np.ndarray):
    """Raises Broken unless the columns of `draws`, float64 (count, columns), are independent standard normals."""
    if not np.isfinite(draws).all():
        raise Broken("a draw of the noise is not finite")
    count, columns = draws.shape
    means = np.abs(draws.mean(0)) * math.sqrt(count)
    if means.max() > -special.ndtri(RATE / (2 * columns)):
        raise Broken(f"the mean of the noise is {means.max() / math.sqrt(count):.3g} standard deviations away from 0")
    low, high = (chi_square_over_freedom(p, count - 1) for p in (RATE / (2 * columns), 1 - RATE / (2 * columns)))
    variances = draws.var(0, ddof=1)
    if variances.min() < low or variances.max() > high:
        worst = math.sqrt(variances.min() if variances.min() < low else variances.max())
        raise Broken(f"the noise is drawn at {worst:.4g} times its stated size in some direction")
    if columns > 1:
        correlations = np.corrcoef(draws, rowvar=False) - np.eye(columns)
        most = np.abs(np.arctanh(np.clip(correlations, -1 + 1e-12, 1 - 1e-12))).max() * math.sqrt(count - 3)
        if most > -special.ndtri(RATE / (columns * (columns - 1))):
            raise Broken(f"noise of two coordinates or steps has the correlation {np.abs(correlations).max():.3g}")
    ordered = np.sort(draws.ravel())
    distance = np.abs(special.ndtr(ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    if distance > math.sqrt(math.log(2 / RATE) / (2 * len(ordered))) + 0.5 / len(ordered):
        raise Broken(f"the noise is not normal: its distribution function is {distance:.2g} away")
    largest, expected = np.abs(ordered[[0, -1]]).max(), special.ndtri((1 + RATE ** (1 / len(ordered))) / 2)
    if largest < expected:
        raise Broken(f"the tail of the noise is cut: of {len(ordered)} draws, the largest is {largest:.3g}")

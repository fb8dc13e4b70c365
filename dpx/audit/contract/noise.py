"""The line of the contract about noise: its size against the bill, and that it is independent standard normals."""

import numpy as np

from dpx.audit.contract.correlation import require_covariance
from dpx.audit.contract.draws import AT_LEAST, FULLY, whitened, whitened_by_itself
from dpx.audit.contract.large import require_enough_noise
from dpx.audit.contract.report import Broken, NotChecked, listed
from dpx.audit.contract.standard import require_no_pattern, require_standard
from dpx.audit.contract.steps import require_other_noise
from dpx.audit.contract.subject import AT_STEPS, STEPS
from dpx.audit.contract.trial import Trial

FAR = (99, 1_000, 10_006, 50_020)  # steps beyond STEPS, the last ones of some runs that `cost` compares
WITH_OTHERS = (1, 50)  # steps at which the parameters have other values, too


def noise(trial: Trial) -> str:
    """The noise is at least the billed multiple of what one example moves, wherever that is, in every direction."""
    trial.require_noise()
    if trial.seen_soon:
        raise Broken(trial.seen_soon)
    more_words = [require_other_noise(trial)]
    used = [_used(trial, step) for step in STEPS]
    for step in WITH_OTHERS:
        _used(trial, step, others=True)
    for step in FAR:
        if _is_billed(trial, step):
            _used(trial, step)
    found, drawn, missing = [value for value in used if value is not None], _draws(trial), []
    more_words.append(require_enough_noise(trial))
    if trial.mechanism.correlated is not None:
        more_words.append(require_covariance(trial))
    if len(found) < len(used):
        missing.append("`secrecy` alone sees its size, because no derivative passes the update")
    elif not trial.moves_by_multiplier:
        missing.append("its size is not compared, because the event bills more than a multiplier")
    if not drawn:
        missing.append("its draws are not tested, because no public value is linear in it; their keys differ by step")
    more_words = [words for words in (drawn, *more_words) if words]
    if missing:
        raise NotChecked("; ".join([*missing, *more_words]))
    billed = [trial.multiplier(step) for step in STEPS]
    more = any(value > 1.01 * least for value, least in zip(found, billed, strict=True))
    words = f"multiplier {listed(found)} {AT_STEPS}; billed {listed(billed)}"
    return "; ".join([words, *["more noise than is billed"] * more, *more_words])


def _is_billed(trial: Trial, step: int) -> bool:
    """Whether a run may be that long, and has noise there."""
    try:
        trial.event(step + 1)
    except ValueError:
        return False
    return trial.multiplier(step) > 0


def _used(trial: Trial, step: int, *, others: bool = False) -> float | None:
    """The noise multiplier of the release; None if no derivative can tell. Raises Broken if it is below the bill."""
    release, billed = trial.release(step, others=others), trial.multiplier(step)
    if release.flat:
        return None
    where = f"step {step}{', with other values of the parameters' * others}"
    if release.uncovered > max(1e-3, release.tolerance):
        raise Broken(f"data moves a public value that no noise moves so, at {where}")
    largest = max(float(release.size(sums).max()) for sums in trial.contributions(step).values())
    used = 1 / max(largest, 1e-30)
    if trial.moves_by_multiplier and not used >= billed * (1 - release.tolerance):
        raise Broken(f"the noise multiplier is {used:.6g} at {where}, and {billed:.6g} is billed")
    return used


def _draws(trial: Trial) -> str:
    """Tests of the draws; "" if there is nothing to test. Each fails for a sound mechanism with probability RATE."""
    if not trial.noise.has_keys:
        raise Broken("the step holds no PRNG key, so its noise is not secret, or it adds none")
    columns: dict[int, np.ndarray] = {}
    steps = STEPS if trial.noise.noise_maps is None else FULLY  # random coordinates take long
    for step in steps:
        standard = whitened if trial.draws_by_dpx else whitened_by_itself
        columns[step] = standard(trial.noise, step, trial.release(step))
    directions = max(found.shape[1] for found in columns.values())
    if not directions:
        return ""
    require_standard(np.concatenate([columns[step] for step in FULLY], axis=1))
    together = np.concatenate([found[:AT_LEAST] for found in columns.values()], axis=1)
    require_standard(together)
    require_no_pattern(together)
    require_no_pattern(columns[STEPS[0]][: 2 * AT_LEAST], triples=True)
    _require_the_same_for_others(trial)
    return f"{trial.noise.count} draws of {directions} directions are independent standard normals"


def _require_the_same_for_others(trial: Trial) -> None:
    """Raises Broken if parameters of other values have other noise, where that shows in the updates."""
    step = WITH_OTHERS[0]
    releases = trial.release(step), trial.release(step, others=True)
    if not all(release.linear for release in releases):
        return
    own, other = (trial.noise(step, others=others)[:AT_LEAST, : releases[0].updates] for others in (False, True))
    own, other = own - own.mean(0), other - other.mean(0)
    sizes = np.linalg.norm(own, axis=0) * np.linalg.norm(other, axis=0)
    if ((own * other).sum(0) < 0.99 * sizes).any():
        raise Broken("the noise depends on the values of the parameters")

"""The parts of the lines "noise" and "cost" about noise that is correlated over the steps (`Mechanism.correlated`).

The noise of a run is C^-1 z. So in the first steps of many runs, C times the released noise must be independent
standard normals, in units of the noise of the first step. And one example moves C G, where G has the sums of the steps,
by as much as some pattern of the steps that the sampling allows, with some signs of its gradients: no less may be
billed.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg

from dpx.accounting.releases import count_releases
from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.draws import TOGETHER
from dpx.audit.contract.keys import with_other_keys
from dpx.audit.contract.release import SMALL
from dpx.audit.contract.report import Broken
from dpx.audit.contract.standard import require_standard
from dpx.audit.contract.trial import Trial
from dpx.audit.stand_ins import without_grid
from dpx.sampling.cyclic import CyclicPoissonSampling
from dpx.sampling.schemes import FixedOrder, FullBatch, ShuffledEpochs

STEPS_OF_RUN, RUNS, DIRECTIONS = 9, 2000, 8
SHORT, MOST_PATTERNS = 10, 4096  # steps of a run of which all patterns are tried, and how many at most
SLACK = 1e-3  # of bills, which have roundings


def require_covariance(trial: Trial) -> str:
    """The noise of the first steps of a run has the covariance C^-1 C^-T; "" if its draws cannot be whitened."""
    release = trial.release(0)
    if not release.linear or trial.noise.noise_maps is not None:
        return ""
    left, sizes, _ = np.linalg.svd(release.noise[: release.updates], full_matrices=False)
    large = np.flatnonzero(sizes > SMALL * sizes[0])[:DIRECTIONS]
    found = (_runs(trial)[..., : release.updates] - release.offset[: release.updates]) @ (left[:, large] / sizes[large])
    columns = trial.mechanism.correlated.column(STEPS_OF_RUN)
    fresh = np.einsum("ts,nsr->ntr", linalg.toeplitz(columns, np.zeros(STEPS_OF_RUN)), found)
    try:
        require_standard(fresh.reshape(len(fresh), -1))
        require_standard(
            np.moveaxis(fresh, 1, 2).reshape(-1, STEPS_OF_RUN)
        )  # all directions together see smaller correlations
    except Broken as error:
        raise Broken(
            f"the noise of {STEPS_OF_RUN} steps is not C^-1 z for the stated C: of C times it, {error}"
        ) from None
    return f"{RUNS} runs of {STEPS_OF_RUN} steps have the covariance C^-1 C^-T of the stated C"


def _runs(trial: Trial) -> np.ndarray:
    """The updates of the first steps of runs of empty batches, under other keys, float64 (runs, steps, o)."""
    grads = inputs.gradients(trial.params, 0, rows=1)

    def run(mechanism: Any, state: Any, params: Any) -> jax.Array:
        def step(state: Any, _: None) -> tuple[Any, jax.Array]:
            updates, state = mechanism.update(grads, state, params, included=jnp.zeros(1, bool))
            return state, inputs.public_floats(updates)

        return jax.lax.scan(step, state, length=STEPS_OF_RUN)[1]

    arguments = trial.state(0), trial.params
    replay, _ = with_other_keys(without_grid(run), trial.mechanism, trial.rebuild, arguments)
    program = jax.jit(jax.vmap(lambda words: replay(jax.random.wrap_key_data(words), arguments)))
    words = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(trial.seed + 2), RUNS)))
    return np.concatenate([np.asarray(program(part), np.float64) for part in np.split(words, RUNS // TOGETHER)])


def require_sensitivity(trial: Trial) -> str:
    """The event of a short run bills at least what the worst pattern of steps moves."""
    mechanism, shown = trial.mechanism, 0.0
    tried = 0
    for steps in range(1, SHORT + 1):
        largest = 0.0
        matrix = np.asarray(linalg.toeplitz(mechanism.correlated.column(steps), np.zeros(steps)))
        for pattern in itertools.islice(patterns(mechanism.sampling, steps), MOST_PATTERNS):
            signs = np.array([(1, *rest) for rest in itertools.product((1, -1), repeat=len(pattern) - 1)])
            largest = max(largest, float(np.linalg.norm(signs @ matrix.T[list(pattern)], axis=1).max()))
            tried += len(signs)
        billed = count_releases(trial.event(steps)).losses("zero_out")
        moved = trial.multiplier(0) / min(loss.noise_multiplier for loss in billed)
        if not moved >= largest * (1 - SLACK):
            words = f"an example moves C G by {largest:.6g} clip norms in {steps} steps"
            raise Broken(f"{words}, and {moved:.6g} are billed")
        turns = math.ceil(steps / getattr(mechanism.sampling, "bands", steps))
        if sum(billed.values()) < turns:
            raise Broken(f"{steps} steps are billed as {sum(billed.values())} turns, and are {turns}")
        shown = max(shown, largest / moved)
    return f"{tried} patterns and signs of up to {SHORT} steps move C G by at most {shown:.4g} of what is billed"


def patterns(sampling: Any, steps: int) -> Iterator[tuple[int, ...]]:
    """The sets of steps in which one example may take part; for cyclic sampling, those of one coin."""
    if isinstance(sampling, CyclicPoissonSampling):
        yield from ((step,) for step in range(steps))
    elif isinstance(sampling, FixedOrder):
        apart = sampling.steps_per_epoch
        yield from (tuple(range(first, steps, apart)) for first in range(min(apart, steps)))
    elif isinstance(sampling, ShuffledEpochs):
        apart = sampling.steps_per_epoch
        epochs = (range(start, min(start + apart, steps)) for start in range(0, steps, apart))
        yield from itertools.product(*epochs)
    elif isinstance(sampling, FullBatch):
        yield tuple(range(steps))

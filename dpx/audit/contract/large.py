"""One batch of many rows on larger parameters: each row counts alone, and no number of the noise is there twice."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.report import Broken
from dpx.audit.contract.steps import alone
from dpx.audit.contract.trial import Trial
from dpx.audit.stand_ins import without_grid
from dpx.contributions import sum_contributions
from dpx.trees import Tree, split

ROWS = 257
DTYPES = (np.float32, jnp.bfloat16, np.float16)
POSITIONS = (0, 15, 16, 31, 32, 64, 128, 200, 256)
SETS = 1 + len(POSITIONS)  # of rows, whose updates are computed at once
TURNED = 101  # every gradient is tried at a second position, so many rows further
LARGE = {  # shapes and dtypes
    "kernel": ((40, 30), np.float32), "again": ((40, 30), np.float32),
    "deep": [((4, 3, 10, 10), jnp.bfloat16), ((), np.float16)],
}  # fmt: skip
MANY = 1000  # numbers of a leaf, of which the deviation is known up to SLACK
SLACK = 0.17  # six standard deviations of an estimate from MANY numbers have 0.13
REPEATED = 0.04  # of the numbers of a draw; of 2,400 float32 normals, about 1 has the size of another one
RATE = 1e-6  # of false alarms, of the test of the distribution


class Large:
    """The mechanism on a batch of ROWS gradients.

    Every second gradient is far above any clip norm, and some of them are 0 except for one leaf.
    silent: the update, or the released sums, of an empty batch, float64 (o,). changes: what each of POSITIONS adds to
    it, float64 (positions, o).
    """

    def __init__(self, trial: Trial):
        self.trial = trial
        try:
            self._take(jax.tree.map(lambda leaf: np.empty(*leaf), LARGE, is_leaf=lambda node: isinstance(node, tuple)))
        except Exception:  # what a mechanism raises for parameters that it was not made for
            leaves, structure = jax.tree.flatten(trial.params)
            self._take(structure.unflatten([np.empty(p.shape, DTYPES[n % 3]) for n, p in enumerate(leaves)]))

    def _take(self, like: Tree) -> None:
        mechanism, params = self.trial.mechanism, inputs.other_values(like)
        self.params, self.state = params, jax.jit(mechanism.init)(params)
        leaves, structure = jax.tree.flatten(inputs.gradients(params, 31, 5e3, rows=ROWS))
        for place, leaf in enumerate(leaves):
            leaf[1::2] *= 1e-7
            for number, position in enumerate(POSITIONS[4:]):
                if number % (len(leaves) + 1) not in (place, len(leaves)):
                    leaf[position] = 0
        self.grads = jax.tree.map(lambda g, p: g.astype(p.dtype), structure.unflatten(leaves), params)
        # What two of 16 bits may differ by where a row adds little to much noise.
        spacings = [np.full(p.size, float(jnp.finfo(p.dtype).eps)) for p in jax.tree.leaves(params)]
        self.rounding = np.concatenate(spacings)

        @without_grid
        def step(grads, state, included):
            if self.trial.release(0).linear:
                return mechanism.update(grads, state, params, included=included)[0]
            return self.trial.released(0, sum_contributions(mechanism, grads, state, included)[0])

        of_sets = jax.vmap(step, (None, None, 0))  # which writes every row in its coordinates once
        self.program = jax.jit(of_sets, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
        self.silent, *alone = self.run(self.grads, [], *([position] for position in POSITIONS))
        self.changes = np.stack(alone) - self.silent
        if not self.trial.release(0).linear:
            self.rounding = np.float64(1e-6)

    def run(self, grads: Tree, *sets: Sequence[int]) -> np.ndarray:
        """The updates, or the released sums, of up to SETS sets of rows; float64 (sets, o)."""
        included = np.zeros((SETS, ROWS), bool)
        for number, rows in enumerate(sets):
            included[number, list(rows)] = True
        return inputs.flattened(self.program(grads, self.state, included), 1)[: len(sets)]


large = functools.lru_cache(maxsize=1)(Large)  # of a trial, compiled once


def require_rows_alone(trial: Trial) -> str:
    """Raises Broken if what a row adds depends on its position, or on the other rows; words."""
    found = large(trial)
    rows = range(ROWS)
    everyone, *others = found.run(found.grads, rows, *([row for row in rows if row != one] for one in POSITIONS))
    turned = jax.tree.map(lambda g: np.roll(g, TURNED, axis=0), found.grads)
    elsewhere = found.run(turned, *([(position + TURNED) % ROWS] for position in POSITIONS)) - found.silent
    beside, size = everyone - np.stack(others), np.abs(everyone) + np.abs(found.silent)
    for position, change, *found_there in zip(POSITIONS, found.changes, beside, elsewhere, strict=True):
        largest = np.abs(change).max()
        for other, words in zip(found_there, ("beside other rows", "at another position"), strict=True):
            if not (np.abs(other - change) <= 1e-3 * largest + 8 * found.rounding * size).all():
                raise Broken(f"row {position} of {ROWS} does not add the same alone and {words}")
    return f"{len(POSITIONS)} of {ROWS} rows add the same alone, beside the others and at other positions"


def require_enough_noise(trial: Trial) -> str:
    """Raises Broken if the noise of larger parameters does not cover the rows, or repeats; words, "" if not tried."""
    release = trial.release(0)
    if not release.linear:
        return ""
    found = large(trial)
    if ((np.abs(found.changes).max(0) > 0) & (found.silent == 0)).any():
        raise Broken("data moves an update that has no noise, in larger parameters")
    if not alone(release):
        return ""
    _require_size(trial, found)
    exact = np.abs(found.silent[(found.rounding < 1e-6) & (found.silent != 0)])
    if len(exact) - len(np.unique(exact)) > REPEATED * len(exact) and len(exact) >= MANY:
        raise Broken(f"of {len(exact)} numbers of the noise, only {len(np.unique(exact))} have other sizes")
    return f"{len(exact)} numbers of one draw have other sizes"


def _require_size(trial: Trial, found: Large) -> None:
    """Raises Broken if the noise is smaller than billed, or not normal, on the leaves of at least MANY numbers."""
    noise, changes = (split(part, found.params) for part in (found.silent, found.changes))
    sizes, standard = np.zeros(len(POSITIONS)), []
    for drawn, moved in zip(*map(jax.tree.leaves, (noise, changes)), strict=True):
        if drawn.size >= MANY and np.count_nonzero(drawn) == drawn.size:
            deviation = np.sqrt(np.mean(drawn**2))
            sizes += (moved.reshape(len(moved), -1) ** 2).sum(1) / deviation**2
            standard.append(drawn.ravel() / deviation)
    used = 1 / max(float(np.sqrt(sizes.max())), 1e-30)
    if trial.billed_by_multiplier and not used >= trial.multiplier(0) * (1 - SLACK):
        raise Broken(f"the noise multiplier is {used:.3g} in larger parameters; {trial.multiplier(0):.6g} is billed")
    if standard:
        ordered = np.sort(np.concatenate(standard))
        distance = np.abs(special.ndtr(ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
        if distance > np.sqrt(np.log(2 / RATE) / (2 * len(ordered))) + 0.5 / len(ordered):
            raise Broken(f"the noise of larger parameters is not normal: its distribution is {distance:.2g} away")

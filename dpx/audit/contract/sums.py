"""The part of the line "bits" about sums: what reaches `keys.release` is the sum, with no more rounding than is billed.

The noise is larger than billed by ETA, for the rounding of the sum. That is enough if the sum is a `Total`, of two
float32 numbers for each coordinate, and not if a mechanism makes one number of it, or adds rows in its own way.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.audit.contract import inputs as inputs
from dpx.audit.contract.report import Broken, NotChecked
from dpx.audit.contract.trial import Trial
from dpx.audit.stand_ins import replacing
from dpx.trees import Tree, split
from dpx.xla.totals import ETA, Total, as_total, doubled

LOW, HIGH = 2.0**-30, 2.0**-12  # changes of a sum of 1: below half a unit of its last place, and above
# One row of 64 is small. A chain of float32 additions then moves by 7 to 15 ETA, also one of microbatches of up to 64.
ROWS, APART = 2**13, 64
LARGE, SMALL = 31 / 32, 0.77  # of the clip norm; and of half a unit of the sum, which is rounded to one or to none
REMOVED = 1  # one of the large rows


class Handed(NamedTuple):
    """What `keys.release` was given. total: high + low, float64 (n,). deviation: of the noise."""

    total: np.ndarray
    deviation: float


def require_low_numbers(trial: Trial) -> None:
    """Raises Broken if a release does not read the low numbers of a sum whose high numbers it reads."""
    state, release = trial.state(0), handing(trial.mechanism.release)
    like = [as_total(one).high for one in trial.sums_like]

    def handed(number: int = -1, high: float = 0, low: float = 0) -> list[Handed]:
        """With the high and the low numbers of one sum changed."""
        sums = []
        for place, shapes in enumerate(like):
            size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
            change = inputs.waves(size, 1.0) * (place == number)
            parts = (np.float32(1) + np.float32(high) * change, np.float32(low) * change)
            sums.append(Total(*(split(part.astype(np.float32), shapes) for part in parts)))
        return release(tuple(sums), state, trial.params)

    before = handed()
    for number in range(len(like)):
        of_high, of_low = handed(number, high=HIGH), handed(number, low=LOW)
        for one, large, small in zip(before, of_high, of_low, strict=True):
            expected, found = (large.total - one.total) * (LOW / HIGH), small.total - one.total
            moved = np.abs(expected) > 1e-3 * np.abs(expected).max(initial=0)
            if not (np.abs(found - expected) <= 0.5 * np.abs(expected))[moved].all():
                raise Broken(
                    "a release reads the high numbers of a sum, and not the low ones: hand the `dpx.xla.totals.Total` "
                    "to `dpx.keys.release`, because a float32 sum of many rows moves by more than the clip norm"
                )


def require_small_rounding(trial: Trial) -> str:
    """Raises Broken if a row moves a long sum by more than it moves an empty one, and ETA; words, "" if not tried."""
    multiplier = trial.multiplier(0)
    if not multiplier > 0:
        return ""
    rows, state = _hostile(trial), trial.state(0)

    def update(grads, included):
        return trial.mechanism.update(grads, state, trial.params, included=included)

    handed, every = handing(update), np.arange(ROWS)
    sets = (every >= 0, every != REMOVED, every == REMOVED, every < 0)
    whole, others, alone, none = (handed(_nulled(rows, included), included) for included in sets)
    squares = [
        np.sum(((a.total - b.total) - (c.total - d.total)) ** 2) / a.deviation**2
        for a, b, c, d in zip(whole, others, alone, none, strict=True)
        if a.deviation > 0
    ]
    excess = multiplier * math.sqrt(sum(squares)) / ETA
    if not excess <= 1:
        raise Broken(
            f"one of {ROWS} rows moves the sum by {excess * ETA:.3g} clip norms more than it moves an empty one, and "
            f"{ETA:.3g} is billed: the rounding of the others depends on it"
        )
    return f"of {ROWS} rows against its rounding, one moves the sum by {excess:.2g} ETA more than alone"


def handing(function: Callable) -> Callable[..., list[Handed]]:
    """`function`, compiled, with what it hands to `keys.release` as its result, also from inside of jit or a loop.

    The result raises NotChecked where nothing was handed over.
    """

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles faster
    def traced(*arguments):
        numbers = itertools.count()

        def record(key, step, total, deviation):
            high, low = doubled(as_total(total))
            jax.debug.callback(functools.partial(_keep, next(numbers)), high, low, jnp.float32(deviation))
            return jax.tree.map(jnp.add, high, low)

        with replacing(release=record):
            return function(*arguments)

    def run(*arguments) -> list[Handed]:
        with _ONE_RUN:
            _seen.clear()
            jax.block_until_ready(traced(*arguments))
            jax.effects_barrier()
            found = [_seen[number] for number in sorted(_seen)]
        if not found:  # a function of the mechanism is jitted, and jax kept a trace of it with another stand-in
            raise NotChecked("what `keys.release` was given cannot be read: leave out jax.jit inside of the mechanism")
        return found

    return run


_seen: dict[int, Handed] = {}  # of the last run; not in a closure, because jax keeps traces of jitted functions
_ONE_RUN = threading.Lock()


def _keep(number, high, low, deviation):
    _seen[number] = Handed(inputs.flattened(high) + inputs.flattened(low), float(deviation))


def _hostile(trial: Trial) -> Tree:
    """Gradients, float32 (ROWS, ...), of which the first add up, in every coordinate, to a bit more than a power of
    two, and to less without one of them. Some others are below half a unit of the sum above that power, so they are
    rounded away; below it, each counts (Casacuberta et al. 2022, https://arxiv.org/abs/2207.10635).
    """
    power = 2.0 ** ((2 * ROWS // 3).bit_length() - 1)
    count = math.ceil(power / LARGE)
    column = np.zeros(ROWS)
    column[APART * math.ceil(count / APART) :: APART] = -SMALL * np.spacing(np.float32(power)) / 2
    column[:count] = LARGE
    column[0] = power + LARGE / 2 - (count - 1) * LARGE
    size = sum(leaf.size for leaf in jax.tree.leaves(trial.params))
    unit = 2.0 ** math.floor(math.log2(trial.clip_norm(0) / math.sqrt(size)))  # a power of two rounds nothing
    return split(np.broadcast_to(np.float32(unit * column[:, None]), (ROWS, size)), trial.params)


def _nulled(rows: Tree, included: np.ndarray) -> Tree:
    return jax.tree.map(lambda g: g * included.reshape(-1, *[1] * (g.ndim - 1)), rows)

"""The privacy contract of docs/design.md as one call, for any mechanism."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from dpx.audit.contract import cost, line_checks, noise, secrecy
from dpx.audit.contract.inputs import default_params
from dpx.audit.contract.report import BrokenLine, ContractReport, Line, NotChecked
from dpx.audit.contract.trial import Trial
from dpx.mechanism import Mechanism, require_mechanism
from dpx.values import Tree, batch_size, described, names_arguments, require_whole
from dpx.xla.place import full_precision

LINES: dict[str, Callable[[Trial], str]] = {
    "bounded": line_checks.check_bounded,
    "float32": line_checks.check_float32,
    "adjacent": line_checks.check_adjacent,
    "padding": line_checks.check_padding,
    "additive": line_checks.check_additive,
    "divisor": line_checks.divisor,
    "noise": noise.check_noise,
    "bits": secrecy.check_bits,
    "resume": line_checks.check_resume,
    "cost": cost.check_cost,
    "sampling": cost.check_sampling,
    "secrecy": secrecy.check_secrecy,
    "branches": secrecy.check_branches,
}
# For one call, by a union bound: ten tests of draws at 4e-6 each; at 1e-6 each, two of signs and sizes, eleven of the
# coordinates, three of repeats, one of larger parameters, one of noise that is seen soon and four of batches. The sum
# is 6.2e-5.
FALSE_ALARMS = 1e-4
MOST_NUMBERS = 1000  # of the parameters, because every pair of coordinates is compared


@names_arguments
def check_contract(
    mechanism: Mechanism,
    loss: Callable | None = None,
    params: Tree = None,
    examples: Tree = None,
    *,
    lines: Sequence[str] | None = None,
    rebuild: Callable[[jax.Array], Mechanism] | None = None,
    draws: int = 4000,
    seed: int = 0,
) -> ContractReport:
    """Checks the privacy contract for a mechanism, including your own compositions: `print(check_contract(mechanism))`.

    * bounded: hostile gradients (0 to 3e38, NaN, inf, also from float16 and bfloat16) contribute at most the clip norm
    * float32: nothing computes in less than float32
    * adjacent: leaving one example out moves the update by at most what the cost assumes, in 6 rows and in 257
    * padding: rows that do not count change nothing
    * additive: `Mechanism.update`, microbatches, ghost norms and `private_updates` give the same step
    * divisor: the updates are divided by a constant
    * noise: the noise is the stated multiple of what one example moves, wherever that is; its draws, under other keys
      and at eight steps, are independent standard normals; it is there, and does not repeat, for other values and
      dtypes of the parameters, in larger ones, and at 1,270 steps up to 2^31
    * bits: releases were rounded to a public grid, after the noise, by `keys.release`, so they show only what the
      cost covers; one of 8,192 rows moves the sum by at most ETA of the clip norm more than it moves an empty one
    * resume: the state alone decides the next step
    * cost: the event matches the sampling that draws and the mechanism's noise multipliers, for up to 10^6 steps (with
      a schedule, 50,021), and the state counts the releases
    * secrecy: nothing but released values is public
    * branches: no program branches on raw data

    mechanism: of `dpx.chain`, `dpx.in_coordinates`, or your own.
    loss: loss(params, example), to check the contract on the paths of `private_updates` too.
    params: pytree of arrays, at most 1,000 numbers; small layers with the names of your model are enough. By default, a
        matrix, a vector, a number, and two arrays of 4 axes and the same shape.
    examples: pytree, with examples on axis 0; needed with a loss.
    lines: the names of the lines to check, from the list above; None checks all.
    rebuild: (key) -> the same mechanism with this key, for the draws. Without it, the keys in the program are replaced
        by independent ones, which hides noise that shares its key with another use, such as random coordinates.
    draws: int, at least 500, how often the noise of a step is drawn. seed: int, at least 0, of the draws and batches.

    On a GPU or a TPU, the check computes products in float32; a proof covers rounding by matrix units (docs/exact.md).
    A line that cannot be decided is "not checked" and says why. A check is not a proof: data or inputs that were not
    tried may still break the contract. A report fails for a sound mechanism with probability at most 1e-4.

    Raises ValueError for another type of mechanism, larger params, a loss without params and examples, and other names.
    """
    names = _require_args(mechanism, loss, params, examples, lines)
    params = default_params() if params is None else params
    draws, seed = require_whole("draws", draws, minimum=500), require_whole("seed", seed, minimum=0)
    with full_precision():
        trial = Trial(mechanism, params, loss, examples, draws=draws, seed=seed, rebuild=rebuild)
        return ContractReport(tuple(_check_contract_line(trial, name) for name in names), FALSE_ALARMS)


def _check_contract_line(trial: Trial, name: str) -> Line:
    try:
        return Line(name, "pass", LINES[name](trial))
    except BrokenLine as broken:
        return Line(name, "fail", str(broken))
    except NotChecked as reason:
        return Line(name, "not checked", str(reason))


def _require_args(
    mechanism: Any, loss: Any, params: Tree, examples: Tree, lines: Sequence[str] | None
) -> Sequence[str]:
    """The names of the lines. Raises ValueError as `check_contract` does."""
    require_mechanism(mechanism)
    if (loss is None) != (examples is None) or (loss is not None and params is None):
        raise ValueError("loss, params and examples must be given together, and examples only with a loss")
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError("params must be known: call check_contract outside of jit")
    numbers = sum(jnp.size(leaf) for leaf in leaves)
    if params is not None and not 1 <= numbers <= MOST_NUMBERS:
        raise ValueError(f"params must hold 1 to {MOST_NUMBERS} numbers: use smaller layers, got {numbers}")
    if loss is not None and batch_size(examples) == 0:
        raise ValueError("examples must hold at least one row, got 0")
    names = list(LINES) if lines is None else list(lines)
    unknown = [name for name in names if name not in LINES]
    if unknown:
        word = unknown[0] if isinstance(unknown[0], str) else lines
        raise ValueError(f"lines must be some of {list(LINES)}, got {described(word)}")
    return names

"""The privacy contract of docs/design.md as one call, for any mechanism.

The check of a line returns words, or raises Violation if the line does not hold and NotChecked if it cannot tell. This
file checks what one example, padding and microbatches do to a release.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.audit.contract import cost, inputs, noise, secrecy
from dpx.audit.contract.draws import FULLY
from dpx.audit.contract.noise import require_rows_alone
from dpx.audit.contract.secrecy import KEY, RAW
from dpx.audit.contract.subject import (
    AT_STEPS,
    STEPS,
    AuditProblem,
    NotChecked,
    Violation,
    all_but_one,
    all_included,
    numbers_as_text,
)
from dpx.audit.contract.trial import MechanismUnderTest
from dpx.keys import is_key
from dpx.mechanism import Mechanism, require_mechanism
from dpx.mechanism.guards import require_key_used
from dpx.sampling.data import batch_size
from dpx.values import Tree, described, explain_misuse, require_function, require_whole
from dpx.xla.jaxprs import closure_arrays, identity_of_program, join_marks, propagate_marks
from dpx.xla.place import full_precision

Outcome = Literal["pass", "fail", "not checked"]


class Line(NamedTuple):
    """One line of the contract. outcome: "pass", "fail" or "not checked". words: the finding, or why there is none."""

    name: str
    outcome: Outcome
    words: str


class ContractReport(NamedTuple):
    """The result of `check_contract`. `str` formats it as a table of the contract's lines.

    lines: the lines of the contract, in the order of their checks. false_alarm_rate: an upper bound on the probability,
        over the choice of the seed, that a sound mechanism fails.
    """

    lines: tuple[Line, ...]
    false_alarm_rate: float

    @property
    def passed(self) -> bool:
        """Whether no line fails. Lines that were not checked do not count: see `unchecked`."""
        return not self.failures

    @property
    def failures(self) -> tuple[Line, ...]:
        """The lines that fail."""
        return tuple(line for line in self.lines if line.outcome == "fail")

    @property
    def unchecked(self) -> tuple[Line, ...]:
        """The lines that could not be checked fully."""
        return tuple(line for line in self.lines if line.outcome == "not checked")

    def line(self, name: str) -> Line:
        """Returns the line with this name. Raises ValueError if it was not requested."""
        for line in self.lines:
            if line.name == name:
                return line
        raise ValueError(f"name must be one of {[line.name for line in self.lines]}, got {name!r}")

    def require(self) -> "ContractReport":
        """Returns this report, or raises AssertionError with it if a line fails. For tests of your own mechanism."""
        if not self.passed:
            raise AssertionError(f"the mechanism breaks the privacy contract:\n{self}")
        return self

    def __repr__(self) -> str:
        found = [line.outcome for line in self.lines]
        return f"ContractReport({', '.join(f'{words}: {found.count(words)}' for words in get_args(Outcome))})"

    def __str__(self) -> str:
        width = max((len(line.name) for line in self.lines), default=0)
        rows = [f"{line.outcome:11}  {line.name:{width}}  {line.words}" for line in self.lines]
        rows.append(f"A sound mechanism fails with a probability of at most {self.false_alarm_rate:g}.")
        return "\n".join(rows)


TOLERANCE = 1e-5  # relative, for the norm of a contribution
GARBAGE = (0, 3, inputs.ROWS - 2)  # positions of the first of two rows of padding


def check_bounded(trial: MechanismUnderTest) -> str:
    """Checks that no gradient of any size or dtype contributes more than a very large one, and nonfinite ones zero."""
    rows, replacements = 0, [trial.with_loud(tree) for tree in trial.hostile[1:]]
    for step in STEPS:
        clip_norm, state = trial.clip_norm(step), trial.state_after(step)
        for name, sums in trial.contributions_by_path(step).items():
            norms = trial.released_norms(step, sums)
            rows += len(norms)
            _require_at_most(norms, clip_norm, f"{name}, step {step}")
        if step not in FULLY:
            continue
        replaced = [trial.sums_of_each_row(tree, state) for tree in replacements]
        for name, sums in trial.contributions_by_path(step).items():
            _require_nonfinite_ignored(trial, sums, replaced, f"{name}, step {step}")
        for problem in trial.problems[1:]:
            for name, of_each in problem.sums.items():
                norms = trial.released_norms(step, of_each(problem.hostile, state))
                rows += len(norms)
                _require_at_most(norms, clip_norm, f"{name} of the loss, step {step}")
    norms = numbers_as_text([trial.clip_norm(step) for step in STEPS])
    return f"{rows} examples {AT_STEPS}: none contributes more than norm {norms}; those that are not finite, zero"


def _require_at_most(norms: np.ndarray, clip_norm: float, where: str):
    if not np.isfinite(norms).all():
        raise Violation(f"an example contributes {norms[~np.isfinite(norms)][0]} ({where})")
    if norms.max() > clip_norm * (1 + TOLERANCE) + 1e-45:
        raise Violation(f"an example contributes norm {norms.max():.7g}, other large ones {clip_norm:.7g} ({where})")


def _require_nonfinite_ignored(trial: MechanismUnderTest, sums, replaced, where: str):
    """Requires that a nonfinite row contributes zero, or that its nonfinite values do not affect its contribution."""
    broken = ~np.isfinite(inputs.flattened_leaves(trial.with_loud(trial.hostile[0]), 1)).all(1)
    found, by_zero, by_one = (inputs.flattened_leaves(tree, 1) for tree in (sums, *replaced))
    scale = np.abs(by_zero).max(1) * 1e-5
    unread = (np.abs(by_zero - by_one).max(1) <= scale) & (np.abs(found - by_zero).max(1) <= scale)
    if (np.abs(found).max(1) > 0)[broken & ~unread].any():
        raise Violation(f"an example that is not finite contributes ({where})")


def check_float32(trial: MechanismUnderTest) -> str:
    """Checks that noise and sums are computed in at least float32, from gradients of any dtype.

    A value that depends on both comes after the noise, so an optimizer may keep its state in bfloat16.
    """
    for closed in (trial.program_of_update, *map(trial.trace_update, inputs.LOW)):
        found = set()

        def visit(equation, marks, control, found=found):
            if join_marks(marks) in (RAW, KEY):
                found |= _low_precision_in_words(equation)

        raw = [RAW] * len(jax.tree.leaves(trial.params))
        marks = raw + [0] * (len(closed.jaxpr.invars) - len(raw))
        propagate_marks(closed, marks, visit, [KEY if is_key(leaf) else 0 for leaf in closed.consts])
        if found:
            raise Violation(f"computes in less than 32 bits: {', '.join(sorted(found))}")
    return "sums and noise have no arithmetic in less than 32 bits, on gradients in float32, float16 and bfloat16"


# These only move low-precision values, such as gradients before they become float32.
MOVES = {
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather", "jit", "pad", "pjit",
    "reshape", "rev", "scan", "select_n", "slice", "squeeze", "transpose", "while",
}  # fmt: skip


def _low_precision_in_words(equation: core.JaxprEqn) -> set[str]:
    """Describes what an equation computes in float16 or bfloat16."""
    given = {str(getattr(v.aval, "dtype", "")) for v in equation.invars}
    low = {str(getattr(v.aval, "dtype", "")) for v in equation.outvars} & {"float16", "bfloat16"}
    if equation.primitive.name in MOVES:
        low -= given
    return {f"{equation.primitive.name} in {dtype}" for dtype in low}


def check_sensitivity(trial: MechanismUnderTest) -> str:
    """Checks that on every path, one example moves the update by at most what the cost assumes, in any batch."""
    trial.require_noise()
    largest, tried = 0.0, 0
    for step in STEPS:
        if not trial.release(step).is_linear:
            _require_adjacent_sums(trial, step)
        release = trial.require_linear_release(step, f"on the sums of step {step} alone, not on updates")
        most = trial.largest_contribution(step) * (1 + 10 * release.tolerance)
        for problem in trial.problems:
            rows = _with_a_loud_row(trial, problem)
            for name, path in list(problem.paths.items())[: None if step in FULLY else 1]:
                everyones, _ = path(rows, trial.state_after(step), all_included())
                for missing in range(inputs.ROWS):
                    others, _ = path(rows, trial.state_after(step), all_but_one(missing))
                    change = inputs.flattened_leaves(everyones) - inputs.flattened_leaves(others)
                    size = release.change_of_update_in_noise(change)
                    if not size <= most:
                        raise Violation(
                            f"one example moves the update by {size:.6g} standard deviations of the noise, and "
                            f"{trial.largest_contribution(step):.6g} are paid for ({name}, {problem.name}, step {step})"
                        )
                    largest, tried = max(largest, size / trial.largest_contribution(step)), tried + 1
    words = f"{tried} times one of {inputs.ROWS} examples left out: at most {largest:.6g} of what the cost counts"
    return f"{words}; {require_rows_alone(trial)}"


def _require_adjacent_sums(trial: MechanismUnderTest, step: int) -> None:
    """Raises Violation if leaving out one example moves the released sums by more than the clip norm."""
    state, rows = trial.state_after(step), _with_a_loud_row(trial, trial.problems[0])
    everyones = trial.sums(rows, state, all_included())
    for missing in range(inputs.ROWS):
        others = trial.sums(rows, state, all_but_one(missing))
        change = jax.tree.map(lambda a, b: np.asarray(a)[None] - np.asarray(b)[None], everyones, others)
        (norm,) = trial.released_norms(step, change)
        if not norm <= trial.clip_norm(step) * (1 + 1e-5):
            raise Violation(
                f"one example moves the sum by {norm:.7g}, and the clip norm is {trial.clip_norm(step):.7g}"
            )


def _with_a_loud_row(trial: MechanismUnderTest, problem: AuditProblem):
    """Returns the rows. If they are gradients, multiplies one of them by 10^6."""
    if problem is not trial.problems[0]:
        return problem.rows
    scale = np.where(np.arange(inputs.ROWS) == 2, np.float32(1e6), np.float32(1))
    return jax.tree.map(lambda g: g * scale.reshape(-1, *[1] * (g.ndim - 1)), problem.rows)


def check_padding(trial: MechanismUnderTest) -> str:
    """Checks that padding, in any position, changes nothing, and that a step with no included row is pure noise."""
    nobody = np.zeros(inputs.ROWS, bool)
    for problem in trial.problems:
        state, stacked = trial.state_after(1), next(iter(problem.paths.values()))
        noise = stacked(inputs.zeros_like(problem.rows), state, nobody)
        for name, path in problem.paths.items():
            for position in (0, 1, 2):
                found = path(inputs.with_garbage_row(problem.rows, position), state, nobody)
                _require_same(found, noise, f"rows move a step that includes none of them ({name})")
        real = inputs.take_rows(problem.rows, np.arange(inputs.ROWS - 2))
        state = trial.state_after(4)
        expected = stacked(real, state, np.ones(inputs.ROWS - 2, bool))
        for name, path in problem.paths.items():
            for first in GARBAGE:
                order = np.insert(np.arange(inputs.ROWS - 2), first, [inputs.ROWS - 2, inputs.ROWS - 1])
                padded = inputs.take_rows(problem.rows, order)
                for position in (first, first + 1):
                    padded = inputs.with_garbage_row(padded, position)
                found = path(padded, state, order < inputs.ROWS - 2)
                _require_same(found, expected, f"padding at row {first} changes the step ({name})", problem)
    return f"NaN, 1e30 and -inf in rows that do not count, at {len(GARBAGE)} positions: the same step"


def check_paths_agree(trial: MechanismUnderTest) -> str:
    """Checks that every path gives the same step."""
    names = []
    for problem in trial.problems:
        names += [f"{name} of {problem.name}" for name in problem.paths]
        for step in STEPS:
            state = trial.state_after(step)
            first, *others = [path(problem.rows, state, all_but_one(2)) for path in problem.paths.values()]
            for name, found in zip(list(problem.paths)[1:], others, strict=True):
                _require_same(found, first, f"{name} and update differ at step {step}", problem)
    return f"the same step by {', '.join(names)}"


def _require_same(found, expected, words: str, problem: AuditProblem | None = None):
    """Raises Violation with these words if two steps differ. A loss's gradients may differ by more rounding."""
    loose = problem is not None and problem.name == "loss"
    try:
        inputs.require_close(found, expected, 1e-4 if loose else 2e-6)
    except AssertionError as error:
        raise Violation(f"{words}: {error}") from None


def check_constant_divisor(trial: MechanismUnderTest) -> str:
    """Checks that k copies of an example move the update k times as far: it is divided by a constant."""
    trial.require_linear_release(0, "not on updates")
    state, tried = trial.state_after(0), []
    one = jax.tree.map(lambda g: np.concatenate([0.01 * g[:1]] * inputs.ROWS), trial.problems[0].rows)
    for name, path in trial.problems[0].paths.items():
        silent = inputs.flattened_leaves(path(one, state, np.zeros(inputs.ROWS, bool))[0])
        for rows, copies in ((inputs.ROWS, 3), (inputs.ROWS, inputs.ROWS), (inputs.ROWS - 2, inputs.ROWS - 2)):
            if rows < inputs.ROWS and name != "update":
                continue
            updates, _ = path(inputs.take_rows(one, np.arange(rows)), state, np.arange(rows) < copies)
            tried.append((inputs.flattened_leaves(updates) - silent) / copies)
            if not np.abs(tried[-1] - tried[0]).max() <= 1e-3 * np.abs(tried[0]).max():
                times = f"{copies} copies of an example in {rows} rows do not move the update {copies} times as far"
                raise Violation(f"{times} ({name})")
    return f"the signal of an example is the same in {len(tried)} batches of other sizes"


def check_resume(trial: MechanismUnderTest) -> str:
    """Checks that a run from a restored state continues with the same noise: a step reads only its arguments."""
    state = trial.state_after(4)
    restored = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), state)
    rows = trial.problems[0].rows
    found, expected = (trial.update(rows, given, all_but_one()) for given in (restored, state))
    _require_same(found, expected, "a state that was stored and restored makes another step")
    require_equal_jaxprs(trial.program_of_update, trial.trace_update())
    return "the same step from a restored state; the same program when it is traced again"


def require_equal_jaxprs(first: core.ClosedJaxpr, second: core.ClosedJaxpr) -> None:
    """Raises Violation if two closed jaxprs of a step differ in an equation or in a constant."""
    if identity_of_program(first) != identity_of_program(second) or not _same_constants(first, second):
        raise Violation("the step is another program when it is traced again: something outside the state enters it")


def _same_constants(first, second) -> bool:
    """Whether the constants are bitwise equal, including those in functions that a program calls."""
    words = ([np.asarray(c).tobytes() for c in inputs.keys_as_bits([*closure_arrays(one)])] for one in (first, second))
    return [*next(words)] == [*next(words)]


LINES: dict[str, Callable[[MechanismUnderTest], str]] = {
    "bounded": check_bounded,
    "float32": check_float32,
    "adjacent": check_sensitivity,
    "padding": check_padding,
    "additive": check_paths_agree,
    "divisor": check_constant_divisor,
    "noise": noise.check_noise,
    "bits": secrecy.check_released_bits,
    "resume": check_resume,
    "cost": cost.check_cost,
    "sampling": cost.check_sampling,
    "secrecy": secrecy.check_no_data_leaks,
    "branches": secrecy.check_no_data_branches,
}
# A union bound for one call: ten tests of draws at 4e-6 each; at 1e-6 each, two of signs and sizes, eleven of the
# coordinates, three of repeats, one of larger parameters, one of an obvious fault in the noise and four of batches. The
# sum is 6.2e-5.
FALSE_ALARMS = 1e-4
MOST_NUMBERS = 1000  # limit on the size of the parameters, because every pair of coordinates is compared


@explain_misuse
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
    * float32: neither sums nor noise are computed in less than float32
    * adjacent: leaving one example out moves the update by at most what the cost assumes, in batches of 6 and 257
    * padding: rows that are not included change nothing
    * additive: `Mechanism.update`, microbatches, ghost norms and `private_updates` give the same step
    * divisor: the updates are divided by a constant
    * noise: the noise is at least the stated multiple of what one example moves, in every direction; its draws, under
      other keys and at eight steps, are independent standard normals; noise is present and does not repeat for other
      parameter values and dtypes, in larger parameters, and at 1,270 step numbers up to 2^31
    * bits: `keys.release` rounds releases to a public grid after the noise, so they show only what the cost covers;
      rounding adds at most ETA of the clip norm to how far one of 8,192 rows moves the sum
    * resume: the state alone decides the next step
    * cost: the event matches the mechanism's sampling and noise multipliers, for up to 10^6 steps (50,021 with a
      schedule), and the state counts the releases
    * sampling: the batches that the sampling draws have the distribution that the event assumes
    * secrecy: public state and updates depend on raw data only through released values
    * branches: no program branches on raw data

    mechanism: from `dpx.chain` or `dpx.in_coordinates`, or your own.
    loss: loss(params, example), to check the contract on the paths of `private_updates` too.
    params: pytree of arrays with at most 1,000 elements; small layers with your model's names are enough. The default
        has a matrix, a vector, a scalar, and two arrays of the same shape with 4 axes.
    examples: pytree with examples on axis 0; required with a loss.
    lines: the names of the lines to check, from the list above; None checks all.
    rebuild: (key) -> the same mechanism with this key, for the draws. Without it, the keys in the program are replaced
        by independent ones, which hides noise that shares its key with another use, such as random coordinates.
    draws: int, at least 500, number of draws of a step's noise. seed: int, at least 0, for the draws and batches.

    On a GPU or TPU, the check computes products in float32; a proof covers rounding by matrix units (docs/exact.md).
    A line that cannot be decided is "not checked" and says why. A check is not a proof: inputs that were not tried may
    still break the contract. A report fails for a sound mechanism with probability at most 1e-4.

    Raises ValueError if `mechanism` has the wrong type, params are too large, a loss comes without params and examples,
    or a line is unknown.
    """
    names = _require_args(mechanism, loss, params, examples, lines)
    params = inputs.default_params() if params is None else params
    if rebuild is not None:
        require_key_used("rebuild", require_function("rebuild", rebuild, "key"))
    draws, seed = require_whole("draws", draws, minimum=500), require_whole("seed", seed, minimum=0)
    with full_precision():
        trial = MechanismUnderTest(mechanism, params, loss, examples, draws=draws, seed=seed, rebuild=rebuild)
        return ContractReport(tuple(_check_contract_line(trial, name) for name in names), FALSE_ALARMS)


def _check_contract_line(trial: MechanismUnderTest, name: str) -> Line:
    try:
        return Line(name, "pass", LINES[name](trial))
    except Violation as broken:
        return Line(name, "fail", str(broken))
    except NotChecked as reason:
        return Line(name, "not checked", str(reason))


def _require_args(
    mechanism: Any, loss: Any, params: Tree, examples: Tree, lines: Sequence[str] | None
) -> Sequence[str]:
    """Returns the names of the lines to check. Raises ValueError as `check_contract` does."""
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
    names = list(LINES) if lines is None else [lines] if isinstance(lines, str) else list(lines)
    unknown = [name for name in names if name not in LINES]
    if unknown:
        word = unknown[0] if isinstance(unknown[0], str) else lines
        raise ValueError(f"lines must be some of {list(LINES)}, got {described(word)}")
    return names

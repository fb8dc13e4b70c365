"""What `dpx.check_setup` finds without running the loss, and the report of all findings.

For the plan: whether batch, data and delta fit the sampling, and the privacy cost of the run. In the equations of the
loss: data other than its example, unused parameters, shared random numbers, dtypes.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx import keys
from dpx.accounting import epsilon
from dpx.accounting.cost import cost_of_run
from dpx.accounting.flat_event import without_truncation
from dpx.gradients.one_example import BATCH_NORM, INSTEAD, LARGE_CONSTANTS, is_batch_norm_error
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch, included_rows
from dpx.sampling.data import batch_size, length_of
from dpx.sampling.schemes import Sampling
from dpx.states.record import fingerprint
from dpx.sums.rounding import ETA
from dpx.values import Tree, described, for_whom, leaf_path, list_first_few, rounded_up
from dpx.xla import jaxprs
from dpx.xla.jaxprs import propagate_marks

Severity = Literal["error", "warning", "note", "ok"]
ORDER = ("error", "warning", "note", "ok")
FOOTNOTE = "* computed from raw data or secret noise: do not publish"


@dataclass(frozen=True)
class Finding:
    """One thing that `dpx.check_setup` checked.

    name: what was checked. severity: "error" (the run fails, or no epsilon covers it), "warning" (probably a mistake),
        "note" or "ok". words: one line. numbers: by name, the numbers in `words` and more.
    """

    name: str
    severity: Severity
    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class SetupReport:
    """The result of `dpx.check_setup`. `str` formats it as a table, worst findings first.

    public_findings: those that depend on public values only. unreleased_findings: those that depend on raw data or
        secret noise. NOT private; None in `dpx.publishable_state(report)`.
    """

    public_findings: tuple[Finding, ...]
    unreleased_findings: tuple[Finding, ...] | None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first."""
        both = (*self.public_findings, *(self.unreleased_findings or ()))
        return tuple(sorted(both, key=lambda finding: ORDER.index(finding.severity)))

    def __getitem__(self, name: str) -> Finding:
        """Returns the finding with this name. Raises KeyError if there is none."""
        return {finding.name: finding for finding in self.findings}[name]

    def __repr__(self) -> str:
        found = [finding.severity for finding in self.findings]
        return f"SetupReport({', '.join(f'{severity}: {found.count(severity)}' for severity in ORDER)})"

    def __str__(self) -> str:
        unreleased = {finding.name for finding in self.unreleased_findings or ()}
        rows = [(f.severity, f.name + " *" * (f.name in unreleased), f.words) for f in self.findings]
        width = max(len(name) for _, name, _ in rows)
        lines = [f"{severity:7}  {name:{width}}  {words}" for severity, name, words in rows]
        return "\n".join([*lines, FOOTNOTE] if unreleased else lines)


FAR = 6.0  # standard deviations of a Poisson batch size; the chance that a drawn batch is further away is about 1e-8
COSTLY = 0.01  # the share of epsilon that truncated batches may cost
WEAK = 10.0  # a larger epsilon promises little


def rows_that_count(batch: Batch, sampling: Sampling) -> tuple[np.ndarray, Finding]:
    """Returns which rows are included, bool (B,), and a finding about whether the sampling draws this many."""
    size = batch_size(batch.examples)
    try:
        included = np.asarray(included_rows(size, batch.included, sampling))
    except ValueError as error:
        return np.ones(size, bool), Finding("batch", "error", str(error), {"rows": size})
    count, expected, most = int(included.sum()), float(sampling.divisor), sampling.most_rows
    numbers = {"rows": size, "included": count, "expected": expected}
    words = f"{count} of {size} rows count, and {expected:g} are expected of {sampling}"
    deviation = math.sqrt(expected * max(0.0, 1 - expected / sampling.examples))
    if count > most:
        words += ": more than it draws, so no epsilon would cover the run"
        return included, Finding("batch", "error", words, numbers)
    if batch.drawn is not None and int(batch.drawn.rows) != count:
        words = f"{count} rows count, and `take` drew {int(batch.drawn.rows)}: no epsilon would cover the run"
        return included, Finding("batch", "error", words, numbers)
    by_chance = most == math.inf or sampling.truncates
    if (by_chance and abs(count - expected) > FAR * deviation + 1) or (not by_chance and count < expected):
        return included, Finding("batch", "warning", words, numbers)
    return included, Finding("batch", "ok", words, numbers)


def find_batch_not_drawn(batch: Batch, sampling: Sampling) -> Finding:
    if batch.drawn is None:
        words = "the batch is not of `sampling.take`: nothing shows that the right sampling drew it"
        return Finding("drawn", "note", words)
    if int(batch.drawn.sampling) != fingerprint(sampling):
        return Finding(
            "drawn", "error", f"the batch was drawn by another sampling than {sampling}, which epsilon is for"
        )
    return Finding("drawn", "ok", "the sampling drew the batch")


def find_length_mismatch(data: Any, sampling: Sampling) -> Finding:
    rows = length_of(data)
    numbers = {"rows": rows, "examples": sampling.examples}
    if rows != sampling.examples:
        words = f"the data have {rows} rows, and epsilon is for {sampling.examples} examples"
        return Finding("data", "error", words, numbers)
    return Finding("data", "ok", f"the data have the {rows} examples that epsilon is for", numbers)


def find_delta_size(delta: float | None, sampling: Sampling) -> Finding:
    if delta is None:
        return Finding("delta", "note", "no delta is given, and the mechanism has no budget: epsilon is not known")
    numbers = {"delta": delta, "examples": sampling.examples}
    if delta >= 1 / sampling.examples:
        words = f"delta {delta:g} is at least 1 / {sampling.examples}: one example released whole would be private"
        return Finding("delta", "warning", words, numbers)
    return Finding("delta", "ok", f"delta {delta:g} is below 1 / {sampling.examples}", numbers)


def find_epsilon_of_run(optimizer: Mechanism, steps: int | None, delta: float | None) -> Finding:
    """Reports the epsilon of the whole run."""
    if steps is None or delta is None:
        return Finding("privacy", "note", "not known without steps and delta, or a budget")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a large delta has its own finding
        spent = epsilon(optimizer, steps, delta=delta)
    numbers, budget = {"epsilon": spent, "delta": delta, "steps": steps}, optimizer.budget
    numbers["eta"] = ETA
    whom = for_whom(1 if budget is None else budget.records)
    cost = f"epsilon {rounded_up(spent, 4)} at delta {rounded_up(delta, 6)}{whom}"
    words = f"{steps} steps cost {cost}, rounding by eta = {ETA:.3g} included"
    if math.isinf(spent):
        return Finding("privacy", "error", f"{words}: a step adds no noise, or delta is too small", numbers)
    if budget is not None and steps > budget.steps:
        return Finding("privacy", "warning", f"{words}; the budget is for {budget.steps} steps", numbers)
    if spent > WEAK:
        return Finding("privacy", "note", f"{words}, which promises little", numbers)
    return Finding("privacy", "ok", words, numbers)


def find_truncation_cost(optimizer: Mechanism, steps: int | None, delta: float | None) -> list[Finding]:
    """Reports the cost of truncating batches (`most_rows`). Returns no finding for other samplings."""
    if steps is None or delta is None or not optimizer.sampling.truncates:
        return []
    cost = cost_of_run(optimizer, steps, records=1)
    spent = cost.profile().epsilon(delta)
    without = cost._replace(event=without_truncation(cost.event)).profile().epsilon(delta)
    more = spent / without - 1 if 0 < without < math.inf else 0.0
    words = f"cutting batches to most_rows = {optimizer.sampling.most_rows} costs {more:.2%} of epsilon"
    numbers = {"epsilon": spent, "epsilon of batches that are not cut": without}
    if more > COSTLY:
        enough = math.ceil((optimizer.sampling.divisor + 5 * math.sqrt(optimizer.sampling.divisor)) / 8) * 8
        return [Finding("truncation", "warning", f"{words}: take more rows, such as {enough}", numbers)]
    return [Finding("truncation", "ok", words, numbers)]


def find_trained_share(flags: Tree, params: Tree) -> Finding:
    """Reports how many parameters the mechanism trains. flags: bools like the parameters."""
    sizes = [math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params)]
    trained, total = sum(itertools.compress(sizes, jax.tree.leaves(flags))), sum(sizes)
    words = f"{trained} of {total} parameters are trained" if trained < total else f"all {total} parameters are trained"
    return Finding("trained", "ok", words, {"trained": trained, "parameters": total})


def find_guessable_key(key: jax.Array | None) -> Finding:
    """Checks whether the mechanism's scalar key may have fewer than 64 secret bits."""
    if key is not None and keys.has_small_seed(key):
        return Finding("key", "warning", keys.SMALL, {"small": True})
    return Finding("key", "ok", "the key has more than 32 bits", {"small": False})


OWN_BACKWARD = ("custom_vjp_call", "custom_vjp_call_jaxpr")
WHOLE_BATCH = ("expand_dims", "broadcast_all", "legacy_vectorized")  # an `ffi_call` batched so sees a whole batch
LARGE = 2**20  # bytes from which an array is worth a note


def example_loss_function(loss: Callable, *, with_key: bool, has_aux: bool) -> Callable[[Tree, Tree], jax.Array]:
    """Returns loss(params, example) -> number. Any key is a constant, because the run's keys must not be used."""

    def loss_value(params, example):
        result = loss(params, example, jax.random.key(0)) if with_key else loss(params, example)
        return result[0] if has_aux else result

    return loss_value


def trace_or_finding(loss: Callable, params: Tree, example: Tree) -> core.ClosedJaxpr | Finding:
    """The closed jaxpr of the loss, or a finding that tracing fails. Raises ValueError unless it is a real scalar."""
    try:
        closed, out = jax.make_jaxpr(loss, return_shape=True)(params, example)
    except NameError as error:
        return Finding("named axes", "error", f"the loss uses a named axis, so it is not that of one example: {error}")
    except Exception as error:
        if not is_batch_norm_error(error):
            raise
        return Finding("running averages", "error", BATCH_NORM)
    if not (hasattr(out, "shape") and out.shape == () and jnp.issubdtype(out.dtype, jnp.floating)):
        raise ValueError(
            f"loss must return one real number for one example (more with has_aux=True), got {described(out)}"
        )
    return closed


def find_closed_over_arrays(closed: core.ClosedJaxpr, example: Tree, rows: int, examples: int) -> Finding:
    """Finds arrays in the loss's closure that may be training data. rows: batch size. examples: dataset size."""
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(example)}
    found = [(jnp.shape(array), _bytes_of(array)) for array in jaxprs.closure_arrays(closed)]
    suspects = [shape for shape, _ in found if _may_hold_data(shape, shapes, rows, examples)]
    size = sum(size for _, size in found)
    numbers = {"arrays": len(found), "bytes": size, "suspects": len(suspects)}
    if suspects:
        words = (
            f"the loss closes over an array of shape {suspects[0]}: if these are training data, no cost covers them. "
        )
        words += f"A public array, such as a frozen base, is safe; to end this warning, {INSTEAD}"
        return Finding("closures", "warning", words, numbers)
    if size >= LARGE:
        words = f"the loss closes over {size / 2**20:.0f} MiB of arrays: they must not be computed from the data"
        if size >= LARGE_CONSTANTS:
            words += f". A program of your own holds them as constants and compiles slowly; `fit` does not. {INSTEAD}"
        return Finding("closures", "note", words, numbers)
    return Finding("closures", "ok", "the loss closes over no large array", numbers)


def find_batch_dependence(closed: core.ClosedJaxpr) -> Finding:
    """Finds equations that may see all rows of a batch under `jax.vmap`, in the loss or its backward pass."""
    found = list(jaxprs.walk_equations(closed))
    if any(equation.primitive.name in OWN_BACKWARD for equation in found):
        found += jaxprs.walk_equations(_gradient_jaxpr(closed))
    whole = {equation.primitive.name for equation in found if equation.params.get("vmap_method") in WHOLE_BATCH}
    all_names = {equation.primitive.name for equation in found}
    names = whole | {name for name in all_names if "callback" in name or name in ("debug_print", "custom_vmap_call")}
    if names:
        listed = ", ".join(sorted(names))
        words = f"the loss contains {listed}, which can see the whole batch; one row must not change another"
        return Finding("batching rules", "warning", words, {"kinds": len(names)})
    return Finding("batching rules", "ok", "no callback and no custom batching rule in the loss", {"kinds": 0})


def _gradient_jaxpr(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The equations of the loss's gradient, which a custom_vjp hides until the gradient is traced."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    floats = [number for number, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jax.make_jaxpr(jax.grad(lambda *values: core.jaxpr_as_fun(closed)(*values)[0], floats))(*inputs)


def find_unused(closed: core.ClosedJaxpr, params: Tree, flags: Tree) -> Finding:
    """Finds trained parameters that do not affect the loss. flags: bools like the parameters, True where trained."""
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    read = jaxprs.inputs_read(closed.jaxpr)[: len(paths)]
    missing = [path for path, flag, used in zip(paths, jax.tree.leaves(flags), read, strict=True) if flag and not used]
    if missing:
        words = f"the loss does not use {list_first_few(missing)}; they get noise and no gradient"
        return Finding("unused parameters", "warning", words, {"parameters": len(missing)})
    return Finding("unused parameters", "ok", "the loss uses every trained parameter", {"parameters": 0})


def find_lost_averages(closed: core.ClosedJaxpr, params: Tree) -> list[Finding]:
    """Finds running averages that the loss computes but nothing keeps, such as BatchNorm's: a old + (1 - a) new, where
    `old` is a constant and `new` depends on the example. Auxiliary outputs of the loss do not keep them."""
    parameter, data, updates = 1, 2, set()

    def visit(equation, marks, control):
        if 0 in marks and any(mark & data for mark in marks):
            updates.add(id(equation))

    count = len(jax.tree.leaves(params))
    propagate_marks(closed, [parameter if i < count else data for i in range(len(closed.jaxpr.invars))], visit)
    found = sum(id(equation) in updates for equation in _unread_averages(closed.jaxpr, [True]))
    words = (
        "the loss computes running averages that nothing keeps, as BatchNorm does. So the layer normalizes each "
        "example by itself, and a model that is evaluated with the averages is not the one that was trained. Do not "
        "keep them: they are not private. Use GroupNorm or LayerNorm (docs/flax.md#batchnorm)"
    )
    return [Finding("running averages", "warning", words, {"averages": found})] if found else []


def _unread_averages(jaxpr: core.Jaxpr, wanted: list[bool]) -> Iterator[core.JaxprEqn]:
    """Yields the equations a x + (1 - a) y on which no wanted result depends, except where y may be chosen in place of
    the average, as Equinox does at the first step."""
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    needed = {
        v for v, is_wanted in zip(jaxpr.outvars, wanted, strict=False) if is_wanted and not isinstance(v, core.Literal)
    }

    def operands_of(name, v):
        known = not isinstance(v, core.Literal) and v in made and made[v].primitive.name == name
        return made[v].invars if known else ()

    def number(*values):  # the value of a literal, or of the difference of two
        if all(isinstance(v, core.Literal) and np.ndim(v.val) == 0 for v in values):
            return float(values[0].val) - sum(float(v.val) for v in values[1:])
        parts = operands_of("sub", values[0]) if len(values) == 1 else ()
        return number(*parts) if parts else None

    def share(term):
        return next((found for found in map(number, operands_of("mul", term)) if found is not None), 0.0)

    def averaged(v):
        return {x for term in operands_of("add", v) for x in operands_of("mul", term) if number(x) is None}

    for equation in reversed(jaxpr.eqns):
        operands = [v for v in equation.invars if not isinstance(v, core.Literal)]
        reached = [v in needed for v in equation.outvars]
        if any(reached):
            begins = equation.primitive.name == "select_n"
            needed |= {v for v in operands if not (begins and averaged(v) & set(operands))}
        if equation.primitive.name == "add" and not any(reached) and abs(sum(map(share, operands)) - 1) < 1e-3:
            yield equation
        for body in jaxprs.open_jaxprs(equation):
            alike = len(body.outvars) == len(reached)
            yield from _unread_averages(body, reached if alike else [True] * len(body.outvars))


def find_untrainable_dtypes(params: Tree, flags: Tree) -> Finding:
    """Finds trained parameters without a real gradient. flags: bools like the parameters, True where trained."""
    found = [(leaf_path(path), jnp.result_type(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    found = [each for each, flag in zip(found, jax.tree.leaves(flags), strict=True) if flag]
    wrong = [f"{path} ({dtype})" for path, dtype in found if not jnp.issubdtype(dtype, jnp.floating)]
    if wrong:
        words = f"{list_first_few(wrong)} have no real gradient: keep them out of params (complex: two real arrays)"
        return Finding("parameter dtypes", "error", words, {"parameters": len(wrong)})
    return Finding("parameter dtypes", "ok", "all trained parameters are real floats", {"parameters": 0})


def is_low_precision(leaf: jax.Array) -> bool:
    """Whether a leaf holds floats of fewer than 32 bits."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.result_type(leaf).itemsize < 4


def _may_hold_data(shape: tuple[int, ...], example_shapes: set, rows: int, examples: int) -> bool:
    """Whether an array may hold the dataset, the batch, or some rows of either."""
    if len(shape) == 0 or shape[0] < 2:
        return False
    return shape[0] == examples or (shape[1:] in example_shapes and (len(shape) > 1 or shape[0] == rows))


def _bytes_of(array: Any) -> int:
    return math.prod(jnp.shape(array)) * jnp.result_type(array).itemsize if hasattr(array, "dtype") else 0


# The primitives that turn a key into random numbers.
DRAWS = ("random_bits", "threefry2x32", "threefry4x32", "rng_bit_generator")
KEYS = {"threefry2x32": 2, "threefry4x32": 4}  # how many leading operands hold the key; 1 for other primitives


def find_constant_keys(loss: Callable, params: Tree, example: Tree, *, with_key: bool) -> Finding:
    """Checks whether the loss draws random numbers from a key that depends on neither the example nor its key.

    loss: a traceable function, as for `private_updates`.
    """
    varying = (example, jax.eval_shape(lambda: jax.random.key(0))) if with_key else (example,)
    closed = jax.make_jaxpr(loss)(params, *varying)
    return find_constant_keys_in(closed, len(closed.jaxpr.invars) - len(jax.tree.leaves(varying)))


def find_constant_keys_in(closed: core.ClosedJaxpr, fixed: int) -> Finding:
    """`find_constant_keys` of a closed jaxpr, whose first `fixed` inputs are the same for all examples."""
    draws = set()

    def visit(equation, varies, control):
        name = equation.primitive.name
        if name in DRAWS and not any(varies[: KEYS.get(name, 1)]):
            draws.add(id(equation))  # even if a later iteration of a loop has another key

    propagate_marks(closed, [number >= fixed for number in range(len(closed.jaxpr.invars))], visit)
    if draws:
        words = (
            "the loss draws random numbers from a constant key: all examples and steps have the same ones, such as one "
            "dropout mask. Take the key of the example: with_key=True and loss(params, example, key). If an nnx module "
            "keeps its random numbers, build it with nnx.Rngs(params=0, dropout=1), because nnx.reseed(module, "
            "dropout=key) changes only a stream of that name (docs/flax.md#nnx). Numbers that are meant to be fixed, "
            "such as random features, are right: draw them before the loss, and this row is silent"
        )
        return Finding("randomness", "warning", words, {"constant": len(draws)})
    return Finding("randomness", "ok", "the loss draws no random numbers from a constant key", {"constant": 0})

"""The batch, the data and delta against the sampling, and the privacy cost of the whole run."""

import itertools
import math
import warnings
from typing import Any

import jax
import numpy as np

from dpx import keys
from dpx.accounting import epsilon
from dpx.accounting.cost import cost_of_run
from dpx.accounting.ledger import without_truncation
from dpx.audit.setup.report import Finding
from dpx.mechanism import Mechanism
from dpx.sampling.batch import Batch, included_rows
from dpx.sampling.loading import length_of
from dpx.sampling.schemes import Sampling
from dpx.states.record import fingerprint
from dpx.sums.float_pair import ETA
from dpx.values import Tree, batch_size, for_whom, rounded_up

FAR = 6.0  # standard deviations of a Poisson batch size; a drawn batch is further away with probability 1e-8 or so
COSTLY = 0.01  # the share of epsilon that cut batches may cost
WEAK = 10.0  # an epsilon above which little is promised


def rows_that_count(batch: Batch, sampling: Sampling) -> tuple[np.ndarray, Finding]:
    """Which rows count, bool (B,), and whether the sampling draws this many."""
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
    """The epsilon of the whole run."""
    if steps is None or delta is None:
        return Finding("privacy", "note", "not known without steps and delta, or a budget")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a large delta, which has its own finding
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


def find_truncated_batches(optimizer: Mechanism, steps: int | None, delta: float | None) -> list[Finding]:
    """What it costs that the sampling truncates batches (`most_rows`); nothing for other samplings."""
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


def find_frozen(flags: Tree, params: Tree) -> Finding:
    """How many parameters the mechanism trains. flags: bools like the parameters."""
    sizes = [math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params)]
    trained, total = sum(itertools.compress(sizes, jax.tree.leaves(flags))), sum(sizes)
    words = f"{trained} of {total} parameters are trained" if trained < total else f"all {total} parameters are trained"
    return Finding("trained", "ok", words, {"trained": trained, "parameters": total})


def find_guessable_key(key: jax.Array | None) -> Finding:
    """Whether the mechanism's key, (), may have fewer than 64 secret bits."""
    if key is not None and keys.is_small(key):
        return Finding("key", "warning", keys.SMALL, {"small": True})
    return Finding("key", "ok", "the key has more than 32 bits", {"small": False})

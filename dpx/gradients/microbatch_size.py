"""How many examples are worked on at once where nobody says so: on a CPU, as many as stay in its cache.

What a step of a whole batch writes is memory that the system has to clear, page by page, and that no cache holds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core

from dpx.gradients import ghost

Tree = Any

CACHE = 2**25  # bytes
SPILLS = 4 * CACHE  # bytes that a whole batch needs, where parts are worth their loop
FUSED = 4  # numbers that the equations of a loss give, for one that XLA writes
SUMS = 12  # examples' bytes that a part must hold for every byte of its sums, which are read and written once a part


class Forward(NamedTuple):
    """numbers: that the loss of one example makes on its way. convolves: whether it convolves anything."""

    numbers: int
    convolves: bool


def forward_cost(loss: Callable, params: Tree, example: Tree) -> Forward:
    jaxpr = jax.make_jaxpr(loss)(params, example).jaxpr
    return Forward(_numbers(jaxpr), _convolves(jaxpr))


def examples_at_once(made: Forward, plan: ghost.Plan | str, params: Tree, size: int) -> int:
    """Of a batch of `size` examples; all of them unless parts are known to be faster.

    They are not where anything convolves, which XLA's loops on a CPU make slow, nor on an accelerator.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or made.convolves:
        return size
    leaves = jax.tree.leaves(params)
    stacked = sum(leaf.size for number, leaf in enumerate(leaves) if _is_stacked(plan, number))
    needed = 4 * (made.numbers // FUSED + stacked)  # bytes of one example
    if needed * size < SPILLS:
        return size
    at_once = max(1, max(CACHE, SUMS * 4 * sum(leaf.size for leaf in leaves)) // needed)
    without_rest = [n for n in range(math.ceil(at_once / 2), at_once + 1) if size % n == 0]  # a rest compiles twice
    return max(without_rest, default=math.ceil(size / math.ceil(size / at_once)))


def _is_stacked(plan: ghost.Plan | str, leaf: int) -> bool:
    return isinstance(plan, str) or plan.choices[leaf].way.keeps_gradients


def _numbers(jaxpr) -> int:
    """How many numbers the equations give, those in the body of a loop once for every turn."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(_numbers(body) for body in _bodies(equation))
        total += equation.params.get("length", 1) * inner or sum(v.aval.size for v in equation.outvars)
    return total


def _convolves(jaxpr) -> bool:
    return any(
        equation.primitive.name == "conv_general_dilated" or any(map(_convolves, _bodies(equation)))
        for equation in jaxpr.eqns
    )


def _bodies(equation):
    for value in jax.tree.leaves(equation.params, is_leaf=lambda node: isinstance(node, core.Jaxpr | core.ClosedJaxpr)):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value

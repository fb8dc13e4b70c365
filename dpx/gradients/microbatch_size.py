"""The default number of examples in memory at once: on a CPU, as many as fit in its cache.

A step over the whole batch writes fresh memory, which the kernel must zero and which does not fit in the cache.
"""

import math
from typing import Any, NamedTuple

import jax
from jax.extend import core

from dpx.gradients import ghost

Tree = Any  # a pytree of arrays

# For one CPU core. benchmarks/step.py times the steps, benchmarks/memory.py measures their memory.
CACHE_BYTES = 2**25  # bytes that the examples of one microbatch may fill
WHOLE_BATCH_BYTES = 4 * CACHE_BYTES  # below this, one pass over the whole batch is as fast as a loop
EQUATION_NUMBERS_PER_WRITE = 4  # XLA fuses equations, so it writes about one of four numbers that they define
EXAMPLE_BYTES_PER_SUM_BYTE = 12  # of a microbatch, at least, because every microbatch reads and writes all sums


class ForwardCost(NamedTuple):
    """Counts in the equations of the loss of one example, which predict its memory and time.

    numbers: int, how many numbers the equations define
    convolves: bool, True if one of them is a convolution
    """

    numbers: int
    convolves: bool


def forward_cost(jaxpr: core.Jaxpr) -> ForwardCost:
    """Counts in the jaxpr of the loss of one example."""
    return ForwardCost(_numbers(jaxpr), _convolves(jaxpr))


def choose_microbatch_size(cost: ForwardCost, plan: ghost.Plan | str, params: Tree, size: int) -> int:
    """How many of the `size` examples of a batch one microbatch holds: all, unless fewer are known to be faster.

    All of them on an accelerator and on several devices. All of them also for a loss with convolutions, because XLA
    runs convolutions slowly inside a loop on a CPU.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or cost.convolves:
        return size
    leaves = jax.tree.leaves(params)
    kept = sum(leaf.size for number, leaf in enumerate(leaves) if _keeps_gradients(plan, number))
    example_bytes = 4 * (cost.numbers // EQUATION_NUMBERS_PER_WRITE + kept)
    if example_bytes * size < WHOLE_BATCH_BYTES:
        return size
    sum_bytes = 4 * sum(leaf.size for leaf in leaves)
    largest = max(1, max(CACHE_BYTES, EXAMPLE_BYTES_PER_SUM_BYTE * sum_bytes) // example_bytes)
    # A size that leaves no rest is better, because a rest is compiled separately.
    without_rest = [n for n in range(math.ceil(largest / 2), largest + 1) if size % n == 0]
    return max(without_rest, default=math.ceil(size / math.ceil(size / largest)))


def _keeps_gradients(plan: ghost.Plan | str, leaf: int) -> bool:
    return isinstance(plan, str) or plan.choices[leaf].way.keeps_gradients


def _numbers(jaxpr) -> int:
    """How many numbers the equations define; those in the body of a loop count once for every iteration."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(_numbers(body) for body in ghost.bodies(equation))
        total += equation.params.get("length", 1) * inner or sum(v.aval.size for v in equation.outvars)
    return total


def _convolves(jaxpr) -> bool:
    return any(
        equation.primitive.name == "conv_general_dilated" or any(map(_convolves, ghost.bodies(equation)))
        for equation in jaxpr.eqns
    )


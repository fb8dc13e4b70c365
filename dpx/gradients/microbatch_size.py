"""The default number of examples in memory at once: as many as fit in memory, and on a CPU in its cache, because a
step over the whole batch writes fresh memory, which the kernel must zero and the cache cannot hold."""

import math
from typing import NamedTuple

import jax
from jax.extend import core

from dpx.gradients import ghost
from dpx.trees import Tree, described
from dpx.xla.apart import may_mix_rows
from dpx.xla.convolutions import CALLS
from dpx.xla.jaxprs import bodies, convolves
from dpx.xla.place import PLATFORMS, Place, here

# For one CPU core. benchmarks/step.py times the steps, benchmarks/memory.py measures their memory.
CACHE_BYTES = 2**25  # bytes that the examples of one microbatch may fill
WHOLE_BATCH = 4  # times these bytes: below, one pass is about as fast as a loop, and compiles faster
EQUATION_NUMBERS_PER_WRITE = 4  # XLA fuses equations, so it writes about one in four numbers that they define
EXAMPLE_BYTES_PER_SUM_BYTE = 12  # at least, in a microbatch, because every microbatch reads and writes all sums

# The same for a loss with convolutions, which are fastest on few examples, because they copy their operands.
CONVOLUTION_BYTES = 2**21
CONVOLUTION_BYTES_PER_SUM_BYTE = 4
CONVOLUTION_EXAMPLES = 8  # at least; with fewer, convolutions are slower


class ForwardCost(NamedTuple):
    """Counts in the equations of the loss of one example, which predict its memory and time.

    numbers: int, how many numbers the equations define. convolves: bool, whether one of them is a convolution
    loops: bool, True if `xla.convolutions.reordered` finds all convolutions, so that none is slow in a loop on a CPU
    mixes: bool, True if rows need `xla.apart.rows_apart`
    """

    numbers: int
    convolves: bool
    loops: bool
    mixes: bool


def forward_cost(jaxpr: core.Jaxpr) -> ForwardCost:
    return ForwardCost(_numbers(jaxpr), convolves(jaxpr), not hides_convolutions(jaxpr), may_mix_rows(jaxpr))


class Microbatches(NamedTuple):
    """How many examples one microbatch holds, and the reason in words; "" if it holds the whole batch."""

    size: int
    reason: str = ""


def require_platform(platform: str | None) -> str:
    """The platform that a program is compiled for, by default that of `here()`. Raises ValueError unless it is one of
    PLATFORMS."""
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)}, or None, got {described(platform)}")
    return platform or here().platform


def choose_microbatch_size(
    cost: ForwardCost, plan: ghost.GhostPlan | ghost.ForwardPlan | str, params: Tree, size: int, place: Place
) -> Microbatches:
    """How many of the `size` examples of a batch one microbatch holds: all, unless they do not fit in half of the
    device's memory, or fewer are known to be faster. More are faster on an accelerator, on several devices, and for
    convolutions that are slow in a loop on a CPU."""
    leaves = jax.tree.leaves(params)
    keeps = [isinstance(plan, str) or plan.keeps_gradients(number) for number in range(len(leaves))]
    kept = sum(leaf.size for leaf, keep in zip(leaves, keeps, strict=True) if keep)
    example_bytes = max(1, 4 * (cost.numbers // EQUATION_NUMBERS_PER_WRITE + kept))
    memory = place.most_memory
    if memory and example_bytes * size > memory / 2:
        largest = max(1, memory // 2 // example_bytes)
        return Microbatches(_without_rest(largest, size), f"all {size} would not fit in half of the device's memory")
    if place.platform != "cpu" or place.devices > 1 or not cost.loops:
        return Microbatches(size)
    sum_bytes = 4 * sum(leaf.size for leaf in leaves)
    if cost.convolves:
        filled, per_sum_byte, least = CONVOLUTION_BYTES, CONVOLUTION_BYTES_PER_SUM_BYTE, CONVOLUTION_EXAMPLES
    else:
        filled, per_sum_byte, least = CACHE_BYTES, EXAMPLE_BYTES_PER_SUM_BYTE, 1
    if example_bytes * size < WHOLE_BATCH * filled:
        return Microbatches(size)
    largest = max(least, max(filled, per_sum_byte * sum_bytes) // example_bytes)
    at_once = _without_rest(largest, size) if largest < size else size
    return Microbatches(at_once, f"all {size} would not fit in the CPU's cache" if at_once < size else "")


def _without_rest(largest: int, size: int) -> int:
    """At most `largest` of `size` examples, if possible without a rest, which would be compiled separately."""
    without_rest = [n for n in range(math.ceil(largest / 2), largest + 1) if size % n == 0]
    return max(without_rest, default=math.ceil(size / math.ceil(size / largest)))


def _numbers(jaxpr) -> int:
    """How many numbers the equations define; the body of a loop counts once for each iteration."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(_numbers(body) for body in bodies(equation))
        total += equation.params.get("length", 1) * inner or sum(v.aval.size for v in equation.outvars)
    return total


def hides_convolutions(jaxpr: core.Jaxpr) -> bool:
    """Whether `reordered` cannot reach a convolution: in a loop, a branch, or under `jax.checkpoint`."""

    def hides(equation):
        inside = hides_convolutions if equation.primitive.name in CALLS else convolves
        return any(map(inside, bodies(equation)))

    return any(map(hides, jaxpr.eqns))

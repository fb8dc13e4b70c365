"""Kernels that a loss makes of its parameters by any function, such as weight norm or the product of two parameters.

Such a kernel W = f(p) is the same for all examples. So an example's gradient by p is J^T, the transpose of the
derivative of f, of its gradient A^T B by W. Where each iteration makes a kernel of its layer, W is the kernels of all
layers. No Gram matrix has the norm of J^T A^T B. So this gradient is computed for one example after another, measured
and thrown away, and computed again for the sum; or it is kept, where that is cheaper.

As f may be anything, nothing bounds the rounding of J^T. In its place, the sum measures every gradient that it adds,
and shortens one that is longer than the norm that was found first (`shortening_factors`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpx.gradients.ghost import algorithms, interpreter, norms, rules, weighted_sums
from dpx.gradients.ghost.algorithms import OPERATIONS_PER_BYTE, NormAlgorithm, Uses
from dpx.gradients.ghost.program import Equation, MadeKernel, Program, ScanStep, Use, View
from dpx.gradients.ghost.rules import Site
from dpx.sums.clipped_sum import plus_finished, total_of_rows, weighted_sum
from dpx.sums.clipped_sum import repeat_to_shape as spread
from dpx.sums.float_pair import FloatPair

PASSES = 1.0  # over kernels and parameters in a cache: what J^T and a norm cost, in passes over fresh memory

TURN = 1.5e5  # operations; what a turn of a loop over examples costs, with the loss of a product of many examples


class MadeKernelGroup(NamedTuple):
    """Parameters of which kernels are made, and all that these kernels share.

    leaves: the numbers of the parameters. kernels: for each, the number of the public value, and where the loss uses it
    """

    leaves: tuple[int, ...]
    kernels: tuple[tuple[int, Uses], ...]

    @property
    def uses(self) -> Uses:
        return Uses(tuple(site for _, uses in self.kernels for site in uses.sites))

    def cheapest(self, shapes: list[tuple[int, ...]], *, force: bool) -> NormAlgorithm | None:
        """How to compute norms and sums; None for the gradients of the backward pass, unless `force`. shapes: of all
        parameters."""
        of_leaves = sum(math.prod(shapes[leaf]) for leaf in self.leaves)
        of_kernels = sum(math.prod(uses.shape) for _, uses in self.kernels)
        through = PASSES * OPERATIONS_PER_BYTE * 4 * (of_leaves + of_kernels)
        keep = (3 if 4 * of_leaves <= algorithms.CACHED_BYTES else 5) * OPERATIONS_PER_BYTE * 4 * of_leaves
        once = TURN + through + sum(map(algorithms.gradient_operations, self.uses.sites))
        backward_pass = through + keep + sum(algorithms.gradient_cost(uses) for _, uses in self.kernels)
        ways = {algorithms.PRODUCT: once + keep, algorithms.AGAIN: 2 * once}
        way = min(ways, key=lambda way: ways[way])
        return way if force or ways[way] < backward_pass else None


def find_made_kernels(
    program: Program, wanted: set[int], made: Mapping[Any, Equation], shapes: list[tuple[int, ...]]
) -> list[MadeKernelGroup]:
    """The kernels of every `wanted` parameter whose kernels can all be followed, in groups with no parameter in common.
    made: as in `rules.recognize`. shapes: of all parameters."""
    uses = {kernel: _kernel_uses(kernel, program, made, shapes) for kernel in program.kernels if kernel.leaves & wanted}
    known = wanted.difference(*(kernel.leaves for kernel, found in uses.items() if found is None))
    groups: list[MadeKernelGroup] = []
    for kernel, found in uses.items():
        if found is not None and kernel.leaves & known:
            meet = [group for group in groups if not kernel.leaves.isdisjoint(group.leaves)]
            leaves = sorted((kernel.leaves & known).union(*(group.leaves for group in meet)))
            kernels = *(each for group in meet for each in group.kernels), (kernel.value, found)
            groups = [*(group for group in groups if group not in meet), MadeKernelGroup(tuple(leaves), kernels)]
    return groups


def _kernel_uses(
    kernel: MadeKernel, program: Program, made: Mapping[Any, Equation], shapes: list[tuple[int, ...]]
) -> Uses | None:
    """Where the loss uses a kernel; None if it is not followed everywhere."""
    sites = [_site(use, program, made) for use in kernel.uses]
    if None in sites:
        return None
    number, loops = program.slice(kernel.value)
    if not isinstance(number, int):
        return Uses(tuple(filter(None, sites)), shape=shapes[kernel.value])
    equation: Any = program.equations[number]
    aval = equation.jaxpr.outvars[equation.outputs.index(kernel.value)].aval
    return Uses(tuple(filter(None, sites)), shape=(*(equation.counts[loop] for loop in loops), *aval.shape))


def _site(use: Use, program: Program, made: Mapping[Any, Equation]) -> Site | None:
    """The site of a whole kernel at one use of it, or None."""
    loops = [(place, step) for place, step in enumerate(use.view.steps, 1) if isinstance(step, ScanStep)]
    end = max((place for place, step in loops if step.sliced), default=0)
    begin, rest = View(use.view.steps[:end]), View(use.view.steps[end:])
    site = rules.recognize(use._replace(view=rest), program, made)
    if isinstance(site, str) or begin.scan_repeats or 0 in begin.slices or (end and (site.lookup or site.record)):
        return None
    if rules.is_complex(program.equations[use.equation]):
        return None
    around = View(tuple(loop._replace(sliced=False) for _, loop in loops))
    return (_site_of_slices(site, begin) if end else site)._replace(use=use._replace(view=around))


def _site_of_slices(site: Site, view: View) -> Site:
    """The site of a whole kernel, from that of one of its slices: each has groups of its own. view: makes slices."""
    kernels, positions, fan_in, fan_out = site.sizes
    slices = math.prod(view.slices)

    def matrices(inputs, dy):
        flat = jax.tree.map(lambda x: x.reshape(slices, *x.shape[len(view.slices) :]), (inputs, dy))
        return tuple(x.reshape(slices * kernels, *x.shape[2:]) for x in jax.vmap(site.matrices)(*flat))

    def arrange(w):
        w = view.apply_to(w)
        return jax.vmap(site.arrange)(w.reshape(slices, *w.shape[len(view.slices) :])).reshape(-1, fan_in, fan_out)

    sizes = slices * kernels, positions, fan_in, fan_out
    return site._replace(sizes=sizes, matrices=matrices, arrange=arrange, apply=None)


class KernelBackward(NamedTuple):
    """How the gradients of one example by the parameters of a `MadeKernelGroup` are computed.

    pullback: of gradients by the kernels, by number of the value. scales: of the mechanism, by leaf
    """

    made: MadeKernelGroup
    pullback: Callable[[dict[int, jax.Array]], dict[int, jax.Array]]
    scales: Mapping[int, jax.Array]

    def gradients(self, records: list) -> tuple[list[jax.Array], list[jax.Array]]:
        """Those of one example, float32, and their norms. records: the inputs and cotangents at each site."""
        left, cotangents = iter(records), {}
        for value, uses in self.made.kernels:
            own = [next(left) for _ in uses.sites]
            alone: list[tuple[int, ...]] = [(number,) for number in range(len(own))]
            cotangents[value] = weighted_sums.example_gradient(uses.sites, alone, uses.shape, own, jnp.float32(1))
        found = self.pullback(cotangents)
        grads = [found[leaf].astype(jnp.float32) * self.scales.get(leaf, 1) for leaf in self.made.leaves]
        grads = jax.lax.optimization_barrier(grads)  # norm and sum must read the same numbers
        return grads, list(map(norms.frobenius, grads))


def backward(
    made: MadeKernelGroup, program: Program, leaves: list[jax.Array], scales: Mapping[tuple[int, int], jax.Array]
) -> KernelBackward:
    """leaves: all parameters. scales: by the numbers of a leaf and of its part, of which there is one here."""

    def kernels(some):
        every = [some.get(number, leaf) for number, leaf in enumerate(leaves)]
        return interpreter.public_values(program, every, {value for value, _ in made.kernels})

    values, pullback = jax.vjp(kernels, {leaf: leaves[leaf] for leaf in made.leaves})

    def of_kernels(cotangents):
        return pullback({value: x.astype(values[value].dtype) for value, x in cotangents.items()})[0]

    return KernelBackward(made, of_kernels, {leaf: scales[leaf, 0] for leaf in made.leaves if (leaf, 0) in scales})


def measure_gradients(backward: KernelBackward, records: list, *, keep: bool) -> tuple[Any, list[jax.Array]]:
    """What `sum_kernel_gradients` needs of B examples, and the norms of their gradients, (B,), by parameter."""

    def of_example(record):
        grads, found = backward.gradients(record)
        return grads if keep else [], found

    grads, found = weighted_sums.map_sequentially(of_example, records)
    return grads if keep else (records, found), found


def sum_kernel_gradients(
    backward: KernelBackward, kept: Any, factors: list[jax.Array], *, keep: bool
) -> list[FloatPair]:
    """sum_i f_i z_i for each parameter. kept: from `measure_gradients`. factors: float32 (B,), for each parameter."""
    if keep:
        return [total_of_rows(lambda some: weighted_sum(*some), rows) for rows in zip(factors, kept, strict=True)]

    def sum_block(rows):
        def add(number, totals):
            (record, first), factors = weighted_sums.take_row(rows, number)
            grads, found = backward.gradients(record)
            factors = [
                f * weighted_sums.shortening_factors(*norms) for f, *norms in zip(factors, found, first, strict=True)
            ]
            more = [jnp.where(spread(f, z.shape) != 0, f * z, 0) for f, z in zip(factors, grads, strict=True)]
            return plus_finished(totals, more)

        return jax.lax.fori_loop(0, len(rows[1][0]), add, begin)

    shapes = jax.eval_shape(lambda record: backward.gradients(record)[0], jax.tree.map(lambda x: x[0], kept[0]))
    begin = [jnp.zeros(shape.shape, jnp.float32) for shape in shapes]
    numbers = sum(shape.size for shape in shapes)
    total = total_of_rows(lambda rows: weighted_sums.sum_in_blocks(sum_block, rows, numbers), (kept, factors))
    low = total.low or [None] * len(begin)
    return [FloatPair(*pair) for pair in zip(total.high, low, strict=True)]

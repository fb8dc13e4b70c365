"""Kernels that a loss makes from its parameters, by concatenation, masks, scales, complex numbers or other functions.

A kernel W is the same for all examples. If each element of a parameter has one place in W, an example's gradient with
respect to the parameter is a block of A^T B, from some columns of A and B, times the slopes: the derivatives of these
elements of W, which are public. Slopes that vary along only one side go into A or B. Others multiply the block element
by element, as a mechanism's scale does. A complex product is a real one with twice the positions.

A kernel may also be made by any other function, W = f(p), such as weight norm or the product of two parameters. An
example's gradient with respect to p is then J^T applied to A^T B, its gradient with respect to W, where J is the
derivative of f. If each iteration makes a kernel for its layer, W is the kernels of all layers. No Gram matrix yields
the norm of J^T A^T B. So this gradient is computed for one example after another, measured and discarded, and computed
again for the sum; or it is kept, if that is cheaper.

Because f may be anything, nothing bounds the rounding of J^T. Instead, the sum measures every gradient that it adds,
and shortens any that is longer than the norm that was measured first (`shortening_factors`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpx.gradients.ghost import algorithms, interpreter, norms, rules, weighted_sums
from dpx.gradients.ghost.algorithms import OPERATIONS_PER_BYTE, NormAlgorithm, ParameterUses
from dpx.gradients.ghost.program import (
    CALLS,
    ELEMENTWISE,
    Constant,
    ElementwiseStep,
    Equation,
    LossProgram,
    MadeKernel,
    ParameterUse,
    ParameterView,
    ScanStep,
)
from dpx.gradients.ghost.rules import CaptureReplacements, Site
from dpx.sums.clipped_sum import add_behind_barrier, total_of_rows, weighted_sum
from dpx.sums.clipped_sum import repeat_to_shape as spread
from dpx.sums.rounding import FloatPair
from dpx.xla import jaxprs

Values = Mapping[int, jax.Array]  # public values, by index
ALL = slice(None)
PULLBACK_PASSES = 1.0  # cost of J^T and a norm, in passes over kernels and parameters in fresh memory
FLOPS_PER_TURN = 1.5e5  # cost of one turn of a loop over examples, which cannot use products of many examples


class ElementwiseSlopes(NamedTuple):
    """The derivatives of the function that an `ElementwiseStep` applies.

    reads: the indices of the public values that they need. axes: the axes along which they vary
    multiply: (x, Values) -> x times the derivatives, element by element
    """

    reads: tuple[int, ...]
    axes: tuple[int, ...]
    multiply: Callable[[Any, Values], jax.Array]


def parameter_site_in_kernel(site: Site, use: ParameterUse, shape: tuple[int, ...], program: LossProgram) -> Site | str:
    """The site of a parameter of this shape that is part of a kernel, or why it is not followed. site: the kernel's
    site. use: the use of the parameter through the kernel."""
    if site.lookup or site.record:
        return "used in a lookup, or in custom_vjp_call, after an equation that computes or places"
    view, linear = use.view, cast(Callable, site.apply)
    steps = [step for step in view.steps if isinstance(step, ElementwiseStep)]
    slopes = {id(step): found for step in steps if (found := _slopes_of_step(step, program))}
    if len(slopes) < len(steps):
        return "used in a function that is not of each number alone, or of what an iteration computes"
    labels = _slope_labels(site, view, shape, slopes)
    box = _bounding_box(labels != 0)
    if box is None:
        return "used in a kernel that has other elements between"
    labels, reads = labels[box], frozenset(number for each in slopes.values() for number in each.reads)
    by_input, by_output = (bool((labels != first).any()) for first in (labels[:, :1], labels[:, :, :1]))
    is_complex = rules.is_complex(program.equations[use.equation])

    def slopes_in_kernel(values: Values) -> jax.Array:
        """The slopes, arranged as (K, I, O)."""
        ones = jnp.ones(shape, jnp.float32)
        return site.arrange(view.apply_steps(ones, lambda step, x: slopes[id(step)].multiply(x, values)))[box]

    moved = site._replace(
        use=use,
        apply=lambda inputs, w: linear(inputs, view.apply_steps(w)),
        arrange=lambda w: site.arrange(view.apply_steps(w))[box],
        reads=reads,
    )
    if by_input and by_output:
        if is_complex:
            return "used in a complex kernel whose numbers have different slopes"
        place = jax.linear_transpose(moved.arrange, jax.ShapeDtypeStruct(shape, jnp.float32))
        moved = moved._replace(slopes=lambda values: place(slopes_in_kernel(values).astype(jnp.float32))[0])
    of_a = (lambda values: slopes_in_kernel(values)[:, None, :, 0]) if by_input and not by_output else None
    of_b = (lambda values: slopes_in_kernel(values)[:, :1]) if steps and not by_input else None
    if box != (ALL, ALL, ALL) or is_complex or of_a:
        return _product_block_site(moved, labels.shape, box, of_a, of_b, is_complex=is_complex)
    return moved if of_b is None else moved._replace(record=CaptureReplacements(None, _scaled_cotangents(site, of_b)))


def _product_block_site(site: Site, sizes: tuple[int, int, int], box: tuple, of_a, of_b, *, is_complex: bool) -> Site:
    """The site of the block `box`, (K, I, O), of A^T B. of_a, of_b: Values -> factors of A and of B, or None."""
    groups, rows, columns = box

    def side(x, of_columns, factors, sign):
        x = x[groups][:, :, of_columns]
        x = x if factors is None else x * factors
        return jnp.concatenate([jnp.real(x), sign * jnp.imag(x)], 1) if is_complex else x

    def left(inputs, dy, values):
        return (side(site.matrices(inputs, dy)[0], rows, of_a and of_a(values), 1),)

    def right(inputs, dy, values):
        return side(site.matrices(inputs, dy)[1], columns, of_b and of_b(values), -1)

    kernels, fan_in, fan_out = sizes
    positions = site.sizes[1] * (2 if is_complex else 1)
    same = () if of_a else tuple((each.start, each.stop, each.step) for each in (groups, rows))
    return rules.captured_matrix_site(site, (kernels, positions, fan_in, fan_out), left, right, same)


def _scaled_cotangents(site: Site, of_b: Callable) -> Callable:
    def right(inputs, dy, values):
        def b(dy):
            return site.matrices(inputs, dy)[1]

        dy = dy.astype(jnp.float32)
        return jax.linear_transpose(b, dy)(b(dy) * of_b(values).astype(jnp.float32))[0]

    return right


def _slopes_of_step(step: ElementwiseStep, program: LossProgram) -> ElementwiseSlopes | None:
    """The slopes of a step; None if they are not public, or if an element of the result may depend on others."""
    equations = [program.equations[number] for number in step.equations]
    base, avals = step.base, {}
    made = {base, *(output for equation in equations for output in equation.outputs)}
    for equation in equations:
        for value, variable in zip(equation.inputs, equation.jaxpr.invars, strict=True):
            key = program.original_index(value)
            avals.setdefault(id(key) if isinstance(key, Constant) else key, (key, variable.aval))
    others = [(key, aval) for key, aval in avals.values() if isinstance(key, Constant) or key not in made]
    of_base = avals[base][1]

    def derivative(x, base_value, *values):
        known = {id(key) if isinstance(key, Constant) else key: y for (key, _), y in zip(others, values, strict=True)}

        def function(base_value):
            found = known | {base: base_value}
            for equation in equations:
                keys = map(program.original_index, equation.inputs)
                operands = [found[id(key) if isinstance(key, Constant) else key] for key in keys]
                found.update(zip(equation.outputs, equation.bind(*operands), strict=True))
            return found[equations[-1].outputs[0]]

        return jax.jvp(function, (base_value,), (x.astype(of_base.dtype),))[1]

    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (of_base, of_base, *(a for _, a in others))]
    closed = jax.make_jaxpr(derivative)(*shapes)
    read = jaxprs.inputs_read(closed.jaxpr)[1:]
    wanted = [key for key, is_read in zip([base, *(key for key, _ in others)], read, strict=True) if is_read]
    public = all(isinstance(key, Constant) or key in program.public for key in wanted)
    if not (public and _is_elementwise_program(closed.jaxpr, {closed.jaxpr.invars[0]}, of_base.shape)):
        return None
    differ = set(range(len(of_base.shape))) if read[0] else set()
    for (key, aval), is_read in zip(others, read[1:], strict=True):
        differ |= _nonconstant_axes(key, aval.shape, program) if is_read else set()

    def multiply(x, values):
        def value(key, shape):
            if isinstance(key, Constant):
                return key.value
            return values[key] if key in wanted else jnp.zeros(shape.shape, shape.dtype)

        known = map(value, [base, *(key for key, _ in others)], shapes[1:])
        return derivative(x, *known)

    reads = tuple(key for key in wanted if not isinstance(key, Constant))
    return ElementwiseSlopes(reads, tuple(sorted(axis for axis in differ if of_base.shape[axis] > 1)), multiply)


def _nonconstant_axes(value: int | Constant, shape: tuple[int, ...], program: LossProgram) -> set[int]:
    """The axes along which a public value may vary."""
    origin = None if isinstance(value, Constant) else program.public.get(value)
    if isinstance(origin, int) and (made := program.equations[origin].jaxpr).primitive.name == "broadcast_in_dim":
        before = made.invars[0].aval.shape
        return {axis for axis, size in zip(made.params["broadcast_dimensions"], before, strict=True) if size > 1}
    return {axis for axis, size in enumerate(shape) if size > 1}


def _is_elementwise_program(jaxpr: core.Jaxpr, moving: set, shape: tuple[int, ...]) -> bool:
    """Whether every element of a result depends on the variables `moving` only through their elements in its own place.
    All must have this shape."""
    for equation in jaxpr.eqns:
        types: list[Any] = [variable.aval for variable in equation.outvars]
        among = [i for i, v in enumerate(equation.invars) if not isinstance(v, core.Literal) and v in moving]
        if not among:
            continue
        if equation.primitive.name in CALLS:
            (body,) = jaxprs.open_jaxprs(equation)
            inside = {body.invars[i] for i in among}
            if not _is_elementwise_program(body, inside, shape):
                return False
            moving |= {v for v, inner in zip(equation.outvars, body.outvars, strict=True) if inner in inside}
        elif equation.primitive.name in ELEMENTWISE and all(aval.shape == shape for aval in types):
            moving |= set(equation.outvars)
        else:
            return False
    return True


def _slope_labels(
    site: Site, view: ParameterView, shape: tuple[int, ...], slopes: dict[int, ElementwiseSlopes]
) -> np.ndarray:
    """Labels the places of a kernel, (K, I, O): 0 where it has no element of the parameter; other labels are equal only
    where the slopes are equal."""

    def label(step, x):
        axes = slopes[id(step)].axes
        sizes = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
        count = int(np.prod(sizes))
        if count * int(x.max(initial=0)) >= 2**30:  # too many labels for int32: treats all slopes as different
            count, sizes, x = x.size, x.shape, (x > 0).astype(np.int32)
        return jnp.where(x > 0, x * count + np.arange(count, dtype=np.int32).reshape(sizes), 0)

    with jax.ensure_compile_time_eval():
        return np.asarray(site.arrange(view.apply_steps(jnp.ones(shape, np.int32 if slopes else np.int8), label)))


def _bounding_box(found: np.ndarray) -> tuple[slice, slice, slice] | None:
    """The box of (K, I, O) where `found` is True; None if these places form no box."""
    slices = []
    for axis, size in enumerate(found.shape):
        places = np.flatnonzero(found.any(tuple(other for other in range(3) if other != axis)))
        if not len(places):
            return None
        step = int(places[1] - places[0]) if len(places) > 1 else 1
        some = slice(int(places[0]), int(places[-1]) + 1, step)
        if len(range(*some.indices(size))) != len(places):
            return None
        slices.append(ALL if len(places) == size else some)
    box = slices[0], slices[1], slices[2]
    return box if found[box].all() else None


class MadeKernelGroup(NamedTuple):
    """Parameters and the kernels made from them. Kernels that share a parameter are in one group.

    leaves: the indices of the parameters. kernels: for each kernel, the index of its public value, and its uses
    """

    leaves: tuple[int, ...]
    kernels: tuple[tuple[int, ParameterUses], ...]

    @property
    def uses(self) -> ParameterUses:
        return ParameterUses(tuple(site for _, uses in self.kernels for site in uses.sites))

    def cheapest_algorithm(self, shapes: list[tuple[int, ...]], *, force: bool) -> NormAlgorithm | None:
        """The cheapest way to compute norms and sums; None if the gradients of the backward pass are cheaper, unless
        `force`. shapes: those of all parameters."""
        of_leaves = sum(math.prod(shapes[leaf]) for leaf in self.leaves)
        of_kernels = sum(math.prod(uses.shape) for _, uses in self.kernels)
        through = PULLBACK_PASSES * OPERATIONS_PER_BYTE * 4 * (of_leaves + of_kernels)
        keep = (3 if 4 * of_leaves <= algorithms.CACHED_BYTES else 5) * OPERATIONS_PER_BYTE * 4 * of_leaves
        once = FLOPS_PER_TURN + through + sum(map(algorithms.gradient_flops, self.uses.sites))
        backward_pass = through + keep + sum(algorithms.gradient_cost(uses) for _, uses in self.kernels)
        ways = {algorithms.PRODUCT: once + keep, algorithms.RECOMPUTED: 2 * once}
        way = min(ways, key=lambda way: ways[way])
        return way if force or ways[way] < backward_pass else None


def find_made_kernels(
    program: LossProgram, wanted: set[int], made: Mapping[Any, Equation], shapes: list[tuple[int, ...]]
) -> list[MadeKernelGroup]:
    """The kernels of every `wanted` parameter whose kernels can all be followed, in groups that share no parameter.
    made: as in `rules.find_parameter_site`. shapes: those of all parameters."""
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
    kernel: MadeKernel, program: LossProgram, made: Mapping[Any, Equation], shapes: list[tuple[int, ...]]
) -> ParameterUses | None:
    """The uses of a kernel; None if some use cannot be followed."""
    sites = [_site_of_kernel_use(use, program, made) for use in kernel.uses]
    if None in sites:
        return None
    number, loops = program.public_origin(kernel.value)
    if not isinstance(number, int):
        return ParameterUses(tuple(filter(None, sites)), shape=shapes[kernel.value])
    equation = program.equations[number]
    aval = equation.jaxpr.outvars[equation.outputs.index(kernel.value)].aval
    return ParameterUses(tuple(filter(None, sites)), shape=(*(equation.counts[loop] for loop in loops), *aval.shape))


def _site_of_kernel_use(use: ParameterUse, program: LossProgram, made: Mapping[Any, Equation]) -> Site | None:
    """The site of a whole kernel at one of its uses, or None."""
    loops = [(place, step) for place, step in enumerate(use.view.steps, 1) if isinstance(step, ScanStep)]
    end = max((place for place, step in loops if step.sliced), default=0)
    begin, rest = ParameterView(use.view.steps[:end]), ParameterView(use.view.steps[end:])
    site = rules.find_parameter_site(use._replace(view=rest), program, made)
    if isinstance(site, str) or begin.scan_repeats or 0 in begin.slice_counts or (end and (site.lookup or site.record)):
        return None
    if rules.is_complex(program.equations[use.equation]):
        return None
    around = ParameterView(tuple(loop._replace(sliced=False) for _, loop in loops))
    return (_merge_kernel_slices(site, begin) if end else site)._replace(use=use._replace(view=around))


def _merge_kernel_slices(site: Site, view: ParameterView) -> Site:
    """The site of a whole kernel, from that of one slice. Each slice gets its own groups. view: makes the slices."""
    kernels, positions, fan_in, fan_out = site.sizes
    slices = math.prod(view.slice_counts)

    def matrices(inputs, dy):
        flat = jax.tree.map(lambda x: x.reshape(slices, *x.shape[len(view.slice_counts) :]), (inputs, dy))
        return tuple(x.reshape(slices * kernels, *x.shape[2:]) for x in jax.vmap(site.matrices)(*flat))

    def arrange(w):
        w = view.apply_steps(w)
        w = w.reshape(slices, *w.shape[len(view.slice_counts) :])
        return jax.vmap(site.arrange)(w).reshape(-1, fan_in, fan_out)

    sizes = slices * kernels, positions, fan_in, fan_out
    return site._replace(sizes=sizes, matrices=matrices, arrange=arrange, apply=None)


class GradientsThroughKernels(NamedTuple):
    """Computes the gradients of one example with respect to the parameters of a `MadeKernelGroup`.

    pullback: maps gradients of kernels, by index of the value, to those of parameters, by leaf. scales: the mechanism's
    """

    made: MadeKernelGroup
    pullback: Callable[[dict[int, jax.Array]], dict[int, jax.Array]]
    scales: Mapping[int, jax.Array]

    def gradients_and_norms(self, records: list) -> tuple[list[jax.Array], list[jax.Array]]:
        """The gradients of one example, float32, and their norms. records: the inputs and cotangents at each site."""
        left, cotangents = iter(records), {}
        for value, uses in self.made.kernels:
            own = [next(left) for _ in uses.sites]
            alone: list[tuple[int, ...]] = [(number,) for number in range(len(own))]
            cotangents[value] = weighted_sums.example_gradient(uses.sites, alone, uses.shape, own, jnp.float32(1))
        found = self.pullback(cotangents)
        grads = [found[leaf].astype(jnp.float32) * self.scales.get(leaf, 1) for leaf in self.made.leaves]
        grads = jax.lax.optimization_barrier(grads)  # norm and sum must read the same numbers
        return grads, list(map(norms.frobenius, grads))


def gradients_through_kernels(
    made: MadeKernelGroup, program: LossProgram, leaves: list[jax.Array], scales: Mapping[tuple[int, int], jax.Array]
) -> GradientsThroughKernels:
    """Builds the `GradientsThroughKernels` of a group. leaves: all parameters. scales: by leaf and its only part."""

    def kernels(some):
        every = [some.get(number, leaf) for number, leaf in enumerate(leaves)]
        return interpreter.compute_public_values(program, every, {value for value, _ in made.kernels})

    values, pullback = jax.vjp(kernels, {leaf: leaves[leaf] for leaf in made.leaves})

    def of_kernels(cotangents):
        return pullback({value: x.astype(values[value].dtype) for value, x in cotangents.items()})[0]

    own = {leaf: scales[leaf, 0] for leaf in made.leaves if (leaf, 0) in scales}
    return GradientsThroughKernels(made, of_kernels, own)


def measure_gradients(backward: GradientsThroughKernels, records: list, *, keep: bool) -> tuple[Any, list[jax.Array]]:
    """Returns what `sum_kernel_gradients` needs for B examples, and the gradients' norms, (B,), by parameter."""

    def of_example(record):
        grads, found = backward.gradients_and_norms(record)
        return grads if keep else [], found

    grads, found = weighted_sums.map_sequentially(of_example, records)
    return grads if keep else (records, found), found


def sum_kernel_gradients(
    backward: GradientsThroughKernels, kept: Any, factors: list[jax.Array], *, keep: bool
) -> list[FloatPair]:
    """Computes sum_i f_i z_i for each parameter. kept: from `measure_gradients`. factors: float32 (B,), for each."""
    if keep:
        return [total_of_rows(lambda some: weighted_sum(*some), rows) for rows in zip(factors, kept, strict=True)]

    def sum_block(rows):
        def add(number, totals):
            (record, first), factors = weighted_sums.take_row(rows, number)
            grads, found = backward.gradients_and_norms(record)
            factors = [
                f * weighted_sums.shortening_factors(*norms) for f, *norms in zip(factors, found, first, strict=True)
            ]
            more = [jnp.where(spread(f, z.shape) != 0, f * z, 0) for f, z in zip(factors, grads, strict=True)]
            return add_behind_barrier(totals, more)

        return jax.lax.fori_loop(0, len(rows[1][0]), add, begin)

    first = jax.tree.map(lambda x: x[0], kept[0])
    shapes = jax.eval_shape(lambda record: backward.gradients_and_norms(record)[0], first)
    begin = [jnp.zeros(shape.shape, jnp.float32) for shape in shapes]
    numbers = sum(shape.size for shape in shapes)
    total = total_of_rows(lambda rows: weighted_sums.sum_in_blocks(sum_block, rows, numbers), (kept, factors))
    low = total.low or [None] * len(begin)
    return [FloatPair(*pair) for pair in zip(total.high, low, strict=True)]

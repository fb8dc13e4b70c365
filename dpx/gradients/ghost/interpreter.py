"""Runs the program of a loss, adds arrays to the outputs of some equations, and returns their operands.

The gradient with respect to such an array is the cotangent of the output. In the body of a scan, the arrays have an
axis for the iterations; the scan slices them and stacks the operands, so it stays a scan. What the loss computes under
`jax.checkpoint` is still recomputed in the backward pass.
"""

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.gradients.ghost import own_backward
from dpx.gradients.ghost.program import Constant, Equation, EquationBlock, LossProgram, count_scan_operands
from dpx.values import Tree
from dpx.xla.ordering import opaque_false, with_cotangent_computed_once
from dpx.xla.place import current_place

MANY_SLICES = 8  # with fewer slices of parameters, sharing kernels makes compilation slower

Seen = dict[int, tuple]  # by index of an equation, its operands; None for those that nothing reads


class InterpreterHooks(NamedTuple):
    """unread: by index of an equation, the operands that nothing reads. hooks: by index of an equation, a function of
    its output, operands and added arrays that replaces the addition; see `BackwardHook.attach_to_output`. starts: by
    index of an equation that slices a parameter, where the slice begins; see `slice_starts`. once: the equations whose
    cotangent is computed once for both the record and the backward pass. products: the equations that return A and B as
    gradients with respect to the added arrays; see `own_backward`. exact: the equations whose operands are returned
    unrounded; each product rounds them, so XLA gathers what several products read only once."""

    unread: Mapping[int, set[int]]
    hooks: Mapping[int, Callable] = {}
    starts: Mapping[int, list[jax.Array]] = {}
    once: Set[int] = frozenset()
    products: Set[int] = frozenset()
    exact: Set[int] = frozenset()


def slice_starts(program: LossProgram, leaves: dict[int, jax.Array]) -> dict[int, list[jax.Array]]:
    """Where slices of parameters begin, int32 () for each axis, by index of the equation. leaves: by index, the
    parameters whose slices pass no gradient on.

    XLA cannot see these values. If they were constants, each layer of a stack that a Python loop indexes would get its
    own kernels, and the step would take a third longer to compile. Returns nothing on several devices, because XLA
    would gather a sharded parameter.
    """
    real = {number: leaf for number, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    slices: dict[int, tuple[int, ...]] = {}
    for number in program.block.equations:
        operand = program.equations[number].inputs[:1]
        if program.equations[number].name == "slice" and isinstance(operand[0], int) and operand[0] in real:
            params = program.equations[number].jaxpr.params
            slices |= {} if params["strides"] else {number: params["start_indices"]}
    if len(slices) < MANY_SLICES or current_place().devices > 1:
        return {}
    distinct = sorted({start for starts in slices.values() for start in starts} - {0})
    known = [np.int32(start) for start in distinct]
    values = jax.lax.cond(opaque_false(list(real.values())[:1]), lambda: [np.int32(0)] * len(known), lambda: known)
    found = dict(zip(distinct, values, strict=True)) | {0: np.int32(0)}
    return {number: [found[start] for start in starts] for number, starts in slices.items()}


def cotangents_to_compute_once(program: LossProgram, recorded: list[int]) -> frozenset[int]:
    """The `once` of `InterpreterHooks`: on several devices, the recorded equations outside scans. Otherwise XLA would
    keep the terms of their cotangents, such as those of logits, during the backward pass of a scan. An equation whose
    output another one reads, such as the layer of a bias, is left out, because both share one cotangent."""
    if current_place().devices == 1 or not any(equation.body for equation in program.equations):
        return frozenset()
    equations = {number: program.equations[number] for number in recorded}
    read = {value for one in equations.values() for value in one.inputs if isinstance(value, int)}
    return frozenset(n for n, one in equations.items() if not one.counts and read.isdisjoint(one.outputs))


def compute_public_values(program: LossProgram, leaves: list[jax.Array], wanted: Set[int]) -> dict[int, jax.Array]:
    """Computes public values once for all examples, and returns them by index. Values that are public in each
    iteration are computed for all iterations, with an axis for each loop over which they vary."""
    needed, equations = list(wanted), set()
    while needed:
        origin = program.public_origin(needed.pop()).origin
        if isinstance(origin, int) and origin not in equations:
            equations.add(origin)
            operands = map(program.unsliced_index, program.equations[origin].inputs)
            needed += [value for value in operands if isinstance(value, int)]
    values: dict[int, jax.Array] = dict(enumerate(leaves))
    for equation in (program.equations[number] for number in sorted(equations)):
        wholes = map(program.unsliced_index, equation.inputs)
        operands = [whole.value if isinstance(whole, Constant) else values[whole] for whole in wholes]
        values.update(zip(equation.outputs, _bind_in_all_iterations(program, equation, operands), strict=True))
    return {number: values[number] for number in wanted}


def _bind_in_all_iterations(program: LossProgram, equation: Equation, operands: list) -> list[jax.Array]:
    of_operands = [program.public_origin(each).loops if isinstance(each, int) else () for each in equation.inputs]
    bind: Callable = equation.bind
    for loop in sorted(set().union(*of_operands), reverse=True):
        bind = jax.vmap(bind, [0 if loop in loops else None for loops in of_operands])
    return bind(*operands)


def _slice_at_starts(equation: Equation, operand: jax.Array, starts: list[jax.Array]) -> list[jax.Array]:
    params = equation.jaxpr.params
    ends = zip(params["start_indices"], params["limit_indices"], strict=True)
    sizes = [end - start for start, end in ends]
    return [jax.lax.dynamic_slice(operand, starts, sizes, allow_negative_indices=False)]


def run_block(
    program: LossProgram, instruments: InterpreterHooks, block: EquationBlock, inputs: list, added: dict[int, Tree]
) -> tuple[list, Seen]:
    """Returns the results of a block, and the operands of those equations in `added` that have no hook.

    added: by index of an equation, an array to add to its output, whose gradient is the output's cotangent; if the
        equation has a hook, any arrays
    """
    values: dict[int, Any] = dict(zip(block.inputs, inputs, strict=True))
    seen: Seen = {}
    unit = current_place().matrix_unit

    def read(number):
        return number.value if isinstance(number, Constant) else values[number]

    for number in block.equations:
        equation = program.equations[number]
        operands = [read(i) for i in equation.inputs]
        body = equation.body
        inside = {n: array for n, array in added.items() if body is not None and number < n < body.stop}
        if body is not None and inside:
            run_body = functools.partial(run_block, program, instruments, body)
            run = _run_scan if equation.name == "scan" else _run_checkpoint
            outputs, more = run(run_body, equation, operands, inside)
            seen.update(more)
        else:
            if number in instruments.starts:
                outputs = _slice_at_starts(equation, operands[0], instruments.starts[number])
            elif number in instruments.products:
                outputs, seen[number] = own_backward.bind_with_slots(equation.jaxpr, operands, added[number]), ()
            else:
                outputs = _broadcast_product(equation, operands) or equation.bind(*operands)
        if number in added and number not in instruments.products:
            wanted = tuple(None if i in instruments.unread[number] else operand for i, operand in enumerate(operands))
            hooked, several = number in instruments.hooks, current_place().devices > 1
            rounds = _rounds_its_cotangent(equation) and not (hooked and several)  # there, the hook rounds it
            if hooked:
                outputs[0], shared = instruments.hooks[number](outputs[0], wanted, added[number])
                later = zip(equation.inputs, shared, strict=True)
                values.update({i: x for i, x in later if isinstance(i, int) and x is not None})
            else:
                seen[number] = wanted
                if unit.rounds_operands and number not in instruments.exact:
                    # Rounds them here already, because a scan stacks them, in half the memory if they are bfloat16.
                    seen[number] = jax.tree.map(lambda x: unit.round_to_store(jnp.asarray(x)), wanted)
                outputs = [_plus_zero_probe(outputs[0], added[number], not rounds)]
            if number in instruments.once:
                outputs = [with_cotangent_computed_once(outputs[0])]
            if rounds:
                outputs = [_with_rounded_cotangent(outputs[0])]
        values.update(zip(equation.outputs, outputs, strict=True))
    return [read(number) for number in block.outputs], seen


def _rounds_its_cotangent(equation: Equation) -> bool:
    """Whether a TPU's backward pass reads the cotangent only in products that round it as `round_to_store` does.
    If so, it is written once, in half the memory, for these products and for the record. Otherwise XLA would recompute
    the cotangent of logits, or of an output that is split, for each product."""
    if equation.name not in ("dot_general", "conv_general_dilated") or equation.jaxpr is None:
        return False
    passes = equation.jaxpr.params["precision"] in (None, (jax.lax.Precision.DEFAULT,) * 2)
    avals = [v.aval for v in (*equation.jaxpr.invars, *equation.jaxpr.outvars)]
    return current_place().platform == "tpu" and passes and all(aval.dtype == jnp.float32 for aval in avals)


@jax.custom_vjp
def _with_rounded_cotangent(x: jax.Array) -> jax.Array:
    """Returns `x`, float32 (...), and rounds its cotangent for a matrix unit, once for all operations that read it."""
    return x


def _round_cotangent(_, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.optimization_barrier(current_place().matrix_unit.round_to_store(cotangent)).astype(jnp.float32),)


_with_rounded_cotangent.defvjp(lambda x: (x, None), _round_cotangent)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _plus_zero_probe(output: jax.Array, added: jax.Array, rounds: bool) -> jax.Array:
    """Returns `output`, with derivative 1 with respect to `added`, rounded for a matrix unit if `rounds`. Nothing reads
    the values of `added`, which are 0, so a scan need not slice them."""
    return output


@_plus_zero_probe.defjvp
def _probe_derivative(rounds, values, derivatives):
    unit, slope = current_place().matrix_unit, derivatives[1].astype(derivatives[0].dtype)
    if rounds and unit.rounds_operands and slope.dtype == jnp.float32:  # XLA might elide two plain conversions
        slope = unit.round_operand(slope)
    return values[0], derivatives[0] + slope


def _run_scan(run: Callable, equation: Equation, operands: list, added: dict) -> tuple[list, Seen]:
    params, (first, count), packed = equation.jaxpr.params, count_scan_operands(equation), _DistinctArrays()
    types = [v.aval for v in equation.jaxpr.invars]
    values = [x if isinstance(x, jax.Array) else jnp.asarray(x, t.dtype) for x, t in zip(operands, types, strict=True)]
    constants, begin, rows = values[:first], values[first : first + count], values[first + count :]

    def body(carry, row):
        slices, added = row
        outputs, seen = run([*constants, *carry, *slices], added)
        return outputs[:count], (outputs[count:], packed.pack(seen))

    options = {name: params[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in params}
    with equation.jaxpr.ctx.manager:
        carry, (stacked, seen) = jax.lax.scan(body, begin, (rows, added), **options)
    return [*carry, *stacked], packed.unpack(seen)


def _run_checkpoint(run: Callable, equation: Equation, operands: list, added: dict) -> tuple[list, Seen]:
    """Returns the results of a checkpoint and the operands of equations in its body; these operands are kept."""
    params, packed = equation.jaxpr.params, _DistinctArrays()

    def body(operands, added):
        outputs, seen = run(operands, added)
        return outputs, packed.pack(seen)

    with equation.jaxpr.ctx.manager:
        again = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
        outputs, seen = again(operands, added)
    return outputs, packed.unpack(seen)


class _DistinctArrays:
    """Returns each distinct array from a body only once, because a scan would stack every copy."""

    def pack(self, seen: Seen) -> list:
        leaves, self.structure = jax.tree.flatten(seen)
        distinct = {id(x): x for x in leaves}
        numbers = {key: number for number, key in enumerate(distinct)}
        self.places = [numbers[id(x)] for x in leaves]
        return list(distinct.values())

    def unpack(self, packed: list) -> Seen:
        return self.structure.unflatten(packed[place] for place in self.places)


def _broadcast_product(equation: Equation, operands: list) -> list[jax.Array] | None:
    """Multiplies arrays of two shapes without the axes of length 1 that both have; None if there are no such axes.
    The derivative is summed over broadcast axes, and on a CPU, XLA sums such a product much faster over axis 1 of
    (B, T, D) than over axis 2 of (B, 1, T, D)."""
    shapes = [jnp.shape(operand) for operand in operands]
    if equation.name != "mul" or len(set(shapes)) == 1 or len(set(map(len, shapes))) > 1:
        return None
    if not (unit := [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if set(lengths) == {1}]):
        return None
    (output,) = equation.bind(*(jax.lax.squeeze(operand, unit) for operand in operands))
    return [jax.lax.expand_dims(output, unit)]

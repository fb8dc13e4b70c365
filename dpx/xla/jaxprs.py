"""Walks through, compares and evaluates the equations of a traced function, including the loops, branches and functions
that it calls, and spreads marks that show which values depend on which inputs."""

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core


def inner_jaxprs(equation: core.JaxprEqn) -> Iterator[Any]:
    """Yields the jaxprs that an equation calls, closed or not: bodies of loops, branches and functions."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value


def open_jaxprs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the `inner_jaxprs` without the constants that they close over."""
    return (getattr(each, "jaxpr", each) for each in inner_jaxprs(equation))


def walk_equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """Yields all equations, each before those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for body in inner_jaxprs(equation):
            yield from walk_equations(body)


def closure_arrays(jaxpr: Any) -> Iterator[Any]:
    """Yields the arrays that a jaxpr and its inner jaxprs close over, which its text does not show."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        yield from (v.val for v in equation.invars if isinstance(v, core.Literal) and np.ndim(v.val))
        for body in inner_jaxprs(equation):
            yield from closure_arrays(body)


def identity_of_program(jaxpr: Any) -> tuple:
    """Returns what a jaxpr computes, as plain values that are equal for two traces of one function. Leaves out large
    constants (see `closure_arrays`) and the values of keys."""
    jaxpr, places = getattr(jaxpr, "jaxpr", jaxpr), {}

    def operand(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return "literal", *type_of_variable(v), _plain_value(v.val if np.ndim(v.val) == 0 else None)
        return places.setdefault(v, len(places))

    inputs = [(operand(v), *type_of_variable(v)) for v in (*jaxpr.constvars, *jaxpr.invars)]
    steps = [(identity_of_equation(e), *map(operand, (*e.invars, *e.outvars))) for e in jaxpr.eqns]
    return (*inputs, *steps, *map(operand, jaxpr.outvars))


def identity_of_equation(equation: core.JaxprEqn) -> tuple:
    """Describes an equation by plain values, without the names of its variables and of the function that it calls."""
    types = tuple(type_of_variable(v) for v in (*equation.invars, *equation.outvars))
    params = {name: value for name, value in equation.params.items() if name != "name"}
    return equation.primitive.name, types, _plain_value(params)


def type_of_variable(variable: Any) -> tuple:
    """The dtype and shape of a variable, and whether its dtype is weak."""
    aval = variable.aval
    return (
        _name(aval.dtype) if hasattr(aval, "dtype") else str(aval),
        getattr(aval, "shape", ()),
        getattr(aval, "weak_type", False),
    )


_name = functools.cache(str)  # of a dtype, which numpy is slow to print


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if _is_jaxpr(value):
        return identity_of_program(value)
    if isinstance(value, dict):
        return tuple(
            (str(name), _plain_value(part)) for name, part in sorted(value.items(), key=lambda item: str(item[0]))
        )
    if isinstance(value, tuple | list):
        return tuple(map(_plain_value, value))
    if isinstance(value, set | frozenset):  # their order differs between processes
        return tuple(sorted(map(str, value)))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return ("key",) if is_key else (str(value.dtype), value.shape, np.asarray(value).tobytes().hex())
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__, re.sub("0x[0-9a-f]+", "", str(value))  # a jax object, without its address


def convolves(jaxpr: Any) -> bool:
    return any(equation.primitive.name == "conv_general_dilated" for equation in walk_equations(jaxpr))


def inputs_read(jaxpr: Any) -> list[bool]:
    """For each input of a jaxpr, whether an output may depend on it."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if not isinstance(var, core.Literal))
    return [var in needed for var in jaxpr.invars]


def constants_and_carry_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan stay the same in all iterations, and how many are carried from one to the next."""
    if "num_consts" in params:  # up to jax 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return constants, carried


def evaluate_jaxpr(jaxpr: core.Jaxpr, constants, arguments, results: Callable) -> list[jax.Array]:
    """Evaluates a jaxpr. results: (equation, operands) -> the outputs of the equation."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        with equation.ctx.manager:
            outputs = results(equation, operands)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def replace_equations(function: Callable, changes: Callable[[core.JaxprEqn], bool], results: Callable) -> Callable:
    """Replaces equations in a `function` of pytrees of arrays, and in the functions and loops that it calls.

    results: (equation, operands) -> its outputs, or None to keep the equation. changes: whether an equation must be
    changed in the jaxprs that other equations call; a jaxpr without such equations stays as it is.
    """

    def outputs(equation, operands):
        if (found := results(equation, operands)) is not None:
            return found
        params = jax.tree.map(body, equation.params, is_leaf=lambda value: not isinstance(value, dict | tuple | list))
        return bind_equation(equation, operands, params)

    def body(value: Any) -> Any:
        if not _is_jaxpr(value) or not any(map(changes, walk_equations(value))):
            return value
        jaxpr, constants = getattr(value, "jaxpr", value), getattr(value, "consts", ())
        avals: list[Any] = [variable.aval for variable in jaxpr.invars]
        inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        made = jax.make_jaxpr(lambda *given: evaluate_jaxpr(jaxpr, constants, given, outputs))(*inputs)
        return made if isinstance(value, core.ClosedJaxpr) else made.jaxpr

    def changed(*arguments):
        # A new function, because for the same one JAX may return an earlier jaxpr that closes over earlier values.
        closed, shapes = jax.make_jaxpr(lambda *given: function(*given), return_shape=True)(*arguments)
        made = evaluate_jaxpr(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), outputs)
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    return changed


def bind_equation(equation: core.JaxprEqn, operands: list, params: dict) -> list[jax.Array]:
    results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return results if equation.primitive.multiple_results else [results]


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


Marks = Sequence[int]  # a set of bits for each value
Visit = Callable[[core.JaxprEqn, Marks, int], None]


def propagate_marks(jaxpr: Any, marks: Marks, visit: Visit, constants: Marks = ()) -> list[int]:
    """Returns the marks of the results of a jaxpr, given the `marks` of its inputs and of its `constants`.

    visit: called as visit(equation, marks of its inputs, control) for every equation, including inner ones, and in a
        loop again whenever an iteration adds a mark. control: the marks of the predicates that decide its course, or 0.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, marks, strict=True)) | dict(zip(jaxpr.constvars, constants, strict=False))

    def marks_of(variable):
        return 0 if isinstance(variable, core.Literal) else known.get(variable, 0)

    for equation in jaxpr.eqns:
        inputs = [marks_of(v) for v in equation.invars]
        outputs, control = _marks_after_equation(equation, inputs, visit)
        visit(equation, inputs, control)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [marks_of(v) for v in jaxpr.outvars]


def join_marks(marks: Marks) -> int:
    return functools.reduce(operator.or_, marks, 0)


def _marks_after_equation(equation: core.JaxprEqn, inputs: list[int], visit: Visit) -> tuple[list[int], int]:
    """The marks of the results of one equation, and of the predicate that controls it."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        results = [propagate_marks(branch, inputs[1:], visit) for branch in params["branches"]]
        return [join_marks([*each, inputs[0]]) for each in zip(*results, strict=True)], inputs[0]
    if name == "while":
        ahead, constants = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outputs = _marks_after_loop(params["body_jaxpr"], inputs[ahead:constants], inputs[constants:], (), visit)
        control = join_marks(propagate_marks(params["cond_jaxpr"], [*inputs[:ahead], *outputs], visit))
        return [each | control for each in outputs], control
    if name == "scan":
        constants, count = constants_and_carry_of_scan(params)
        carried = constants + count
        return _marks_after_loop(
            params["jaxpr"], inputs[:constants], inputs[constants:carried], inputs[carried:], visit
        ), 0
    called, outputs = params.get("jaxpr", params.get("call_jaxpr")), [join_marks(inputs)] * len(equation.outvars)
    for body in open_jaxprs(equation):
        if len(body.invars) == len(inputs):
            found = propagate_marks(body, inputs, visit)
            outputs = found if body is getattr(called, "jaxpr", called) else outputs
    return outputs, 0


def _marks_after_loop(body: Any, constants: Marks, carried: Marks, rest: Marks, visit: Visit) -> list[int]:
    """The marks of the results of a loop after any number of iterations."""
    while True:
        outputs = propagate_marks(body, [*constants, *carried, *rest], visit)
        longer = [a | b for a, b in zip(carried, outputs, strict=False)]
        if longer == carried:
            return [*longer, *outputs[len(longer) :]]
        carried = longer

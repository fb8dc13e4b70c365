"""Random numbers of the loss whose key is a constant, so that they are the same for every example and every step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from dpx.checking.report import Finding
from dpx.trees import Tree
from dpx.xla.jaxprs import bodies, parts_of_scan

# The primitives that turn a key into random numbers.
DRAWS = ("random_bits", "threefry2x32", "threefry4x32", "rng_bit_generator")
KEYS = {"threefry2x32": 2, "threefry4x32": 4}  # how many of the first operands are the key; 1 of the others


def constant_keys(loss: Callable, params: Tree, example: Tree, *, with_key: bool) -> Finding:
    """Whether the loss draws random numbers from a key that depends on neither the example nor the example's key.

    loss: as for `private_updates`, a function that can be traced.
    """
    varying = (example, jax.eval_shape(lambda: jax.random.key(0))) if with_key else (example,)
    closed = jax.make_jaxpr(loss)(params, *varying)
    return of_program(closed, len(closed.jaxpr.invars) - len(jax.tree.leaves(varying)))


def of_program(closed: Any, fixed: int) -> Finding:
    """`constant_keys` of a closed jaxpr, whose first `fixed` inputs are the same for all examples."""
    draws, _ = _constant_draws(closed.jaxpr, [number >= fixed for number in range(len(closed.jaxpr.invars))])
    if draws:
        words = (
            "the loss draws random numbers from a constant key: all examples and steps have the same ones, such as one "
            "dropout mask. Take the key of the example: with_key=True and loss(params, example, key). Numbers that are "
            "meant to be fixed, such as random features, are right: draw them before the loss, and this row is silent"
        )
        return Finding("randomness", "warning", words, {"constant": draws})
    return Finding("randomness", "ok", "the loss draws no random numbers from a constant key", {"constant": 0})


def _constant_draws(jaxpr: Any, varies: Sequence[bool]) -> tuple[int, list[bool]]:
    """How many draws have a key that is the same for all examples, and which outputs differ; varies: of the inputs."""
    differ, draws = dict(zip(jaxpr.invars, varies, strict=True)), 0

    def read(atoms) -> list[bool]:
        return [not isinstance(atom, core.Literal) and differ.get(atom, False) for atom in atoms]

    for equation in jaxpr.eqns:
        operands, name = read(equation.invars), equation.primitive.name
        draws += name in DRAWS and not any(operands[: KEYS.get(name, 1)])
        found, outputs = _inside(equation, operands)
        draws += found
        differ.update(zip(equation.outvars, outputs, strict=True))
    return draws, read(jaxpr.outvars)


def _inside(equation: Any, operands: list[bool]) -> tuple[int, list[bool]]:
    """The draws in the functions that an equation calls, and which of its outputs differ between examples."""
    params, name = equation.params, equation.primitive.name
    if name == "scan":
        return _repeated(params["jaxpr"].jaxpr, operands, *parts_of_scan(params))
    if name == "while":
        start = params["cond_nconsts"]
        carried = len(operands) - start - params["body_nconsts"]
        return _repeated(params["body_jaxpr"].jaxpr, operands[start:], params["body_nconsts"], carried)
    given = operands[1:] if name == "cond" else operands
    found, outputs = 0, [any(operands)] * len(equation.outvars)
    for body in bodies(equation):
        if len(body.invars) == len(given):
            draws, seen = _constant_draws(body, given)
            found += draws
            if name in ("jit", "pjit"):
                outputs = seen
    return found, outputs


def _repeated(body: Any, operands: list[bool], constants: int, carried: int) -> tuple[int, list[bool]]:
    """The same for the body of a loop: the draws of its first turn, and what differs after its last."""
    draws, outputs = _constant_draws(body, operands)
    before = operands[constants : constants + carried]
    carry = [first or after for first, after in zip(before, outputs[:carried], strict=True)]
    if carry != before:
        later = [*operands[:constants], *carry, *operands[constants + carried :]]
        _, outputs = _repeated(body, later, constants, carried)
    return draws, [*carry, *outputs[carried:]]

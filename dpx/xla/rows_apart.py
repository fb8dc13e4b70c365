"""Keeps the rows of a batch apart under `jax.vmap`, whatever one of them holds. Also turns off, at `import dpx`, a
fault of XLA that mixes rows, and refuses to release while it is on.

The gradient of a kernel in feature groups is a convolution in *batch* groups. `jax.vmap` turns the rows of a batch into
more such groups, and on CPUs and GPUs XLA computes one convolution of all groups, with zeros between them. Because 0 *
NaN is NaN, one row with NaN or infinity would reach the gradients of all others, and a private sum would move by many
clip norms. So `with_rows_apart` writes batch groups as feature groups, which XLA computes one by one
(tests/test_rows_apart.py).

A CPU computes feature groups one by one only for floats of up to 32 bits. In float64 it computes one convolution with
zeros, so `with_rows_apart` computes it row after row.

Some functions are one loop over all their elements, which ends when the last element has converged. The others go on
and move by roundings (1.5e-6 for `lax.betainc`), so the slowest row of a batch would change all rows. `with_rows_apart`
computes such functions row after row. No other loop needs this: `jax.vmap` stops each row of a loop in the loss
separately, and jax's other series (igamma and its derivatives) stop each element separately.

If rows are sharded, XLA's partitioner (jaxlib 0.10.2) loses the gradients of kernels on all devices but the first,
where the features are the last axis. So there, `with_rows_apart` moves the features to the front in convolutions whose
kernels differ between rows. It checks this where the rows are batched, because other convolutions need no other order.

With keys of "rbg", `jax.vmap` draws the random numbers of all rows from the key of the first one, which may come from
its example: then leaving out that example moved a sum of 8 rows by 2.3 clip norms. They are drawn row after row too.

On CPUs, jaxlib 0.10.2 hands some reductions to the library YNNPACK, which reads elements of other rows: in the batch of
a vmapped loss with two sums of products over up to 13 elements, from a few thousand rows on. Then one example moves the
gradients and norms of others, which no clip bounds (https://github.com/jax-ml/jax/issues/39103, found in release 0.10.2
and fixed before 0.12). No check in dpx could see it, so the reductions are kept from that library:
`XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce`, which a process must have before its first computation."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np
from jax import lax
from jax.extend import core

from dpx.xla.jaxprs import bind_equation, replace_equations, walk_equations
from dpx.xla.place import current_place

# Primitives that are one loop over all their elements. On a TPU, XLA rotates all matrices until the last is diagonal.
ITERATES = frozenset({"regularized_incomplete_beta"})
ITERATES_ON_TPU = ITERATES | {"eigh", "svd"}
GROUPS_APART = ("float32", "bfloat16", "float16", "complex64")  # dtypes of convolutions whose groups XLA keeps apart


def with_rows_apart(function: Callable) -> Callable:
    """Keeps the rows of a `function` of pytrees of arrays apart under `jax.vmap`, whatever values they hold."""

    return replace_equations(function, _mixes_rows, _compute_rows_apart)


def gradient_may_mix_rows(jaxpr: Any, *, tangents: bool = True) -> bool:
    """Whether the gradient may need `with_rows_apart`. tangents: whether derivatives by `jax.custom_jvp` count."""

    def may_mix(equation):
        name = equation.primitive.name
        if name == "conv_general_dilated" and not _may_join_groups(equation):
            groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
            return groups > 1 or _rows_are_sharded()
        if name == "custom_jvp_call":  # such as jax.nn.relu: look at its own derivative
            return tangents and _may_mix_tangents(equation)
        return _needs_row_loop(equation) or name.startswith("custom_vjp_call")  # its derivative may hold anything

    return any(map(may_mix, walk_equations(jaxpr)))


def _rows_are_sharded() -> bool:
    """Whether the rows of a batch may be on several devices."""
    return (current_place().row_devices or current_place().devices) > 1


def loops_until_all_converge(equation: core.JaxprEqn) -> bool:
    """Whether an equation is one loop over all elements of its operands, until the last of them has converged."""
    return equation.primitive.name in (ITERATES_ON_TPU if current_place().platform == "tpu" else ITERATES)


def _may_join_groups(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a convolution whose groups, of features or of the batch, XLA may join on a CPU."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return any(str(aval.dtype) not in GROUPS_APART for aval in avals)


def _needs_row_loop(equation: core.JaxprEqn) -> bool:
    """Whether an equation must be computed for one row after another."""
    return loops_until_all_converge(equation) or _may_join_groups(equation) or _vmap_may_share_key(equation)


def _vmap_may_share_key(equation: core.JaxprEqn) -> bool:
    """Whether `jax.vmap` may draw the random numbers of all rows from one key, as for key<rbg> and key<urbg>."""
    name, types = equation.primitive.name, (str(getattr(v.aval, "dtype", "")) for v in equation.invars)
    return name == "rng_bit_generator" or (name.startswith("random_") and any("rbg" in each for each in types))


def _may_mix_tangents(equation: core.JaxprEqn) -> bool:
    avals: list[Any] = [variable.aval for variable in equation.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    real = [number for number, aval in enumerate(avals) if np.issubdtype(aval.dtype, np.inexact)]

    def tangents(inputs):
        def function(*floats):
            given = dict(enumerate(inputs)) | dict(zip(real, floats, strict=True))
            return bind_equation(equation, list(given.values()), equation.params)

        floats = [inputs[number] for number in real]
        return jax.jvp(function, floats, floats)[1]

    try:
        return gradient_may_mix_rows(jax.make_jaxpr(tangents)(shapes), tangents=False)
    except Exception:
        return True  # a derivative that cannot be inspected


def _compute_rows_apart(equation: core.JaxprEqn, operands: list) -> list[jax.Array] | None:
    if equation.primitive.name == "conv_general_dilated" and not _may_join_groups(equation):
        return [_convolution_apart(*operands, **equation.params)]
    if _needs_row_loop(equation):
        in_turn = jax.custom_batching.sequential_vmap(
            lambda *given: bind_equation(equation, list(given), equation.params)
        )
        return in_turn(*operands)
    return None


def _mixes_rows(equation: core.JaxprEqn) -> bool:
    convolves = equation.primitive.name == "conv_general_dilated"
    joins = convolves and (equation.params["batch_group_count"] > 1 or _rows_are_sharded())
    return _needs_row_loop(equation) or joins


def _convolution_apart(data: jax.Array, kernel: jax.Array, **params) -> jax.Array:
    convolve = functools.partial(_batch_groups_as_feature_groups, **params)
    if not _rows_are_sharded():
        return convolve(data, kernel)
    batched = jax.custom_batching.custom_vmap(convolve)

    @batched.def_vmap
    def convolve_rows(_, mapped, data, kernel):
        of_row = functools.partial(_convolve_features_first, convolve) if mapped[1] else convolve
        return jax.vmap(of_row, [0 if each else None for each in mapped])(data, kernel), True

    return batched(data, kernel)


def _convolve_features_first(convolve: functools.partial, data: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `convolve(data, kernel)` with the axes of batch and features before the spatial ones."""
    of_data, of_kernel, of_result = convolve.keywords["dimension_numbers"]
    numbers = lax.ConvDimensionNumbers(*[tuple(range(data.ndim))] * 3)
    made = convolve(data.transpose(of_data), kernel.transpose(of_kernel), dimension_numbers=numbers)
    return made.transpose(np.argsort(of_result))


def _batch_groups_as_feature_groups(
    data: jax.Array, kernel: jax.Array, *, batch_group_count: int, **params
) -> jax.Array:
    bind = functools.partial(lax.conv_general_dilated_p.bind, batch_group_count=1, **params)
    if batch_group_count == 1:
        return bind(data, kernel)
    (batch, *_), (outputs, *_), (_, features, *_) = params["dimension_numbers"]
    data, kernel = (_split_axis(x, axis, batch_group_count) for x, axis in ((data, batch), (kernel, outputs)))
    made = jax.vmap(bind, (batch, outputs), features)(data, kernel)
    return made.reshape(*made.shape[:features], -1, *made.shape[features + 2 :])


def _split_axis(x: jax.Array, axis: int, groups: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


FLAG, OFF = "xla_cpu_experimental_ynn_fusion_type", "-reduce"
WRONG, RIGHT = (0, 10, 2), (0, 12)  # the first version of jaxlib with the fault, and one without it
ROWS, NUMBERS = 4096, 13


def is_suspected_version(version: str = jaxlib.__version__) -> bool:
    return WRONG <= tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < RIGHT


def disable_row_mixing() -> None:
    """Turns off XLA's fault for this process and its child processes, unless XLA has already read its flags."""
    flags = os.environ.get("XLA_FLAGS", "")
    if is_suspected_version() and FLAG not in flags and flags.strip()[:1] in ("", "-"):  # else it names a file of flags
        os.environ["XLA_FLAGS"] = f"--{FLAG}={OFF} {flags}".strip()  # first: XLA stops at a word without a dash


@functools.cache
def require_rows_apart() -> None:
    """Raises ValueError if XLA mixes rows on this process's CPU."""
    if is_suspected_version() and jax.default_backend() == "cpu" and has_row_mixing_fault():
        raise ValueError(
            f"jaxlib {jaxlib.__version__} mixes the rows of a batch on this CPU, so one example would move others "
            "without a bound: import dpx before JAX computes anything, without another "
            f"--{FLAG} in XLA_FLAGS, or install jaxlib 0.12"
        )


@jax.disable_jit(False)  # without jit, nothing is compiled
def has_row_mixing_fault() -> bool:
    """Whether one row's sums read another row, in the smallest program that is known to trigger the fault."""

    def sums(b, k, u, v):
        return (u[None] * b).sum(1) + (v[None] * k).sum((1, 2))

    shapes = (ROWS, NUMBERS), (ROWS, 4, NUMBERS), (NUMBERS,), (4, NUMBERS)
    b, k, u, v = (np.ones(shape, np.float32) for shape in shapes)
    b[1:], k[:] = 0, 0
    compiled = jax.jit(sums).lower(b, k, u, v).compile()  # calling it could trace it into the surrounding step
    return bool(np.asarray(compiled(b, k, u, v))[1:].any())

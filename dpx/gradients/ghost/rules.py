"""Layers whose gradient is a product A^T B of the layer's input A and the cotangent B of its output.

A rule reads one equation of one example's loss, and returns a `Site`, or the reason why there is none. A new layer
needs a rule listed in `RULES`, a model in tests/test_ghost_zoo.py, and a case in tests/test_ghost_hostile.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dpx.gradients.ghost import own_backward
from dpx.gradients.ghost.norms import EXACT, gradient_matrices
from dpx.gradients.ghost.program import CALLS, Constant, Equation, LossProgram, ParameterUse
from dpx.sums.clipped_sum import repeat_to_shape
from dpx.xla.ordering import opaque_false
from dpx.xla.place import current_place

# XLA's convolution is fast on a CPU only if the data or the result have more than 16 features. Fewer are padded to 32.
FEW_FEATURES, ENOUGH_FEATURES = 16, 32
MOST_PICKED = 1024  # a matrix unit makes patches of up to this many elements, with a square matrix of that size


class Patches(NamedTuple):
    """The patches of a convolution's data, which make it a dense layer, and its per-example gradients.

    Patches repeat every element of the data once for each tap, and the patches of a batch would not fit in a CPU's
    cache. So on a CPU, the gradients are convolutions of the data and the cotangents, one example after another. These
    need no patches, are at least as fast as the product of patches, and compile faster.

    All fields but the first two have an entry for each spatial axis.

    features: the number of the data's features. groups: how many groups the features form, as in the result
    taps, strides, dilations: of the kernel. padding: (low, high, interior) of the data. spatial: sizes of the result
    """

    features: int
    groups: int
    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[tuple[int, int, int], ...]
    spatial: tuple[int, ...]

    def patch_matrix(self, data: jax.Array, *, by_unit: bool = False) -> jax.Array:
        """The matrix A, float32 (B, K, T, I), for data, float32 (B, images, *sizes, features). by_unit: whether a
        matrix unit that takes bfloat16 makes the patches; the data must then be bfloat16 numbers."""
        x = self._padded_data(data.reshape(-1, *data.shape[2:]))
        x = self._windows_by_convolution(x) if by_unit else self._windows(x, len(self.taps))
        x = x.reshape(len(data), -1, x.shape[-1] // self.features, self.groups, self.features // self.groups)
        return x.transpose(0, 3, 1, 2, 4).reshape(len(data), self.groups, x.shape[1], -1)

    def cotangent_matrix(self, dy: jax.Array) -> jax.Array:
        """The matrix B, float32 (B, K, T, O), for cotangents of the result, float32 (B, images, *spatial, features)."""
        return dy.reshape(len(dy), -1, self.groups, dy.shape[-1] // self.groups).transpose(0, 2, 1, 3)

    def kernel_gradients(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """The product A^T B, float32 (B, K, I, O), for A = `patch_matrix(data)` and B = `cotangent_matrix(dy)`."""
        # On several devices, examples may be sharded and so need one product. With one tap, the patches are the data.
        if current_place().devices > 1 or math.prod(self.taps) == 1:
            return gradient_matrices(self.patch_matrix(data), self.cotangent_matrix(dy))
        by_unit = current_place().platform == "tpu" and math.prod(self.taps) * self.features <= MOST_PICKED
        apart = functools.partial(self._gradients_of_patches, by_unit=by_unit)
        return lax.platform_dependent(data, dy, cpu=self._gradients_one_by_one, default=apart)

    def _gradients_of_patches(self, data: jax.Array, dy: jax.Array, *, by_unit: bool = False) -> jax.Array:
        # The barrier is there because on a GPU, XLA finds no tiling for a product fused with making the patches.
        return gradient_matrices(
            *lax.optimization_barrier((self.patch_matrix(data, by_unit=by_unit), self.cotangent_matrix(dy)))
        )

    def _gradients_one_by_one(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """Computes `kernel_gradients` for one group of one example after another."""
        features, features_out = self.features // self.groups, dy.shape[-1] // self.groups
        one = self._replace(features=features, groups=1)
        images, first = np.int32(data.shape[1]), np.int32(0)  # int32, even where jax_enable_x64 makes other ints int64
        # Keeps the order of axes of the loss's convolution; otherwise XLA would copy the arrays before the loop.
        rows = [x.reshape(-1, *x.shape[2:]) for x in (data, dy)]

        def put(number, products):
            number = lax.convert_element_type(number, np.int32)
            example, group = lax.div(number, np.int32(self.groups)), lax.rem(number, np.int32(self.groups))

            def part(x, columns):
                start = (example * images, *[first] * (x.ndim - 2), group * np.int32(columns))
                return lax.dynamic_slice(x, start, (images, *x.shape[1:-1], columns), allow_negative_indices=False)

            some = one._gradients_by_convolution(*map(part, rows, (features, features_out)))
            start = example, group, first, first
            return lax.dynamic_update_slice(products, some, start, allow_negative_indices=False)

        shape = len(data), self.groups, math.prod(self.taps) * features, features_out
        zero = opaque_false(dy).astype(jnp.float32)  # not a constant, for the reason given in `keys/noise.py`
        return lax.fori_loop(0, len(data) * self.groups, put, jnp.full(shape, zero))

    def _gradients_by_convolution(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """Computes `kernel_gradients` of one example and one group as a convolution along the last two axes. Its images
        are the features of the data; its features are the images and the positions along other axes."""
        others, features_out = max(0, len(self.taps) - 2), dy.shape[-1]
        x, kernel = self._windows(self._padded_data(data), others), dy
        x, kernel = (x.reshape(-1, *x.shape[1 + others :]) for x in (x, kernel))
        if len(self.taps) == 1:
            x, kernel = x[:, None], kernel[:, None]
        if max(len(x), features_out) <= FEW_FEATURES:
            kernel = lax.pad(kernel, jnp.float32(0), [(0, 0, 0)] * 3 + [(0, ENOUGH_FEATURES - features_out, 0)])
        products = lax.conv_general_dilated(
            x.transpose(3, 1, 2, 0),
            kernel.transpose(1, 2, 0, 3),
            window_strides=(1, *self.dilations)[-2:],
            padding="VALID",
            rhs_dilation=(1, *self.strides)[-2:],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=EXACT,
        )
        products = products[..., :features_out].reshape(-1, self.features, *products.shape[1:3], features_out)
        return products.transpose(0, 2, 3, 1, 4).reshape(1, 1, -1, features_out)

    def _padded_data(self, x: jax.Array) -> jax.Array:
        """Pads data, (N, *sizes, features), and drops elements that no window reaches."""
        padding = []
        for axis, (low, _, interior) in enumerate(self.padding):
            size = (x.shape[1 + axis] - 1) * (interior + 1) + 1
            wanted = (self.taps[axis] - 1) * self.dilations[axis] + self._span_of_tap(axis)
            padding.append((low, wanted - size - low, interior))
        return lax.pad(x, jnp.float32(0), [(0, 0, 0), *padding, (0, 0, 0)])

    def _windows_by_convolution(self, x: jax.Array) -> jax.Array:
        """Makes the windows along all spatial axes by a convolution with ones and zeros, which is exact at any
        precision, because each sum has a single nonzero term. On a v5e, slicing takes five times the cycles."""
        axes, count = len(self.taps), math.prod(self.taps) * self.features
        kernel = jnp.eye(count, dtype=jnp.bfloat16).reshape(*self.taps, self.features, count)
        last, middle = axes + 1, range(1, axes + 1)
        numbers = lax.ConvDimensionNumbers((0, last, *middle), (last, axes, *range(axes)), (0, last, *middle))
        how = {"window_strides": self.strides, "padding": "VALID", "rhs_dilation": self.dilations}
        found = lax.conv_general_dilated(x.astype(jnp.bfloat16), kernel, **how, dimension_numbers=numbers)
        return found.astype(jnp.float32)

    def _windows(self, x: jax.Array, axes: int) -> jax.Array:
        """The windows, (N, *spatial, ..., taps * features), of padded data along the first `axes` spatial axes."""
        for axis in reversed(range(axes)):
            starts = [tap * self.dilations[axis] for tap in range(self.taps[axis])]
            span, stride = self._span_of_tap(axis), self.strides[axis]
            x = jnp.concatenate([lax.slice_in_dim(x, at, at + span, stride, 1 + axis) for at in starts], -1)
        return x

    def _span_of_tap(self, axis: int) -> int:
        """How many elements along an axis one tap spans over all windows."""
        return (self.spatial[axis] - 1) * self.strides[axis] + 1


MOST_ROWS = 2**31 - 1  # the most rows of a table, because indices are int32
LONGEST_KERNEL = 128  # the largest sum of a kernel's spatial sizes; each tap is a slice, and many compile slowly


class CaptureReplacements(NamedTuple):
    """Functions that replace the captured inputs and cotangents of an equation. Values: public values, by index.

    inputs, cotangents: (inputs, dy, Values) -> the replacement. `inputs` is None if the inputs stay; see `kernels`
    key: uses of one equation with equal keys share the replaced inputs; () to share nothing
    """

    inputs: Callable | None
    cotangents: Callable
    key: tuple = ()


class Site(NamedTuple):
    """One use of a parameter W in which y = apply(inputs, W) is linear in W. The cotangent of y is dy.

    use:      the parameter leaf, the equation and the operand
    sizes:    (K, T, I, O): the numbers of groups, of positions, and of inputs and outputs per position
    apply:    (inputs, W) -> y: the equation in float32. inputs: all operands of the equation
    matrices: (inputs, dy) -> A (K, T, I) and B (K, T, O), float32, with arrange(dL/dW) = A^T B. For a lookup, A has the
              indices of the rows, int32 (T,), negative where no row is read, and B is (T, O)
    products: (inputs, dy) -> A^T B, float32 (B, K, I, O), for B examples
    arrange:  W -> (K, I, O): the same elements in the order of A^T B
    lookup:   bool, whether the equation reads rows of W by index; `apply` is then None
    distinct: bool, whether a lookup never reads a row twice
    expands:  int, the number of elements of A if it has the patches of a convolution; otherwise 0
    unread:   the indices of the operands that none of these functions reads
    multiply: (A, B) -> A^T B, for B examples
    record:   replaces `inputs` and `dy` above; None if they are read as captured
    slopes:   Values -> float32 factors, shaped like W, that multiply dL/dW; None for 1
    reads:    the indices of the public values that `record` and `slopes` read
    """

    use: ParameterUse
    sizes: tuple[int, int, int, int]
    apply: Callable | None
    matrices: Callable
    products: Callable
    arrange: Callable
    lookup: bool = False
    distinct: bool = False
    expands: int = 0
    unread: frozenset[int] = frozenset()
    multiply: Callable = gradient_matrices
    record: CaptureReplacements | None = None
    slopes: Callable | None = None
    reads: frozenset[int] = frozenset()


def find_parameter_site(use: ParameterUse, program: LossProgram, made: Mapping[Any, Equation]) -> Site | str:
    """The site of a use, or why the parameter is not followed there. The use's view begins at a part of the parameter.
    made: for each value, by index, the equation that computes it."""
    if use.equation < 0:
        return "the loss is the parameter itself"
    equation = program.equations[use.equation]
    name = equation.name
    if equation.jaxpr is None or name not in RULES:
        return f"used in {name}"
    if name not in ("gather", "dynamic_slice", "dot_general") and is_complex(equation):  # a product: see `kernels`
        return f"used in {name} with operands that are not real numbers"
    site = RULES[name](use, equation.jaxpr)
    if name in SUMS and equation.outputs[0] in program.public:
        return f"used in {name} with other parameters"
    if name == "dot_general" and isinstance(site, Site):
        site = _one_hot_lookup_site(use, equation, made) or site
    repeats = use.view.scan_repeats
    if isinstance(site, Site) and 0 in (*site.sizes, *repeats):
        return f"used in {name} on an array without elements, or in a scan without iterations"
    if isinstance(site, str):
        return site
    if name in own_backward.NAMES:
        return _site_of_custom_backward(_merge_scan_repeats(site, repeats) if repeats else site)
    if not repeats:
        return site
    whole = name == "dynamic_slice" and math.prod(repeats) * site.sizes[1] >= site.sizes[2]
    of_layer = name in ("gather", "dynamic_slice") and equation.outputs[0] in program.slices
    if whole or (of_layer and _iterations_make_kernels(use.leaf, program)):
        return f"used in {name} in each iteration of a scan"  # together, the rows are as large as the table's gradient
    return _merge_scan_repeats(site, repeats)


def _iterations_make_kernels(leaf: int, program: LossProgram) -> bool:
    """Whether the iterations of a scan multiply data by a kernel that they make from a parameter. If so, the cotangents
    of its rows are gradients of layers, which are larger than the inputs and cotangents of these layers."""
    layers = (kernel for kernel in program.kernels if kernel.value in program.slices and leaf in kernel.leaves)
    met = {program.equations[use.equation].name for kernel in layers for use in kernel.uses}
    return not met.isdisjoint(("dot_general", "conv_general_dilated"))


def is_complex(equation: Equation) -> bool:
    """Whether an operand is complex."""
    avals = [operand.aval for operand in equation.jaxpr.invars] if equation.jaxpr else []
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals)


def _merge_scan_repeats(site: Site, repeats: tuple[int, ...]) -> Site:
    """Turns a site in scans whose iterations all use the same W into one use with more positions. repeats: the numbers
    of iterations of these scans; inputs, cotangents and y begin with an axis for each."""
    kernels, positions, fan_in, fan_out = site.sizes

    def apply(inputs, w):
        one: Any = site.apply
        for count in reversed(repeats):
            one = jax.vmap(one, (0, None), axis_size=count)
        return one(inputs, w)

    sizes = kernels, math.prod(repeats) * positions, fan_in, fan_out
    if site.expands:  # a convolution treats iterations as more images
        return site._replace(sizes=sizes, apply=apply, expands=math.prod(repeats) * site.expands)

    def matrices(inputs, dy):
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(repeats) :]), (inputs, dy))
        a, b = jax.vmap(site.matrices)(*flat)
        if site.lookup:
            return a.reshape(-1), b.reshape(-1, fan_out)
        return a.swapaxes(0, 1).reshape(kernels, -1, fan_in), b.swapaxes(0, 1).reshape(kernels, -1, fan_out)

    return site._replace(
        sizes=sizes,
        apply=None if site.lookup else apply,
        matrices=matrices,
        products=lambda inputs, dy: site.multiply(*jax.vmap(matrices)(inputs, dy)),
        distinct=False,
    )


def _site_of_custom_backward(site: Site) -> Site:
    """The site of an equation whose backward pass computes A and B, so that they can be captured directly."""

    def left(inputs, dy, values):
        return (site.matrices(inputs, dy)[0],)

    def right(inputs, dy, values):
        return site.matrices(inputs, dy)[1]

    return captured_matrix_site(site, site.sizes, left, right)


def captured_matrix_site(site: Site, sizes: tuple[int, int, int, int], left: Callable, right: Callable, key=()) -> Site:
    """A site of these sizes where `left` computes the tuple (A,) and `right` computes B; see `CaptureReplacements`."""

    def matrices(inputs, dy):
        return inputs[0].astype(jnp.float32), dy.astype(jnp.float32)

    return site._replace(
        sizes=sizes,
        apply=lambda inputs, w: jnp.einsum("kti,kio->kto", inputs[0], site.arrange(w), precision=EXACT),
        matrices=matrices,
        products=lambda inputs, dy: gradient_matrices(*matrices(inputs, dy)),
        record=CaptureReplacements(left, right, key),
    )


def _exact_float32(x: jax.Array) -> jax.Array:
    """Converts what norms and sums read to float32 numbers that the matrix unit multiplies exactly. Captured real
    numbers have already passed `MatrixUnit.round_to_store`, so only integers need rounding."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x  # see `kernels`
    floating, unit = jnp.issubdtype(x.dtype, jnp.floating), current_place().matrix_unit
    return x.astype(jnp.float32) if floating else unit.round_operand(x)


def _dot_general_rule(use: ParameterUse, equation) -> Site | str:
    """A dot_general of data and W, with any contracted, batch and free axes: a dense layer."""
    weight, data = use.operand, 1 - use.operand
    contracted, batch = equation.params["dimension_numbers"]
    shapes = [operand.aval.shape for operand in equation.invars]

    def free_axes(side):
        return [axis for axis in range(len(shapes[side])) if axis not in (*contracted[side], *batch[side])]

    def size(side, axes):
        return math.prod(shapes[side][axis] for axis in axes)

    groups, positions = size(data, batch[data]), size(data, free_axes(data))
    fan_in, fan_out = size(data, contracted[data]), size(weight, free_axes(weight))

    def apply(inputs, w):
        operands = (_exact_float32(inputs[data]), w) if weight == 1 else (w, _exact_float32(inputs[data]))
        dimensions = equation.params["dimension_numbers"]
        return lax.dot_general(*operands, dimensions, precision=EXACT, preferred_element_type=jnp.float32)

    def matrices(inputs, dy):
        a = _exact_float32(inputs[data]).transpose(*batch[data], *free_axes(data), *contracted[data])
        dy = _exact_float32(dy)
        if weight == 1:
            b = dy.reshape(groups, positions, fan_out)
        else:
            b = dy.reshape(groups, fan_out, positions).transpose(0, 2, 1)
        return a.reshape(groups, positions, fan_in), b

    def arrange(w):
        return w.transpose(*batch[weight], *contracted[weight], *free_axes(weight)).reshape(groups, fan_in, fan_out)

    return _make_site(use, (groups, positions, fan_in, fan_out), apply, matrices, arrange)


def _one_hot_lookup_site(use: ParameterUse, equation: Equation, made: Mapping[Any, Equation]) -> Site | None:
    """The site of a product of W with one-hot rows, possibly scaled; None for any other product. It is a lookup whose
    cotangents are multiplied by the nonzero element of each row. A mask, or an index of -1, makes a row all zeros."""
    jaxpr = equation.jaxpr
    weight, data = use.operand, 1 - use.operand
    contracted, batch = jaxpr.params["dimension_numbers"]
    value, table = equation.inputs[data], jaxpr.invars[weight].aval.shape
    if batch[0] or len(contracted[0]) != 1 or _axis_of_one_hot(_producer(value, made), made) != contracted[data][0]:
        return None
    (along,), (axis,) = contracted[data], contracted[weight]
    slices = tuple(size for number, size in enumerate(jaxpr.invars[data].aval.shape) if number != along)

    def numbers(inputs):
        return _exact_float32(inputs[data]).sum(along)

    def starts(inputs):
        first = lax.argmax(inputs[data].astype(bool), along, jnp.int32)
        return {axis: jnp.where(numbers(inputs) != 0, first, -1)}

    def slices_last(dy):  # the free axes of `data` come first, if it is the first operand
        return dy if weight == 1 else jnp.moveaxis(dy, range(len(table) - 1, dy.ndim), range(len(slices)))

    sizes = tuple(1 if number == axis else size for number, size in enumerate(table))
    site = _lookup_site(use, table, sizes, slices, starts, slices_last, clips=False, numbers=numbers)
    return site if isinstance(site, Site) else None


def _producer(operand: Any, made: Mapping[Any, Any]) -> Any:
    """The equation that computes an operand, or the operand itself if it is constant; None for a program's input."""
    return operand if isinstance(operand, core.Literal | Constant) else made.get(operand)


def _jaxpr_of(maker: Any) -> Any:
    return None if isinstance(maker, core.Literal | Constant) else getattr(maker, "jaxpr", maker)


def _axis_of_one_hot(equation: Any, made: Mapping[Any, Any]) -> int | None:
    """The axis along which a value has at most one nonzero element, at a computed index, like the result of
    `jax.nn.one_hot`, perhaps times a mask; None for any other value. equation: computes the value. made: the equation
    that computes each operand, in a `LossProgram` or in a jaxpr that it calls."""
    jaxpr = _jaxpr_of(equation)
    if jaxpr is None:
        return None
    name, inputs = jaxpr.primitive.name, getattr(equation, "inputs", jaxpr.invars)

    if name in CALLS and len(jaxpr.outvars) == 1:
        body = jaxpr.params[CALLS[name]].jaxpr
        makers = zip(body.invars, (_producer(operand, made) for operand in inputs), strict=True)
        inside = {**made, **dict(makers), **{variable: each for each in body.eqns for variable in each.outvars}}
        return _axis_of_one_hot(_producer(body.outvars[0], inside), inside)
    if name == "convert_element_type":
        return _axis_of_one_hot(_producer(inputs[0], made), made)
    if name == "transpose":
        axis = _axis_of_one_hot(_producer(inputs[0], made), made)
        return None if axis is None else jaxpr.params["permutation"].index(axis)
    masked = {"mul": (0, 1), "and": (0, 1), "div": (0,), "select_n": range(1, len(inputs))}.get(name, ())
    masked = [number for number in masked if name != "select_n" or not _is_zero(_producer(inputs[number], made), made)]
    for number in masked if name != "select_n" or len(masked) == 1 else ():
        axis, out = _axis_of_one_hot(_producer(inputs[number], made), made), jaxpr.outvars[0].aval.shape
        if axis is not None and jaxpr.invars[number].aval.shape[axis] == out[axis]:
            return axis
    if name != "eq":
        return None
    for number, axis in enumerate(_axis_of_iota(_producer(operand, made), made) for operand in inputs):
        other, maker = jaxpr.invars[1 - number].aval, _producer(inputs[1 - number], made)
        if axis is None or jaxpr.invars[number].aval.shape[axis] < jaxpr.outvars[0].aval.shape[axis]:
            continue
        if (of := _jaxpr_of(maker)) is not None and of.primitive.name == "broadcast_in_dim":
            sizes = dict(zip(of.params["broadcast_dimensions"], of.invars[0].aval.shape, strict=True))
        else:
            sizes = dict(enumerate(other.shape))
        return axis if sizes.get(axis, 1) == 1 else None
    return None


def _is_zero(maker: Any, made: Mapping[Any, Any]) -> bool:
    """Whether a value is a constant 0, perhaps broadcast."""
    jaxpr = _jaxpr_of(maker)
    if isinstance(maker, core.Literal | Constant):
        value = maker.val if isinstance(maker, core.Literal) else maker.value
        return np.ndim(value) == 0 and not isinstance(value, jax.core.Tracer) and bool(np.asarray(value) == 0)
    if jaxpr is None or jaxpr.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    return _is_zero(_producer(getattr(maker, "inputs", jaxpr.invars)[0], made), made)


def _axis_of_iota(equation: Any, made: Mapping[Any, Any]) -> int | None:
    """The axis along which a value is 0, 1, 2, ..., exactly in its dtype; None for any other value."""
    jaxpr = _jaxpr_of(equation)
    if jaxpr is None:
        return None
    if jaxpr.primitive.name == "broadcast_in_dim":
        axis = _axis_of_iota(_producer(getattr(equation, "inputs", jaxpr.invars)[0], made), made)
        to = None if axis is None else jaxpr.params["broadcast_dimensions"][axis]
        return to if to is not None and jaxpr.invars[0].aval.shape[axis] == jaxpr.params["shape"][to] else None
    if jaxpr.primitive.name != "iota":
        return None
    axis, dtype = jaxpr.params["dimension"], jaxpr.params["dtype"]
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = jnp.iinfo(dtype).max if whole else 2 ** (jnp.finfo(dtype).nmant + 1)
    return axis if jaxpr.params["shape"][axis] - 1 <= most else None


def _convolution_rule(use: ParameterUse, equation) -> Site | str:
    """A conv_general_dilated of data and a kernel: a dense layer on the patches of the data."""
    params, (data, kernel) = equation.params, [operand.aval for operand in equation.invars]
    if use.operand != 1 or params["batch_group_count"] != 1:
        return "used in a convolution as the data, or with batch groups"
    lhs, rhs, out = params["dimension_numbers"]
    taps = tuple(kernel.shape[axis] for axis in rhs[2:])
    groups = params["feature_group_count"]
    features_out, features_in = kernel.shape[rhs[0]] // groups, kernel.shape[rhs[1]]
    if sum(taps) > LONGEST_KERNEL:
        return f"used in a convolution of {sum(taps)} taps along its axes, more than {LONGEST_KERNEL}"
    images, spatial = data.shape[lhs[0]], tuple(equation.outvars[0].aval.shape[axis] for axis in out[2:])
    positions, fan_in = images * math.prod(spatial), math.prod(taps) * features_in

    def apply(inputs, w):
        names = "window_strides padding lhs_dilation rhs_dilation dimension_numbers feature_group_count"
        kept = {name: params[name] for name in names.split()}
        return lax.conv_general_dilated(
            _exact_float32(inputs[0]), w, **kept, precision=EXACT, preferred_element_type=jnp.float32
        )

    lows_highs = zip(params["padding"], params["lhs_dilation"], strict=True)
    patches = Patches(
        features=groups * features_in,
        groups=groups,
        taps=taps,
        strides=params["window_strides"],
        dilations=params["rhs_dilation"],
        padding=tuple((low, high, dilation - 1) for (low, high), dilation in lows_highs),
        spatial=spatial,
    )

    def features_last(x, numbers):
        """Arranges B examples as float32 (B, images, *spatial, features); iterations, if any, become images."""
        first, order = x.ndim - len(numbers), (numbers[0], *numbers[2:], numbers[1])
        x = _exact_float32(x).transpose(*range(first), *(first + axis for axis in order))
        return x if first == 1 else x.reshape(len(x), -1, *x.shape[first + 1 :])

    def matrices(inputs, dy):
        data, dy = features_last(inputs[0][None], lhs), features_last(dy[None], out)
        return patches.patch_matrix(data)[0], patches.cotangent_matrix(dy)[0]

    def products(inputs, dy):
        return patches.kernel_gradients(features_last(inputs[0], lhs), features_last(dy, out))

    def arrange(w):
        w = w.transpose(*rhs[2:], rhs[1], rhs[0]).reshape(math.prod(taps), features_in, groups, features_out)
        return w.transpose(2, 0, 1, 3).reshape(groups, fan_in, features_out)

    site = _make_site(use, (groups, positions, fan_in, features_out), apply, matrices, arrange)
    return site._replace(products=products, expands=groups * positions * fan_in)


def _gather_rule(use: ParameterUse, equation) -> Site | str:
    """A gather of slices of a table, for example the rows of an embedding."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    if use.operand != 0 or params["mode"] == lax.GatherScatterMode.ONE_HOT:
        return "used in a gather as indices, or as a product with one-hot rows"
    offsets = numbers.offset_dims
    batched = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))

    def starts(inputs):
        index, shape = inputs[1], inputs[1].shape[:-1]
        found = {axis: lax.broadcasted_iota(jnp.int32, shape, of) for axis, of in batched}
        return found | {axis: index[..., column] for column, axis in enumerate(numbers.start_index_map)}

    def slices_last(dy):
        return dy.transpose(*(axis for axis in range(dy.ndim) if axis not in offsets), *offsets)

    clips, count = params["mode"] == lax.GatherScatterMode.CLIP, equation.invars[1].aval.shape[:-1]
    return _lookup_site(
        use, equation.invars[0].aval.shape, params["slice_sizes"], count, starts, slices_last, clips=clips
    )


def _dynamic_slice_rule(use: ParameterUse, equation) -> Site | str:
    """A dynamic_slice of W: one block, whose start depends on the data. An earlier equation has replaced negative
    starts, and JAX moves starts that are too close to the end."""
    if use.operand != 0:
        return "used in dynamic_slice as a start"
    table, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    return _lookup_site(use, table, sizes, (), lambda inputs: dict(enumerate(inputs[1:])), lambda dy: dy, clips=True)


def _slice_rule(use: ParameterUse, equation) -> Site | str:
    """A slice of W, such as the row of one token, treated as a lookup: see `plan`."""
    if equation.params["strides"] is not None:
        return "used in slice with strides"
    table, sizes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    starts = dict(enumerate(map(jnp.int32, equation.params["start_indices"])))
    return _lookup_site(use, table, sizes, (), lambda inputs: starts, lambda dy: dy, clips=True)


def _lookup_site(
    use: ParameterUse,
    table: tuple[int, ...],
    sizes: tuple[int, ...],
    slices: tuple[int, ...],
    starts: Callable,
    slices_last: Callable,
    *,
    clips: bool,
    numbers: Callable | None = None,
) -> Site | str:
    """The site of a lookup of slices of these `sizes` in an array of shape `table`. A row of the table holds the
    elements along the axes that a slice spans completely.

    slices: the shape of the array of slices. starts: inputs -> where the slices begin, int (slices), by axis of the
        table; 0 along other axes. slices_last: dy -> dy as (slices, the axes of a slice)
    clips: whether a slice that would leave the table is moved inside; otherwise it reads nothing
    numbers: inputs -> factors of the slices, float32 (slices), for slices of one row; None for 1
    """
    across = [axis for axis, size in enumerate(sizes) if size < table[axis]]
    order = (*across, *(axis for axis in range(len(table)) if axis not in across))
    count, positions = (math.prod(of[axis] for axis in across) for of in (table, sizes))
    width, positions = math.prod(table) // max(1, count), positions * math.prod(slices)
    if count > MOST_ROWS:
        return f"used in a lookup of {count} rows, more than {MOST_ROWS}"

    def matrices(inputs, dy):
        inside, first = [], dict.fromkeys(across, jnp.zeros(slices, jnp.int32))
        for axis, start in starts(inputs).items():
            last = min(table[axis] - sizes[axis], jnp.iinfo(start.dtype).max)
            start = jnp.clip(start, 0, last) if clips else start
            inside += [] if clips else [(start >= 0) & (start <= last)]
            first[axis] = start.astype(jnp.int32)
        shape = (*slices, *(sizes[axis] for axis in across))
        rows = jnp.zeros(shape, jnp.int32)
        for place, axis in enumerate(across, len(slices)):
            along = repeat_to_shape(first[axis], shape)
            along = along + lax.broadcasted_iota(jnp.int32, shape, place) if sizes[axis] > 1 else along
            rows = along if place == len(slices) else rows * table[axis] + along
        if inside:
            rows = jnp.where(repeat_to_shape(functools.reduce(jnp.logical_and, inside), shape), rows, -1)
        b = _exact_float32(slices_last(dy)).reshape(*slices, *sizes)
        b = b.transpose(*range(len(slices)), *(len(slices) + axis for axis in order))
        rows, b = rows.reshape(positions), b.reshape(positions, width)
        if numbers is not None:
            b = jnp.where(rows[:, None] < 0, b, b * numbers(inputs).reshape(positions, 1))
            b = current_place().matrix_unit.round_operand(b)
        return rows, b

    def arrange(w):
        return w.transpose(order).reshape(1, count, width)

    site = _make_site(use, (1, positions, count, width), None, matrices, arrange)
    return site._replace(lookup=True, distinct=math.prod(slices) == 1)


def _broadcast_arithmetic_rule(use: ParameterUse, equation) -> Site | str:
    """An add, sub or mul of data and W, which broadcasts W: A^T B is a sum over the broadcast axes. For add and sub, A
    holds ones; for mul, every element of W is its own group."""
    name, out, data = equation.primitive.name, equation.outvars[0].aval.shape, 1 - use.operand
    shape = equation.invars[use.operand].aval.shape or (1,) * len(out)
    along = [axis for axis, size in enumerate(out) if shape[axis] != size]
    order = (*along, *(axis for axis in range(len(out)) if axis not in along))
    positions, count = math.prod(out[axis] for axis in along), math.prod(shape)
    groups, width = (count, 1) if name == "mul" else (1, count)
    sign = -1 if name == "sub" and use.operand == 1 else 1

    def by_position(x):
        return _exact_float32(x).transpose(order).reshape(positions, groups, width).swapaxes(0, 1)

    def apply(inputs, w):
        w = jnp.broadcast_to(w.reshape(shape), out)
        return w * _exact_float32(inputs[data]) if name == "mul" else sign * w

    def matrices(inputs, dy):
        if name == "mul":
            return by_position(jnp.broadcast_to(inputs[data], out)), by_position(dy)
        return jnp.ones((1, positions, 1), jnp.float32), sign * by_position(dy)

    site = _make_site(
        use, (groups, positions, 1, width), apply, matrices, lambda w: w.reshape(groups, 1, width), _product_as_sum
    )
    return site if name == "mul" else site._replace(unread=frozenset({0, 1}))


def _product_as_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `gradient_matrices` of A, (B, K, T, 1), and B, (B, K, T, O), as a sum, which XLA does faster."""
    return jnp.sum(a * b, 2)[:, :, None]


def _make_site(use, sizes, apply, matrices, arrange, multiply: Callable = gradient_matrices) -> Site:
    return Site(
        use,
        sizes,
        apply=apply and (lambda inputs, w: apply(inputs, use.view.apply_steps(w))),
        matrices=matrices,
        products=lambda inputs, dy: multiply(*jax.vmap(matrices)(inputs, dy)),
        arrange=lambda w: arrange(use.view.apply_steps(w)),
        unread=frozenset({use.operand}),
        multiply=multiply,
    )


def _custom_vjp_rule(use: ParameterUse, equation) -> Site | str:
    """A function whose backward pass computes the gradient of W as one product."""
    product = own_backward.find_gradient_product(equation, use.operand)
    if product is None:
        return "used in custom_vjp_call, whose backward pass does not give it one product"
    return _make_site(use, product.sizes, None, lambda inputs, dy: dy[use.operand], product.arrange_parameter)


MATRICES = {
    "dot_general": _dot_general_rule,
    "conv_general_dilated": _convolution_rule,
    "gather": _gather_rule,
    "dynamic_slice": _dynamic_slice_rule,
}
SUMS = dict.fromkeys(("add", "sub", "mul"), _broadcast_arithmetic_rule)
RULES = MATRICES | SUMS | {"slice": _slice_rule} | dict.fromkeys(own_backward.NAMES, _custom_vjp_rule)

"""The patches of the data of a convolution, which make it a dense layer, and its per-example gradients.

All patches of a batch hold every number of the data once for each tap, and would leave the cache of a CPU. So there,
the gradients are convolutions of the data and the cotangents, of one example after another. Such a convolution needs no
patches, is as fast as their product or faster, and compiles faster.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx.gradients.ghost.norms import EXACT, product
from dpx.xla.devices import device_count
from dpx.xla.ordering import opaque_false

# XLA has a fast convolution on a CPU if the data or the result have more than 16 features. Fewer are padded to 32.
FEW_FEATURES, ENOUGH_FEATURES = 16, 32


class Patches(NamedTuple):
    """The patches of a convolution. Each field but the first two has an entry for each spatial axis.

    features: of the data. groups: how many groups they form, and those of the result
    taps, strides, dilations: of the kernel. padding: (low, high, interior) of the data. spatial: sizes of the result
    """

    features: int
    groups: int
    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[tuple[int, int, int], ...]
    spatial: tuple[int, ...]

    def matrix(self, data: jax.Array) -> jax.Array:
        """A, float32 (B, K, T, I), of data, float32 (B, images, *sizes, features)."""
        x = self._windows(self._padded(data.reshape(-1, *data.shape[2:])), len(self.taps))
        x = x.reshape(len(data), -1, x.shape[-1] // self.features, self.groups, self.features // self.groups)
        return x.transpose(0, 3, 1, 2, 4).reshape(len(data), self.groups, x.shape[1], -1)

    def cotangents(self, dy: jax.Array) -> jax.Array:
        """B, float32 (B, K, T, O), of the cotangents of the result, float32 (B, images, *spatial, features)."""
        return dy.reshape(len(dy), -1, self.groups, dy.shape[-1] // self.groups).transpose(0, 2, 1, 3)

    def products(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """A^T B, float32 (B, K, I, O), of A = `matrix(data)` and B = `cotangents(dy)`."""
        # On several devices, the examples may be sharded. The patches of one tap are the data.
        if device_count() > 1 or math.prod(self.taps) == 1:
            return self._at_once(data, dy)
        return lax.platform_dependent(data, dy, cpu=self._one_by_one, default=self._at_once)

    def _at_once(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """`products`, by all patches."""
        return product(self.matrix(data), self.cotangents(dy))

    def _one_by_one(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """`products`, of one group of one example after another."""
        features, features_out = self.features // self.groups, dy.shape[-1] // self.groups
        one = self._replace(features=features, groups=1)
        images, first = np.int32(data.shape[1]), np.int32(0)  # int32, also where jax_enable_x64 makes other ints int64
        # The axes as the convolution of the loss has them; with others, XLA would copy the arrays before the loop.
        rows = [x.reshape(-1, *x.shape[2:]) for x in (data, dy)]

        def put(number, products):
            number = lax.convert_element_type(number, np.int32)
            example, group = lax.div(number, np.int32(self.groups)), lax.rem(number, np.int32(self.groups))

            def part(x, columns):
                start = (example * images, *[first] * (x.ndim - 2), group * np.int32(columns))
                return lax.dynamic_slice(x, start, (images, *x.shape[1:-1], columns), allow_negative_indices=False)

            some, start = one._convolved(*map(part, rows, (features, features_out))), (example, group, first, first)
            return lax.dynamic_update_slice(products, some, start, allow_negative_indices=False)

        shape = len(data), self.groups, math.prod(self.taps) * features, features_out
        zero = opaque_false(dy).astype(jnp.float32)  # not a constant, for the reason in `keys.normals._chunks`
        return lax.fori_loop(0, len(data) * self.groups, put, jnp.full(shape, zero))

    def _convolved(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """`products` of one example and one group, as a convolution along the last two axes.

        Its images are the features of the data. Its features are the images, and the positions along other axes.
        """
        others, features_out = max(0, len(self.taps) - 2), dy.shape[-1]
        x, kernel = self._windows(self._padded(data), others), dy
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

    def _padded(self, x: jax.Array) -> jax.Array:
        """Data, (N, *sizes, features), with the padding, and without numbers that no window reaches."""
        padding = []
        for axis, (low, _, interior) in enumerate(self.padding):
            size = (x.shape[1 + axis] - 1) * (interior + 1) + 1
            wanted = (self.taps[axis] - 1) * self.dilations[axis] + self._span(axis)
            padding.append((low, wanted - size - low, interior))
        return lax.pad(x, jnp.float32(0), [(0, 0, 0), *padding, (0, 0, 0)])

    def _windows(self, x: jax.Array, axes: int) -> jax.Array:
        """The windows, (N, *spatial, ..., taps * features), of padded data along the first `axes` spatial axes."""
        for axis in reversed(range(axes)):
            starts = [tap * self.dilations[axis] for tap in range(self.taps[axis])]
            span, stride = self._span(axis), self.strides[axis]
            x = jnp.concatenate([lax.slice_in_dim(x, at, at + span, stride, 1 + axis) for at in starts], -1)
        return x

    def _span(self, axis: int) -> int:
        """How many numbers of an axis the windows of one tap span."""
        return (self.spatial[axis] - 1) * self.strides[axis] + 1

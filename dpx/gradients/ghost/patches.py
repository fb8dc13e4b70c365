"""The patches of the data of a convolution, which make it a dense layer, and its per-example gradients by them.

All patches of a batch hold every number of the data once for each tap, and would leave the cache of a CPU. So there, a
loop takes one tap after another, unless the patches of one tap are small.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpx._ordering import opaque_false
from dpx.gradients.ghost.norms import product

# Of one tap of one example: with fewer columns of A, or fewer numbers, products are slow (benchmarks/step.py).
SMALL_COLUMNS, SMALL_PATCHES = 8, 2**11


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
        return self._by_group(self._windows(self._padded(data), []), len(data))

    def cotangents(self, dy: jax.Array) -> jax.Array:
        """B, float32 (B, K, T, O), of the cotangents of the result, float32 (B, images, *spatial, features)."""
        return dy.reshape(len(dy), -1, self.groups, dy.shape[-1] // self.groups).transpose(0, 2, 1, 3)

    def products(self, data: jax.Array, dy: jax.Array) -> jax.Array:
        """A^T B, float32 (B, K, I, O), of A = `matrix(data)` and B = `cotangents(dy)`."""
        looped = self._looped()

        def at_once(data, dy):
            return product(self.matrix(data), self.cotangents(dy))

        def in_loop(data, dy):
            return self._in_loop(data, dy, looped)

        # On several devices, the examples may be sharded.
        if not looped or jax.device_count() > 1:
            return at_once(data, dy)
        return lax.platform_dependent(data, dy, cpu=in_loop, default=at_once)

    def _looped(self) -> int:
        """The number of axes whose taps are in the loop: all, but the last ones if the patches of one tap are small."""
        looped, columns = len(self.taps), self.features
        while looped and (columns < SMALL_COLUMNS or columns * math.prod(self.spatial) < SMALL_PATCHES):
            looped -= 1
            columns *= self.taps[looped]
        return looped if math.prod(self.taps[:looped]) > 1 else 0

    def _in_loop(self, data: jax.Array, dy: jax.Array, looped: int) -> jax.Array:
        """`products`, with the taps of the first axes one after another."""
        x, size, taps = self._padded(data), len(data), self.taps[:looped]
        count, columns = math.prod(taps), math.prod(self.taps[looped:]) * self.features // self.groups

        def put(number, products):
            strides = [math.prod(taps[axis + 1 :]) for axis in range(looped)]
            places = [lax.rem(lax.div(number, np.int32(s)), np.int32(n)) for s, n in zip(strides, taps, strict=True)]
            some = product(self._by_group(self._windows(x, places), size), self.cotangents(dy))[:, :, None]
            return lax.dynamic_update_slice(products, some, (0, 0, number, 0, 0), allow_negative_indices=False)

        # With a constant, the memory would be taken when the program starts.
        zero = opaque_false(dy).astype(jnp.float32)
        shape = size, self.groups, count, columns, dy.shape[-1] // self.groups
        products = lax.fori_loop(0, count, put, jnp.full(shape, zero))
        return products.reshape(size, self.groups, count * columns, -1)

    def _padded(self, data: jax.Array) -> jax.Array:
        """The padded data, (B * images, *sizes, features)."""
        *before, (low, high, interior) = self.padding
        x = data.reshape(-1, *data.shape[2:])
        if interior:
            return lax.pad(x, jnp.float32(0), [(0, 0, 0), *self.padding, (0, 0, 0)])
        # With one axis less, the program is faster on a CPU, and compiles much faster.
        x = x.reshape(*x.shape[:-2], -1)
        x = lax.pad(x, jnp.float32(0), [(0, 0, 0), *before, (low * self.features, high * self.features, 0)])
        return x.reshape(*x.shape[:-1], -1, self.features)

    def _windows(self, x: jax.Array, places: list[jax.Array]) -> jax.Array:
        """The windows, (B * images, *spatial, taps * features), of padded data.

        On the first axes, they are those of one tap, whose numbers are `places`, int () each; on the others, of all.
        """
        for axis, place in enumerate(places):
            x = lax.dynamic_slice_in_dim(x, place * np.int32(self.dilations[axis]), self._span(axis), 1 + axis)
            x = lax.slice_in_dim(x, 0, None, self.strides[axis], 1 + axis)
        for axis in reversed(range(len(places), len(self.taps))):
            starts = [tap * self.dilations[axis] for tap in range(self.taps[axis])]
            span, stride = self._span(axis), self.strides[axis]
            x = jnp.concatenate([lax.slice_in_dim(x, at, at + span, stride, 1 + axis) for at in starts], -1)
        return x

    def _span(self, axis: int) -> int:
        """How many numbers of an axis the windows of one tap span."""
        return (self.spatial[axis] - 1) * self.strides[axis] + 1

    def _by_group(self, x: jax.Array, examples: int) -> jax.Array:
        """Windows, (B * images, *spatial, taps * features), as (B, K, T, taps * features / K)."""
        x = x.reshape(examples, -1, x.shape[-1] // self.features, self.groups, self.features // self.groups)
        return x.transpose(0, 3, 1, 2, 4).reshape(examples, self.groups, x.shape[1], -1)

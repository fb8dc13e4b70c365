"""The memory of correlated noise: what the last releases differ from their sums by, and what it adds to the next sum.

The numbers are functions of raw data and of releases (`event.py`), so they are never released. They
are two float32 numbers each, 8 bytes, because float32 alone would move a sum by up to 2^-23 sqrt(numbers) deviations.
The last w steps are in a ring on axis 0 of every array: step t writes row t mod w, and moves no other row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.states.record import ReleaseState
from dpx.sums import doubles
from dpx.sums.total import FloatPair
from dpx.trees import Tree


class CorrelatedNoiseState(NamedTuple):
    """The record of the releases, and the noise of the last ones.

    inner: ReleaseState, public.
    unreleased_noise: two float32 (w, ...) arrays for each array of the encoded gradients, the last w noises: a release
        minus one of them is the sum of raw gradients. Never share it.
    """

    inner: ReleaseState
    unreleased_noise: FloatPair


def empty(params: Tree, steps: int) -> CorrelatedNoiseState:
    """The state before the first release, sharded like the parameters. steps: w, int, at least 1."""

    def ring(p: jax.Array) -> jax.Array:
        zeros = jnp.zeros_like(p, dtype=jnp.float32)
        return jnp.stack([zeros] * steps)

    return CorrelatedNoiseState(ReleaseState.empty(params), FloatPair(*(jax.tree.map(ring, params) for _ in range(2))))


def added(state: CorrelatedNoiseState, weights: np.ndarray) -> Tree:
    """sum_j weights_j noise_(t-1-j), float64 like the gradients. weights: float64 (w,). Inside `jax.enable_x64`."""
    count = len(weights)
    ages = (state.inner.step - 1 - jnp.arange(count, dtype=jnp.int32)) % count
    of_rows = doubles.constants(weights)[ages]

    def add(high: jax.Array, low: jax.Array) -> jax.Array:
        # Row after row in one loop over the numbers: a sum over axis 0 takes seven times as long on a CPU.
        rows = (high[row].astype(jnp.float64) + low[row].astype(jnp.float64) for row in range(count))
        return sum((weight * row for weight, row in zip(of_rows, rows, strict=True)), start=jnp.float64(0))

    return jax.tree.map(add, *state.unreleased_noise)


def after(state: CorrelatedNoiseState, noise: FloatPair, release: ReleaseState) -> CorrelatedNoiseState:
    """The next state. noise: of this step, like the gradients. release: the next record."""
    rows = state.unreleased_noise

    def write(row: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(rows, row, state.inner.step % len(rows), 0)

    return CorrelatedNoiseState(
        release, FloatPair(*(jax.tree.map(write, *parts) for parts in zip(noise, rows, strict=True)))
    )

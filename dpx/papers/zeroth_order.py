"""Zeroth-order training: reads derivatives of each example's loss along a few random directions, and no gradient.

DP-ZO (Tang et al. 2024, https://arxiv.org/abs/2401.04343) and DPZero (Zhang et al. 2024,
https://arxiv.org/abs/2310.09639) use one direction, and the difference of two losses. DP-AggZO uses several directions
and clips their derivatives together, as dpx does. In dpx, the derivatives are exact, by `jax.jvp`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Coordinates, Mechanism, in_coordinates
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule
from dpx.values import explain_misuse, require_whole


@accepts_budget
def zeroth_order_sgd(
    *,
    directions: int = 16,
    clip_norm: ScalarOrSchedule,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD on derivatives along random directions, with the memory of inference (DP-ZO, DPZero, DP-AggZO).

    For K normal directions u_k, drawn anew at every step and not secret, each example contributes the K derivatives
    u_k . g / sqrt(K), which are clipped and summed. The release r becomes the update sum_k r_k u_k / sqrt(K). If
    nothing is clipped, the mean update is the gradient, and a coordinate has, on average, as much noise as in DP-SGD.
    No gradient is computed: `private_updates` evaluates the loss with one direction at a time, K times per step.

    The papers' claim holds: the directions do not depend on the data, and only the sums of derivatives are released.

    directions: K, at least 1. The time of a step grows with K, but not its memory. The update's error grows with d/K
        for d parameters: even small models learn slowly, but pretrained ones learn well if few directions matter.
    clip_norm: applies to the K derivatives of an example, in the units of the gradient; a number or a schedule.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains. `dpx.in_coordinates` with `dpx.coordinates.trainable` and
    `dpx.coordinates.random_directions` does this for some layers only.
    """
    mechanism = dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)
    return in_coordinates(mechanism, random_directions(count=directions, key=key))


class DirectionsState(NamedTuple):
    """step: int32 (), the number of releases. The directions depend on this number and the key alone."""

    step: jax.Array


@explain_misuse
def random_directions(*, count: int, key: jax.Array) -> Coordinates:
    """Writes a gradient g as K = `count` numbers u_k . g / sqrt(K); every step draws new standard normal u_k.

    `private_updates` computes these by forward-mode derivatives, without g, unless coordinates other than `trainable`
    precede them.

    count: int, at least 1. key: a scalar PRNG key, whose "directions" stream is used, with the step folded in.
    Raises ValueError for any other count.
    """
    count = require_whole("count", count)
    stream = keys.stream(key, "directions")

    def random_direction(number, state, like):
        """Returns direction k, u_k / sqrt(K), float32, like the gradient."""
        drawn = jax.random.fold_in(keys.public_key(keys.fold_in(stream, state.step)), number)
        normals = optax.tree.random_like(drawn, like, jax.random.normal, jnp.float32)
        return jax.tree.map(lambda leaf: leaf / math.sqrt(count), normals)

    def encode(grad, state):
        def derivative_along(_, k):
            products = jax.tree.map(lambda u, g: jnp.sum(u * g), random_direction(k, state, grad), grad)
            return None, sum(jax.tree.leaves(products))

        return jax.lax.scan(derivative_along, None, jnp.arange(count, dtype=jnp.int32))[1]

    def decode(released, state, like):
        def add(total, numbered):
            k, value = numbered
            return jax.tree.map(lambda t, u: t + value * u, total, random_direction(k, state, like)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(count, dtype=jnp.int32), released))
        return total, DirectionsState(state.step + 1)

    return Coordinates(
        init=lambda params: DirectionsState(jnp.zeros((), jnp.int32)),
        encode=encode,
        decode=decode,
        name=f"derivatives along {count} random directions",
        undo="the directions, times the released numbers",
        encode_whole_batch=True,
        direction=random_direction,
    )

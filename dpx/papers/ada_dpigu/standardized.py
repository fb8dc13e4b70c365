"""Standardization (AdaCliP): each coordinate is centered and scaled by averages of its earlier released values."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx.mechanism import Coordinates, Tree
from dpx.validation import require_number


class StandardizedState(NamedTuple):
    """Moving averages of released values.

    mean: float32, like the parameters, the average of the released gradient.
    variance: float32, like the parameters, the average of its squared deviation from the mean.
    """

    mean: Tree
    variance: Tree


def standardized(
    *,
    mean_decay: float = 0.9,
    variance_decay: float = 0.999,
    initial_variance: float = 0.0,
    stability: float = 1e-3,
    relative: bool = True,
) -> Coordinates:
    """Each coordinate minus its released mean, divided by its released scale.

    g -> (g - mean) / scale,  scale = sqrt(variance) + stability;  `decode` undoes this on the released gradient
    mean     <- mean_decay mean + (1 - mean_decay) released
    variance <- variance_decay variance + (1 - variance_decay) (released - mean)^2,  with the mean before its change

    Both averages see released gradients only. A coordinate released as exactly 0 is frozen and keeps its averages. The
    mean is subtracted from every example, so `private_updates` computes per-example gradients instead of ghost norms.

    mean_decay, variance_decay: in [0, 1). initial_variance: at least 0, in the squared units of the gradient.
    stability: at least 1e-12, in the units of the gradient.
    relative: divide the scale by its root mean square, so that the clip norm keeps the units of the gradient. Without
        it, as published, the scale is that of a batch's mean: every example is clipped, the scale shrinks to
        `stability`, and the clip norm to `stability * clip_norm`.

    Raises ValueError for numbers outside their domains.
    Source: AdaCliP, Pichapati et al. 2019, https://arxiv.org/abs/1908.07643, with the averages of AdaDPIGU,
    https://arxiv.org/abs/2507.06525.
    """
    for name, decay in (("mean_decay", mean_decay), ("variance_decay", variance_decay)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} must be in [0, 1), got {decay}")
    require_number("initial_variance", initial_variance, minimum=0)
    require_number("stability", stability, minimum=1e-12)
    scales = functools.partial(_scales, stability=stability, relative=relative)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return StandardizedState(zeros, jax.tree.map(lambda z: z + initial_variance, zeros))

    def encode(grad, state):
        return jax.tree.map(lambda g, m, s: (g - m) / s, grad, state.mean, scales(state.variance))

    def decode(released, state, like):
        mean, variance = state
        restored = jax.tree.map(lambda r, m, s: r * s + m, released, mean, scales(variance))

        def average(decay, old, new):
            return jax.tree.map(lambda r, o, n: jnp.where(r == 0, o, decay * o + (1 - decay) * n), released, old, new)

        deviation = jax.tree.map(lambda r, m: (r - m) ** 2, restored, mean)
        following = StandardizedState(average(mean_decay, mean, restored), average(variance_decay, variance, deviation))
        return restored, following

    return Coordinates(
        init=init,
        encode=encode,
        decode=decode,
        name="standardize by released means and scales, in whose units the clip norm and the noise are",
        undo="undo the standardization",
    )


def _scales(variance: Tree, *, stability: float, relative: bool) -> Tree:
    """The scale of every coordinate, float32, like the parameters."""
    scale = jax.tree.map(lambda v: jnp.sqrt(v) + stability, variance)
    if not relative:
        return scale
    root_mean_square = optax.tree.norm(scale) / math.sqrt(sum(leaf.size for leaf in jax.tree.leaves(scale)))
    return jax.tree.map(lambda s: s / root_mean_square, scale)

"""DP-SGD: the Gaussian mechanism on clipped per-example gradients, on which most methods are built.

Proof of the bound. An example whose gradient has norm n is multiplied by C / max(n, C), so its contribution has norm
n C / max(n, C), at most C. With groups of clip norms C_k, the norm is at most sqrt(sum_k C_k^2) = C, because the groups
share no coordinate. Leaving the example out changes the sum by its contribution alone, which is at most C, and the
computed sum by at most C (1 + ETA), whatever the data (`dpx.sums.rounding`). The noise on every coordinate has
standard deviation sigma C (1 + ETA), where sigma and C are functions of the step, so one release is the Gaussian
mechanism with noise multiplier sigma. The division by B is post-processing.

`normalized` is automatic clipping, which normalizes every example's gradient, so that no clip norm must be chosen.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.mechanism.base import (
    SUM,
    Mechanism,
    describe_groups,
    describe_number_or_schedule,
    insert_stages_around_sum,
    require_mechanism,
)
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule, require_scalar_or_schedule, value_at, values_over
from dpx.states.record import ReleaseState
from dpx.sums import norms
from dpx.sums.rounding import ETA
from dpx.values import Tree, described, range_in_words, require_number

# In the units of the gradient. The squares of norms outside this range, or sums of them, leave float32's range.
SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 2.0**-40, 1e15
SMALLEST_NOISE, LARGEST_NOISE = 2.0**-55, 2.0**45  # multipliers above 0: clip norm times noise is a normal float32


@accepts_budget
def dp_sgd(
    *,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD: clip each example's gradient, sum, add noise, divide (Abadi et al. 2016, arXiv:1607.00133).

    private gradient = (sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2 I)) / B,  with the expected batch size B

    The paper claims the epsilon of its moments accountant, which holds. Because one example moves the sum by at most C,
    dpx composes all steps by privacy loss distributions, for the sampling that draws the batches. Use `dpx.chain` to
    put any optax optimizer behind it.

    clip_norm: C, in the units of the gradient; a number in [2^-40, 1e15] or an optax schedule of the step. A pytree
        prefix of the gradients clips each group (layer) to its own norm; C is then sqrt(sum of the groups' squares).
    noise_multiplier: sigma, 0 or in [2^-55, 2^45], the standard deviation of the noise on the sum, divided by C; a
        number, a schedule of the step, or a `dpx.Budget`, for which dpx finds the smallest sigma. 0 costs infinity.
    sampling: draws the batches, sets B and wraps the event.
    key: a secret scalar PRNG key for one run. Never reuse it: two runs with one key share their noise, and subtracting
        their results removes it. Every step draws its own part of the key's "noise" stream.
    Raises ValueError for an argument outside its domain (a schedule: when its cost is computed), a traced value, or
    another kind of key.

        >>> sampling = dpx.PoissonSampling(examples=1_000, batch_size=50)
        >>> print(dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key()))
        Mechanism(
             clip to norm 1
          -> sum over the batch
          -> add noise of standard deviation 1 x clip norm
          -> divide by the expected batch size 50
          drawn by PoissonSampling(examples=1000, batch_size=50)
        ...
    """
    domain = {"minimum": SMALLEST_CLIP_NORM, "maximum": LARGEST_CLIP_NORM}
    clip_norm = jax.tree.map(lambda c: require_scalar_or_schedule("clip_norm", c, **domain), clip_norm)
    if not jax.tree.leaves(clip_norm):
        raise ValueError(f"clip_norm must hold at least one number or schedule, got {described(clip_norm)}")
    noise_multiplier = require_scalar_or_schedule("noise_multiplier", noise_multiplier, minimum=0)
    if not callable(noise_multiplier):
        require_noise_in_range(np.array([noise_multiplier]))
    if isinstance(sampling, type) or not (hasattr(sampling, "event") and hasattr(sampling, "divisor")):
        such = "dpx.PoissonSampling(examples=..., batch_size=...)"
        raise ValueError(f"sampling must be a dpx sampling record such as {such}, got {described(sampling)}")
    noise_key = keys.stream(keys.warn_if_guessable(key), "noise")
    # With many groups, a float32 norm may fall below the true one by more than ETA covers.
    norm_of_groups = optax.tree.norm if jax.tree_util.all_leaves([clip_norm]) else tree_norm

    def clip_factors(found, state):
        return (jax.tree.map(lambda n, c: c / jnp.maximum(n, c), found, _clip_norms_at_step(clip_norm, state.step)),)

    def release(sums, state, params):
        (total,), step = sums, state.step
        multiplier = value_at(noise_multiplier, step)
        silent = not callable(noise_multiplier) and noise_multiplier == 0  # in which case no noise is drawn
        deviation = 0.0 if silent else multiplier * norm_of_groups(_clip_norms_at_step(clip_norm, step)) * (1 + ETA)
        released = keys.release(noise_key, step, total, deviation)
        updates = jax.tree.map(lambda r: r / sampling.divisor, released)
        return optax.tree.cast_like(updates, params), state.after_release(multiplier)

    def event(steps):
        for value in jax.tree.leaves(clip_norm):
            values = values_over(value, steps if callable(value) else 1)
            _require_all_in_range("clip_norm", values, SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM)
        multipliers = values_over(noise_multiplier, steps)
        require_noise_in_range(multipliers if callable(noise_multiplier) else multipliers[:1])
        return sampling.event(multipliers)

    return Mechanism(
        begin=ReleaseState.empty_record,
        encode=lambda grad, state: grad,
        norm=lambda encoded: jax.tree.map(lambda _, group: tree_norm(group), clip_norm, encoded),
        clip_factors=clip_factors,
        bound=lambda state: _clip_norms_at_step(clip_norm, state.step),
        release=release,
        event=event,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        key=key,
        supports_ghost_norms=True,
        stages=_stages_of_pipeline(clip_norm, noise_multiplier, sampling),
    )


def tree_norm(tree: Tree) -> jax.Array:
    """Returns the 2-norm of a tree of float32 arrays, a float32 scalar, never below the true one (`dpx.sums.norms`)."""
    return norms.norm_of_arrays(jax.tree.leaves(tree))


def _clip_norms_at_step(clip_norm: Tree, step: jax.Array) -> Tree:
    """Returns the clip norm of every group at one step, as float32 scalars."""
    return jax.tree.map(lambda c: value_at(c, step), clip_norm)


def _require_all_in_range(name: str, values: np.ndarray, minimum: float, maximum: float):
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= minimum) & (values <= maximum)))
    if len(wrong):
        bound = range_in_words(minimum, maximum)
        raise ValueError(f"{name} must be finite and {bound} at every step, got {values[wrong[0]]} at step {wrong[0]}")


def require_noise_in_range(multipliers: np.ndarray):
    """Raises ValueError unless every noise multiplier is 0, or in [2^-55, 2^45]."""
    _require_all_in_range("noise_multiplier", multipliers, 0, math.inf)
    outside = (multipliers > 0) & ~((multipliers >= SMALLEST_NOISE) & (multipliers <= LARGEST_NOISE))
    for step in np.flatnonzero(outside)[:1]:
        raise ValueError(f"noise_multiplier must be 0 or in [2^-55, 2^45], got {multipliers[step]:g} at step {step}")


def _stages_of_pipeline(clip_norm: Tree, noise_multiplier: ScalarOrSchedule, sampling: Sampling) -> tuple[str, ...]:
    clip = f"clip to norm {describe_groups(clip_norm)}"
    noise = f"add noise of standard deviation {describe_number_or_schedule(noise_multiplier)} x clip norm"
    if not jax.tree_util.all_leaves([clip_norm]):
        clip = f"clip each group to its own norm: {describe_groups(clip_norm)}"
        norms = jax.tree.leaves(clip_norm)
        scheduled = any(callable(norm) for norm in norms)
        whole = (lambda step: optax.tree.norm(_clip_norms_at_step(norms, step))) if scheduled else math.hypot(*norms)
        noise += f", which is {describe_number_or_schedule(whole)}, the root of the sum of their squares"
    return clip, SUM, noise, f"divide by the expected batch size {sampling.divisor}"


def normalized(mechanism: Mechanism, *, stability: float = 0.01) -> Mechanism:
    """Applies `mechanism` to normalized gradients, g / (|g| + stability), with norms below 1 (per group, if any).

    Guarantee: the inner clip still bounds the result, so the cost is that of the inner mechanism, for every clip norm.
    A clip norm of 1 never clips, because the normalized gradients are shorter. Gradients with norms below 2^-40 become
    zero.

    stability: at least 1e-6, in the units of the gradient. Raises ValueError for a smaller value.
    Source: automatic clipping, Bu et al. 2023, https://arxiv.org/abs/2206.07136.
    """
    require_mechanism(mechanism)
    stability = require_number("stability", stability, minimum=1e-6)

    def clip_factors(norms, state):
        factors = mechanism.clip_factors(jax.tree.map(lambda n: n / (n + stability), norms), state)
        # A smaller norm may lack most of the true one, because squares below 2^-126 are lost.
        return tuple(
            jax.tree.map(lambda n, f: jnp.where(n < SMALLEST_CLIP_NORM, 0, f / (n + stability)), norms, factor)
            for factor in factors
        )

    stages = insert_stages_around_sum(mechanism.stages, before_bound=(f"normalize to g / (|g| + {stability:g})",))
    return mechanism.replace(
        clip_factors=clip_factors,
        bound=lambda state: jax.tree.map(lambda clip_norm: jnp.minimum(clip_norm, 1), mechanism.bound(state)),
        stages=stages,
    )

"""The Gaussian mechanism on clipped per-example gradients: the ground every method stands on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpx import keys
from dpx._numbers import ScalarOrSchedule, at, between, over, require_scalar_or_schedule
from dpx.accounting.budget import calibrated
from dpx.mechanism import Mechanism, Tree
from dpx.release_state import ReleaseState
from dpx.sampling import Sampling

SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM = 2.0**-40, 1e15  # the squares of others, or sums of them, leave float32


@calibrated
def gaussian_mechanism(
    *,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """private gradient = (sum_i min(1, C / |g_i|) g_i + N(0, (sigma C)^2 I)) / B.

    Guarantee: one example moves the sum by at most C, so `steps` releases cost `sampling.event` of their noise
    multipliers (Abadi et al. 2016, https://arxiv.org/abs/1607.00133).

    clip_norm: C, a number in [2^-40, 1e15], or an optax schedule of the step. A pytree prefix of the gradients clips
        each group (layer) to its own norm; the sensitivity of the whole is then C = sqrt(sum of their squares), and the
        noise has that scale in every coordinate.
    noise_multiplier: sigma, the standard deviation of the noise on the sum, divided by C; a number, a schedule of the
        step, or the `dpx.Budget` that it is calibrated to. 0 bills infinity.
    sampling: draws the batches, states B and wraps the event.
    key: a secret jax PRNG key, of one run. Never reuse it: two runs with one key share their noise, and subtracting
        their results removes it. Its "noise" stream is used, with the step folded in.

    Raises ValueError for a negative or non-finite number, a value that is traced (it could not be billed), or no key.
    """
    clip_norm = jax.tree.map(
        lambda c: require_scalar_or_schedule("clip_norm", c, minimum=SMALLEST_CLIP_NORM, maximum=LARGEST_CLIP_NORM),
        clip_norm,
    )
    if not jax.tree.leaves(clip_norm):
        raise ValueError(f"clip_norm must hold at least one number or schedule, got {clip_norm!r}")
    noise_multiplier = require_scalar_or_schedule("noise_multiplier", noise_multiplier, minimum=0)
    if not (hasattr(sampling, "event") and hasattr(sampling, "divisor")):
        raise ValueError(f"sampling must be a dpx sampling record such as PoissonSampling, got {sampling!r}")
    noise_key = keys.stream(key, "noise")

    def clip_norms(step):
        return jax.tree.map(lambda c: at(c, step), clip_norm)

    def norm(encoded):
        return jax.tree.map(lambda _, group: optax.tree.norm(group), clip_norm, encoded)

    def weigh(norms, state):
        return (jax.tree.map(lambda n, c: c / jnp.maximum(n, c), norms, clip_norms(state.step)),)

    def release(sums, state, params):
        (total,) = sums
        step = state.step
        multiplier = at(noise_multiplier, step)
        deviation = multiplier * optax.tree.norm(clip_norms(step))
        noise = keys.normal_like(jax.random.fold_in(noise_key, step), total)
        updates = jax.tree.map(lambda s, n: (s + deviation * n) / sampling.divisor, total, noise)
        return optax.tree.cast_like(updates, params), state.after(multiplier)

    def event(steps):
        for value in jax.tree.leaves(clip_norm):
            _require_all("clip_norm", over(value, steps), SMALLEST_CLIP_NORM, LARGEST_CLIP_NORM)
        multipliers = over(noise_multiplier, steps)
        _require_all("noise_multiplier", multipliers, 0, math.inf)
        return sampling.event(multipliers)

    scale = _describe(noise_multiplier)
    return Mechanism(
        init=lambda params: ReleaseState.empty(),
        encode=lambda grad, state: grad,
        norm=norm,
        weigh=weigh,
        release=release,
        event=event,
        sampling=sampling,
        noise_multiplier=noise_multiplier,
        key=key,
        supports_ghost_norms=True,
        stages=(
            f"clip to norm {jax.tree.map(_describe, clip_norm)}",
            f"sum, add noise of {scale} x clip norm",
            f"divide by the expected batch size {sampling.divisor}",
        ),
    )


def _require_all(name: str, values: np.ndarray, minimum: float, maximum: float):
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= minimum) & (values <= maximum)))
    if len(wrong):
        bound = between(minimum, maximum)
        raise ValueError(f"{name} must be finite and {bound} at every step, got {values[wrong[0]]} at step {wrong[0]}")


def _describe(value: ScalarOrSchedule) -> str:
    if callable(value):
        return f"{over(value, 1)[0]:.4g} at step 0 (a schedule)"
    return f"{value:.6g}"

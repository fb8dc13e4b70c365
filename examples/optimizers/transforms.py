"""The optimizers behind DP-SGD. g_t is the gradient that it releases at step t, and s the standard deviation of its
noise on one coordinate.

* SGD: momentum 0.9. Adam: decays 0.9 and 0.999, stability 1e-8. All others have these numbers too.
* scale-then-privatize Adam (arXiv:2507.01129, Algorithm 8): g -> g / a before the clip, and the release times a, with
  a = sqrt(v_{t-1}) + stability, and Adam's v of the releases; then Adam. Here v has Adam's bias correction, a is
  divided by its root mean square, so that the clip norm keeps its units, and the stability is `own` times s.
* DP-AdamBC (arXiv:2312.14334): Adam with m / sqrt(max(v - s^2, floor)). The floor is `own` times s^2.
* DOPPLER (arXiv:2408.13460): m_t = .9 m_{t-1} + .05 (g_t + g_{t-1}), divided by what it makes of ones; then SGD without
  momentum, or Adam with a first decay of 0, because two averages in a row made Adam diverge. It is a filter of first
  order, which removes the highest frequency.
* DiSK (arXiv:2410.03883): the gradient of an example is c f'(x + gamma d) + (1 - c) f'(x), with d the last step,
  c = (1 - kappa) / (kappa gamma), kappa 0.7 and gamma 0.5; m_t = (1 - kappa) m_{t-1} + kappa g_t; then SGD or Adam. The
  parameters are both points, the loss is c f(ahead) + (1 - c) f(at), and the coordinates add both gradients. So the
  combination of one example is clipped as one gradient, and a step costs what that of DP-SGD does.

All else is a function of released gradients, so it costs nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpx.coordinates import Coordinates

KAPPA, GAMMA = 0.7, 0.5


class Scaled(NamedTuple):
    """Of the released gradients: the average square, like the parameters, and their number, float32 ()."""

    square: Any
    count: jax.Array


def scaled(stability: float, decay: float = 0.999) -> Coordinates:
    """g -> g / a, a = (sqrt(v) + stability) / its root mean square; v: Adam's second moment of earlier releases."""

    def scales(state: Scaled):
        correction = 1 - decay ** jnp.maximum(state.count, 1)
        raw = jax.tree.map(lambda v: jnp.sqrt(v / correction) + stability, state.square)
        mean = optax.tree.norm(raw) / sum(leaf.size for leaf in jax.tree.leaves(raw)) ** 0.5
        return jax.tree.map(lambda a: a / mean, raw)

    def decode(released, state, like):
        restored = jax.tree.map(jnp.multiply, released, scales(state))
        square = jax.tree.map(lambda v, r: decay * v + (1 - decay) * r**2, state.square, restored)
        return restored, Scaled(square, state.count + 1)

    return Coordinates(
        init=lambda params: Scaled(optax.tree.zeros_like(params), jnp.zeros(())),
        encode=lambda grad, state: jax.tree.map(jnp.divide, grad, scales(state)),
        decode=decode,
        name="divide by the scales of released gradients",
        undo="multiply by these scales",
        supports_ghost_norms=True,
    )


def without_noise(variance: float, floor: float) -> optax.GradientTransformation:
    """Adam's direction with the variance of the noise taken out of the second moment, down to floor * variance."""

    def update(updates, state, params=None):
        m, v, count = state
        m = optax.tree.update_moment(updates, m, 0.9, 1)
        v = optax.tree.update_moment(updates, v, 0.999, 2)
        count = count + 1
        first, second = 1 - 0.9**count, 1 - 0.999**count
        scale = jax.tree.map(lambda v: jnp.sqrt(jnp.maximum(v / second - variance, floor * variance)), v)
        return jax.tree.map(lambda m, a: m / first / a, m, scale), (m, v, count)

    def init(params):
        return optax.tree.zeros_like(params), optax.tree.zeros_like(params), jnp.zeros(())

    return optax.GradientTransformation(init, update)


def low_pass(keep: float = 0.9) -> optax.GradientTransformation:
    """m_t = keep m_{t-1} + (1 - keep) / 2 (g_t + g_{t-1}), divided by what it makes of ones."""

    def update(updates, state, params=None):
        before, m, made = state
        both = jax.tree.map(lambda new, old: (1 - keep) / 2 * (new + old), updates, before)
        m, made = jax.tree.map(
            lambda m, b: keep * m + b, (m, made), (both, jnp.where(made > 0, 1 - keep, (1 - keep) / 2))
        )
        return jax.tree.map(lambda m: m / made, m), (updates, m, made)

    def init(params):
        return optax.tree.zeros_like(params), optax.tree.zeros_like(params), jnp.zeros(())

    return optax.GradientTransformation(init, update)


def both_points(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """DiSK's loss, whose gradient with respect to both points is summed: parameters {"at": x, "ahead": x + gamma d}."""
    share = (1 - KAPPA) / (KAPPA * GAMMA)
    return lambda points, *rest: share * loss(points["ahead"], *rest) + (1 - share) * loss(points["at"], *rest)


SUMMED = Coordinates(
    init=lambda params: (),
    encode=lambda grad, state: jax.tree.map(jnp.add, grad["at"], grad["ahead"]),
    decode=lambda released, state, like: ({"at": released, "ahead": released}, state),
    name="add the gradients at both points",
)


def disk(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """The average of the releases, then `base` at x; the point ahead follows."""

    def init(params):
        return optax.tree.zeros_like(params["at"]), base.init(params["at"])

    def update(updates, state, params=None):
        assert params is not None
        m, inner = state
        m = jax.tree.map(lambda m, g: (1 - KAPPA) * m + KAPPA * g, m, updates["at"])
        step, inner = base.update(m, inner, params["at"])
        ahead = jax.tree.map(lambda x, old, d: x + (1 + GAMMA) * d - old, params["at"], params["ahead"], step)
        return {"at": step, "ahead": ahead}, (m, inner)

    return optax.GradientTransformation(init, update)


class Optimizer(NamedTuple):
    """behind: (rate, the noise's standard deviation, own) -> the transform. adaptive: whether rates are Adam's."""

    title: str
    behind: Callable[[float, float, float], optax.GradientTransformation]
    adaptive: bool
    own: tuple[float, ...] = (0.0,)
    before: Callable[[float, float], Coordinates] | None = None  # (the noise's standard deviation, own)
    points: bool = False


def sgd(rate: float) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=0.9)


OPTIMIZERS = {
    "sgd": Optimizer("SGD with momentum", lambda rate, noise, own: sgd(rate), False),
    "adam": Optimizer("Adam", lambda rate, noise, own: optax.adam(rate), True),
    "scaled": Optimizer(
        "scale-then-privatize Adam",
        lambda rate, noise, own: optax.adam(rate),
        True,
        (0.01, 0.3),
        lambda noise, own: scaled(own * noise),
    ),
    "adam-bc": Optimizer(
        "DP-AdamBC",
        lambda rate, noise, own: optax.chain(without_noise(noise**2, own), optax.scale(-rate)),
        True,
        (0.1, 1.0),
    ),
    "doppler-sgd": Optimizer(
        "DOPPLER, SGD", lambda rate, noise, own: optax.chain(low_pass(), optax.sgd(10 * rate)), False
    ),
    "doppler-adam": Optimizer(
        "DOPPLER, Adam", lambda rate, noise, own: optax.chain(low_pass(), optax.adam(rate, b1=0)), True
    ),
    "disk-sgd": Optimizer("DiSK, SGD", lambda rate, noise, own: disk(sgd(rate)), False, points=True),
    "disk-adam": Optimizer("DiSK, Adam", lambda rate, noise, own: disk(optax.adam(rate)), True, points=True),
}

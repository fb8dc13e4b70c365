"""Random and ranked freeze: only some coordinates are trained at a time, and only these get noise."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from dpx import keys
from dpx.accounting.budget import accepts_budget
from dpx.mechanism import Coordinates, Mechanism, in_coordinates
from dpx.mechanism.base import describe_period, describe_share
from dpx.mechanism.dp_sgd import dp_sgd
from dpx.mechanism.masks import apply_mask, complement_of_rate, count_coordinates_in_share, mask_of_largest, random_mask
from dpx.sampling.schemes import Sampling
from dpx.schedules import ScalarOrSchedule, require_fractions
from dpx.values import Tree, explain_misuse, find_only_node, require_bool, require_whole, unflatten_vectors


@accepts_budget
def random_freeze_sgd(
    *,
    freeze_rate: ScalarOrSchedule,
    every: int,
    posterior: bool = False,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD in which a random share of the coordinates is frozen (Zhu and Blaschko 2021, arXiv:2112.00845).

    mask -> clip -> sum -> add noise -> divide -> mask, with exactly floor((1 - freeze_rate) d) ones in each mask.

    The paper claims the epsilon of DP-SGD. That holds, because the masks do not depend on data; but the paper's runs
    shuffle the data and report the cost of Poisson sampling. dpx reports that of the sampling that draws the batches.

    freeze_rate: in [0, 1), the share of frozen coordinates; to freeze them gradually, use
        `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    every: at least 1, for how many steps a mask is kept; an epoch in the paper.
    posterior: whether to clip first and mask only the release, so that frozen coordinates count in the norm.
    clip_norm: applies to each masked gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the noise's standard deviation on the sum, in clip norms; a number, a schedule, or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.

    Momentum chained behind this mechanism still moves frozen coordinates, as in the paper.
    """
    return in_coordinates(
        dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        random_freeze(freeze_rate=freeze_rate, every=every, posterior=posterior, key=key),
    )


@accepts_budget
def ranked_freeze_sgd(
    *,
    freeze_rate: ScalarOrSchedule,
    every: int,
    clip_norm: ScalarOrSchedule | Tree,
    noise_multiplier: ScalarOrSchedule,
    sampling: Sampling,
    key: jax.Array,
) -> Mechanism:
    """DP-SGD that freezes the coordinates that moved least in the last period (arXiv:2112.00845v1, Algorithm 2).

    The paper claims the epsilon of DP-SGD. That holds if the ranking reads the same release as the update, because two
    draws of noise would be two releases. dpx uses one Gaussian release per step for both.

    freeze_rate: in [0, 1), the share of frozen coordinates; a number or a schedule of the step.
    every: at least 1, the number of steps in a period, after which the coordinates are ranked again.
    clip_norm: applies to each masked gradient; a number, a schedule of the step, or one for each group of layers.
    noise_multiplier: the standard deviation of the noise on the sum, divided by the clip norm; or a `dpx.Budget`.
    sampling: how the batches are drawn, such as `dpx.PoissonSampling`. key: a secret scalar key for this run alone.
    Raises ValueError for numbers outside their domains.
    """
    return in_coordinates(
        dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key),
        ranked_freeze(freeze_rate=freeze_rate, every=every),
    )


class RandomFreezeState(NamedTuple):
    """The mask of the next step, and the seed from which it is drawn.

    step: int32 (), the number of releases.
    seed: uint32 (2,), which reveals nothing about the noise.
    kept: int32 (), the number of ones in the mask.
    mask: bool, like the parameters; True where the coordinate is trained.
    """

    step: jax.Array
    seed: jax.Array
    kept: jax.Array
    mask: Tree


@explain_misuse
def random_freeze(*, freeze_rate: ScalarOrSchedule, every: int, posterior: bool = False, key: jax.Array) -> Coordinates:
    """Trains a random subset of the coordinates, redrawn every `every` steps, and freezes the others.

    g -> m g for a mask m with exactly floor((1 - freeze_rate) d) ones, at least 1, that depends only on the key and the
    step. Frozen coordinates get neither gradient nor noise, and do not count in the norm.

    freeze_rate: in [0, 1). A schedule of the step is read (in float32) at the first step of every period; to freeze
        gradually, use `optax.linear_schedule(0.0, freeze_rate, cooling_steps)`.
    every: int, at least 1, for how many steps a mask is kept; an epoch in the paper.
    posterior: whether to clip first and mask only the release, so that frozen coordinates count in the norm.
    key: a secret scalar PRNG key, whose "random_freeze" stream is used, with the number of the period folded in.
    Raises ValueError for numbers outside their domains; schedules are checked when the cost is computed.
    Source: Zhu and Blaschko 2021, https://arxiv.org/abs/2112.00845.
    """
    require_fractions("freeze_rate", freeze_rate, "[0, 1)")
    stream, share = keys.stream(key, "random_freeze"), complement_of_rate(freeze_rate)

    def begin(step, like) -> RandomFreezeState:
        seed = jax.random.key_data(keys.public_key(keys.fold_in(stream, step // every)))
        kept = count_coordinates_in_share(share, step, like)
        return RandomFreezeState(step, seed, kept, random_mask(seed, kept, like))

    def following(released, state, like):
        step = state.step + 1
        return lax.cond(step % every == 0, lambda: begin(step, like), lambda: state._replace(step=step))

    words = f"of the coordinates, drawn at random {describe_period(require_whole('every', every))}"
    frozen = _freezing_coordinates(
        freeze_rate, lambda params: begin(jnp.zeros((), jnp.int32), params), following, words
    )
    if not require_bool("posterior", posterior):
        return frozen
    return frozen._replace(encode=lambda grad, state: grad, name=f"draw a mask for after the clip: {frozen.name}")


class RankedFreezeState(NamedTuple):
    """The mask, and the sums that rank the coordinates for the next mask; both depend on released values only.

    step: int32 (), the number of releases.
    total: float32, like the parameters, the sum of the values released in this period.
    mask: bool, like the parameters; True where the coordinate is trained.
    """

    step: jax.Array
    total: Tree
    mask: Tree


def ranked_freeze(*, freeze_rate: ScalarOrSchedule, every: int) -> Coordinates:
    """Trains the coordinates that moved most in the last `every` steps, and freezes the others.

    g -> m g, where m has ones at the floor((1 - freeze_rate) d) coordinates, at least 1, with the largest |sum of
    released values|. Frozen coordinates accumulate noise, so they can be trained again later. One noisy release serves
    both the update and the ranking, so the ranking costs no privacy. In the first period nothing is frozen.

    freeze_rate: in [0, 1); a schedule of the step is read (in float32) at the first step of every period.
    every: int, at least 1, the number of steps in a period.
    Raises ValueError for numbers outside their domains; schedules are checked when the cost is computed.
    Source: Zhu and Blaschko 2021, Appendix C, https://arxiv.org/abs/2112.00845v1.
    """
    require_fractions("freeze_rate", freeze_rate, "[0, 1)")
    share = complement_of_rate(freeze_rate)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, bool), zeros)
        return RankedFreezeState(jnp.zeros((), jnp.int32), zeros, ones)

    def following(released, state, like):
        step, total = state.step + 1, jax.tree.map(jnp.add, state.total, released)

        def begin():
            mask = mask_of_largest(jax.tree.map(jnp.abs, total), count_coordinates_in_share(share, step, like))
            return RankedFreezeState(step, jax.tree.map(jnp.zeros_like, total), mask)

        return lax.cond(step % every == 0, begin, lambda: RankedFreezeState(step, total, state.mask))

    period = describe_period(require_whole("every", every))
    return _freezing_coordinates(
        freeze_rate, init, following, f"of the coordinates, those that moved least, ranked {period}"
    )


def _freezing_coordinates(
    freeze_rate: ScalarOrSchedule, init: Callable, following: Callable, words: str
) -> Coordinates:
    """Returns coordinates that apply the mask of their state. following: (released, state, like) -> next state."""
    return Coordinates(
        init=init,
        encode=lambda grad, state: apply_mask(grad, state.mask),
        decode=lambda released, state, like: (apply_mask(released, state.mask), following(released, state, like)),
        name=f"freeze {describe_share(freeze_rate)} {words}",
        undo="mask the released gradient",
        supports_ghost_norms=True,
        check=lambda steps: require_fractions("freeze_rate", freeze_rate, "[0, 1)", steps),
    )


class SparseUpdates(NamedTuple):
    """Updates with at most `kept` nonzero coordinates.

    values: float32 (size,), the trained coordinates in the order of the parameters, then zeros. seed: uint32 (2,), the
        seed of the mask. kept: int32 (), the number of ones in the mask.
    """

    values: jax.Array
    seed: jax.Array
    kept: jax.Array


def sparse_pack(updates: Tree, state: Tree, *, size: int) -> SparseUpdates:
    """Packs the values of `updates` that `random_freeze` does not freeze, with the seed of the mask.

    updates: like the parameters. state: the one that was passed to the step, not the one that the step returned.
    size: int, the length of `values`, at least the number of kept coordinates (`sparse_density` times d).
    Raises ValueError for a smaller size; under jit, where that number is not known, values beyond `size` are lost.
    """
    freeze = find_only_node(state, RandomFreezeState, "random freeze")
    if not isinstance(freeze.kept, jax.core.Tracer) and size < int(freeze.kept):
        raise ValueError(f"size must be at least the {int(freeze.kept)} coordinates kept, got {size}")
    (places,) = jnp.nonzero(ravel_pytree(freeze.mask)[0], size=size, fill_value=-1)
    flat, _ = ravel_pytree(optax.tree.cast(updates, jnp.float32))
    return SparseUpdates(jnp.where(places < 0, 0, flat[places]), freeze.seed, freeze.kept)


def sparse_unpack(packed: SparseUpdates, like: Tree) -> Tree:
    """Unpacks what `sparse_pack` packed, into the shapes and dtypes of `like` (the parameters)."""
    mask, _ = ravel_pytree(random_mask(packed.seed, packed.kept, like))
    (places,) = jnp.nonzero(mask, size=packed.values.size, fill_value=mask.size)
    flat = jnp.zeros(mask.size, jnp.float32).at[places].set(packed.values, mode="drop")
    return optax.tree.cast_like(unflatten_vectors(flat, like), like)


def sparse_density(state: Tree) -> jax.Array:
    """Returns the share of coordinates that the next step under `random_freeze` updates, a float32 scalar in (0, 1].

    Raises ValueError unless the state has exactly one random freeze.
    """
    freeze = find_only_node(state, RandomFreezeState, "random freeze")
    return freeze.kept / sum(math.prod(m.shape) for m in jax.tree.leaves(freeze.mask))

"""Mechanisms that are broken on purpose, each in the way of a real bug, and the line of the contract that sees it.

Each is a function (key, steps) -> Mechanism, whose docstring says where the bug was seen. `steps` is the length of the
run, for an attack that trains; the check of the contract does not read it.
"""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from dpx import keys, masks
from dpx.contributions import sum_contributions
from dpx.sampling.draws import Draw
from dpx.trees import split
from dpx.xla.totals import as_total

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=8)
CLIP_NORM, NOISE_MULTIPLIER = 0.7, 1.3
DEVIATION = CLIP_NORM * NOISE_MULTIPLIER  # of the noise on the sum


class Zoo(NamedTuple):
    """make: (key, steps) -> Mechanism. line: of `check_contract`, which fails.

    seen_by: "check_contract" alone, or "lower_bound" where an attack on the bill can see it too.
    """

    make: Callable[[jax.Array, int], dpx.Mechanism]
    line: str
    seen_by: Literal["check_contract", "lower_bound"] = "check_contract"

    @property
    def name(self) -> str:
        return self.make.__name__


def sound(key: jax.Array, steps: int = 1, *, sampling: Any = SAMPLING, **changes: Any) -> dpx.Mechanism:
    """DP-SGD, which the others break."""
    numbers = {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE_MULTIPLIER} | changes
    return dpx.dp_sgd(**numbers, sampling=sampling, key=key)


def with_own_update(mechanism: dpx.Mechanism, update: Callable) -> dpx.Mechanism:
    """`mechanism` with another `update`; `private_updates` uses its other fields, as before."""

    class Updated(dpx.Mechanism):
        pass

    broken = tuple.__new__(Updated, (mechanism.init, update))
    broken.__dict__.update(mechanism.__dict__)
    return broken


def high(total: Any) -> Any:
    """The sum as one float32 number for each coordinate."""
    return as_total(total).high


def with_update(mechanism: dpx.Mechanism, change: Callable) -> dpx.Mechanism:
    """`mechanism`, but its update sees change(grads, included) as gradients and included."""

    def update(grads, state, params=None, *, included=None):
        grads, included = change(grads, included)
        return mechanism.update(grads, state, params, included=included)

    return with_own_update(mechanism, update)


def with_noise(mechanism: dpx.Mechanism, draw: Callable, deviation: Any = DEVIATION) -> dpx.Mechanism:
    """`mechanism`, but its noise on the sum is `deviation` times draw(sum, step)."""

    def release(sums, state, params):
        noise = draw(high(sums[0]), state.step)
        updates = jax.tree.map(lambda s, n: (s + deviation * n) / mechanism.sampling.divisor, high(sums[0]), noise)
        return optax.tree.cast_like(updates, params), state.after(NOISE_MULTIPLIER)

    return mechanism.replace(release=release)


def standard(key: jax.Array) -> Callable:
    """Sound noise: (sum, step) -> standard normals like the sum."""
    return lambda total, step: keys.normal_like(keys.stream(key, "noise"), step, total)


# The bound.


def no_clip(key, steps):
    """Layers that the library does not know are left out of the clip (a class of bugs of Opacus before 1.0)."""
    return sound(key).replace(weigh=lambda norms, state: (jnp.ones_like(norms),))


def clip_after_the_sum(key, steps):
    """`clip_grad_norm_` on the gradient of the batch, in place of every example's (many re-implementations)."""
    mechanism = no_clip(key, steps)

    def release(sums, state, params):
        scale = CLIP_NORM / jnp.maximum(optax.tree.norm(high(sums[0])), CLIP_NORM)
        return sound(key).release((jax.tree.map(lambda s: s * scale, high(sums[0])),), state, params)

    return mechanism.replace(release=release)


def clip_of_the_next_step(key, steps):
    """The clip reads the schedule after the counter has moved, the noise before (loops that count twice)."""
    mechanism = sound(key, clip_norm=lambda step: 1 - 0.05 * step.astype(jnp.float32))
    return mechanism.replace(weigh=lambda norms, state: mechanism.weigh(norms, state._replace(step=state.step - 1)))


def half_precision_norms(key, steps):
    """Norms in float16 under mixed precision, which are rounded, and overflow at 65,504 (fp16 training with hooks)."""

    def norm(encoded):
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float16))) for leaf in jax.tree.leaves(encoded)]
        return jnp.sqrt(sum(squares)).astype(jnp.float32)

    return sound(key).replace(norm=norm, supports_ghost_norms=False)


def not_a_number_passes(key, steps):
    """A norm of NaN compares as small, so that the example is not clipped (`if norm > C`, in several libraries)."""
    mechanism = sound(key)
    return mechanism.replace(norm=lambda encoded: jnp.nan_to_num(mechanism.norm(encoded), posinf=0.0))


def projected_after_the_clip(key, steps):
    """Clipped, then projected, at the noise of the clip norm: a projection can lengthen (D2P2-SGD as published)."""
    projection = dpx.coordinates.random_projection(rank=8, kind="gaussian", key=key)
    inner = sound(key)
    projected = dpx.in_coordinates(inner, projection)

    def encode(grad, state):
        scale = CLIP_NORM / jnp.maximum(optax.tree.norm(grad), CLIP_NORM)
        return projected.encode(jax.tree.map(lambda g: g * scale, grad), state)

    return projected.replace(encode=encode, weigh=lambda norms, state: (jnp.ones_like(norms),))


def clipped_by_microbatch(key, steps):
    """The mean of two examples is clipped, and an example is billed (TF Privacy's num_microbatches)."""

    def change(grads, included):
        def pairs(g):
            kept = jnp.where(included.reshape(-1, *[1] * (g.ndim - 1)), g, 0)
            second = (jnp.arange(g.shape[0]) % 2 == 1).reshape(-1, *[1] * (g.ndim - 1))
            return jnp.where(second, (kept + jnp.roll(kept, 1, axis=0)) / 2, 0)

        return jax.tree.map(pairs, grads), jnp.ones_like(included)

    return with_update(sound(key), change)


def batch_normalized(key, steps):
    """Gradients are standardized by the mean of the batch before the clip (BatchNorm under per-example gradients)."""

    def change(grads, included):
        def centered(g):
            count = included.reshape(-1, *[1] * (g.ndim - 1)).astype(jnp.float32)
            mean = jnp.sum(jnp.where(count > 0, g, 0), 0, keepdims=True) / jnp.maximum(jnp.sum(count), 1)
            return g - mean

        return jax.tree.map(centered, grads), included

    return with_update(sound(key), change)


# Padding and batches.


def padding_counts(key, steps):
    """The padding of a static shape enters as real rows (Poisson batches in jitted loops)."""
    return with_update(sound(key), lambda grads, included: (grads, jnp.ones_like(included)))


def realized_divisor(key, steps):
    """The sum and the noise are divided by the size of the drawn batch (the mean loss of every library)."""
    mechanism = sound(key)

    def update(grads, state, params=None, *, included=None):
        updates, after = mechanism.update(grads, state, params, included=included)
        scale = SAMPLING.divisor / jnp.maximum(jnp.sum(included), 1)
        return jax.tree.map(lambda u: u * scale, updates), after

    return with_own_update(mechanism, update)


def mask_of_the_microbatch(key, steps):
    """Every microbatch draws a random mask of its own (dropout-like masks inside of the accumulation loop)."""
    microbatches = itertools.count()

    def encode(grad, state):
        drawn = jax.random.bits(jax.random.fold_in(key, next(microbatches)), (2,), jnp.uint32)
        return masks.masked(grad, masks.random_mask(drawn, jnp.int32(8), grad))

    return sound(key).replace(encode=encode, supports_ghost_norms=False)


@dataclass(frozen=True, kw_only=True)
class BilledAs:
    """Batches of another sampling than the one that states the divisor and the bill, `billed`."""

    examples: int
    relation: ClassVar[str] = "zero_out"
    pads: ClassVar[bool] = True
    most_rows: ClassVar[float] = float("inf")

    @property
    def billed(self) -> Any:
        raise NotImplementedError

    @property
    def divisor(self) -> float:
        return self.billed.divisor

    def event(self, multipliers):
        return self.billed.event(multipliers)


@dataclass(frozen=True, kw_only=True)
class ShuffledBilledAsPoisson(BilledAs):
    """Batches of shuffled epochs, with the event of Poisson sampling."""

    batch_size: int

    @property
    def billed(self):
        return dpx.PoissonSampling(examples=self.examples, batch_size=self.batch_size)

    def draw(self, key, step, *, size=None):
        return dpx.ShuffledEpochs(examples=self.examples, batch_size=self.batch_size).draw(key, step, size=size)


def shuffled_billed_as_poisson(key, steps):
    """Shuffled epochs, billed as Poisson sampling (Opacus' and TF Privacy's defaults; Chua et al. 2024, 2403.17673)."""
    return sound(key, sampling=ShuffledBilledAsPoisson(examples=96, batch_size=8))


class FixedSizeBilledAsPoisson(ShuffledBilledAsPoisson):
    """Batches of a fixed size, with the event of Poisson sampling."""

    def draw(self, key, step, *, size=None):
        return dpx.FixedSizeSampling(examples=self.examples, batch_size=self.batch_size).draw(key, step, size=size)


def fixed_size_billed_as_poisson(key, steps):
    """Subsets of a fixed size, billed as Poisson sampling of add-or-remove neighbors (many papers' code)."""
    return sound(key, sampling=FixedSizeBilledAsPoisson(examples=96, batch_size=8))


class TruncatedBilledAsPoisson(ShuffledBilledAsPoisson):
    """Poisson batches that are cut to eight rows at random, with the event of Poisson sampling."""

    def draw(self, key, step, *, size=None):
        cut = dpx.PoissonSampling(examples=self.examples, batch_size=8, most_rows=8)
        return cut.draw(key, step, size=size)


def truncated_billed_as_poisson(key, steps):
    """Batches that are cut to the expected size, billed as Poisson sampling (maximum batch sizes of several loops)."""
    return sound(key, sampling=TruncatedBilledAsPoisson(examples=96, batch_size=8))


class FirstRowsKept(ShuffledBilledAsPoisson):
    """Poisson batches of which the first rows are kept, with the event of a random subset."""

    most_rows: ClassVar[float] = 8

    def draw(self, key, step, *, size=None):
        indices, included = dpx.PoissonSampling(examples=self.examples, batch_size=8).draw(key, step)
        kept = np.sort(indices[included])[:8]
        return Draw(np.pad(kept, (0, 8 - len(kept))), np.arange(8) < len(kept))

    def event(self, multipliers):
        return dpx.PoissonSampling(examples=self.examples, batch_size=8, most_rows=8).event(multipliers)


def first_rows_kept(key, steps):
    """Truncated batches in which the examples of the lowest numbers are kept, billed as random subsets."""
    return sound(key, sampling=FirstRowsKept(examples=96, batch_size=8))


class WeightedBilledByTheMean(ShuffledBilledAsPoisson):
    """Poisson batches at rates that are proportional to weights, with the event of the mean rate."""

    def draw(self, key, step, *, size=None):
        return self.weighted.draw(key, step, size=size)

    @property
    def weighted(self):
        return dpx.PoissonSampling(examples=96, batch_size=8, weights=1.0 + 4 * (np.arange(96) % 8 == 0))


def weighted_billed_by_the_mean(key, steps):
    """Batches that a weighted sampler draws, billed at batch size / examples (Opacus, issue 813)."""
    return sound(key, sampling=WeightedBilledByTheMean(examples=96, batch_size=8))


class OtherWeights(ShuffledBilledAsPoisson):
    """Poisson batches at rates of other weights than those that are stated and billed."""

    weights: ClassVar[Any] = 1.0 + np.arange(96) % 3

    @property
    def stated(self):
        return dpx.PoissonSampling(examples=96, batch_size=8, weights=self.weights)

    @property
    def rates(self):
        return self.stated.rates

    def draw(self, key, step, *, size=None):
        other = dpx.PoissonSampling(examples=96, batch_size=8, weights=1.0 + 4 * (np.arange(96) % 3 == 0))
        return other.draw(key, step, size=size)

    def event(self, multipliers):
        return self.stated.event(multipliers)


def other_weights(key, steps):
    """A sampler whose weights are renormalized after the bill (weights that are learned during the run)."""
    return sound(key, sampling=OtherWeights(examples=96, batch_size=8))


@dataclass(frozen=True, kw_only=True)
class GroupsThatChange(BilledAs):
    """Cyclic Poisson sampling with new groups in every second turn: an example may take part twice in a row."""

    batch_size: int
    bands: int

    @property
    def billed(self):
        sizes = {"examples": self.examples, "batch_size": self.batch_size, "bands": self.bands}
        return dpx.sampling.CyclicPoissonSampling(**sizes)

    def draw(self, key, step, *, size=None):
        return self.billed.draw(jax.random.fold_in(key, step // (2 * self.bands)), step, size=size)


def groups_that_change(key, steps):
    """Groups that are drawn anew from time to time, billed as ones that are fixed for the run."""
    return sound(key, sampling=GroupsThatChange(examples=96, batch_size=8, bands=3))


class PoissonBilledAsCyclic(GroupsThatChange):
    """Poisson batches, billed by one release of each turn."""

    def draw(self, key, step, *, size=None):
        return dpx.PoissonSampling(examples=self.examples, batch_size=self.batch_size).draw(key, step, size=size)


def poisson_billed_as_cyclic(key, steps):
    """Poisson batches, billed as cyclic ones, of which an example has one in three."""
    return sound(key, sampling=PoissonBilledAsCyclic(examples=96, batch_size=8, bands=3))


class OrderBilledOnce(ShuffledBilledAsPoisson):
    """Batches in the order of the data, of which all epochs are billed as one."""

    def draw(self, key, step, *, size=None):
        return dpx.sampling.FixedOrder(examples=self.examples, batch_size=self.batch_size).draw(key, step, size=size)

    def event(self, multipliers):
        return dp_accounting.GaussianDpEvent(min(multipliers)) if len(multipliers) else dp_accounting.NoOpDpEvent()


def order_billed_once(key, steps):
    """Several epochs in one order, billed as the parallel composition of one epoch."""
    return sound(key, sampling=OrderBilledOnce(examples=96, batch_size=8))


class EveryBatchTwice(ShuffledBilledAsPoisson):
    """Poisson batches, each of which is used at two steps, billed as two batches."""

    def draw(self, key, step, *, size=None):
        poisson = dpx.PoissonSampling(examples=self.examples, batch_size=self.batch_size)
        return poisson.draw(key, step // 2, size=size)


def every_batch_twice(key, steps):
    """A batch serves for two steps, which are billed as independent samples (data echoing; several local steps)."""
    return sound(key, sampling=EveryBatchTwice(examples=96, batch_size=8))


@dataclass(frozen=True, kw_only=True)
class AllocatedOnce(BilledAs):
    """Random allocation with the same allocation in every epoch, billed as new ones."""

    steps_per_epoch: int

    @property
    def billed(self):
        return dpx.sampling.RandomAllocation(examples=self.examples, steps_per_epoch=self.steps_per_epoch)

    def draw(self, key, step, *, size=None):
        return self.billed.draw(key, step % self.steps_per_epoch, size=size)


def allocated_once(key, steps):
    """Fixed batches that are walked through every epoch, billed as random allocation of each epoch."""
    return sound(key, sampling=AllocatedOnce(examples=96, steps_per_epoch=12))


class PermutedBilledAsAllocated(AllocatedOnce):
    """Batches of a permutation, of one size, billed as random allocation: the steps of examples are not independent."""

    def draw(self, key, step, *, size=None):
        size_of_batch = self.examples // self.steps_per_epoch
        return dpx.ShuffledEpochs(examples=self.examples, batch_size=size_of_batch).draw(key, step, size=size)


def permuted_billed_as_allocated(key, steps):
    """Shuffled batches, billed as random allocation."""
    return sound(key, sampling=PermutedBilledAsAllocated(examples=96, steps_per_epoch=12))


class PoissonBilledAsAllocated(AllocatedOnce):
    """Poisson batches, which may hold an example twice an epoch, billed as random allocation."""

    def draw(self, key, step, *, size=None):
        return dpx.PoissonSampling(examples=self.examples, batch_size=self.divisor).draw(key, step, size=size)


def poisson_billed_as_allocated(key, steps):
    """Poisson batches, billed as random allocation, which is cheaper at a small delta."""
    return sound(key, sampling=PoissonBilledAsAllocated(examples=96, steps_per_epoch=12))


class ReplacedBilledAsRemoved(FixedSizeBilledAsPoisson):
    """Batches of a fixed size under replace-one neighbors, with the noise of one clip norm in place of two."""

    relation: ClassVar[str] = "replace_one"
    pads: ClassVar[bool] = False

    def event(self, multipliers):
        inner = [dp_accounting.GaussianDpEvent(float(sigma)) for sigma in multipliers]
        sampled = dp_accounting.SampledWithoutReplacementDpEvent
        return dp_accounting.ComposedDpEvent([sampled(self.examples, self.batch_size, one) for one in inner])


def replaced_billed_as_removed(key, steps):
    """Replacing an example moves the sum by 2 C, and C is billed (accountants of subsets without replacement)."""
    return sound(key, sampling=ReplacedBilledAsRemoved(examples=96, batch_size=8))


# The noise.


def two_thirds_of_the_noise(key, steps):
    """A constant is lost between the accountant and the optimizer (the oldest bug)."""
    return with_noise(sound(key), standard(key), 2 / 3 * DEVIATION)


def noise_divided_twice(key, steps):
    """Noise of the mean is added to the mean, and both are divided by the batch again (loss_reduction="mean")."""
    return with_noise(sound(key), standard(key), DEVIATION / SAMPLING.divisor)


def noise_of_the_drawn_batch(key, steps):
    """The noise is scaled by the size of the drawn batch, which is private and can be 0 (noise on the mean)."""
    mechanism = sound(key)

    def update(grads, state, params=None, *, included=None):
        updates, after = mechanism.update(grads, state, params, included=included)
        noise, _ = mechanism.update(grads, state, params, included=jnp.zeros_like(included))
        share = jnp.sum(included) / SAMPLING.divisor
        return jax.tree.map(lambda u, n: u - n + share * n, updates, noise), after

    return with_own_update(mechanism, update)


def uniform_noise(key, steps):
    """`rand` in place of `randn`, at the right standard deviation (a typing error)."""

    def draw(total, step):
        bits = keys.stream(key, "noise", step)
        return optax.tree.random_like(
            bits, total, lambda k, shape, dtype: jax.random.uniform(k, shape, dtype, -(3**0.5), 3**0.5), jnp.float32
        )

    return with_noise(sound(key), draw)


def laplace_noise(key, steps):
    """Laplace noise of the right standard deviation (a library of other queries)."""

    def draw(total, step):
        return optax.tree.random_like(quick(key, "noise", step), total, jax.random.laplace, jnp.float32)

    return with_noise(sound(key), draw, DEVIATION / 2**0.5)


def discrete_noise(key, steps):
    """Poisson noise, less its mean, of the right standard deviation (integers for secure aggregation)."""

    def draw(total, step):
        return optax.tree.random_like(
            quick(key, "noise", step), total, lambda k, shape, dtype: jax.random.poisson(k, 4.0, shape) / 2 - 2.0
        )

    return with_noise(sound(key), draw)


def truncated_noise(key, steps):
    """A truncated normal, as initializers draw it: a release beyond the cut tells that an example is there."""

    def draw(total, step):
        bits = quick(key, "noise", step)
        return optax.tree.random_like(
            bits, total, lambda k, shape, dtype: jax.random.truncated_normal(k, -3, 3, shape, dtype), jnp.float32
        )

    return with_noise(sound(key), draw)


def bfloat16_noise(key, steps):
    """Noise in the dtype of the model, of which there are some hundred values (mixed precision; Mironov 2012)."""

    def draw(total, step):
        noise = optax.tree.random_like(keys.stream(key, "noise", step), total, jax.random.normal, jnp.bfloat16)
        return jax.tree.map(lambda n: n.astype(jnp.float32), noise)

    return with_noise(sound(key), draw)


def one_key_for_all_leaves(key, steps):
    """Every layer's noise comes from the same key, which is not split (JAX code that maps over leaves)."""

    def draw(total, step):
        return jax.tree.map(lambda s: jax.random.normal(keys.stream(key, "noise", step), s.shape), total)

    return with_noise(sound(key), draw)


def one_noise_for_all_steps(key, steps):
    """The key is a constant of the jitted step, so every step has the same noise (JAX loops without `split`)."""
    return with_noise(sound(key), lambda total, step: keys.normal_like(keys.stream(key, "noise"), 0, total))


def noise_from_the_host(key, steps):
    """A generator of the process that is seeded at its start: a resumed run repeats its noise (Opacus, torch)."""
    generator = random.Random(0)

    def draw(total, step):
        own = jax.random.fold_in(key, generator.getrandbits(31))
        return keys.normal_like(own, step, total)

    return with_noise(sound(key), draw)


def layers_clipped_apart(key, steps):
    """Every layer is clipped to C, and the noise is that of one C, not of C times the root of the layers."""
    return with_noise(sound(key, clip_norm=dict.fromkeys(("kernel", "bias", "scale"), CLIP_NORM)), standard(key))


def layer_without_noise(key, steps):
    """A layer is clipped and gets no noise (parameters that a hook forgets)."""

    def draw(total, step):
        noise = standard(key)(total, step)
        return noise | {"bias": jnp.zeros_like(noise["bias"])}

    return with_noise(sound(key), draw)


def noise_from_the_projection(key, steps):
    """The noise has the key of the random projection, so whoever knows the projection subtracts it."""

    def release(sums, state, params):
        step_key = keys.public(keys.fold_in(keys.stream(key, "projection"), state.step))
        matrix_key = jax.random.fold_in(jax.random.fold_in(step_key, 0), 0)  # of the first group's first block
        noise = jax.random.normal(matrix_key, high(sums[0])[0].shape)
        return [(high(sums[0])[0] + DEVIATION * noise) / SAMPLING.divisor], state.after(NOISE_MULTIPLIER)

    projection = dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key)
    return dpx.in_coordinates(sound(key).replace(release=release), projection)


def noise_on_another_mask(key, steps):
    """Sparse training draws one mask for the gradient and another one for the noise (masks of a stale step)."""
    freeze = {"freeze_rate": 0.3, "every": 2, "clip_norm": CLIP_NORM, "noise_multiplier": NOISE_MULTIPLIER}
    mechanism = dpx.methods.random_freeze_sgd(**freeze, sampling=SAMPLING, key=key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        silent, _ = mechanism.release(jax.tree.map(jnp.zeros_like, sums), state, params)
        first = jax.tree.map(jnp.zeros_like, params)
        first["kernel"] = first["kernel"].at[:, 0].set(1)
        return jax.tree.map(lambda u, n, f: u - f * n, updates, silent, first), after

    return mechanism.replace(release=release)


# The bill.


def schedule_shifted_by_a_step(key, steps):
    """The noise of a falling schedule is the next step's, the bill this one's (counters that start at 1)."""

    def schedule(step):
        return NOISE_MULTIPLIER * 0.9 ** step.astype(jnp.float32)

    mechanism = sound(key, noise_multiplier=schedule)

    def release(sums, state, params):
        updates, _ = mechanism.release(sums, state._replace(step=state.step + 1), params)
        return updates, state.after(schedule(state.step))

    return mechanism.replace(release=release)


def last_step_is_free(key, steps):
    """The accountant steps after the check of the loop, so the last release is not billed."""
    mechanism = sound(key)
    return mechanism.replace(event=lambda steps: mechanism.event(max(steps - 1, 0)))


def other_noise_is_billed(key, steps):
    """The event is made of another multiplier than the noise (two configuration files)."""
    return sound(key).replace(event=sound(key, noise_multiplier=1.5 * NOISE_MULTIPLIER).event)


def event_of_another_sampling(key, steps):
    """Subsets of a fixed size, billed by the event of a Poisson sampling of the right rate (a closure of one's own)."""
    mechanism = sound(key, sampling=dpx.FixedSizeSampling(examples=1000, batch_size=8))
    return mechanism.replace(event=sound(key).event)


def event_of_its_own_kind_and_a_lower_rate(key, steps):
    """The event of a projection of its own, at the rate of half of the batch (two configuration files)."""
    half = sound(key, sampling=dpx.PoissonSampling(examples=1000, batch_size=4))
    make = functools.partial(dpx.mechanisms.clip_then_project, rank=12, kind="gaussian", key=key)
    return make(sound(key)).replace(event=make(half).event)


def counts_nothing(key, steps):
    """A step that the counter does not see (gradient accumulation inside a step, `optax.MultiSteps`)."""
    mechanism = sound(key)
    return mechanism.replace(release=lambda sums, state, params: (mechanism.release(sums, state, params)[0], state))


# Secrets.


def sums_in_the_state(key, steps):
    """The clipped sum before the noise stays in the optimizer state, which is checkpointed (p.summed_grad)."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state["inner"], params)
        return updates, {"inner": after, "last": sums}

    return mechanism.replace(
        init=lambda params: {"inner": mechanism.init(params), "last": (jax.tree.map(jnp.zeros_like, params),)},
        weigh=lambda norms, state: mechanism.weigh(norms, state["inner"]),
        release=release,
    )


def sums_of_one_step_in_the_state(key, steps):
    """The same at step 7 alone, as where a state is checkpointed now and then."""
    whole = sums_in_the_state(key, steps)

    def release(sums, state, params):
        updates, after = whole.release(sums, state, params)
        return updates, after | {"last": jax.tree.map(lambda s: jnp.where(state["inner"].step == 7, s, 0), sums)}

    return whole.replace(release=release)


def mask_of_raw_gradients(key, steps):
    """The coordinates that are released are the largest of the sum before the noise (top-k sparsification)."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        large = jax.tree.map(lambda s: jnp.abs(s) > 0.1, high(sums[0]))
        return jax.tree.map(lambda u, keep: jnp.where(keep, u, 0), updates, large), after

    return mechanism.replace(release=release)


def importance_of_raw_gradients(key, steps):
    """Importance scores of gradients before the noise choose the mask of later steps (AdaDPIGU as published)."""
    mechanism = dpx.in_coordinates(sound(key), dpx.coordinates.importance_mask(keep=0.5, warmup=3))

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        score = jax.tree.map(lambda s, g: s + jnp.abs(g), state.coordinates[0].score, high(sums[0]))
        return updates, after._replace(coordinates=(after.coordinates[0]._replace(score=score),))

    return mechanism.replace(release=release)


def selective_release(key, steps):
    """An update is kept only if the raw gradient agrees, and the choice is not billed (selective release)."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        agree = sum(jax.tree.leaves(jax.tree.map(lambda s, u: jnp.sum(s * u), high(sums[0]), updates)))
        return jax.tree.map(lambda u: jnp.where(agree > 0, u, 0), updates), after

    return mechanism.replace(release=release)


def clip_norm_of_raw_norms(key, steps):
    """The clip norm follows the norms of the batch without noise (adaptive clipping by the median)."""
    settings = {"initial_clip_norm": 0.4, "indicator_noise": 0.8, "noise_multiplier": NOISE_MULTIPLIER}
    mechanism = dpx.mechanisms.adaptive_clipping(**settings, sampling=SAMPLING, key=key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        moved = state.clip_norm * jnp.exp(-0.2 * high(sums[0])["indicator"] / SAMPLING.divisor)
        return updates, after._replace(clip_norm=moved)

    return mechanism.replace(release=release)


def feedback_at_the_papers_noise(key, steps):
    """The error of the clip is fed back, and every release is billed as if it stood alone (DiceSGD's theorem)."""
    mechanism = dpx.methods.dice_sgd(
        clip_norm=CLIP_NORM, feedback_norm=CLIP_NORM, outer_clip_norm=float("inf"), noise_multiplier=NOISE_MULTIPLIER,
        sampling=SAMPLING, key=key,
    )  # fmt: skip
    return mechanism.replace(event=sound(key).event)


def branches_on_raw_gradients(key, steps):
    """A conditional on raw gradients, whose time and results tell (`optax.apply_if_finite` around a mechanism)."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(high(sums[0])))
        return jax.lax.cond(total > 0, lambda u: u, lambda u: jax.tree.map(jnp.zeros_like, u), updates), after

    return mechanism.replace(release=release)


def normals(key: jax.Array, step: Any, tree: Any) -> Any:
    """Standard normals like `tree` that do not come from `keys.normal_like`."""
    return split(jax.random.normal(quick(key, "own noise", step), (sum(map(jnp.size, jax.tree.leaves(tree))),)), tree)


def quick(key: jax.Array, name: str, step: Any) -> jax.Array:
    """A key of the stream with this name, from which jax.random makes small programs: XLA compiles them quickly."""
    return keys.public(keys.stream(key, name, step))


def sound_noise_of_its_own(key, steps=1):
    return with_noise(sound(key), lambda total, step: normals(key, step, total))


def with_noise_of_params(mechanism: dpx.Mechanism, draw: Callable) -> dpx.Mechanism:
    """`mechanism`, but its noise on the sum is DEVIATION times draw(sum, step, params)."""

    def release(sums, state, params):
        noise = draw(high(sums[0]), state.step, params)
        updates = jax.tree.map(lambda s, n: (s + DEVIATION * n) / mechanism.sampling.divisor, high(sums[0]), noise)
        return optax.tree.cast_like(updates, params), state.after(NOISE_MULTIPLIER)

    return mechanism.replace(release=release)


# Noise that is missing, or there twice, at some parameters.


def no_noise_in_16_bits(key, steps):
    """Leaves of bfloat16 get no noise (a loop over `dtype == float32`)."""

    def draw(total, step, params):
        return jax.tree.map(lambda n, p: n * np.float32(p.dtype != jnp.bfloat16), standard(key)(total, step), params)

    return with_noise_of_params(sound(key), draw)


def no_noise_on_convolutions(key, steps):
    """Leaves of more than two axes get no noise (a loop over dense layers)."""
    return with_noise(
        sound(key), lambda total, step: jax.tree.map(lambda n: n * np.float32(n.ndim < 3), normals(key, step, total))
    )


def noise_by_shape(key, steps):
    """The key of a leaf is made from its shape, so that equal layers share noise (a cache of generators)."""

    def draw(total, step):
        def of(leaf):
            return jax.random.normal(
                jax.random.fold_in(quick(key, "noise", step), hash(leaf.shape) % 2**31), leaf.shape
            )

        return jax.tree.map(of, total)

    return with_noise(sound(key), draw)


def noise_scaled_by_params(key, steps):
    """The noise is relative to the parameters, which one does not see where all of them are 1."""

    def draw(total, step, params):
        return jax.tree.map(lambda n, p: n * jnp.abs(p).astype(jnp.float32), standard(key)(total, step), params)

    return with_noise_of_params(sound(key), draw)


def noise_keyed_by_params(key, steps):
    """The key depends on the parameters too: the noise of a step can be made again at other ones."""

    def draw(total, step, params):
        own = jax.random.fold_in(
            key, sum(jnp.sum(p).astype(jnp.int32) for p in jax.tree.leaves(params)).astype(jnp.uint32)
        )
        return normals(own, step, total)

    return with_noise_of_params(sound(key), draw)


def noise_in_tiles(key, steps):
    """Large layers get the same 1,024 numbers again and again (a pool of noise that was drawn before)."""

    def draw(total, step):
        pool = normals(key, step, jnp.zeros(1024))
        numbers = iter(itertools.accumulate([0, *(leaf.size for leaf in jax.tree.leaves(total))]))
        return jax.tree.map(lambda s: pool[(np.arange(s.size) + next(numbers)) % 1024].reshape(s.shape), total)

    return with_noise(sound(key), draw)


def noise_of_256_sizes(key, steps):
    """Noise of 8 bits (quantized communication), at the right standard deviation."""

    def draw(total, step):
        uniform = jax.tree.map(lambda n: jax.scipy.stats.norm.cdf(n), normals(key, step, total))
        return jax.tree.map(lambda u: jax.scipy.stats.norm.ppf((jnp.floor(u * 512) + 0.5) / 512), uniform)

    return with_noise(sound(key), draw)


def noise_by_number_of_parameters(key, steps):
    """The noise is divided by the root of the number of parameters above 100, as if that were its norm."""

    def draw(total, step):
        numbers = sum(leaf.size for leaf in jax.tree.leaves(total))
        return jax.tree.map(lambda n: n / max(1.0, numbers / 100) ** 0.5, normals(key, step, total))

    return with_noise(sound(key), draw)


# Noise that repeats without a correlation.


def one_noise_with_other_signs(key, steps):
    """Two leaves share the sizes of their noise and have signs of their own (antithetic or reflected draws)."""

    def draw(total, step):
        def of(number, leaf):
            size = jnp.abs(jax.random.normal(quick(key, "noise", step), leaf.shape))
            own = jax.random.fold_in(quick(key, "signs", step), number)
            return size * jax.random.rademacher(own, leaf.shape, jnp.float32)

        leaves, structure = jax.tree.flatten(total)
        return structure.unflatten([of(number, leaf) for number, leaf in enumerate(leaves)])

    return with_noise(sound(key), draw)


def other_signs_at_every_step(key, steps):
    """The sizes of the noise are the same at all steps, and the signs are drawn anew."""

    def draw(total, step):
        size = jax.tree.map(jnp.abs, normals(key, 0, total))
        sign = optax.tree.random_like(quick(key, "signs", step), total, jax.random.rademacher, jnp.float32)
        return jax.tree.map(lambda n, s: n * s, size, sign)

    return with_noise(sound(key), draw)


def sign_of_two_others(key, steps):
    """Every third number has the sign of the product of the two before it: no two of them are dependent."""

    def draw(total, step):
        def of(n):
            flat = n.reshape(-1)
            product = jnp.sign(jnp.roll(flat, 1) * jnp.roll(flat, 2))
            third = np.arange(flat.size) % 3 == 2
            return jnp.where(third, jnp.abs(flat) * product, flat).reshape(n.shape)

        return jax.tree.map(of, normals(key, step, total))

    return with_noise(sound(key), draw)


# Faults at some steps.


def no_noise_at_some_steps(key, steps):
    """Steps 2 and 3 have no noise (a warm-up that is off by two)."""

    def draw(total, step):
        silent = (step == 2) | (step == 3)
        return jax.tree.map(lambda n: jnp.where(silent, 0.0, n), standard(key)(total, step))

    return with_noise(sound(key), draw)


def no_noise_from_step_50(key, steps):
    """A schedule of the noise ends, and the bill's does not."""
    return with_noise(
        sound(key),
        lambda total, step: jax.tree.map(lambda n: jnp.where(step >= 50, 0.0, n), standard(key)(total, step)),
    )


def half_the_noise_from_step_1000(key, steps):
    """The noise falls after a warm-up, and the bill does not know of it."""
    return with_noise(
        sound(key),
        lambda total, step: jax.tree.map(lambda n: jnp.where(step >= 1000, 0.5 * n, n), standard(key)(total, step)),
    )


def repeats_after(period: int) -> Callable:
    def repeating(key, steps):
        """The number of the step is taken modulo a period (a ring buffer of keys; a counter of few bits)."""
        return with_noise(sound(key), lambda total, step: normals(key, step % period, total))

    repeating.__name__ = f"noise_repeats_after_{period}"
    return repeating


def dpx_noise_repeats(key, steps):
    """Noise of dpx at the step modulo 1,000, behind random coordinates."""
    repeating = with_noise(
        sound(key), lambda total, step: keys.normal_like(keys.stream(key, "noise"), step % 1000, total)
    )
    return dpx.in_coordinates(repeating, dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key))


def step_in_bfloat16(key, steps):
    """The number of the step is rounded, from 256 on (a counter in the dtype of the model)."""
    return with_noise(sound(key), lambda total, step: normals(key, step.astype(jnp.bfloat16).astype(jnp.int32), total))


def step_in_float32(key, steps):
    """The number of the step is rounded, from 2^24 on."""
    return with_noise(sound(key), lambda total, step: normals(key, step.astype(jnp.float32).astype(jnp.int32), total))


def key_of_eight_bits(key, steps):
    """The noise has one of 256 seeds (`seed % 256`)."""

    def draw(total, step):
        seed = keys.words(keys.stream(key, "noise"))[0] % 256
        return normals(jax.random.fold_in(jax.random.key(0), seed), step, total)

    return with_noise(sound(key), draw)


# Large batches and long runs.


def signs_share_the_key_of_the_noise(key, steps):
    """Random signs before the clip, and again after the release, with the signs of the noise: |noise| comes back."""
    stream = keys.stream(key, "noise")

    def flip(tree, step):
        signs = jax.tree.map(jnp.sign, keys.normal_like(stream, step, tree))
        return jax.tree.map(jnp.multiply, tree, signs)

    coordinates = dpx.coordinates.Coordinates(
        init=lambda params: jnp.zeros((), jnp.int32),
        encode=flip,
        decode=lambda released, step, like: (flip(released, step), step + 1),
        name="flip random signs",
        undo="flip the signs back",
    )
    return dpx.in_coordinates(sound(key), coordinates)


def clipped_in_groups(key, steps):
    """In a batch of more than 32 rows, the sum of 16 rows is clipped, and each row of others (vectorized clipping)."""

    def change(grads, included):
        rows = included.shape[0]
        if rows <= 32:
            return grads, included

        def pooled(g):
            kept = jnp.where(included.reshape(-1, *[1] * (g.ndim - 1)), g, 0)
            groups = jnp.pad(kept, [(0, -rows % 16)] + [(0, 0)] * (g.ndim - 1)).reshape(-1, 16, *g.shape[1:])
            firsts = jnp.zeros_like(groups).at[:, 0].set(groups.sum(1))
            return firsts.reshape(-1, *g.shape[1:])[:rows]

        return jax.tree.map(pooled, grads), jnp.ones_like(included)

    return with_update(sound(key), change)


def last_rows_not_clipped(key, steps):
    """Rows from 256 on are added as they are (a loop over whole chunks of 256, and a rest)."""
    mechanism = sound(key)

    def update(grads, state, params=None, *, included=None):
        rest = jnp.arange(included.shape[0]) >= 256
        updates, after = mechanism.update(grads, state, params, included=included & ~rest)

        def add(u, g):
            kept = (included & rest).reshape(-1, *[1] * (g.ndim - 1))
            return u + (jnp.where(kept, g, 0).astype(jnp.float32).sum(0) / SAMPLING.divisor).astype(u.dtype)

        return jax.tree.map(add, updates, grads), after

    return with_own_update(mechanism, update)


def bill_is_capped(key, steps):
    """At most 1,000 steps are billed (a table of a fixed size)."""
    mechanism = sound(key)
    return mechanism.replace(event=lambda steps: mechanism.event(min(steps, 1000)))


def bill_loses_a_schedule(key, steps):
    """A schedule is billed by its first 5,000 steps, with the last of them for the others."""

    def schedule(step):
        return NOISE_MULTIPLIER * (0.5 + 0.5 * jnp.exp(-step.astype(jnp.float32) / 1e5))

    mechanism = sound(key, noise_multiplier=schedule)
    held = sound(key, noise_multiplier=lambda step: schedule(jnp.minimum(step, 5000)))
    return mechanism.replace(event=held.event)


# The bits.


def noise_in_floating_point(key, steps):
    """A float sum plus a float of noise, whose bits show the sum (Mironov 2012; every library until 2026)."""
    return with_noise(sound(key), standard(key))


def noise_of_24_bits_on_a_grid(key, steps):
    """Rounded to a public grid, but the noise has 2^23 values, so a sum makes some cells impossible."""
    mechanism, gamma = sound(key), 2.0**-20

    def release(sums, state, params):
        noise = normals(keys.stream(key, "noise"), state.step, high(sums[0]))
        updates = jax.tree.map(lambda s, n: jnp.round((s + DEVIATION * n) / gamma) * gamma / 8, high(sums[0]), noise)
        return optax.tree.cast_like(updates, params), state.after(NOISE_MULTIPLIER)

    return mechanism.replace(release=release)


def grid_of_the_data(key, steps):
    """The deviation, and so the grid, depends a little on the sum (a scale that is found in the batch)."""
    mechanism = sound(key)

    def release(sums, state, params):
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(high(sums[0]))]))
        deviation = DEVIATION * (1 + 1e-6 * jnp.tanh(largest))
        released = keys.release(keys.stream(key, "noise"), state.step, sums[0], deviation)
        updates = jax.tree.map(lambda r: r / mechanism.sampling.divisor, released)
        return optax.tree.cast_like(updates, params), state.after(NOISE_MULTIPLIER)

    return mechanism.replace(release=release)


def raw_bits_beside_the_release(key, steps):
    """What is released is on the grid, and then a raw sum is added that is too small to matter (error feedback)."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        return jax.tree.map(lambda u, s: u + (1e-9 * s).astype(u.dtype), updates, high(sums[0])), after

    return mechanism.replace(release=release)


def sum_of_one_number(key, steps):
    """The two float32 numbers of a sum become one before the noise (a helper that flattens, or a cast to float32)."""
    mechanism = sound(key)

    def release(sums, state, params):
        total = as_total(sums[0])
        one = total.high if total.low is None else jax.tree.map(jnp.add, total.high, total.low)
        return mechanism.release((one,), state, params)

    return mechanism.replace(release=release)


def sum_of_one_number_in_a_layer(key, steps):
    """The same for the numbers of one layer only."""
    mechanism = sound(key)

    def release(sums, state, params):
        total = as_total(sums[0])
        if total.low is not None:
            total = total._replace(low=total.low | {"bias": jnp.zeros_like(total.low["bias"])})
        return mechanism.release((total,), state, params)

    return mechanism.replace(release=release)


def order_dependent_sum(key, steps):
    """One product adds all rows, in a chain whose rounding depends on each (the clipped sum of every library)."""
    return added_in_a_chain(sound(key))


def added_in_a_chain(mechanism: dpx.Mechanism) -> dpx.Mechanism:
    def update(grads, state, params=None, *, included=None):
        encoded, norms, factors = jax.vmap(mechanism.contribute, (0, None))(grads, state)
        counts = included & (norms < 1e18)

        def add(z):
            counted = jnp.where(counts.reshape(-1, *[1] * (z.ndim - 1)), z, 0)
            return jnp.tensordot(jnp.where(counts, factors[0], 0), counted, 1)

        return mechanism.release_once((jax.tree.map(add, encoded),), state, params, jnp.sum(included))

    return with_own_update(mechanism, update)


def order_dependent_microbatches(key, steps):
    """The sums of microbatches are added to one float32 number (gradient accumulation, in every library)."""
    mechanism = sound(key)

    def update(grads, state, params=None, *, included=None):
        def parts(x):
            filled = jnp.pad(x, [(0, -len(x) % 16)] + [(0, 0)] * (x.ndim - 1))
            return filled.reshape(-1, 16, *x.shape[1:])

        def add(total, rows):
            return jax.tree.map(jnp.add, total, sum_contributions(mechanism, rows[0], state, rows[1])[0][0].high), None

        zeros = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)
        total, _ = jax.lax.scan(add, zeros, (jax.tree.map(parts, grads), parts(included)))
        return mechanism.release_once((total,), state, params, jnp.sum(included))

    return with_own_update(mechanism, update)


ZOO = [
    Zoo(no_clip, "bounded"),
    Zoo(clip_after_the_sum, "bounded"),
    Zoo(clip_of_the_next_step, "noise"),
    Zoo(half_precision_norms, "float32"),
    Zoo(not_a_number_passes, "bounded"),
    Zoo(projected_after_the_clip, "noise"),
    Zoo(clipped_by_microbatch, "adjacent"),
    Zoo(batch_normalized, "adjacent"),
    Zoo(padding_counts, "padding"),
    Zoo(realized_divisor, "divisor"),
    Zoo(mask_of_the_microbatch, "additive"),
    Zoo(shuffled_billed_as_poisson, "sampling", "lower_bound"),
    Zoo(fixed_size_billed_as_poisson, "sampling", "lower_bound"),
    Zoo(truncated_billed_as_poisson, "sampling"),
    Zoo(first_rows_kept, "sampling"),
    Zoo(weighted_billed_by_the_mean, "sampling"),
    Zoo(other_weights, "sampling"),
    Zoo(groups_that_change, "sampling"),
    Zoo(poisson_billed_as_cyclic, "sampling"),
    Zoo(order_billed_once, "sampling"),
    Zoo(every_batch_twice, "sampling", "lower_bound"),
    Zoo(allocated_once, "sampling"),
    Zoo(permuted_billed_as_allocated, "sampling"),
    Zoo(poisson_billed_as_allocated, "sampling"),
    Zoo(replaced_billed_as_removed, "sampling", "lower_bound"),
    Zoo(two_thirds_of_the_noise, "noise", "lower_bound"),
    Zoo(noise_divided_twice, "noise", "lower_bound"),
    Zoo(noise_of_the_drawn_batch, "noise", "lower_bound"),
    Zoo(uniform_noise, "noise", "lower_bound"),
    Zoo(laplace_noise, "noise"),
    Zoo(discrete_noise, "noise"),
    Zoo(truncated_noise, "noise"),
    Zoo(bfloat16_noise, "float32"),
    Zoo(one_key_for_all_leaves, "noise", "lower_bound"),
    Zoo(one_noise_for_all_steps, "noise", "lower_bound"),
    Zoo(noise_from_the_host, "resume"),
    Zoo(layers_clipped_apart, "noise", "lower_bound"),
    Zoo(layer_without_noise, "noise", "lower_bound"),
    Zoo(noise_from_the_projection, "noise", "lower_bound"),
    Zoo(noise_on_another_mask, "noise", "lower_bound"),
    Zoo(schedule_shifted_by_a_step, "noise"),
    Zoo(last_step_is_free, "cost"),
    Zoo(other_noise_is_billed, "cost", "lower_bound"),
    Zoo(event_of_another_sampling, "cost"),
    Zoo(event_of_its_own_kind_and_a_lower_rate, "cost"),
    Zoo(counts_nothing, "cost"),
    Zoo(sums_in_the_state, "secrecy"),
    Zoo(sums_of_one_step_in_the_state, "secrecy"),
    Zoo(mask_of_raw_gradients, "secrecy", "lower_bound"),
    Zoo(importance_of_raw_gradients, "secrecy"),
    Zoo(selective_release, "secrecy", "lower_bound"),
    Zoo(clip_norm_of_raw_norms, "secrecy"),
    Zoo(feedback_at_the_papers_noise, "secrecy", "lower_bound"),
    Zoo(branches_on_raw_gradients, "branches"),
    Zoo(no_noise_in_16_bits, "noise"),
    Zoo(no_noise_on_convolutions, "noise"),
    Zoo(noise_by_shape, "noise"),
    Zoo(noise_scaled_by_params, "noise"),
    Zoo(noise_keyed_by_params, "noise"),
    Zoo(noise_in_tiles, "noise"),
    Zoo(noise_of_256_sizes, "noise"),
    Zoo(noise_by_number_of_parameters, "noise"),
    Zoo(one_noise_with_other_signs, "noise"),
    Zoo(other_signs_at_every_step, "noise"),
    Zoo(sign_of_two_others, "noise"),
    Zoo(no_noise_at_some_steps, "noise"),
    Zoo(no_noise_from_step_50, "noise"),
    Zoo(half_the_noise_from_step_1000, "noise"),
    Zoo(repeats_after(7), "noise"),
    Zoo(repeats_after(1000), "noise"),
    Zoo(dpx_noise_repeats, "noise"),
    Zoo(step_in_bfloat16, "noise"),
    Zoo(step_in_float32, "noise"),
    Zoo(key_of_eight_bits, "noise"),
    Zoo(signs_share_the_key_of_the_noise, "noise"),
    Zoo(clipped_in_groups, "adjacent"),
    Zoo(last_rows_not_clipped, "adjacent"),
    Zoo(bill_is_capped, "cost"),
    Zoo(bill_loses_a_schedule, "cost"),
    Zoo(noise_in_floating_point, "bits"),
    Zoo(noise_of_24_bits_on_a_grid, "bits"),
    Zoo(grid_of_the_data, "bits"),
    Zoo(raw_bits_beside_the_release, "bits"),
    Zoo(sum_of_one_number, "bits"),
    Zoo(sum_of_one_number_in_a_layer, "bits"),
    Zoo(order_dependent_sum, "bits"),
    Zoo(order_dependent_microbatches, "bits"),
]

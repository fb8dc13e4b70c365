"""Mechanisms that are broken on purpose, each in the way of a real bug, and the line of the contract that sees it.

`@breaks(line, part)` adds a row to `ZOO`: the function below it is one part of a mechanism that is otherwise sound. Its
docstring says where the bug was seen.
"""

import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from dpx import keys
from dpx.mechanism import masks
from dpx.sampling.batch import Draw
from dpx.sums.clipped_sum import sum_contributions
from dpx.sums.rounding import as_pair
from dpx.values import unflatten_vectors

SAMPLING = dpx.PoissonSampling(examples=1000, batch_size=8)
CLIP_NORM, NOISE_MULTIPLIER = 0.7, 1.3
DEVIATION = CLIP_NORM * NOISE_MULTIPLIER  # of the noise on the sum
Make = Callable[[jax.Array], dpx.Mechanism]  # from a key


class Broken(NamedTuple):
    """line: of `check_contract`, which fails for the mechanism of `make`."""

    name: str
    make: Make
    line: str


ZOO: list[Broken] = []


def breaks(line: str, part: Callable[[Callable], Make] = lambda make: make) -> Callable[[Callable], Make]:
    """A row of ZOO. part: the mechanism that is made of the decorated function."""

    def add(function: Callable) -> Make:
        make = functools.wraps(function)(part(function))
        ZOO.append(Broken(make.__name__, make, line))
        return make

    return add


def sound(key: jax.Array, *, sampling: Any = SAMPLING, **changes: Any) -> dpx.Mechanism:
    """DP-SGD, which the others break."""
    numbers = {"clip_norm": CLIP_NORM, "noise_multiplier": NOISE_MULTIPLIER} | changes
    return dpx.dp_sgd(**numbers, sampling=sampling, key=key)


# The parts: each takes a function, and returns (key) -> Mechanism.


def released(function: Callable) -> Make:
    """What is released is function(mechanism, sums, state, params)."""

    def make(key):
        mechanism = sound(key)
        return mechanism.replace(release=functools.partial(function, mechanism))

    return make


def noise(draw: Callable) -> Make:
    """The noise on the sum is DEVIATION times draw(key, sum, step)."""
    return lambda key: with_noise(sound(key), functools.partial(draw, key))


def noise_of_params(draw: Callable) -> Make:
    """The noise on the sum is DEVIATION times draw(key, sum, step, params)."""
    return lambda key: with_noise_of_params(sound(key), functools.partial(draw, key))


def updated(function: Callable) -> Make:
    """`update` is function(mechanism, grads, state, params, included)."""
    return lambda key: with_own_update(sound(key), function)


def given(change: Callable) -> Make:
    """`update` sees change(grads, included) as gradients and included."""

    def update(mechanism, grads, state, params, included):
        grads, included = change(grads, included)
        return mechanism.update(grads, state, params, included=included)

    return updated(update)


def billed(event: Callable) -> Make:
    """The event is event(mechanism, steps)."""

    def make(key):
        mechanism = sound(key)
        return mechanism.replace(event=functools.partial(event, mechanism))

    return make


def with_own_update(mechanism: dpx.Mechanism, function: Callable) -> dpx.Mechanism:
    """`mechanism` with another `update`; `private_updates` uses its other fields, as before."""

    class Updated(dpx.Mechanism):
        def update(self, grads, state, params=None, *, included=None):
            return function(mechanism, grads, state, params, included)

    names = [field.name for field in dataclasses.fields(mechanism) if field.init]
    return Updated(**{name: getattr(mechanism, name) for name in names})


def with_noise(mechanism: dpx.Mechanism, draw: Callable, deviation: Any = DEVIATION) -> dpx.Mechanism:
    """`mechanism`, but its noise on the sum is `deviation` times draw(sum, step)."""
    return with_noise_of_params(mechanism, lambda total, step, params: draw(total, step), deviation)


def with_noise_of_params(mechanism: dpx.Mechanism, draw: Callable, deviation: Any = DEVIATION) -> dpx.Mechanism:
    def release(sums, state, params):
        noise = draw(high(sums[0]), state.step, params)
        updates = jax.tree.map(lambda s, n: (s + deviation * n) / mechanism.sampling.divisor, high(sums[0]), noise)
        return optax.tree.cast_like(updates, params), state.after_release(NOISE_MULTIPLIER)

    return mechanism.replace(release=release)


def high(total: Any) -> Any:
    """The sum as one float32 number for each coordinate."""
    return as_pair(total).high


def of_each(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    """Flags of rows, (B,), in the number of axes of `leaf`, (B, ...)."""
    return flags.reshape(-1, *[1] * (leaf.ndim - 1))


def kept(included: jax.Array, leaf: jax.Array) -> jax.Array:
    return jnp.where(of_each(included, leaf), leaf, 0)


def standard(key: jax.Array, total: Any, step: Any) -> Any:
    """Sound noise: standard normals like the sum."""
    return keys.normals_of_release(keys.stream(key, "noise"), step, total)


def normals(key: jax.Array, step: Any, tree: Any) -> Any:
    """Standard normals like `tree` that do not come from `keys.normals_of_release`."""
    return unflatten_vectors(
        jax.random.normal(quick(key, "own noise", step), (sum(map(jnp.size, jax.tree.leaves(tree))),)), tree
    )


def quick(key: jax.Array, name: str, step: Any) -> jax.Array:
    """A key of the stream with this name, from which jax.random makes small programs: XLA compiles them quickly."""
    return keys.public_key(keys.stream(key, name, step))


def drawn_by(sample: Callable) -> Callable:
    """Noise (key, sum, step) of sample(key, shape)."""

    def draw(key, total, step):
        return optax.tree.random_like(quick(key, "noise", step), total, lambda k, shape, dtype: sample(k, shape))

    return draw


def sound_noise_of_its_own(key):
    return with_noise(sound(key), lambda total, step: normals(key, step, total))


# The bound.


@breaks("bounded")
def no_clip(key):
    """Layers that the library does not know are left out of the clip (a class of bugs of Opacus before 1.0)."""
    return sound(key).replace(clip_factors=lambda norms, state: (jnp.ones_like(norms),))


@breaks("bounded")
def clip_after_the_sum(key):
    """`clip_grad_norm_` on the gradient of the batch, in place of every example's (many re-implementations)."""

    def release(sums, state, params):
        scale = CLIP_NORM / jnp.maximum(optax.tree.norm(high(sums[0])), CLIP_NORM)
        return sound(key).release((jax.tree.map(lambda s: s * scale, high(sums[0])),), state, params)

    return no_clip(key).replace(release=release)


@breaks("noise")
def clip_of_the_next_step(key):
    """The clip reads the schedule after the counter has moved, the noise before (loops that count twice)."""
    mechanism = sound(key, clip_norm=lambda step: 1 - 0.05 * step.astype(jnp.float32))
    return mechanism.replace(
        clip_factors=lambda norms, state: mechanism.clip_factors(norms, state._replace(step=state.step - 1))
    )


@breaks("float32")
def half_precision_norms(key):
    """Norms in float16 under mixed precision, which are rounded, and overflow at 65,504 (fp16 training with hooks)."""

    def norm(encoded):
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float16))) for leaf in jax.tree.leaves(encoded)]
        return jnp.sqrt(sum(squares)).astype(jnp.float32)

    return sound(key).replace(norm=norm, supports_ghost_norms=False)


@breaks("bounded")
def not_a_number_passes(key):
    """A norm of NaN compares as small, so that the example is not clipped (`if norm > C`, in several libraries)."""
    mechanism = sound(key)
    return mechanism.replace(norm=lambda encoded: jnp.nan_to_num(mechanism.norm(encoded), posinf=0.0))


@breaks("noise")
def projected_after_the_clip(key):
    """Clipped, then projected, at the noise of the clip norm: a projection can lengthen (D2P2-SGD as published)."""
    projection = dpx.coordinates.random_projection(rank=8, kind="gaussian", key=key)
    projected = dpx.in_coordinates(sound(key), projection)

    def encode(grad, state):
        scale = CLIP_NORM / jnp.maximum(optax.tree.norm(grad), CLIP_NORM)
        return projected.encode(jax.tree.map(lambda g: g * scale, grad), state)

    return projected.replace(encode=encode, clip_factors=lambda norms, state: (jnp.ones_like(norms),))


@breaks("adjacent", given)
def clipped_by_microbatch(grads, included):
    """The mean of two examples is clipped, and an example is billed (TF Privacy's num_microbatches)."""

    def pairs(g):
        rows, second = kept(included, g), of_each(jnp.arange(g.shape[0]) % 2 == 1, g)
        return jnp.where(second, (rows + jnp.roll(rows, 1, axis=0)) / 2, 0)

    return jax.tree.map(pairs, grads), jnp.ones_like(included)


@breaks("adjacent", given)
def batch_normalized(grads, included):
    """Gradients are standardized by the mean of the batch before the clip (BatchNorm under per-example gradients)."""

    def centered(g):
        count = jnp.maximum(jnp.sum(included), 1).astype(jnp.float32)
        return g - jnp.sum(kept(included, g), 0, keepdims=True) / count

    return jax.tree.map(centered, grads), included


@breaks("adjacent", given)
def clipped_in_groups(grads, included):
    """In a batch of more than 32 rows, the sum of 16 rows is clipped, and each row of others (vectorized clipping)."""
    rows = included.shape[0]
    if rows <= 32:
        return grads, included

    def pooled(g):
        padded = jnp.pad(kept(included, g), [(0, -rows % 16)] + [(0, 0)] * (g.ndim - 1))
        groups = padded.reshape(-1, 16, *g.shape[1:])
        firsts = jnp.zeros_like(groups).at[:, 0].set(groups.sum(1))
        return firsts.reshape(-1, *g.shape[1:])[:rows]

    return jax.tree.map(pooled, grads), jnp.ones_like(included)


@breaks("adjacent", updated)
def last_rows_not_clipped(mechanism, grads, state, params, included):
    """Rows from 256 on are added as they are (a loop over whole chunks of 256, and a rest)."""
    rest = jnp.arange(included.shape[0]) >= 256
    updates, after = mechanism.update(grads, state, params, included=included & ~rest)

    def add(u, g):
        return u + (kept(included & rest, g).astype(jnp.float32).sum(0) / SAMPLING.divisor).astype(u.dtype)

    return jax.tree.map(add, updates, grads), after


# Padding and batches.


@breaks("padding", given)
def padding_counts(grads, included):
    """The padding of a static shape enters as real rows (Poisson batches in jitted loops)."""
    return grads, jnp.ones_like(included)


@breaks("divisor", updated)
def realized_divisor(mechanism, grads, state, params, included):
    """The sum and the noise are divided by the size of the drawn batch (the mean loss of every library)."""
    updates, after = mechanism.update(grads, state, params, included=included)
    scale = SAMPLING.divisor / jnp.maximum(jnp.sum(included), 1)
    return jax.tree.map(lambda u: u * scale, updates), after


@breaks("additive")
def mask_of_the_microbatch(key):
    """Every microbatch draws a random mask of its own (dropout-like masks inside of the accumulation loop)."""
    microbatches = itertools.count()

    def encode(grad, state):
        drawn = jax.random.bits(jax.random.fold_in(key, next(microbatches)), (2,), jnp.uint32)
        return masks.apply_mask(grad, masks.random_mask(drawn, jnp.int32(8), grad))

    return sound(key).replace(encode=encode, supports_ghost_norms=False)


def changed(sampling: Any, **attributes: Any) -> Any:
    """A copy of a sampling with other methods."""
    other = copy.copy(sampling)
    object.__setattr__(other, "__class__", type("Changed", (type(sampling),), attributes))
    return other


def first_rows(key: jax.Array, step: int) -> Draw:
    indices, included = POISSON.draw(key, step)
    first = np.sort(indices[included])[:8]
    return Draw(np.pad(first, (0, 8 - len(first))), np.arange(8) < len(first))


def event_of_one_epoch(self: Any, multipliers: np.ndarray) -> dp_accounting.DpEvent:
    return dp_accounting.GaussianDpEvent(min(multipliers)) if len(multipliers) else dp_accounting.NoOpDpEvent()


def event_of_a_removal(self: Any, multipliers: np.ndarray) -> dp_accounting.DpEvent:
    inner = [dp_accounting.GaussianDpEvent(float(sigma)) for sigma in multipliers]
    sampled = dp_accounting.SampledWithoutReplacementDpEvent
    return dp_accounting.ComposedDpEvent([sampled(self.examples, self.batch_size, one) for one in inner])


SIZES = {"examples": 96, "batch_size": 8}
POISSON, CUT = dpx.PoissonSampling(**SIZES), dpx.PoissonSampling(**SIZES, most_rows=8)
FIXED, SHUFFLED = dpx.FixedSizeSampling(**SIZES), dpx.ShuffledEpochs(**SIZES)
ORDERED, CYCLIC = dpx.sampling.FixedOrder(**SIZES), dpx.sampling.CyclicPoissonSampling(**SIZES, bands=3)
ALLOCATED = dpx.sampling.RandomAllocation(examples=96, steps_per_epoch=12)
EIGHTHS, THIRDS = (dpx.PoissonSampling(**SIZES, weights=1.0 + 4 * (np.arange(96) % n == 0)) for n in (8, 3))
STATED = dpx.PoissonSampling(**SIZES, weights=1.0 + np.arange(96) % 3)
BATCHES = {  # by name: the sampling that is billed, and draw(key, step) of the batches
    # Opacus' and TF Privacy's defaults; Chua et al. 2024, https://arxiv.org/abs/2403.17673
    "shuffled_billed_as_poisson": (POISSON, SHUFFLED.draw),
    # many papers' code, of add-or-remove neighbors
    "fixed_size_billed_as_poisson": (POISSON, FIXED.draw),
    # maximum batch sizes of several loops
    "truncated_billed_as_poisson": (POISSON, CUT.draw),
    # the examples of the lowest numbers are kept, and random subsets are billed
    "first_rows_kept": (CUT, first_rows),
    # a weighted sampler, billed at batch size / examples: Opacus, issue 813
    "weighted_billed_by_the_mean": (POISSON, EIGHTHS.draw),
    # weights that are learned during the run, and renormalized after the bill
    "other_weights": (STATED, THIRDS.draw),
    # groups that are drawn anew from time to time, so that an example may take part twice in a row
    "groups_that_change": (CYCLIC, lambda key, step: CYCLIC.draw(jax.random.fold_in(key, step // 6), step)),
    # an example has one release in three
    "poisson_billed_as_cyclic": (CYCLIC, POISSON.draw),
    # data echoing; several local steps: a batch serves for two steps, which are billed as independent samples
    "every_batch_twice": (POISSON, lambda key, step: POISSON.draw(key, step // 2)),
    # fixed batches that are walked through every epoch
    "allocated_once": (ALLOCATED, lambda key, step: ALLOCATED.draw(key, step % 12)),
    # the steps of the examples are not independent, because all batches have one size
    "permuted_billed_as_allocated": (ALLOCATED, SHUFFLED.draw),
    # an example may be in two batches of an epoch; the bill is lower at a small delta
    "poisson_billed_as_allocated": (ALLOCATED, POISSON.draw),
    # several epochs in one order, billed as the parallel composition of one epoch
    "order_billed_once": (changed(ORDERED, event=event_of_one_epoch), ORDERED.draw),
    # replacing an example moves the sum by 2 C, and C is billed: accountants of subsets without replacement
    "replaced_billed_as_removed": (changed(FIXED, event=event_of_a_removal), FIXED.draw),
}


def of_batches(sampling: Any, draw: Callable) -> Make:
    other = changed(sampling, draw=lambda self, key, step, *, size=None: draw(key, step))
    return lambda key: sound(key, sampling=other)


ZOO += [Broken(name, of_batches(*batches), "sampling") for name, batches in BATCHES.items()]


# The noise.


@breaks("noise")
def two_thirds_of_the_noise(key):
    """A constant is lost between the accountant and the optimizer (the oldest bug)."""
    return with_noise(sound(key), functools.partial(standard, key), 2 / 3 * DEVIATION)


@breaks("noise")
def noise_divided_twice(key):
    """Noise of the mean is added to the mean, and both are divided by the batch again (loss_reduction="mean")."""
    return with_noise(sound(key), functools.partial(standard, key), DEVIATION / SAMPLING.divisor)


@breaks("noise", updated)
def noise_of_the_drawn_batch(mechanism, grads, state, params, included):
    """The noise is scaled by the size of the drawn batch, which is private and can be 0 (noise on the mean)."""
    updates, after = mechanism.update(grads, state, params, included=included)
    silent, _ = mechanism.update(grads, state, params, included=jnp.zeros_like(included))
    share = jnp.sum(included) / SAMPLING.divisor
    return jax.tree.map(lambda u, n: u - n + share * n, updates, silent), after


@breaks("noise", noise)
def uniform_noise(key, total, step):
    """`rand` in place of `randn`, at the right standard deviation (a typing error)."""
    return drawn_by(lambda k, shape: jax.random.uniform(k, shape, minval=-(3**0.5), maxval=3**0.5))(key, total, step)


@breaks("noise", noise)
def laplace_noise(key, total, step):
    """Laplace noise of the right standard deviation (a library of other queries)."""
    return drawn_by(lambda k, shape: jax.random.laplace(k, shape) / 2**0.5)(key, total, step)


@breaks("noise", noise)
def discrete_noise(key, total, step):
    """Poisson noise, less its mean, of the right standard deviation (integers for secure aggregation)."""
    return drawn_by(lambda k, shape: jax.random.poisson(k, 4.0, shape) / 2 - 2.0)(key, total, step)


@breaks("noise", noise)
def truncated_noise(key, total, step):
    """A truncated normal, as initializers draw it: a release beyond the cut tells that an example is there."""
    return drawn_by(lambda k, shape: jax.random.truncated_normal(k, -3, 3, shape))(key, total, step)


@breaks("float32", noise)
def bfloat16_noise(key, total, step):
    """Noise in the dtype of the model, of which there are some hundred values (mixed precision; Mironov 2012)."""
    drawn = optax.tree.random_like(keys.stream(key, "noise", step), total, jax.random.normal, jnp.bfloat16)
    return jax.tree.map(lambda n: n.astype(jnp.float32), drawn)


@breaks("noise", noise)
def one_key_for_all_leaves(key, total, step):
    """Every layer's noise comes from the same key, which is not split (JAX code that maps over leaves)."""
    return jax.tree.map(lambda s: jax.random.normal(keys.stream(key, "noise", step), s.shape), total)


@breaks("noise", noise)
def one_noise_for_all_steps(key, total, step):
    """The key is a constant of the jitted step, so every step has the same noise (JAX loops without `split`)."""
    return standard(key, total, 0)


@breaks("resume")
def noise_from_the_host(key):
    """A generator of the process that is seeded at its start: a resumed run repeats its noise (Opacus, torch)."""
    generator = random.Random(0)

    def draw(total, step):
        return keys.normals_of_release(jax.random.fold_in(key, generator.getrandbits(31)), step, total)

    return with_noise(sound(key), draw)


@breaks("noise")
def layers_clipped_apart(key):
    """Every layer is clipped to C, and the noise is that of one C, not of C times the root of the layers."""
    layers = sound(key, clip_norm=dict.fromkeys(("kernel", "bias", "scale"), CLIP_NORM))
    return with_noise(layers, functools.partial(standard, key))


@breaks("noise", noise)
def layer_without_noise(key, total, step):
    """A layer is clipped and gets no noise (parameters that a hook forgets)."""
    drawn = standard(key, total, step)
    return drawn | {"bias": jnp.zeros_like(drawn["bias"])}


@breaks("noise")
def noise_from_the_projection(key):
    """The noise has the key of the random projection, so whoever knows the projection subtracts it."""

    def release(sums, state, params):
        step_key = keys.public_key(keys.fold_in(keys.stream(key, "projection"), state.step))
        matrix_key = jax.random.fold_in(jax.random.fold_in(step_key, 0), 0)  # of the first group's first block
        drawn = jax.random.normal(matrix_key, high(sums[0])[0].shape)
        return [(high(sums[0])[0] + DEVIATION * drawn) / SAMPLING.divisor], state.after_release(NOISE_MULTIPLIER)

    projection = dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key)
    return dpx.in_coordinates(sound(key).replace(release=release), projection)


@breaks("noise")
def noise_on_another_mask(key):
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


@breaks("noise")
def schedule_shifted_by_a_step(key):
    """The noise of a falling schedule is the next step's, the bill this one's (counters that start at 1)."""

    def schedule(step):
        return NOISE_MULTIPLIER * 0.9 ** step.astype(jnp.float32)

    mechanism = sound(key, noise_multiplier=schedule)

    def release(sums, state, params):
        updates, _ = mechanism.release(sums, state._replace(step=state.step + 1), params)
        return updates, state.after_release(schedule(state.step))

    return mechanism.replace(release=release)


@breaks("cost", billed)
def last_step_is_free(mechanism, steps):
    """The accountant steps after the check of the loop, so the last release is not billed."""
    return mechanism.event(max(steps - 1, 0))


@breaks("cost", billed)
def bill_is_capped(mechanism, steps):
    """At most 1,000 steps are billed (a table of a fixed size)."""
    return mechanism.event(min(steps, 1000))


@breaks("cost")
def bill_loses_a_schedule(key):
    """A schedule is billed by its first 5,000 steps, with the last of them for the others."""

    def schedule(step):
        return NOISE_MULTIPLIER * (0.5 + 0.5 * jnp.exp(-step.astype(jnp.float32) / 1e5))

    held = sound(key, noise_multiplier=lambda step: schedule(jnp.minimum(step, 5000)))
    return sound(key, noise_multiplier=schedule).replace(event=held.event)


@breaks("cost")
def other_noise_is_billed(key):
    """The event is made of another multiplier than the noise (two configuration files)."""
    return sound(key).replace(event=sound(key, noise_multiplier=1.5 * NOISE_MULTIPLIER).event)


@breaks("cost")
def event_of_another_sampling(key):
    """Subsets of a fixed size, billed by the event of a Poisson sampling of the right rate (a closure of one's own)."""
    mechanism = sound(key, sampling=dpx.FixedSizeSampling(examples=1000, batch_size=8))
    return mechanism.replace(event=sound(key).event)


@breaks("cost")
def event_of_its_own_kind_and_a_lower_rate(key):
    """The event of a projection of its own, at the rate of half of the batch (two configuration files)."""
    half = sound(key, sampling=dpx.PoissonSampling(examples=1000, batch_size=4))
    make = functools.partial(dpx.mechanisms.clip_then_project, rank=12, kind="gaussian")
    return make(sound(key)).replace(event=make(half).event)


@breaks("cost", released)
def counts_nothing(mechanism, sums, state, params):
    """A step that the counter does not see (gradient accumulation inside a step, `optax.MultiSteps`)."""
    return mechanism.release(sums, state, params)[0], state


# Secrets.


def keeping_sums(key: jax.Array, keep: Callable) -> dpx.Mechanism:
    """With keep(sum, step) of every sum in the state."""
    mechanism = sound(key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state["inner"], params)
        return updates, {"inner": after, "last": jax.tree.map(lambda s: keep(s, state["inner"].step), sums)}

    return mechanism.replace(
        begin=lambda params: {"inner": mechanism.begin(params), "last": (jax.tree.map(jnp.zeros_like, params),)},
        clip_factors=lambda norms, state: mechanism.clip_factors(norms, state["inner"]),
        release=release,
    )


@breaks("secrecy")
def sums_in_the_state(key):
    """The clipped sum before the noise stays in the optimizer state, which is checkpointed (p.summed_grad)."""
    return keeping_sums(key, lambda total, step: total)


@breaks("secrecy")
def sums_of_one_step_in_the_state(key):
    """The same at step 7 alone, as where a state is checkpointed now and then."""
    return keeping_sums(key, lambda total, step: jnp.where(step == 7, total, 0))


@breaks("secrecy", released)
def mask_of_raw_gradients(mechanism, sums, state, params):
    """The coordinates that are released are the largest of the sum before the noise (top-k sparsification)."""
    updates, after = mechanism.release(sums, state, params)
    large = jax.tree.map(lambda s: jnp.abs(s) > 0.1, high(sums[0]))
    return jax.tree.map(lambda u, keep: jnp.where(keep, u, 0), updates, large), after


@breaks("secrecy")
def importance_of_raw_gradients(key):
    """Importance scores of gradients before the noise choose the mask of later steps (AdaDPIGU as published)."""
    mechanism = dpx.in_coordinates(sound(key), dpx.coordinates.importance_mask(keep=0.5, warmup=3))

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        score = jax.tree.map(lambda s, g: s + jnp.abs(g), state.coordinates[0].score, high(sums[0]))
        return updates, after._replace(coordinates=(after.coordinates[0]._replace(score=score),))

    return mechanism.replace(release=release)


@breaks("secrecy", released)
def selective_release(mechanism, sums, state, params):
    """An update is kept only if the raw gradient agrees, and the choice is not billed (selective release)."""
    updates, after = mechanism.release(sums, state, params)
    agree = sum(jax.tree.leaves(jax.tree.map(lambda s, u: jnp.sum(s * u), high(sums[0]), updates)))
    return jax.tree.map(lambda u: jnp.where(agree > 0, u, 0), updates), after


@breaks("secrecy")
def clip_norm_of_raw_norms(key):
    """The clip norm follows the norms of the batch without noise (adaptive clipping by the median)."""
    settings = {"initial_clip_norm": 0.4, "indicator_noise": 0.8, "noise_multiplier": NOISE_MULTIPLIER}
    mechanism = dpx.mechanisms.adaptive_clipping(**settings, sampling=SAMPLING, key=key)

    def release(sums, state, params):
        updates, after = mechanism.release(sums, state, params)
        moved = state.clip_norm * jnp.exp(-0.2 * high(sums[0])["indicator"] / SAMPLING.divisor)
        return updates, after._replace(clip_norm=moved)

    return mechanism.replace(release=release)


@breaks("secrecy")
def feedback_at_the_papers_noise(key):
    """The error of the clip is fed back, and every release is billed as if it stood alone (DiceSGD's theorem)."""
    norms = {"clip_norm": CLIP_NORM, "feedback_norm": CLIP_NORM, "outer_clip_norm": float("inf")}
    mechanism = dpx.methods.dice_sgd(**norms, noise_multiplier=NOISE_MULTIPLIER, sampling=SAMPLING, key=key)
    return mechanism.replace(event=sound(key).event)


@breaks("branches", released)
def branches_on_raw_gradients(mechanism, sums, state, params):
    """A conditional on raw gradients, whose time and results tell (`optax.apply_if_finite` around a mechanism)."""
    updates, after = mechanism.release(sums, state, params)
    total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(high(sums[0])))
    return jax.lax.cond(total > 0, lambda u: u, lambda u: jax.tree.map(jnp.zeros_like, u), updates), after


# Noise that is missing, or there twice, at some parameters.


@breaks("noise", noise_of_params)
def no_noise_in_16_bits(key, total, step, params):
    """Leaves of bfloat16 get no noise (a loop over `dtype == float32`)."""
    return jax.tree.map(lambda n, p: n * np.float32(p.dtype != jnp.bfloat16), standard(key, total, step), params)


@breaks("noise", noise)
def no_noise_on_convolutions(key, total, step):
    """Leaves of more than two axes get no noise (a loop over dense layers)."""
    return jax.tree.map(lambda n: n * np.float32(n.ndim < 3), normals(key, step, total))


@breaks("noise", noise)
def noise_by_shape(key, total, step):
    """The key of a leaf is made from its shape, so that equal layers share noise (a cache of generators)."""

    def of(leaf):
        own = jax.random.fold_in(quick(key, "noise", step), hash(leaf.shape) % 2**31)
        return jax.random.normal(own, leaf.shape)

    return jax.tree.map(of, total)


@breaks("noise", noise_of_params)
def noise_scaled_by_params(key, total, step, params):
    """The noise is relative to the parameters, which one does not see where all of them are 1."""
    return jax.tree.map(lambda n, p: n * jnp.abs(p).astype(jnp.float32), standard(key, total, step), params)


@breaks("noise", noise_of_params)
def noise_keyed_by_params(key, total, step, params):
    """The key depends on the parameters too: the noise of a step can be made again at other ones."""
    number = sum(jnp.sum(p).astype(jnp.int32) for p in jax.tree.leaves(params)).astype(jnp.uint32)
    return normals(jax.random.fold_in(key, number), step, total)


@breaks("noise", noise)
def noise_in_tiles(key, total, step):
    """Large layers get the same 1,024 numbers again and again (a pool of noise that was drawn before)."""
    pool = normals(key, step, jnp.zeros(1024))
    numbers = iter(itertools.accumulate([0, *(leaf.size for leaf in jax.tree.leaves(total))]))
    return jax.tree.map(lambda s: pool[(np.arange(s.size) + next(numbers)) % 1024].reshape(s.shape), total)


@breaks("noise", noise)
def noise_of_256_sizes(key, total, step):
    """Noise of 8 bits (quantized communication), at the right standard deviation."""
    uniform = jax.tree.map(lambda n: jax.scipy.stats.norm.cdf(n), normals(key, step, total))
    return jax.tree.map(lambda u: jax.scipy.stats.norm.ppf((jnp.floor(u * 512) + 0.5) / 512), uniform)


@breaks("noise", noise)
def noise_by_number_of_parameters(key, total, step):
    """The noise is divided by the root of the number of parameters above 100, as if that were its norm."""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(total))
    return jax.tree.map(lambda n: n / max(1.0, numbers / 100) ** 0.5, normals(key, step, total))


# Noise that repeats without a correlation.


@breaks("noise", noise)
def one_noise_with_other_signs(key, total, step):
    """Two leaves share the sizes of their noise and have signs of their own (antithetic or reflected draws)."""

    def of(number, leaf):
        size = jnp.abs(jax.random.normal(quick(key, "noise", step), leaf.shape))
        own = jax.random.fold_in(quick(key, "signs", step), number)
        return size * jax.random.rademacher(own, leaf.shape, jnp.float32)

    leaves, structure = jax.tree.flatten(total)
    return structure.unflatten([of(number, leaf) for number, leaf in enumerate(leaves)])


@breaks("noise", noise)
def other_signs_at_every_step(key, total, step):
    """The sizes of the noise are the same at all steps, and the signs are drawn anew."""
    sign = optax.tree.random_like(quick(key, "signs", step), total, jax.random.rademacher, jnp.float32)
    return jax.tree.map(lambda n, s: jnp.abs(n) * s, normals(key, 0, total), sign)


@breaks("noise", noise)
def sign_of_two_others(key, total, step):
    """Every third number has the sign of the product of the two before it: no two of them are dependent."""

    def of(n):
        flat = n.reshape(-1)
        product = jnp.sign(jnp.roll(flat, 1) * jnp.roll(flat, 2))
        third = np.arange(flat.size) % 3 == 2
        return jnp.where(third, jnp.abs(flat) * product, flat).reshape(n.shape)

    return jax.tree.map(of, normals(key, step, total))


# Faults at some steps.

SHARES = {  # by name: the share of the noise that is left at a step
    # a warm-up that is off by two
    "no_noise_at_some_steps": lambda step: jnp.where((step == 2) | (step == 3), 0.0, 1.0),
    # a schedule of the noise ends, and the bill's does not
    "no_noise_from_step_50": lambda step: jnp.where(step >= 50, 0.0, 1.0),
    # the noise falls after a warm-up, and the bill does not know of it
    "half_the_noise_from_step_1000": lambda step: jnp.where(step >= 1000, 0.5, 1.0),
}
REPEATED = {  # by name: the step whose noise a step has
    # a ring buffer of keys; a counter of few bits
    "noise_repeats_after_7": lambda step: step % 7,
    "noise_repeats_after_1000": lambda step: step % 1000,
    # a counter in the dtype of the model, which is rounded from 256 on
    "step_in_bfloat16": lambda step: step.astype(jnp.bfloat16).astype(jnp.int32),
    # rounded from 2^24 on
    "step_in_float32": lambda step: step.astype(jnp.float32).astype(jnp.int32),
}


def of_share(share: Callable) -> Make:
    return noise(lambda key, total, step: jax.tree.map(lambda n: n * share(step), standard(key, total, step)))


def of_step(of: Callable) -> Make:
    return noise(lambda key, total, step: normals(key, of(step), total))


ZOO += [Broken(name, of_share(share), "noise") for name, share in SHARES.items()]
ZOO += [Broken(name, of_step(of), "noise") for name, of in REPEATED.items()]


@breaks("noise")
def dpx_noise_repeats(key):
    """Noise of dpx at the step modulo 1,000, behind random coordinates."""
    repeating = with_noise(sound(key), lambda total, step: standard(key, total, step % 1000))
    return dpx.in_coordinates(repeating, dpx.coordinates.random_projection(rank=12, kind="gaussian", key=key))


@breaks("noise", noise)
def key_of_eight_bits(key, total, step):
    """The noise has one of 256 seeds (`seed % 256`)."""
    seed = keys.key_words(keys.stream(key, "noise"))[0] % 256
    return normals(jax.random.fold_in(jax.random.key(0), seed), step, total)


@breaks("noise")
def signs_share_the_key_of_the_noise(key):
    """Random signs before the clip, and again after the release, with the signs of the noise: |noise| comes back."""

    def flip(tree, step):
        return jax.tree.map(lambda leaf, n: leaf * jnp.sign(n), tree, standard(key, tree, step))

    coordinates = dpx.coordinates.Coordinates(
        init=lambda params: jnp.zeros((), jnp.int32),
        encode=flip,
        decode=lambda released, step, like: (flip(released, step), step + 1),
        name="flip random signs",
        undo="flip the signs back",
    )
    return dpx.in_coordinates(sound(key), coordinates)


# The bits.


@breaks("bits", noise)
def noise_in_floating_point(key, total, step):
    """A float sum plus a float of noise, whose bits show the sum (Mironov 2012; every library until 2026)."""
    return standard(key, total, step)


@breaks("bits")
def noise_of_24_bits_on_a_grid(key):
    """Rounded to a public grid, but the noise has 2^23 values, so a sum makes some cells impossible."""
    gamma = 2.0**-20

    def release(sums, state, params):
        drawn = normals(keys.stream(key, "noise"), state.step, high(sums[0]))
        updates = jax.tree.map(lambda s, n: jnp.round((s + DEVIATION * n) / gamma) * gamma / 8, high(sums[0]), drawn)
        return optax.tree.cast_like(updates, params), state.after_release(NOISE_MULTIPLIER)

    return sound(key).replace(release=release)


@breaks("bits", released)
def grid_of_the_data(mechanism, sums, state, params):
    """The deviation, and so the grid, depends a little on the sum (a scale that is found in the batch)."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(high(sums[0]))]))
    deviation = DEVIATION * (1 + 1e-6 * jnp.tanh(largest))
    noisy = keys.release(keys.stream(mechanism.key, "noise"), state.step, sums[0], deviation)
    updates = jax.tree.map(lambda r: r / mechanism.sampling.divisor, noisy)
    return optax.tree.cast_like(updates, params), state.after_release(NOISE_MULTIPLIER)


@breaks("bits", released)
def raw_bits_beside_the_release(mechanism, sums, state, params):
    """What is released is on the grid, and then a raw sum is added that is too small to matter (error feedback)."""
    updates, after = mechanism.release(sums, state, params)
    return jax.tree.map(lambda u, s: u + (1e-9 * s).astype(u.dtype), updates, high(sums[0])), after


@breaks("bits", released)
def sum_of_one_number(mechanism, sums, state, params):
    """The two float32 numbers of a sum become one before the noise (a helper that flattens, or a cast to float32)."""
    total = as_pair(sums[0])
    one = total.high if total.low is None else jax.tree.map(jnp.add, total.high, total.low)
    return mechanism.release((one,), state, params)


@breaks("bits", released)
def sum_of_one_number_in_a_layer(mechanism, sums, state, params):
    """The same for the numbers of one layer only."""
    total = as_pair(sums[0])
    if total.low is not None:
        total = total._replace(low=total.low | {"bias": jnp.zeros_like(total.low["bias"])})
    return mechanism.release((total,), state, params)


def added_in_a_chain(mechanism, grads, state, params, included):
    encoded, norms, factors = jax.vmap(mechanism.contribute, (0, None))(grads, state)
    counts = included & (norms < 1e18)
    total = jax.tree.map(lambda z: jnp.tensordot(jnp.where(counts, factors[0], 0), kept(counts, z), 1), encoded)
    return mechanism.check_and_release((total,), state, params, jnp.sum(included))


@breaks("bits", updated)
def order_dependent_sum(mechanism, grads, state, params, included):
    """One product adds all rows, in a chain whose rounding depends on each (the clipped sum of every library)."""
    return added_in_a_chain(mechanism, grads, state, params, included)


@breaks("bits", updated)
def order_dependent_microbatches(mechanism, grads, state, params, included):
    """The sums of microbatches are added to one float32 number (gradient accumulation, in every library)."""

    def parts(x):
        filled = jnp.pad(x, [(0, -len(x) % 16)] + [(0, 0)] * (x.ndim - 1))
        return filled.reshape(-1, 16, *x.shape[1:])

    def add(total, rows):
        return jax.tree.map(jnp.add, total, sum_contributions(mechanism, rows[0], state, rows[1])[0][0].high), None

    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)
    total, _ = jax.lax.scan(add, zeros, (jax.tree.map(parts, grads), parts(included)))
    return mechanism.check_and_release((total,), state, params, jnp.sum(included))

"""One training step in JAX: without privacy, private without a library, and private with each JAX library."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpx
from benchmarks.models import PROBLEMS, Problem

LIBRARIES = ("jax", "jaxlib", "optax", "flax", "jax-privacy")
FLOOR = "JAX, not private"
PARTS = (8, 32)  # of the batch, one after another: without privacy, it may be faster than the whole batch
MICROBATCH = 16
# The rows that hold a gradient for every example of the batch.
STACKED = ("JAX, by hand", "dpx vmap", "optax.contrib", "jax_privacy")
CLIP_NORM = NOISE_MULTIPLIER = 1.0


def device() -> str:
    return jax.devices()[0].device_kind


def rows(model: str, size: int) -> dict[str, Callable]:
    """name -> (() -> run): the first compiles, `run()` makes one step and waits for it."""
    problem, key = PROBLEMS[model](), jax.random.key(2)
    batch = problem.batch(size)
    mechanism = dpx.dp_sgd(
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        sampling=dpx.PoissonSampling(examples=50_000, batch_size=size),
        key=key,
    )
    silent = mechanism.replace(
        release=lambda sums, state, params: (jax.tree.map(lambda s: s / size, sums[0].high), state)
    )
    state = mechanism.init(problem.params)

    def non_private(params, batch):
        return jax.grad(lambda p: jax.vmap(problem.loss, (None, 0))(p, batch).mean())(params)

    def in_parts(parts, params, batch):
        pieces = jax.tree.map(lambda x: x.reshape(parts, size // parts, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(sums, piece):
            return jax.tree.map(jnp.add, sums, non_private(params, piece)), None

        # Convolutions in a loop are slow on a CPU.
        sums, _ = jax.lax.scan(add, zeros, pieces, unroll=parts if "cnn" in model or "resnet" in model else 1)
        return jax.tree.map(lambda s: s / parts, sums)

    def noise(params, key):
        return optax.tree.random_like(key, params, jax.random.normal)

    def by_hand(params, batch, key):
        grads = jax.vmap(jax.grad(problem.loss), (None, 0))(params, batch)
        weights = jnp.minimum(1, CLIP_NORM / jax.vmap(optax.tree.norm)(grads))
        sums = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), grads)
        return jax.tree.map(lambda s, n: (s + NOISE_MULTIPLIER * CLIP_NORM * n) / size, sums, noise(sums, key))

    def with_dpx(mechanism, clipping):
        step = dpx.private_updates(problem.loss, mechanism, norms=clipping)
        everyone = dpx.Batch(batch, None)
        return compiled(lambda params, batch, state: step(params, batch, state)[:2], problem.params, everyone, state)

    aggregate = optax.contrib.differentially_private_aggregate(CLIP_NORM, NOISE_MULTIPLIER, key)

    def with_optax(params, batch, state):
        grads = jax.vmap(jax.grad(problem.loss), (None, 0))(params, batch)
        return aggregate.update(grads, state, params)

    found = {FLOOR: compiled(non_private, problem.params, batch)}
    for parts in PARTS:
        if size % parts == 0:
            found[f"{FLOOR}, {parts} parts"] = compiled(functools.partial(in_parts, parts), problem.params, batch)
    found |= {
        "noise alone": compiled(noise, problem.params, key),
        "JAX, by hand": compiled(by_hand, problem.params, batch, key),
        "dpx auto, without noise": with_dpx(silent, "auto"),
        "dpx auto": with_dpx(mechanism, "auto"),
        "dpx ghost": with_dpx(mechanism, "ghost"),
        "dpx vmap": with_dpx(mechanism, "vmap"),
        "optax.contrib": compiled(with_optax, problem.params, batch, aggregate.init(problem.params)),
    }
    if importlib.util.find_spec("jax_privacy"):
        at_once = min(MICROBATCH, size)
        found["jax_privacy"] = with_jax_privacy(problem, batch, key, None)
        found[f"jax_privacy, {at_once} at once"] = with_jax_privacy(problem, batch, key, at_once)
    return found


def with_jax_privacy(problem: Problem, batch, key, microbatch_size) -> Callable:
    import jax_privacy

    clipped_grad = jax_privacy.clipped_grad(
        problem.loss,
        l2_clip_norm=CLIP_NORM,
        normalize_by=len(jax.tree.leaves(batch)[0]),
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER * clipped_grad.sensitivity(), prng_key=key
    )

    def step(params, batch, state):
        return privatizer.update(clipped_grad(params, batch), state)

    return compiled(step, problem.params, batch, privatizer.init(problem.params))


def compiled(step: Callable, *inputs: Any) -> Callable:
    def make():
        program = jax.jit(step).lower(*inputs).compile()
        return lambda: jax.block_until_ready(program(*inputs))

    return make

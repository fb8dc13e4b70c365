"""Thirty models of ten code bases: what ghost norms follow, and what a step costs.

    python -m benchmarks.zoo
    python -m benchmarks.zoo --times --core 1  # CPU time on this core; without it, wall time of all

`JAX` is a step without privacy: the mean gradient. `vmap` is the private step with `norms="vmap"`, which clips the
gradient of every example; `dpx` is the one that `private_updates` chooses. Both return the updates and the next state,
and neither losses nor norms, as JAX's step returns none. Three steps show where the time goes: `noise` is JAX's step
with the noise of dpx and no clipping, `by hand` clips by `jax.vmap` without noise, and adds without protection against
rounding, and `bare` has the ghost norms of dpx, with neither noise nor protection. `clipping` is the faster of the last
two, and `all parts` is JAX's step, and what `noise` and `by hand` take more. Operations are those on floats
that XLA counts in a program before it is optimized, with the noise; a loop counts one turn. The steps take turns, the
least of their times counts, and memory is what XLA allocates beside arguments and results. Without `--times`, the page
has only what ghost norms follow. Writes benchmarks/results/zoo.md; a package that is not installed is left out.
"""

import argparse
import contextlib
import functools
import importlib.util
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpx
from benchmarks import accelerators, report
from benchmarks.timing import CLOCKS, Timer, interleaved, pin
from benchmarks.zoo_models import ANIMALS
from dpx.gradients.ghost import norms, weighted_sums
from dpx.gradients.one_example import rows_with_keys
from dpx.sums import rounding
from dpx.sums.rounding import as_pair
from dpx.xla.matrix_units import MatrixUnit

ROUNDS = 8
NOISE = 1e-5  # so small that the grid of the noise hides no error of a sum
PACKAGES = "jax flax dm-haiku equinox keras transformers google-tunix numpyro distrax jraph e3nn-jax".split()


def optimizer(examples: int, clip_norm: float) -> dpx.Mechanism:
    sampling = dpx.FullBatch(examples=examples)
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=NOISE, sampling=sampling, key=dpx.secret_key(2**40 + 1))


def clipped_mean(loss, params, rows, clip_norm: float):
    """What a step without noise releases: by `jax.vmap`, in NumPy, and independent of dpx. Also the norms, (B,)."""
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, rows)
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), gradients))
    norms = np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))
    factors = np.minimum(1, clip_norm / norms) / len(norms)
    return jax.tree.unflatten(treedef, [np.tensordot(factors, leaf, 1) for leaf in leaves]), norms


def distance(found, expected) -> float:
    """Between two pytrees, as a share of the norm of `expected`."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    return math.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs))


@contextlib.contextmanager
def without_proof() -> Iterator[None]:
    """What is traced inside has no barriers, no blocks, and no bounds on rounding and range."""

    def outer_norm(a, b, scale=None):
        if scale is None:
            return jnp.sqrt(jnp.sum(jnp.sum(a * a, (1, 2)) * jnp.sum(b * b, (1, 2))))
        return jnp.sqrt(jnp.einsum("ki,kio,ko", a[:, 0] ** 2, scale**2, b[:, 0] ** 2))

    def gram_norm(a, b):
        of_a, of_b = (jnp.einsum("ksi,kti->kst", x, x) for x in (a, b))
        return jnp.sqrt(jnp.sum(of_a * of_b))

    plain: dict[Any, dict[str, Any]] = {
        jax.lax: {"optimization_barrier": jax.lax.optimization_barrier},
        rounding: {"may_add_in_float32": rounding.may_add_in_float32},
        MatrixUnit: {"round_operand": MatrixUnit.round_operand, "truncate_operand": MatrixUnit.truncate_operand},
        weighted_sums: {
            "sum_gradients_one_by_one": weighted_sums.sum_gradients_one_by_one,
            "scaled_rows": lambda f, x: jax.vmap(jnp.multiply)(f, x),
        },
        norms: {
            "outer_norm": outer_norm,
            "gram_norm": gram_norm,
            "frobenius": lambda x: jnp.sqrt(jnp.sum(x * x)),
        },
    }
    cached = rounding.most_float32_rows, rounding.most_float32_turns
    with contextlib.ExitStack() as patches:
        for holder, functions in plain.items():
            patches.enter_context(mock.patch.multiple(holder, **functions))
        accelerators.leave_out_the_proof()
        for function in cached:
            function.cache_clear()
        yield
    for function in cached:
        function.cache_clear()


def followed(loss, params, rows) -> dict[str, Any]:
    """The shares of the parameters that ghost norms follow, and why they do not follow the others."""
    made = optimizer(len(jax.tree.leaves(rows)[0]), 1.0)
    table = dpx.explain_norms(loss, made, params, dpx.Batch(rows, None), norms="ghost")
    leaves = jax.tree.leaves(params)
    # A reason says why it cannot be followed; without one, the gradient of an example is the cheapest way.
    rows_of = zip(table.rows, leaves, strict=True)
    lost = [(leaf, why) for (_, way, why), leaf in rows_of if way == "per-example gradients" and why]
    matrices = sum(leaf.size for leaf in leaves if leaf.ndim > 1)
    of_matrices = [leaf.size for leaf, _ in lost if leaf.ndim > 1]
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "followed": 1 - sum(leaf.size for leaf, _ in lost) / sum(leaf.size for leaf in leaves),
        "matrices": 1 - sum(of_matrices) / matrices,
        "because": sorted({why for leaf, why in lost if leaf.ndim > 1}),
    }


def measured(loss, params, rows, clock) -> dict[str, Any]:
    """Floating-point operations, seconds and bytes of a step, and the error of a release without its noise. Half of the
    rows are clipped."""
    count = len(jax.tree.leaves(rows)[0])
    clip_norm = float(np.median(clipped_mean(loss, params, rows, 1.0)[1]))
    made, included = optimizer(count, clip_norm), np.ones(count, bool)
    state, batch = made.init(params), dpx.Batch(rows, included)

    def plain(params, batch, state, reduce=jnp.mean):
        return jax.grad(lambda params: reduce(jax.vmap(loss, (None, 0))(params, batch.examples)))(params)

    def noisy(params, batch, state):
        return made.check_and_release((as_pair(plain(params, batch, state, jnp.sum)),), state, params, count)[0]

    def by_hand(params, batch, state):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch.examples)
        factors = jnp.minimum(1, clip_norm / jax.vmap(optax.global_norm)(grads)) / count
        return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), grads)

    chosen, by_vmap = dpx.private_updates(loss, made), dpx.private_updates(loss, made, norms="vmap")

    def bare(params, batch, state):
        with without_proof():
            found, _ = chosen.row_sum(params, state, rows_with_keys(made, state, rows, with_key=False), batch.included)
        return jax.tree.map(lambda leaf: leaf / count, found[0].high)

    steps: dict[str, Any] = {"JAX": plain, "noise": noisy, "by hand": by_hand}
    steps |= {"vmap": lambda *given: by_vmap(*given)[:2], "dpx": lambda *given: chosen(*given)[:2], "bare": bare}
    lowered: dict[str, Any] = {each: jax.jit(step).lower(params, batch, state) for each, step in steps.items()}
    programs: dict[str, Any] = {each: one.compile() for each, one in lowered.items()}
    run = {each: functools.partial(_run, program, params, batch, state) for each, program in programs.items()}
    timers = {each: Timer(one, clock) for each, one in run.items()}
    # A step of an empty batch releases the noise alone, which is that of the same key and step.
    batches = (dpx.Batch(rows, each) for each in (included, ~included))
    whole, noise = (programs["dpx"](params, each, state)[0] for each in batches)
    released = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), whole, noise)
    expected = clipped_mean(loss, params, rows, clip_norm)[0]
    assert distance(programs["bare"](params, batch, state), expected) < 1e-3
    return {
        "operations": {each: one.cost_analysis()["flops"] for each, one in lowered.items()},
        "memory": {each: one.memory_analysis().temp_size_in_bytes for each, one in programs.items()},
        "time": {each: min(seconds) for each, seconds in interleaved(timers, ROUNDS).items()},
        "error": distance(released, expected),
    }


def _run(program, *arguments):
    return jax.block_until_ready(program(*arguments))


def of_two(found: dict[str, Any], kind: str, other: str) -> float:
    return found[kind]["dpx"] / found[kind][other]


def parts(time: dict[str, float]) -> dict[str, float]:
    """What the parts of a private step take, and dpx against all of them."""
    of_all = time["noise"] + time["by hand"] - time["JAX"]
    time = time | {"clipping": min(time["by hand"], time["bare"])}
    against_jax = {f"{each} / JAX": time[each] / time["JAX"] for each in ("noise", "by hand", "bare", "clipping")}
    return against_jax | {"all parts / JAX": of_all / time["JAX"], "dpx / all parts": time["dpx"] / of_all}


RATIOS = [("operations", "JAX"), ("operations", "vmap"), ("time", "JAX"), ("time", "vmap"), ("memory", "vmap")]


def page(found: dict[str, dict[str, Any]], missing: list[str], batch: int, core: int) -> str:
    kinds = [each for each in RATIOS if each[0] in next(iter(found.values()))]
    columns = ["model", "parameters", "followed", "of matrices", *(f"{kind} / {other}" for kind, other in kinds)]
    of_parts = {name: parts(each["time"]) if kinds else {} for name, each in found.items()}
    columns += [*next(iter(of_parts.values())), *(["error of sums"] if kinds else []), "matrices that are not followed"]
    rows = [
        [name, f"{each['parameters']:,}", f"{each['followed']:.0%}", f"{each['matrices']:.0%}"]
        + [f"{of_two(each, *kind):.2f}" for kind in kinds]
        + [f"{ratio:.2f}" for ratio in of_parts[name].values()]
        + ([f"{each['error']:.0e}"] if kinds else [])
        + [", ".join(each["because"])]
        for name, each in found.items()
    ]
    most, of_matrices = (sum(each[name] >= 0.95 for each in found.values()) for name in ("followed", "matrices"))
    said = [
        f"Of {len(found)} models, {most} have 95% of their parameters followed, and {of_matrices} have 95% of those "
        "in arrays of two axes or more. The rest are biases and scales, whose gradients of examples are small."
    ]
    for kind, other in kinds:
        ratios = [of_two(each, kind, other) for each in found.values()]
        said.append(f"{kind} / {other}: median {np.median(ratios):.2f}, largest {max(ratios):.2f}.")
    for each in next(iter(of_parts.values())):
        ratios = [of_model[each] for of_model in of_parts.values()]
        said.append(f"{each}: median {np.median(ratios):.2f}, least {min(ratios):.2f}, largest {max(ratios):.2f}.")
    said += [f"Not installed: {', '.join(missing)}."] if missing else []
    heading = report.heading("benchmarks.zoo", PACKAGES, batch=batch, **report.load(core))
    return report.write("zoo", heading, {"Models": report.grid(columns, rows)}, notes=said)


def made_of(name: str, count: int):
    """The loss, the parameters and `count` rows of a model."""
    loss, params, rows = ANIMALS[name].make()
    return loss, jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, rows(count))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--times", action="store_true", help="also measure operations, time, memory and the error of sums"
    )
    parser.add_argument("--core", type=int, default=-1)
    options = parser.parse_args()
    pin(options.core)
    clock = CLOCKS["wall" if options.core < 0 else "cpu"]
    there = {name: all(map(importlib.util.find_spec, animal.needs)) for name, animal in ANIMALS.items()}
    found = {}
    for name in (name for name in ANIMALS if there[name]):
        model = made_of(name, options.batch)
        found[name] = followed(*model) | (measured(*model, clock) if options.times else {})
        print(name, found[name], flush=True)
    print(page(found, [name for name in ANIMALS if not there[name]], options.batch, options.core))


if __name__ == "__main__":
    main()

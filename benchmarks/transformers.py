"""The time and the memory of a private step of transformers at their usual sizes.

    python -m benchmarks.transformers

The models are those of Hugging Face's transformers 4, with random weights, if it is installed; else ours of the same
widths (GPT-2 then without tied weights). All rows of a model take turns in one process, on one CPU core. The fair floor
is JAX's fastest step without privacy: of the whole batch, or of 2, 4 or 8 parts of it, one after another. The private
floor adds one normal for each parameter, and the matrix products of the norms, each measured alone. Noise alone writes
more memory than in a step, so it is no strict bound. torch and Opacus, if they are installed, have models of the same
widths, in benchmarks/torch_models.py, GPT-2 without tied weights. Writes benchmarks/results/transformers.md.
"""

import argparse
import functools
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import report, timing

SEQUENCE = {"gpt2_4_layers": 64, "gpt2_small": 64, "bert_base": 128}
BATCH = {"gpt2_4_layers": 8, "gpt2_small": 8, "bert_base": 8, "vit_small": 16}
PARTS = (2, 4, 8)
NOISE, PRODUCTS = "noise of dpx alone", "products of the norms alone"
BY_HAND = "by hand, no noise"
PLAIN, PLAIN_TORCH, OPACUS = "JAX, not private", "torch, not private", "Opacus ghost"
OURS = "transformers is not installed: models of the same widths, GPT-2 without tied weights."
LARGEST_STACK = 2**32  # bytes; rows that hold more of per-example gradients are compiled, but not run


class Problem(NamedTuple):
    """params: a pytree; loss: (params, example) -> scalar; batch: a pytree with the examples on axis 0."""

    params: Any
    loss: Callable
    batch: Any


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def build(name: str) -> Problem:
    return (hugging_face if installed() else ours)(name)


def hugging_face(name: str) -> Problem:
    """The model of the library, without dropout."""
    import jax
    import numpy as np
    import optax

    hf: Any = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    rng, size = np.random.default_rng(0), BATCH[name]
    labels = (np.arange(size) % 2).astype(np.int32)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    if name.startswith("gpt2"):
        small = {"vocab_size": 5000, "n_embd": 256, "n_layer": 4, "n_head": 4}
        config = hf.GPT2Config(**(small if name == "gpt2_4_layers" else {}))
        model: Any = hf.FlaxGPT2LMHeadModel(config, _do_init=False, input_shape=(1, SEQUENCE[name]))
    elif name == "bert_base":
        config = hf.BertConfig()
        model = hf.FlaxBertForSequenceClassification(config, _do_init=False, input_shape=(1, SEQUENCE[name]))
    else:
        config = hf.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
        model = hf.FlaxViTForImageClassification(config, _do_init=False)

    def next_token_loss(params, tokens):
        logits = model(tokens[None], params=params).logits[0]
        return cross_entropy(logits[:-1], tokens[1:]).mean()

    def class_loss(params, example):
        return cross_entropy(model(example[0][None], params=params).logits[0], example[1])

    params = jax.jit(lambda: model.init_weights(jax.random.key(0), model.input_shape))()
    if name == "vit_small":
        return Problem(params, class_loss, (rng.normal(size=(size, 3, 224, 224)).astype(np.float32), labels))
    tokens = rng.integers(0, config.vocab_size, (size, SEQUENCE[name])).astype(np.int32)
    return Problem(params, class_loss, (tokens, labels)) if "bert" in name else Problem(params, next_token_loss, tokens)


def ours(name: str) -> Problem:
    """A model of the same widths."""
    import jax
    import numpy as np
    import optax

    from benchmarks import models

    rng, size = np.random.default_rng(0), BATCH[name]
    tokens = rng.integers(0, 5000, (size, SEQUENCE.get(name, 1) + 1)).astype(np.int32)
    made = {
        "gpt2_4_layers": lambda: models.LanguageModel(5000, 4, 256, 4),
        "gpt2_small": models.LanguageModel,
        "bert_base": lambda: models.Transformer(30_522, 12, 768, 12, SEQUENCE["bert_base"]),
        "vit_small": models.VisionTransformer,
    }
    module: Any = made[name]()
    inputs = rng.normal(size=(size, 224, 224, 3)).astype(np.float32) if name == "vit_small" else tokens[:, :-1]
    labels = tokens[:, 1:] if name.startswith("gpt2") else (np.arange(size) % 2).astype(np.int32)
    params = jax.jit(lambda: module.init(jax.random.key(0), inputs[0])["params"])()

    def loss(params, example):
        logits = module.apply({"params": params}, example[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1]).mean()

    return Problem(params, loss, (inputs, labels))


def steps(problem: Problem, size: int) -> dict[str, tuple[Callable, tuple]]:
    """name -> (step, its inputs)."""
    import jax
    import jax.numpy as jnp
    import optax

    import dpx
    from dpx import keys

    params, loss, batch = problem
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=size)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(2))
    state = mechanism.init(params)

    def not_private(params, batch):
        return jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, batch).mean())(params)

    def in_parts(parts, params, batch):
        chunks = jax.tree.map(lambda x: x.reshape(parts, size // parts, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(
            lambda sums, chunk: (jax.tree.map(jnp.add, sums, not_private(params, chunk)), None), zeros, chunks
        )
        return jax.tree.map(lambda s: s / parts, sums)

    def by_hand(params, batch):
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        factors = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads))
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / size, grads)

    def with_dpx(clipping):
        step = dpx.private_updates(loss, mechanism, norms=clipping)
        return lambda params, batch, state: step(params, dpx.Batch(batch, None), state)[:2]

    def noise(params):
        return optax.tree.random_like(jax.random.key(0), params, jax.random.normal)

    def noise_of_dpx(params):
        return keys.release(jax.random.key(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params), 1.0)

    # A row of seconds is not repeated before it is timed, so it pays for the memory that the row before gave back. The
    # rows with all gradients in memory come last, and a short row first.
    found: dict[str, tuple[Callable, tuple]] = {
        "noise alone": (noise, (params,)),
        PLAIN: (not_private, (params, batch)),
    }
    for parts in PARTS:
        found[f"{PLAIN}, {parts} parts"] = functools.partial(in_parts, parts), (params, batch)
    found[NOISE] = noise_of_dpx, (params,)
    found[PRODUCTS] = norm_products(problem, mechanism, state, size)
    found |= {f"dpx {clipping}": (with_dpx(clipping), (params, batch, state)) for clipping in ("auto", "ghost")}
    if importlib.util.find_spec("jax_privacy"):
        found["jax_privacy"] = with_jax_privacy(problem, size)
    found |= {BY_HAND: (by_hand, (params, batch)), "dpx vmap": (with_dpx("vmap"), (params, batch, state))}
    return found


def norm_products(problem: Problem, mechanism, state, size: int) -> tuple[Callable, tuple]:
    """The Gram matrices of every norm that dpx computes from them, of random matrices of the same shapes; nothing else.

    Per-example gradients count nothing, because their products stand in place of those of a step without privacy.
    """
    import jax
    import jax.numpy as jnp

    from dpx.gradients import ghost
    from dpx.gradients.ghost import algorithms

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), problem.batch)
    traced = ghost.trace_loss(lambda params, example: (problem.loss(params, example), ()), problem.params, one)
    plan: Any = ghost.make_ghost_plan(traced, mechanism, problem.params, state, force=False)
    matrices = []
    for choice in (choice for choices in plan.choices for choice in choices):
        for site in choice.uses.sites if choice.algorithm is not algorithms.PRODUCT else ():
            groups, positions, *widths = site.sizes
            for width in widths[site.lookup :] if positions > 1 else ():
                matrices.append(jax.random.normal(jax.random.key(len(matrices)), (size, groups, positions, width)))
    return lambda matrices: [jnp.einsum("bksi,bkti->bkst", x, x) for x in matrices], (matrices,)


def with_jax_privacy(problem: Problem, size: int) -> tuple[Callable, tuple]:
    import jax
    import jax_privacy

    clipped = jax_privacy.clipped_grad(
        problem.loss, l2_clip_norm=1.0, normalize_by=size, keep_batch_dim=False, microbatch_size=1
    )
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=clipped.sensitivity(), prng_key=jax.random.key(2)
    )
    return (
        lambda params, batch, state: privatizer.update(clipped(params, batch), state),
        (problem.params, problem.batch, privatizer.init(problem.params)),
    )


def torch_steps(name: str) -> dict[str, Callable]:
    """name -> (() -> run) of torch and Opacus: nothing, if one of them is not installed."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("opacus")):
        return {}
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    from benchmarks import torch_models, torch_rows

    def language_model(vocabulary, layers, features, heads):
        embedding = nn.Sequential(nn.Embedding(vocabulary, features), torch_models.Positions(SEQUENCE[name], features))
        decoder = torch_models.encoder(layers, features, heads, causal=True)
        return nn.Sequential(embedding, *decoder, nn.Linear(features, vocabulary, bias=False))

    def bert():
        embedding = nn.Sequential(nn.Embedding(30_522, 768), torch_models.Positions(SEQUENCE[name], 768))
        return nn.Sequential(embedding, *torch_models.encoder(12, 768, 12), torch_models.Mean(), nn.Linear(768, 2))

    module = {
        "gpt2_4_layers": lambda: language_model(5000, 4, 256, 4),
        "gpt2_small": lambda: language_model(50_257, 12, 768, 12),
        "bert_base": bert,
        "vit_small": torch_models.vit_small,
    }[name]()
    rng, size = np.random.default_rng(0), BATCH[name]
    if name == "vit_small":
        inputs = torch.from_numpy(rng.standard_normal((size, 3, 224, 224), np.float32))
    else:
        inputs = torch.from_numpy(rng.integers(0, 5000, (size, SEQUENCE[name])))
    labels = inputs.roll(-1, 1) if name.startswith("gpt2") else torch.arange(size) % 2
    return {
        PLAIN_TORCH: lambda: torch_rows.running(module, torch_models.Loss(), (inputs, labels)),
        OPACUS: torch_rows.with_opacus(module, (inputs, labels), "ghost"),
    }


def measured(model: str, problem: Problem, size: int, options, clock: Callable) -> dict[str, dict[str, float]]:
    """name -> {"memory": MiB of temporary memory, "seconds": median}."""
    import jax

    found, timers = {}, {}
    stack = 4 * size * sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    for name, (step, inputs) in steps(problem, size).items():
        if options.rows and not any(part in name for part in options.rows):
            continue
        program = jax.jit(step).lower(*inputs).compile()
        memory: Any = program.memory_analysis()
        found[name] = {"memory": memory.temp_size_in_bytes / 2**20}
        print(f"    {name}: {found[name]}", file=sys.stderr, flush=True)
        if options.rounds and (stack <= LARGEST_STACK or name not in (BY_HAND, "dpx vmap")):
            timers[name] = timing.Timer(lambda run=program, xs=inputs: jax.block_until_ready(run(*xs)), clock)
    for name, run in torch_steps(model).items() if options.rounds else ():
        if not options.rows or any(part in name for part in options.rows):
            found[name], timers[name] = {}, timing.Timer(run(), clock)
    for name, times in timing.interleaved(timers, options.rounds).items():
        found[name]["seconds"] = statistics.median(times)
    return found


def fair_floor(rows) -> float:
    return min(
        (row["seconds"] for name, row in rows.items() if name.startswith(PLAIN) and "seconds" in row), default=0.0
    )


def private_floor(rows) -> str | None:
    """The fair floor with one normal for each parameter and the products of the norms, divided by the fair floor."""
    if not ({NOISE, PRODUCTS} <= set(rows) and fair_floor(rows)):
        return None
    return f"{1 + (rows[NOISE]['seconds'] + rows[PRODUCTS]['seconds']) / fair_floor(rows):.2f}"


def opacus_ratio(rows) -> str | None:
    return f"{rows[OPACUS]['seconds'] / rows[PLAIN_TORCH]['seconds']:.2f}" if OPACUS in rows else None


def tables(results) -> dict[str, str]:
    names = list(dict.fromkeys(name for rows in results.values() for name in rows))

    def column(field, unit=lambda rows: 1.0, form="{:.2f}"):
        def cell(name):
            return lambda rows: form.format(rows[name][field] / unit(rows)) if field in rows.get(name, {}) else None

        return [(name, cell(name)) for name in names]

    return {
        "Time divided by that of JAX's fastest step without privacy": report.table(
            results,
            [
                ("fastest (s)", lambda rows: f"{fair_floor(rows):.3f}" if fair_floor(rows) else None),
                ("private floor", private_floor),
            ]
            + column("seconds", fair_floor)
            + [("Opacus ghost, divided by torch", opacus_ratio)],
        ),
        "Temporary memory, MiB": report.table(results, column("memory", form="{:.0f}")),
    }


def heading(module: str, core: int, **facts: Any) -> str:
    import jax

    import dpx  # noqa: F401 - before the first computation of JAX: see dpx/xla/rows_apart.py

    libraries = ("jax", "jaxlib", "flax", "optax", "transformers", "jax-privacy", "torch", "opacus")
    return report.heading(module, libraries, devices=[jax.devices()[0].device_kind], **report.load(core), **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument("--rows", nargs="+", help="parts of their names; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="0 to compile and not to run")
    parser.add_argument("--core", type=int, default=0, help="the CPU core to pin to; -1 for none (as on a GPU)")
    parser.add_argument("--clock", choices=timing.CLOCKS, default="wall", help="cpu is fairer on a busy machine")
    parser.add_argument("--name", default="transformers", help="of the page")
    options = parser.parse_args()
    timing.pin(options.core)
    head = heading("benchmarks.transformers", options.core, clock=options.clock)
    notes = [] if installed() else [OURS]
    notes.append(
        f"Rows that would hold more than {LARGEST_STACK / 2**30:.0f} GiB of gradients are compiled, and not run."
    )
    results, page = {}, ""
    for name in options.models:
        print(name, file=sys.stderr, flush=True)
        clock = timing.CLOCKS[options.clock]
        results[f"{name}, {BATCH[name]}"] = measured(name, build(name), BATCH[name], options, clock)
        page = report.write(options.name, head, tables(results), notes=notes)
    print(page)


if __name__ == "__main__":
    main()

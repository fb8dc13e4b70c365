"""What DP-FEST and DP-AdaFEST save, and cost in accuracy, on a generated recommender.

`python -m benchmarks.sparse_embeddings` writes results/sparse_embeddings.md. A user has tastes, in 3 dimensions, and a
history of items. Items are drawn by popularity (a power law), and a user keeps those of the most taste. The task is
whether the user likes one more item, by its quality and by taste, as the AUC on users who were never trained on.
Learning rates are chosen by the AUC of seed 0, alike for all.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from benchmarks import report
from dpx.coordinates import look_up_public_rows, row_updates

ITEMS, TASTES, HISTORY, WIDTH, USERS, TESTED, BATCH, STEPS = 20_000, 3, 8, 16, 100_000, 20_000, 1000, 200
EPSILON, DELTA, CLIP, CHOSEN = 3.0, 1e-6, 0.5, 1000
RATES = (64.0, 256.0)


def generated(seed: int, users: int) -> tuple[np.ndarray, np.ndarray]:
    """Items of each user, int32 (users, HISTORY + 1), the last of which is judged; and whether it is liked, float32."""
    items = np.random.default_rng(99).normal(size=(ITEMS, TASTES)) / np.sqrt(TASTES)
    quality = np.random.default_rng(98).normal(size=ITEMS)
    popular = 1 / (5 + np.arange(ITEMS)) ** 1.2
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(users, TASTES))
    offered = rng.choice(ITEMS, size=(users, 4 * HISTORY), p=popular / popular.sum())
    liking = np.einsum("ut,uot->uo", taste, items[offered]) + 0.3 * rng.gumbel(size=offered.shape)
    kept = np.take_along_axis(offered, np.argsort(-liking, 1)[:, :HISTORY], 1)
    judged = rng.choice(ITEMS, size=users, p=popular / popular.sum())
    liked = quality[judged] + 3 * np.einsum("ut,ut->u", taste, items[judged]) > rng.logistic(size=users)
    return np.concatenate([kept, judged[:, None]], 1).astype(np.int32), liked.astype(np.float32)


def of_vectors(model, vectors, liked):
    """The loss of one user. vectors: (HISTORY + 1, WIDTH), those of the history and of the judged item."""
    return logistic(score(model, vectors), liked)


def logistic(logit, liked):
    return jnp.logaddexp(0.0, logit) - liked * logit


def score(model, vectors):
    return jnp.mean(vectors[:-1, 1:], 0) @ model["mix"] @ vectors[-1, 1:] + vectors[-1, 0] + model["bias"]


def parameters(seed: int, count: int):
    table = 0.3 * jax.random.normal(jax.random.key(seed), (count, WIDTH))
    return {"tables": table, "mix": jnp.eye(WIDTH - 1), "bias": jnp.zeros(())}


def auc(params, items, liked) -> float:
    scores = np.asarray(jax.jit(jax.vmap(lambda row: score(params, params["tables"][row])))(items))
    ranks = np.argsort(np.argsort(scores)) + 1.0
    positive = liked > 0
    count = positive.sum()
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(liked) - count)))


def dp_sgd(params, run):
    """Also without noise and clipping, if the run says so."""
    mechanism = dpx.dp_sgd(clip_norm=CLIP, **run)
    inner = dpx.private_updates(lambda p, e: of_vectors(p, p["tables"][e[0]], e[1]), mechanism)

    def step(params, batch, state, rate):
        found = inner(params, batch, state)
        return jax.tree.map(lambda p, u: p - rate * u, params, found.updates), found.state

    return mechanism, step


def fest(params, run):
    """The CHOSEN most popular items are public. The parameter of the mechanism has their rows alone."""
    mechanism, public = dpx.dp_sgd(clip_norm=CLIP, **run), np.arange(CHOSEN)

    def loss(p, example):
        (items, liked), otherwise = example
        return of_vectors(p, look_up_public_rows(p["tables"], public, items, otherwise), liked)

    inner = dpx.private_updates(loss, mechanism)

    def step(params, batch, state, rate):
        few = params | {"tables": params["tables"][:CHOSEN]}
        examples = batch.examples, params["tables"][batch.examples[0]]
        found = inner(few, batch._replace(examples=examples), state)
        table = params["tables"].at[:CHOSEN].add(-rate * found.updates["tables"])
        moved = jax.tree.map(lambda p, u: p - rate * u, few, found.updates)
        return moved | {"tables": table}, found.state

    return mechanism.replace(begin=lambda p: mechanism.begin(p | {"tables": p["tables"][:CHOSEN]})), step


def ada_fest(params, run, threshold):
    inner = row_updates(
        lambda model, vectors, example: of_vectors(model, vectors, example[1]),
        rows=lambda example: example[0],
        threshold=threshold,
        most_rows=CHOSEN,
        clip_norm=CLIP,
        **run,
    )

    def step(params, batch, state, rate):
        updates, state, _ = inner(params, batch, state)
        rows = updates.pop("tables")
        table = rows._replace(values=-rate * rows.values).added_to(params["tables"])
        model = {name: params[name] - rate * update for name, update in updates.items()}
        return model | {"tables": table}, state

    return inner.optimizer, step


METHODS = {
    "without noise": dp_sgd,
    "DP-SGD": dp_sgd,
    f"DP-FEST, the {CHOSEN} most popular rows": fest,
    "DP-AdaFEST, threshold 2": lambda params, run: ada_fest(params, run, 2.0),
    "DP-AdaFEST, threshold 6": lambda params, run: ada_fest(params, run, 6.0),
}


def trained(name: str, seed: int, rate: float, steps: int) -> float:
    """The AUC after a run of one method."""
    items, liked = generated(1 + seed, USERS)
    sampling = dpx.PoissonSampling(examples=USERS, batch_size=BATCH)
    noise = 0.0 if name == "without noise" else dpx.Budget(epsilon=EPSILON, delta=DELTA, steps=STEPS)
    run = {"noise_multiplier": noise, "sampling": sampling, "key": dpx.secret_key(2**100 + seed)}
    params = parameters(seed, ITEMS)
    mechanism, step = METHODS[name](params, run)
    state = mechanism.init(params)
    step = jax.jit(step, donate_argnums=(0, 2))
    for _ in range(steps):
        batch = sampling.take((items, liked), mechanism.key, state)
        params, state = step(params, batch, state, jnp.float32(rate))
    return auc(params, *generated(1000, TESTED))


def measured(build, count: int) -> tuple[float, float]:
    """Seconds of a step, and MiB of temporary memory, with a table of `count` rows, which the step donates."""
    sampling = dpx.PoissonSampling(examples=10**6, batch_size=BATCH)
    run = {"noise_multiplier": 1.0, "sampling": sampling, "key": dpx.secret_key(2**100)}
    items, liked = generated(0, BATCH)
    params = parameters(0, count)
    mechanism, step = build(params, run)
    state, batch = (
        mechanism.init(params),
        dpx.Batch((jnp.asarray(items % count), jnp.asarray(liked)), jnp.ones(BATCH, bool)),
    )
    program = jax.jit(step, donate_argnums=(0, 2)).lower(params, batch, state, jnp.float32(1.0)).compile()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        params, state = jax.block_until_ready(program(params, batch, state, jnp.float32(1.0)))
        times.append(time.perf_counter() - start)
    memory: Any = program.memory_analysis()
    return min(times), memory.temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--largest", type=int, default=10**7, help="rows of the largest table")
    options = parser.parse_args()
    rows = []
    for name in METHODS:
        found = {rate: trained(name, 0, rate, options.steps) for rate in RATES}
        rate = max(found, key=lambda rate: found[rate])
        scores = [found[rate], *(trained(name, seed, rate, options.steps) for seed in range(1, options.seeds))]
        error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        rows.append((name, f"{100 * statistics.mean(scores):.2f} ± {100 * error:.2f}", f"{rate:g}"))
        print(*rows[-1], flush=True)
    sizes = [count for count in (10**5, 10**6, 10**7) if count <= options.largest]
    memory = []
    for name, build in list(METHODS.items())[1:4]:
        for count in sizes:
            if name == "DP-SGD" and count > 10**6:
                continue
            seconds, mebibytes = measured(build, count)
            memory.append(
                (name, f"{count:,}", f"{count * WIDTH * 4 / 2**20:.0f}", f"{1000 * seconds:.0f}", f"{mebibytes:.0f}")
            )
            print(*memory[-1], flush=True)
    facts = {"seeds": options.seeds, "epsilon": f"{EPSILON:g} at delta {DELTA:g}", "learning_rates": RATES}
    heading = report.heading("benchmarks.sparse_embeddings", ("jax", "jaxlib", "optax", "numpy"), **facts)
    accuracy = f"AUC in percent, with {ITEMS:,} items and {USERS:,} users, after {options.steps} steps of {BATCH} users"
    size = f"One step on {BATCH} users, with {WIDTH} numbers in a row, which updates the table in its memory"
    tables = {
        accuracy: report.grid(("method", "AUC", "learning rate"), rows),
        size: report.grid(("method", "rows", "table, MiB", "ms a step", "temporary memory, MiB"), memory),
    }
    notes = [
        "The AUC is on other users, with the standard error of the seeds. The optimizer is plain SGD.",
        "Without noise, gradients are clipped all the same.",
        "Memory is what XLA plans. Times are the least of four steps, beside other programs, so they say little.",
    ]
    report.write("sparse_embeddings", heading, tables, notes=notes)


if __name__ == "__main__":
    main()

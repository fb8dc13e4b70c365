"""The small public model that is fine-tuned where no checkpoint is named: bytes of the standard library's docstrings.

It is trained without privacy, because Python's own documentation is public, and is kept as a checkpoint in the layout
of Llama, so that it is loaded like any other.
"""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from examples.finetune import checkpoints, documents
from examples.finetune.model import Architecture, fresh
from examples.finetune.rows import Bytes, rows_of
from examples.finetune.training import loss_of_rows

SMALL = Architecture(
    vocabulary=Bytes.vocabulary, width=64, layers=3, heads=4, kv_heads=2, head_width=16, hidden=176, positions=1024
)
STEPS, BATCH, LENGTH, LEARNING_RATE = 1000, 32, 128, 3e-3


def small_base(
    cache_dir: str | Path, *, sizes: Architecture = SMALL, steps: int = STEPS, progress: bool = False
) -> Path:
    """The folder of the checkpoint, which is made if it is not there: some minutes on one core."""
    corpus = documents.standard_library()
    words = json.dumps([repr(sizes), LENGTH, steps, BATCH, LEARNING_RATE, corpus.fingerprint])
    folder = Path(cache_dir).expanduser() / f"decoder-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    if (folder / checkpoints.CONFIG).is_file():  # which is written last
        return folder
    rows = rows_of(corpus, Bytes(), length=LENGTH)
    graphdef, params = fresh(sizes, jax.random.key(0))
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 20, steps), weight_decay=0.01
    )

    @jax.jit
    def step(params, state, tokens, sizes):
        loss = lambda params: loss_of_rows(nnx.merge(graphdef, params), tokens, sizes)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    rng, state = np.random.default_rng(0), optimizer.init(params)
    for number in range(steps):
        drawn = rng.integers(0, len(rows.tokens), BATCH)
        params, state, value = step(params, state, rows.tokens[drawn], rows.sizes[drawn])
        if progress and (number + 1) % 100 == 0:
            print(f"base: step {number + 1} of {steps}, public loss {float(value):.3f}", flush=True)
    checkpoints.save(folder, graphdef, params)
    return folder

"""The memory that XLA plans for a private step of GPT-2 small on a CPU: full, LoRA, and zeroth order.

    python -m benchmarks.zeroth_order

The step is compiled and not run, so it takes no parameters of a trained model and little memory. Writes
benchmarks/results/zeroth_order.md.
"""

import argparse
import sys
from typing import Any

from benchmarks import report, sharded

LENGTH, DIRECTIONS, RANK = 512, 4, 8
ROWS = ("full", f"LoRA, rank {RANK}", f"zeroth order, {DIRECTIONS} directions")


def planned(row: str, batch: int) -> float:
    """MiB of temporaries of a step on `batch` rows at once."""
    import jax

    import dpx

    sizes = sharded.GPT2 | {"length": LENGTH, "batch": batch}
    model = sharded.decoder("gpt2", layers=12, lora_rank=RANK if row == ROWS[1] else 0, **sizes)
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=batch)
    of: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": sampling, "key": jax.random.key(2)}
    mechanism = dpx.methods.zeroth_order_sgd(directions=DIRECTIONS, **of) if row == ROWS[2] else dpx.dp_sgd(**of)
    if model.trained is not None:
        mechanism = dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask=model.trained))
    step = dpx.private_updates(model.loss, mechanism, microbatch_size=batch)
    state = jax.eval_shape(mechanism.init, model.params)
    inputs = model.params, dpx.Batch(model.batch, None), state
    found: Any = jax.jit(step).lower(*inputs).compile().memory_analysis()
    return found.temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    options = parser.parse_args()
    head = report.heading("benchmarks.zeroth_order", ("jax", "jaxlib", "flax"))
    found: dict[str, list[str]] = {row: [] for row in ROWS}
    for row, cells in found.items():
        for batch in options.batches:
            cells.append(f"{planned(row, batch):,.0f}")
            print(row, batch, cells[-1], file=sys.stderr, flush=True)
    columns = ["trained", *(f"{batch} texts of {LENGTH} tokens" for batch in options.batches)]
    table = report.grid(columns, ([row, *cells] for row, cells in found.items()))
    print(report.write("zeroth_order", head, {"MiB of temporaries of a private step of GPT-2 small": table}))


if __name__ == "__main__":
    main()

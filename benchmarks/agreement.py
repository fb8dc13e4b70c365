"""Whether the rows of `benchmarks.step` compute the same update: their clipped means, without noise, are compared.

    python -m benchmarks.agreement --models mlp transformer

Prints the distance of every private row from `dpx vmap`, divided by its norm. Fails if one is above 1e-4.
"""

import argparse
import math
import sys
from collections.abc import Callable

import jax
import numpy as np
from torch import nn

from benchmarks import jax_rows, torch_models, torch_rows
from benchmarks.models import PROBLEMS as MODELS
from benchmarks.problems import ON_A_CPU, PROBLEMS

TOLERANCE = 1e-4
CLIP_NORM = 0.5  # below the norm of any gradient here


def in_torch_order(model: nn.Module, tree) -> list[np.ndarray]:
    """Parameters (or gradients) of the Flax model as those of the torch model, layer for layer."""
    seen: dict[str, int] = {}

    def layer(kind):
        seen[kind] = seen.get(kind, -1) + 1
        return tree[f"{kind}_{seen[kind]}"]

    def dense(part, fan_out):
        kernel = part["kernel"].reshape(-1, fan_out)
        return [kernel.T, part["bias"].reshape(-1)] if "bias" in part else [kernel.T]

    found, channels, width, attention = [], 0, 0, {}
    for module in model.modules():
        match module:
            case torch_models.Positions():
                found += [tree["positions"]]
            case torch_models.Attention():
                part = layer("MultiHeadDotProductAttention")
                attention = {id(getattr(module, name)): part[name] for name in ("query", "key", "value", "out")}
            case nn.Linear() if id(module) in attention:
                found += dense(attention[id(module)], module.out_features)
            case nn.Linear():
                part = layer("Dense")
                if channels:  # after a Flatten: from channels last to channels first
                    side = math.isqrt(module.in_features // channels)
                    kernel = part["kernel"].reshape(side, side, channels, -1).transpose(2, 0, 1, 3)
                    part, channels = part | {"kernel": kernel}, 0
                found += dense(part, module.out_features)
            case nn.Conv2d():
                part = layer("Conv")
                found += [part["kernel"].transpose(3, 2, 0, 1)] + ([part["bias"]] if "bias" in part else [])
                width = module.out_channels
            case nn.Flatten():
                channels = width if "Conv" in seen else 0
            case nn.LayerNorm() | nn.GroupNorm():
                part = layer(type(module).__name__)
                found += [part["scale"], part["bias"]]
            case nn.Embedding():
                found += [layer("Embed")["embedding"]]
    return [np.array(array) for array in found]


def distances(model: str, size: int, wanted: Callable[[str], bool]) -> dict[str, float]:
    def in_numpy(tree):
        return jax.tree.map(np.asarray, tree)

    def jax_gradients(output):
        return in_numpy(output if isinstance(output, dict) else output[0])

    def distance(left, right):
        squares = [(np.sum((x - y) ** 2), np.sum(y**2)) for x, y in zip(left, right, strict=True)]
        difference, norm = np.sqrt(np.sum(squares, axis=0, dtype=np.float64))
        return float(difference / norm)

    arguments = {"noise_multiplier": 0.0, "clip_norm": CLIP_NORM}
    module = torch_models.build(model)
    weights = in_torch_order(module, in_numpy(MODELS[model]().params))
    ours = jax_rows.rows(model, size, **arguments)
    expected = jax_gradients(ours["dpx vmap"]()())
    found = {
        name: distance(jax.tree.leaves(jax_gradients(make()())), jax.tree.leaves(expected))
        for name, make in ours.items()
        if name not in (jax_rows.FLOOR, "noise alone", "dpx vmap") and wanted(name)
    }
    theirs = torch_rows.rows(model, size, **arguments, weights=weights)
    expected = in_torch_order(module, expected)
    for name, make in theirs.items():
        if name != torch_rows.FLOOR and wanted(name):
            found[name] = distance([gradient.cpu().numpy() for gradient in make()()], expected)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PROBLEMS, default=list(ON_A_CPU))
    parser.add_argument("--size", type=int, default=8, help="of the batch")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of their names; default: all")
    options = parser.parse_args()
    worst = 0.0
    for model in options.models:
        for name, value in distances(
            model, options.size, lambda row: any(part in row for part in options.rows)
        ).items():
            print(f"{model}, {name}: {value:.1e}", flush=True)
            worst = max(worst, value)
    if not worst < TOLERANCE:
        sys.exit(f"rows differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()

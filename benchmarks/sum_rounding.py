"""How far one example can move a float32 sum of clipped gradients, on data that are chosen against its rounding.

`python -m benchmarks.sum_rounding` prints the move in clip norms, by batch size and by the way to sum the batch. Half
of the examples are 1. The others are smaller than half a unit in the last place of that sum, so they are rounded away;
without one of the 1s, every small one counts (Casacuberta et al. 2022, https://arxiv.org/abs/2207.10635).
"""

import jax
import jax.numpy as jnp
import numpy as np

import dpx


def move(power: int, microbatch_size: int | None) -> float:
    """Of a batch of 2^(power + 1) + 1 examples, by leaving one out; in clip norms."""
    half = 2**power
    gradients = np.ones(2 * half + 1, np.float32)
    gradients[0], gradients[half + 1 :] = 0.5, -0.77 * 2.0 ** (power - 24)
    mechanism = dpx.dp_sgd(
        clip_norm=1.0, noise_multiplier=0.0, sampling=dpx.FullBatch(examples=len(gradients)), key=dpx.secret_key(0)
    )
    params = {"b": jnp.zeros(4)}
    gradient = jax.jit(
        dpx.private_updates(lambda params, x: params["b"][0] * x, mechanism, microbatch_size=microbatch_size)
    )
    sums = []
    for one in (1.0, 0.0):
        gradients[1] = one
        updates = gradient(params, dpx.Batch(gradients, None), mechanism.init(params)).updates
        sums.append(float(updates["b"][0]) * len(gradients))
    return abs(sums[0] - sums[1])


def main() -> None:
    print(f"{'batch':>8} {'default':>9} {'one at a time':>14}")
    for power in (7, 9, 11, 12, 14):
        found = [move(power, microbatch_size) for microbatch_size in (None, 1)]
        print(f"{2 ** (power + 1) + 1:>8} {found[0]:>9.3f} {found[1]:>14.3f}")


if __name__ == "__main__":
    main()

"""How a device multiplies matrices: which operands its unit multiplies exactly, and how its additions round.

A GPU's tensor core and a TPU's matrix unit multiply low-precision operands exactly, and add the products in their
own order, with their own rounding. To bound what an example adds to a sum, two things must hold. The norm and the sum
must read the same values, so every operand is rounded once, as a function of its own example: this rounding is part of
the example's gradient, like the rounding inside the model, and costs nothing. And the error of the additions must be
bounded.

THE ADDER. An instruction adds n <= k exact products to a partial sum. It aligns all terms to the largest exponent (a
product has the sum of its operands' exponents), drops what is below 2^-(23 + e) there, adds the rest exactly, and drops
what is below 2^-23 of the result. (k, e) is (8, 1) for bfloat16 on an A100 and (16, 2) on an H100 or a B200, and (4, 1)
and (8, 2) for TF32 (Xie et al. 2025, arXiv:2511.10909, and their simulator; an H200 gives these bits). An instruction
may be off by more than a float32 addition, but adds more terms. Let u = 2^-24, and M the sum of the absolute values of
all terms so far, which bounds all values in an instruction.

One sum of T products z_i, in pieces of at least k whose sums are added in float32. The term with the largest exponent
loses nothing: a product has 22 bits or fewer, a partial sum 24. So an instruction's error is at most 2 u (1 +
n 2^-e) M, and 2 u (1 + (n - 1) 2^-e) M for the first of a piece. Let C_i be the sum of these factors over the
instruction that adds product i and all later ones. Then the sum is off by at most u sum_i C_i |z_i|; one piece is the
worst case, because k products of another cost more than the float32 addition of their sum. Float32 additions have C_i =
T + 1, T + 1, T, ..., 3, if each product is rounded twice before (`PRODUCTS`). For either adder, the largest C_i bounds
the error in terms of sum |z_i|, and the root of the sum of all C_i^2 in terms of the root of sum z_i^2. A tensor core's
are less than `rounding_factor` = 1.6 times those of float32 additions: a test evaluates T up to 700, and both ratios
tend to 2 (1 / k + 2^-e), which is at most 1.5.

The same sum with one term replaced by zero. What an instruction drops from a term has the term's sign. So for a
product, which is the same in both runs or missing in one, the dropped parts differ by at most 2^-(23 + e) M; for the
partial sum, by twice that. But one term loses nothing, so together they differ by at most n + 1 times 2^-(23 + e) M,
whichever term is the largest in each run. What is dropped from the result differs by at most 2^-23 M, because results
of different signs are as far apart as both together. Let D_i count the instruction that adds row i and all later ones.
Then all this is at most

    2 u c sum_i D_i |z_i|,   c = 1 + (k + 1) 2^-e,

where a float32 addition, off by u M in each run, has k = 1 and c = 1. `dpx.sums.rounding` bounds this over all
coordinates and orders. For blocks of up to 96 rows it is less than for float32 additions, so a tensor core needs no
other blocks.

ASSUMED. Nobody has published how a TPU adds. dpx assumes that its unit multiplies bfloat16 numbers exactly, that the
sum of their products is as exact as additions that are each off by 4 u M, and that its vector unit adds and multiplies
float32 numbers as IEEE specifies, except for denormals. It assumes that GPUs with float32 products compute them with
fused multiply-adds, and that newer tensor cores add as exactly as an H100, or better.

Nothing is rounded where products are computed in float32: on CPUs, on GPUs without TF32, and on any GPU under
`jax.default_matmul_precision("highest")`, with which JAX's own products do not round either.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32_FRACTION = 23  # bits


class HardwareAdder(NamedTuple):
    """products: k, how many products an instruction adds. move: c, how far its result can move between two runs."""

    products: int
    move: float


def tensor_core_adder(products: int, extra: int) -> HardwareAdder:
    """The adder of the proof with these k and e."""
    return HardwareAdder(products, 1 + (products + 1) * 2.0**-extra)


FUSED = HardwareAdder(1, 1.0)  # a float32 addition of a product


@dataclass(frozen=True)
class MatrixUnit:
    """fraction: bits of an operand's fraction. precision: the JAX precision of products of such operands. adders: the
    possible ones, because a program is compiled for a platform and not for one device. rounding_factor: how many times
    as much as float32 additions a sum may round."""

    fraction: int
    precision: Any
    adders: tuple[HardwareAdder, ...] = (FUSED,)
    rounding_factor: float = 1.0

    @property
    def rounds_operands(self) -> bool:
        """Whether this unit multiplies operands exactly only if they were rounded before."""
        return self.fraction < FLOAT32_FRACTION

    def round_operand(self, x: jax.Array) -> jax.Array:
        """Rounds `x`, of any real dtype, to the nearest float32 values that this unit multiplies exactly."""
        bfloat16, x = x.dtype == jnp.bfloat16, x.astype(jnp.float32)
        # XLA keeps a reduce_precision, but removes two conversions that undo each other.
        return x if bfloat16 or not self.rounds_operands else lax.reduce_precision(x, 8, self.fraction)

    def round_to_store(self, x: jax.Array) -> jax.Array:
        """Returns integers as they are, and other real arrays rounded, in the smallest dtype that holds the result."""
        if not self.rounds_operands or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.bfloat16:
            return x
        return self.round_operand(x).astype(jnp.bfloat16 if self.fraction == 7 else jnp.float32)

    def round_gradient(self, x: jax.Array) -> jax.Array:
        """Rounds a stored gradient, read by norm and sum but by no product: `round_to_store` if that saves memory."""
        return self.round_to_store(x) if self.fraction == 7 else x

    def truncate_operand(self, x: jax.Array) -> jax.Array:
        """Truncates `x`, float32 (...), toward 0 to values that this unit multiplies exactly."""
        if not self.rounds_operands:
            return x
        kept = np.uint32(2**32 - 2 ** (FLOAT32_FRACTION - self.fraction))
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & kept, jnp.float32)


FLOAT32 = MatrixUnit(FLOAT32_FRACTION, lax.Precision.HIGHEST)
TF32 = MatrixUnit(
    10, lax.DotAlgorithmPreset.TF32_TF32_F32, (FUSED, tensor_core_adder(4, 1), tensor_core_adder(8, 2)), 1.6
)
BFLOAT16 = MatrixUnit(
    7, lax.DotAlgorithmPreset.BF16_BF16_F32, (FUSED, tensor_core_adder(8, 1), tensor_core_adder(16, 2)), 1.6
)
OF_A_TPU = MatrixUnit(7, lax.DotAlgorithmPreset.BF16_BF16_F32, (HardwareAdder(1, 4.0),), 4.0)
FULL, LOW = ("highest", "float32", "F32_F32_F32"), ("bfloat16", "BF16_BF16_F32")  # precisions of JAX's products


def matrix_unit_of(platform: str) -> MatrixUnit:
    """The unit that multiplies matrices on this platform, under JAX's default precision."""
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    if platform == "tpu":
        return OF_A_TPU
    if platform not in ("gpu", "cuda") or precision in FULL or not _has_tf32():
        return FLOAT32
    return BFLOAT16 if precision in LOW else TF32


def _has_tf32() -> bool:
    """Whether this process's GPU, if it has one, has tensor cores for TF32: NVIDIA's since the A100."""
    if jax.default_backend() != "gpu":
        return True
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    return capability[:1].isdigit() and float(capability) >= 8

"""DiceSGD's own privacy theorem, which does not hold: compare with it, never train with its noise."""

import math

from dpx.accounting import checks
from dpx.values import require_whole


def dice_theorem_noise(
    *, clip_norm: float, examples: int, steps: int, epsilon: float, delta: float, residual: float = math.inf
) -> float:
    """The noise of DiceSGD's privacy theorem, a CLAIM that does not hold.

    sigma_1 = sqrt(32 T (C^2 + 2 min(C, G')^2) ln(1/delta)) / (N epsilon)

    The noise on the MEAN gradient for which Theorem 3.8 of DiceSGD (https://arxiv.org/abs/2311.14632) claims (epsilon,
    delta). The proof uses a lower bound on a clip factor where it needs an upper one. Counterexample: all gradients are
    zero except one constant gradient of norm 150 C, with N 50000, B 1000, T 150, C1 = C2 = C / B. Then delta at epsilon
    2 is at least 0.408, but the theorem claims 1e-5.

    clip_norm: C, with C1 <= C2 <= C / B. examples: their number N. steps: T, int, at least 0.
    epsilon: positive and finite. delta: in (0, 1). residual: G' = max(0, largest gradient + its deviation - C1).
    Raises ValueError for steps, epsilon or delta outside these ranges.
    """
    epsilon, delta = checks.require_positive_epsilon(epsilon), checks.require_delta(delta)
    steps = require_whole("steps", steps, minimum=0)
    squares = clip_norm**2 + 2 * min(clip_norm, residual) ** 2
    return math.sqrt(32 * steps * squares * math.log(1 / delta)) / (examples * epsilon)

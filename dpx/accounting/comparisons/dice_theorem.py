"""DiceSGD's own privacy theorem, which does not hold: to compare with, never to train with."""

import math

from dpx.accounting import checks


def dice_theorem_noise(
    *, clip_norm: float, examples: int, steps: int, epsilon: float, delta: float, residual: float = math.inf
) -> float:
    """sigma_1 = sqrt(32 T (C^2 + 2 min(C, G')^2) ln(1/delta)) / (N epsilon), a CLAIM that does not hold.

    The noise on the MEAN gradient for which Theorem 3.8 of DiceSGD claims (epsilon, delta). Its proof uses a lower
    bound of a clip factor where it needs an upper one. With gradients that are all zero but for one constant gradient
    of norm 150 C, and N 50000, B 1000, T 150, C1 = C2 = C / B, delta(2) is at least 0.408 where 1e-5 is claimed.

    clip_norm: C, with C1 <= C2 <= C / B. residual: G' = max(0, largest gradient + its deviation - C1).
    """
    checks.epsilon(epsilon, positive=True)
    checks.delta(delta)
    squares = clip_norm**2 + 2 * min(clip_norm, residual) ** 2
    return math.sqrt(32 * checks.steps(steps) * squares * math.log(1 / delta)) / (examples * epsilon)

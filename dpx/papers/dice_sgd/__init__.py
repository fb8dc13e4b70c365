"""DiceSGD: clipping with error feedback (Zhang et al. 2023, arXiv:2311.14632)."""

from dpx.papers.dice_sgd.mechanism import dice_sgd, dice_theorem_noise

__all__ = ["dice_sgd", "dice_theorem_noise"]

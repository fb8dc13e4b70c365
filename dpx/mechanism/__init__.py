"""Mechanisms and coordinates, and how they compose: read `base.py` first. Also what the papers share: DP-SGD, on which
all but DiceSGD build, two other ways to clip, and masks. `guards.py` refuses what would make a stated cost untrue."""

from dpx.mechanism.base import Coordinates, Mechanism, chain, in_coordinates, require_mechanism

__all__ = ["Coordinates", "Mechanism", "chain", "in_coordinates", "require_mechanism"]

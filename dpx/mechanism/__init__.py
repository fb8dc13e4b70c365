"""Both nouns and how they compose (`base.py`: read it first), and what the papers share: DP-SGD, on which all but
DiceSGD build, two other ways to clip, and masks, of layers and with an exact number of ones. `guards.py` refuses what
would make a stated cost untrue."""

from dpx.mechanism.base import Coordinates, Mechanism, in_coordinates, require_mechanism

__all__ = ["Coordinates", "Mechanism", "in_coordinates", "require_mechanism"]

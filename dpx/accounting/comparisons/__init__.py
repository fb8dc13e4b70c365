"""Nothing here may be reported as spent: these are numbers that papers claim, to compare a bill with.

`cdp` holds zCDP and tCDP, which are guarantees but loose. `dice_theorem_noise` is a theorem that does not hold.

To add one: a file here, whose first docstring line says what holds and what does not, one import and one name in
`__all__` below, and a test in tests/ that shows the difference from the true bill.
"""

from dpx.accounting.comparisons import cdp
from dpx.accounting.comparisons.dice_theorem import dice_theorem_noise

__all__ = ["cdp", "dice_theorem_noise"]

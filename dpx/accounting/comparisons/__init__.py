"""Nothing here may be reported as spent: zCDP and tCDP, which are loose, and a theorem that does not hold."""

from dpx.accounting.comparisons import cdp as cdp
from dpx.accounting.comparisons.dice_theorem import dice_theorem_noise as dice_theorem_noise

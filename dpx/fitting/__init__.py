"""The training loop for those who want to write none: `fit`, its records, and checkpoints that replay bit for bit.

`loop.py` has the loop; `steps.py` one compiled step; `settings.py` the checks; `checkpoints.py` the files of a run.
"""

from dpx.fitting.loop import fit as fit
from dpx.fitting.records import FitResult as FitResult
from dpx.fitting.records import Progress as Progress

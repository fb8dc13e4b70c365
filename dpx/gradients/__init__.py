"""Private gradients of a loss: the clipped sum of a batch, by ghost norms or by per-example gradients.

How a batch becomes an update: rows.py (an example and its key), sums.py (the clipped sum, in microbatches),
private_grad.py (the release), accumulate.py (a batch in chunks), augmented.py (several views of an example),
explicit_axes.py (on several devices), results.py.

To add one: a layer that ghost norms can follow is a rule in ghost/rules.py, and a way to compute norms is a record in
ghost/ways.py. Both need a model in tests/test_ghost_zoo.py and a case in tests/test_ghost_hostile.py. Another value of
`clipping` belongs in sums.py (`Clipping`, `RowSum.plan`).
"""

from dpx.gradients.accumulate import accumulate as accumulate
from dpx.gradients.augmented import augmented as augmented
from dpx.gradients.private_grad import explain as explain
from dpx.gradients.private_grad import private_grad as private_grad
from dpx.gradients.private_grad import private_update as private_update
from dpx.gradients.results import PrivateGradient as PrivateGradient
from dpx.gradients.results import Unreleased as Unreleased

"""Private gradients of a loss: the clipped sum of a batch, by ghost norms or by per-example gradients.

To add one: a layer that ghost norms can follow is a rule in ghost/rules.py, and a way to compute norms is a record in
ghost/ways.py. Both need a model in tests/test_ghost_zoo.py and a case in tests/test_ghost_hostile.py. Another value of
`clipping` belongs in private_grad.py (`Clipping`, `_check`, `_plan`).
"""

from dpx.gradients.private_grad import explain as explain
from dpx.gradients.private_grad import private_grad as private_grad
from dpx.gradients.results import PrivateGradient as PrivateGradient
from dpx.gradients.results import Unreleased as Unreleased

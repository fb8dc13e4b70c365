"""Private gradients of a loss: the clipped sum of a batch, by ghost norms or by per-example gradients.

To add a layer that ghost norms follow: a rule in `ghost/rules.py` and a model in `tests/test_ghost_zoo.py`.
"""

from dpx.gradients.private_grad import PrivateGradient as PrivateGradient
from dpx.gradients.private_grad import explain as explain
from dpx.gradients.private_grad import private_grad as private_grad

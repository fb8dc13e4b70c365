"""Ghost norms: the norms and the clipped sum of per-example gradients without the gradients, for any JAX loss.

Goodfellow 2015 (https://arxiv.org/abs/1510.01799) derives the norms for dense layers, Li et al. 2022
(https://arxiv.org/abs/2110.05679) those for sequences and embeddings, and Bu et al. 2023
(https://arxiv.org/abs/2210.00038) compute the sum in the same backward pass, by a method chosen for each layer.

A cotangent is the gradient of the loss with respect to the output of a layer. The files build on each other. program.py
represents the loss as a list of equations, and what happens to a parameter before each use. trace.py finds the
equations that use each parameter, also in the bodies of scans and checkpoints, and in branches. interpreter.py runs the
loss and captures the inputs and cotangents there. rules.py describes layers whose gradient is a product A^T B, such as
convolutions, and own_backward.py those of a `jax.custom_vjp`. norms.py computes |A^T B|, and weighted_sums.py the sum.
algorithms.py has a record for each way to compute both. kernels.py takes the gradient of a kernel through the function
that makes it. plan.py chooses an algorithm for each parameter. hooks.py computes norms and sums for each slice of a
stack of layers, also inside the backward pass, to save memory. engine.py runs the plan. A parameter that cannot be
followed keeps its per-example gradients.

An example whose gradient has a norm above 2^63 contributes zero, as with per-example gradients. Here it also does if a
cotangent of a layer, or an input whose cotangent is not 0, is above 2^63, even if their product is small.
"""

from dpx.gradients.ghost.engine import sum_by_plan as sum_by_plan
from dpx.gradients.ghost.hooks import second_pass_leaves as second_pass_leaves
from dpx.gradients.ghost.plan import ForwardModePlan as ForwardModePlan
from dpx.gradients.ghost.plan import GhostPlan as GhostPlan
from dpx.gradients.ghost.plan import NormExplanation as NormExplanation
from dpx.gradients.ghost.plan import explain_plan as explain_plan
from dpx.gradients.ghost.plan import make_ghost_plan as make_ghost_plan
from dpx.gradients.ghost.trace import trace_loss as trace_loss

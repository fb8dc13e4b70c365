"""Ghost norms: the norms and the clipped sum of per-example gradients without the gradients, for any JAX loss.

trace.py follows every parameter through the loss of one example; rules.py knows the layers whose gradients are products
A^T B; norms.py has |A^T B|, shared.py that of a parameter used several times; plan.py chooses; engine.py runs. What
cannot be followed keeps its per-example gradient.

As with per-example gradients, an example whose gradient has a norm above 2^63 contributes zero. Here it also does if a
cotangent of a layer is above 2^63, or an input of a layer whose cotangent is not 0, even where their product is small.
"""

from dpx.gradients.ghost.engine import sum_contributions as sum_contributions
from dpx.gradients.ghost.plan import Explanation as Explanation
from dpx.gradients.ghost.plan import Plan as Plan
from dpx.gradients.ghost.plan import explain as explain
from dpx.gradients.ghost.plan import make_plan as make_plan

"""Private gradients of a loss: the clipped sum of a batch, by ghost norms or by per-example gradients.

From a batch to an update: one_example.py (an example and its key), clipped_gradients.py (the clipped sum, in
microbatches), private_updates.py (the release, also for a batch in chunks).

To extend it: a layer that ghost norms can follow needs a rule in ghost/rules.py, and a way to compute norms needs a
record in ghost/algorithms.py. Both need a model in tests/test_ghost_zoo.py and a case in tests/test_ghost_hostile.py.
Another value of `norms` belongs in clipped_gradients.py (`Norms`, `RowSum.plan_and_cost`).
"""

from dpx.gradients.private_updates import PrivateUpdates as PrivateUpdates
from dpx.gradients.private_updates import Unreleased as Unreleased
from dpx.gradients.private_updates import augmented as augmented
from dpx.gradients.private_updates import explain_norms as explain_norms
from dpx.gradients.private_updates import private_updates as private_updates
from dpx.gradients.private_updates import private_updates_from as private_updates_from
from dpx.gradients.private_updates import private_updates_in_chunks as private_updates_in_chunks

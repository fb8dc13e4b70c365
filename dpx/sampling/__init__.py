"""Which examples take part in a step: records that draw the batches and state their cost; batches; users.

A batch comes about in this order: schemes.py (`Sampling`, which says what examples take part and what that costs, and
whose `take`, `batches` and `draw_ahead` read the step from the optimizer state), batch.py (coins and permutations on
the host, and `Batch`), loading.py (the user's data as rows, and batches loaded ahead). users.py makes a user the unit,
and chooses records of several owners.

To add one: a frozen dataclass in schemes.py with the fields and methods of `Sampling`, and a line in `dpx/catalog.py`.
`PoissonSampling`, and `CyclicPoissonSampling` with `RandomAllocation`, have files of their own; they are `VaryingSize`,
because chance decides the size of their batches.
"""

from dpx.sampling.allocation import CyclicPoissonSampling as CyclicPoissonSampling
from dpx.sampling.allocation import RandomAllocation as RandomAllocation
from dpx.sampling.batch import Batch as Batch
from dpx.sampling.poisson import PoissonSampling as PoissonSampling
from dpx.sampling.schemes import FixedOrder as FixedOrder
from dpx.sampling.schemes import FixedSizeSampling as FixedSizeSampling
from dpx.sampling.schemes import FullBatch as FullBatch
from dpx.sampling.schemes import Sampling as Sampling
from dpx.sampling.schemes import ShuffledEpochs as ShuffledEpochs
from dpx.sampling.users import UserData as UserData
from dpx.sampling.users import records_to_keep as records_to_keep

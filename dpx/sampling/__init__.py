"""Which examples take part in a step: records that draw the batches and state their cost; batches; users.

A batch comes about in this order: schemes.py (`Sampling`, which says what examples take part and what that costs, and
whose `take`, `batches` and `draw_ahead` read the step from the optimizer state), batch.py (coins and permutations on
the host, and `Batch`), loading.py (the user's data as rows, and batches loaded ahead). users.py makes a user the unit,
and chooses records of several owners.

To add one: a frozen dataclass with the fields and methods of `Sampling` in schemes.py, or in varying.py if chance
decides the size of its batches, and a line in `dpx/catalog.py`.
"""

from dpx.sampling.batch import Batch as Batch
from dpx.sampling.schemes import FixedOrder as FixedOrder
from dpx.sampling.schemes import FixedSizeSampling as FixedSizeSampling
from dpx.sampling.schemes import FullBatch as FullBatch
from dpx.sampling.schemes import Sampling as Sampling
from dpx.sampling.schemes import ShuffledEpochs as ShuffledEpochs
from dpx.sampling.users import UserData as UserData
from dpx.sampling.users import records_to_keep as records_to_keep
from dpx.sampling.varying import CyclicPoissonSampling as CyclicPoissonSampling
from dpx.sampling.varying import PoissonSampling as PoissonSampling
from dpx.sampling.varying import RandomAllocation as RandomAllocation

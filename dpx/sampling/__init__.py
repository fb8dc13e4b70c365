"""Which examples take part in a step: records that draw the batches and state their cost; batches; users.

The files are in the order in which a batch is made. schemes.py has `Sampling`, which says which examples take part and
what that costs; its `take`, `batches` and `draw_ahead` read the step from the optimizer state. batch.py has `Batch`,
coins and permutations. loading.py reads rows and loads batches ahead. users.py makes a user the privacy unit, and
chooses which records to keep when a record has several owners.

To add one: write a frozen dataclass that extends `Sampling`, in schemes.py, or in varying.py if the size of its batches
is random, and add a line to `dpx/catalog.py`.
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

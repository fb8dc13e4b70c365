"""Statistics of private data, on the same exact noise as training: what surrounds a run, and costs as it does.

    budget = dpx.Budget(epsilon=0.1, delta=1e-6, steps=1)
    noise = {"noise_multiplier": budget, "key": dpx.secret_key()}
    age = dpx.statistics.release_mean(table[:, 0], low=0, high=100, **noise)
    age.value, age.interval(0.95), age.event

* How many, and how much: `release_count`, `release_sum`, `release_mean`, `release_histogram`, `release_quantiles`.
* Features for a model: `standardize`.
* A model on private validation data: `release_accuracy`, and `PrivateMetric` for `dpx.fit(..., evaluate_private=)`.

The arguments that all of them take:

noise_multiplier: float, positive, of the noise, relative to what one example, or one user, moves. Or a `dpx.Budget`:
    the least noise with which `steps` releases like this one are within it.
key: a secret PRNG key, (), of this release alone. The same question about the same data has the same noise, so to
    repeat it costs nothing; another one with this key is refused. Whether it is refused shows whether the data are the
    same, which epsilon does not cover: take a new key for other data.
noise: "gaussian" or "laplace". None is, for a budget without a ledger, the one that deviates less, and Gaussian
    otherwise, because Laplace releases are expensive in a ledger. Laplace noise of multiplier b costs epsilon 1 / b at
    delta 0.
words: what is released, in one line, for its record.
ledger: a `dpx.PrivacyLedger`, in which the release is paid for before it is made, for all records that a person owns
    by its terms. part: the name of the part of the data, as for the ledger.

They raise ValueError for data that are not numbers of this shape, for arguments outside their ranges, for a key that
has made another release, for noise so large or so small that the proof has no room, and where the ledger does.

What one unit moves is bounded in whole numbers (`sums.py`, `quantiles.py`), the noise has the privacy that is stated to
the last bit (`noise.py`), and `released.py` has the record of a release. Values are read on the host, in float64.
"""

from dpx.statistics.metrics import PrivateMetric as PrivateMetric
from dpx.statistics.metrics import release_accuracy as release_accuracy
from dpx.statistics.quantiles import Quantiles as Quantiles
from dpx.statistics.quantiles import release_quantiles as release_quantiles
from dpx.statistics.released import Release as Release
from dpx.statistics.released import Statistic as Statistic
from dpx.statistics.sums import Scaling as Scaling
from dpx.statistics.sums import release_count as release_count
from dpx.statistics.sums import release_histogram as release_histogram
from dpx.statistics.sums import release_mean as release_mean
from dpx.statistics.sums import release_sum as release_sum
from dpx.statistics.sums import standardize as standardize

"""Statistics of private data, with the same exact noise as training, and with a cost that composes with a run's.

    budget = dpx.Budget(epsilon=0.1, delta=1e-6, steps=1)
    noise = {"noise_multiplier": budget, "key": dpx.secret_key()}
    age = dpx.statistics.release_mean(table[:, 0], low=0, high=100, **noise)
    age.value, age.interval(0.95), age.event

* Describe data: `release_count`, `release_sum`, `release_mean`, `release_histogram`, `release_quantiles`.
* Scale the features that a model reads: `standardize`.
* Evaluate on private validation data: `release_accuracy`, and `PrivateMetric` for `dpx.fit(..., evaluate_private=)`.

All of them take these arguments:

noise_multiplier: positive float, the noise relative to the most that one example or user can change. Or a `dpx.Budget`,
    which finds the least noise that keeps `steps` releases like this one within it.
key: a secret scalar PRNG key for this release alone. Repeating a question on the same data repeats its noise and costs
    nothing; any other question with this key is refused. Whether a repeat is refused reveals whether the data changed,
    which epsilon does not cover, so take a new key for other data.
noise: "gaussian" or "laplace". None picks the smaller of the two for a budget without a ledger, and Gaussian otherwise,
    because Laplace releases are expensive in a ledger. Laplace noise of multiplier b costs epsilon 1 / b at delta 0.
words: one line that says what is released, for its record.
ledger: a `dpx.PrivacyLedger`, which is charged before the release is made, for all records that its terms allow one
    person to own. part: the name of the part of the data, as for the ledger.

They raise ValueError if the data are not numbers of this shape, an argument is out of range, the key has already made
another release, the noise is too large or too small for the proof, or the ledger refuses the release.

The effect of one unit is bounded in whole numbers (`sums.py`, `quantiles.py`), and the stated privacy holds for every
bit of the noise (`noise.py`). `released.py` has the record of a release. Values are read on the host, in float64.
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

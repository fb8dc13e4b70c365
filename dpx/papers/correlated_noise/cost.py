"""The cost of a run whose noise is correlated over the steps, in real numbers and for the released bits.

Let C be lower triangular and Toeplitz, c_0 = 1, and let S_t be the sum of clipped gradients in step t. A step draws
fresh normals g_t, and releases r_t, the value y_t + tau g_t rounded to the public grid (`dpx.keys.release`), where

    banded C:           n_t = r_t - S_t,   y_t = S_t - sum_(j > 0) c_j n_(t-j)                                   (1)
    banded inverse d:   m_t = r_t - y_t,   y_t = S_t + sum_(j > 0) d_j m_(t-j)                                   (2)

**Both are y_t = (C S)_t - sum_(j > 0) c_j r_(t-j).** For (1), insert n = r - S. For (2), r - S = C^-1 m, so m = C r - C
S, and y = r - m. The last sum contains only earlier releases. So a step is a plain Gaussian release of (C S)_t with
fresh noise, shifted by a public value, and the noise of the run is r - S = C^-1 (tau g + the rounding of the grid).

**No noise is used again.** n and m are functions of the data and of earlier releases. Given these, the normals of a
step are fresh, as the theorem of `arithmetic.py` requires at every release. So the cost holds for the bits.

**The shift.** One example moves the vector C S by at most `sensitivity` clip norms (`strategy.py`), for any
gradients, even those that depend on the releases, because the bound holds for every path. If the means of a sequence of
Gaussians are chosen one after the other, and differ by v_t with sum |v_t|^2 <= mu^2, the sequence is a function of
N(0, 1) or N(mu, 1), and of noise that does not depend on the example (Denisov et al. 2022, arXiv:2202.08312, theorem
2.1). So a run in a fixed order costs ONE Gaussian release.

**Cyclic Poisson sampling** (arXiv:2306.08153, theorem 4). Let C have at most b bands, and let the b groups be public.
The example has a coin in every b-th step, and by (1) its gradient g of step s moves y_s, ..., y_(s + b - 1) by c_0 g,
..., c_(b-1) g, and nothing later, because c ends. So the b steps from s on share one coin, with rate q b. If it is
heads, their shift is at most |c| clip norms, otherwise 0, and g is fixed at step s. That is one Poisson-sampled
Gaussian, and the next b steps are another. The steps before the first s do not depend on the example. If C is full, the
coin of s moves all later steps, and nothing is proved.

**Pairs of normals that are bad for the other data set** (`far` in `arithmetic.py`). Given the earlier releases, the
memory is fixed for each data set, so the example moves y_t by a fixed v_t, and |v_t| is at most the shift of the whole
run, rounding included: `largest_shift`. For cyclic sampling, let all coins but the example's be public. Then y_t has
two possible values: among the rows of the memory that y_t reads, only n_s contains the example, and the releases of the
other b - 1 steps are given. So the outputs that are good for both values are those of the theorem.

**Rounding.** S_t is exact in float64, because it is defined as what the program computes. The memory and y_t are
rounded to two float32 numbers, with relative errors of at most v = 2^-48 + (p + 3) 2^-52 for p weights. These are
functions of data and releases, so they belong to the shift: they move y_t by e_t. In steps where the example moves
nothing in the memory, all bits are the same.

    (1)  |e_t| <= v (|S_t| + 2 L |n|),                    L = sum_(j > 0) |c_j|,    |n| <= |d|_1 (N tau + C)
    (2)  e = C (eta - epsilon) + epsilon, |eta_t| <= v (|S_t| + L |m|), |epsilon_t| <= v |m|,  L = sum_(j > 0) |d_j|

where N = 13.3 sqrt(numbers), because the normals end at 13.16 deviations and a cell is at most 1/16 of one. The added
clip norm covers r_t, a float32 number, and m of the neighboring data, which C S moves. A batch has at most 2^24
examples that count. `rounding_shift_bound` sums up over the steps, and doubles the result because both data sets round.
"""

import math

import attrs
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpx.accounting.checks import Relation
from dpx.accounting.loss import PrivacyLoss, ReleaseCount, in_deviations
from dpx.accounting.pld.losses import SampledGaussian, StepLoss
from dpx.keys.noise import LARGEST_RELEASE
from dpx.papers.correlated_noise.strategy import Strategy
from dpx.sampling.varying import CyclicPoissonSampling
from dpx.values import require_number, require_whole

_FARTHEST = 13.3 * math.sqrt(LARGEST_RELEASE)  # N
_MOST_ROWS = 2.0**24


@attrs.frozen
class CorrelatedGaussianDpEvent(DpEvent, PrivacyLoss):
    """The first steps of a run with correlated noise, in a fixed order or on full batches.

    noise_multiplier: s, that of one step: the standard deviation of z over the clip norm, less what rounding costs.
        sensitivity: that of C for these steps. steps: int. coefficients, inverse_coefficients: floats, of C and its
        inverse. dp-accounting's accountants refuse this event.
    """

    noise_multiplier: float
    sensitivity: float
    steps: int
    coefficients: tuple[float, ...]
    inverse_coefficients: tuple[float, ...]

    @property
    def release_count(self) -> ReleaseCount:
        return ReleaseCount(self.steps, float(self.steps))

    def largest_shift(self, relation: Relation) -> float:
        """The most that one example moves a release, given the earlier ones, in deviations of the fresh noise."""
        return in_deviations(self.sensitivity, self.noise_multiplier)

    def step_loss(self, relation: Relation) -> StepLoss:
        _require_zero_out(relation)
        return SampledGaussian(self.noise_multiplier / self.sensitivity, 1.0, relation)


@attrs.frozen
class CyclicBandedDpEvent(DpEvent, PrivacyLoss):
    """One round of cyclic Poisson sampling with a banded C: one release for each group, and one coin per example.

    noise_multiplier: the standard deviation of z, divided by the clip norm and the norm of c, less what rounding costs.
        sampling_probability: the rate of the coin. releases: int, in one round. coefficients: c, floats.
        dp-accounting's accountants refuse this event.
    """

    noise_multiplier: float
    sampling_probability: float
    releases: int
    coefficients: tuple[float, ...]

    @property
    def release_count(self) -> ReleaseCount:
        return ReleaseCount(self.releases, float(self.releases))

    def largest_shift(self, relation: Relation) -> float:
        """See `CorrelatedGaussianDpEvent.largest_shift`."""
        return in_deviations(1, self.noise_multiplier)

    def step_loss(self, relation: Relation) -> StepLoss:
        _require_zero_out(relation)
        return SampledGaussian(self.noise_multiplier, self.sampling_probability, relation)


def _require_zero_out(relation: Relation) -> None:
    if relation != "zero_out":
        words = "one example replaced by a null in all its steps"
        raise ValueError(f'correlated noise has a known cost only under relation "zero_out", {words}; got {relation!r}')


def rounding_shift_bound(
    column: np.ndarray, inverse: np.ndarray, *, banded: bool, terms: int, steps: int, noise_multiplier: float
) -> float:
    """Bounds how far rounding moves the releases of neighboring data sets apart, in deviations of z: see the module.

    column, inverse: the first columns of C and C^-1 for the run, float64. banded: whether C is banded, as in (1).
        terms: int, of the fed-back sum. steps: int, in how many steps the data sets differ. noise_multiplier: s.
    """
    unit, twice = 2.0**-48 + (terms + 3) * 2.0**-52, 2 * math.sqrt(steps)
    of_c, of_inverse = float(np.abs(column).sum()), float(np.abs(inverse).sum())
    if banded:
        by_noise = 2 * (of_c - 1) * of_inverse
        by_sum = _MOST_ROWS + 2 * by_noise
        return twice * unit * (by_sum / noise_multiplier + by_noise * _FARTHEST)
    largest = 1 + math.sqrt(steps) * of_c  # |m| in clip norms, without noise: one gradient moves it by `of_c`
    by_noise = of_c * of_inverse + 1
    return twice * unit * ((of_c * _MOST_ROWS + by_noise * largest) / noise_multiplier + by_noise * _FARTHEST)


def cyclic_poisson_event(
    strategy: Strategy, *, examples: int, batch_size: float, groups: int, steps: int, noise_multiplier: float
) -> DpEvent:
    """Returns the event of a whole run with noise C^-1 z, for a banded C and cyclic Poisson sampling.

    strategy: C. examples: int. batch_size: expected, above 0. groups: int, at least the bands of C. steps: int, in all.
    noise_multiplier: the standard deviation of z, divided by the clip norm and by `column_norm(strategy, steps=steps)`.
    Raises ValueError as `CyclicPoissonSampling` does, and if C has more bands than there are groups, as a dense C (of a
    banded inverse) always has.
    """
    sampling = CyclicPoissonSampling(examples=examples, batch_size=batch_size, bands=groups)
    require_bands_fit_groups(strategy, sampling)
    noise = require_number("noise_multiplier", noise_multiplier, minimum=0)
    return sampling.event(np.full(require_whole("steps", steps), noise))


def require_bands_fit_groups(strategy: Strategy, sampling: CyclicPoissonSampling) -> None:
    """Raises ValueError unless C has at most as many bands as the sampling has groups."""
    if strategy.bands is None or strategy.bands > sampling.bands:
        found = f"{strategy.bands} bands"
        if strategy.bands is None:  # of lambda_cgd and banded_inverse_square_root
            found = "a banded inverse, where C is full: take optimized(bands=...), or FixedOrder or ShuffledEpochs"
        words = f"the groups of {sampling}, because the steps of a group must not share noise"
        raise ValueError(f"strategy must have at most {sampling.bands} bands, {words}; got {found}")


def fixed_order_event(*, noise_multiplier: float) -> DpEvent:
    """Returns the event of a whole run with noise C^-1 z in a fixed order: one Gaussian release.

    noise_multiplier: the standard deviation of z, divided by the clip norm and by the `sensitivity` of C in this order.
    """
    return GaussianDpEvent(require_number("noise_multiplier", noise_multiplier, minimum=0))

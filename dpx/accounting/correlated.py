"""A run of Gaussian releases whose noise is correlated over the steps: one Gaussian release of the whole run.

Step t releases S_t + s C_clip sum_j d_j z_(t-j), where S_t is the sum of clipped gradients and C^-1 is the Toeplitz
matrix of d. All releases together are C^-1 (C S + s C_clip z): a function of C S plus independent noise of the standard
deviation s C_clip. One example moves C S by at most `sensitivity` times C_clip (`dpx/strategies/sensitivities.py`), so
the run is the Gaussian mechanism of noise multiplier s / sensitivity. That S_t depends on the earlier releases changes
nothing (Denisov et al. 2022, arXiv:2202.08312, theorem 2.1), because C is lower triangular: row t of C S is a function
of S_0, ..., S_t, and the law of z is the same in all directions. So are the first steps of a longer run.

This is for noise of real numbers. For the bits of the releases, the theorem of `arithmetic.py` needs fresh normals in
every release, and here they are used again. So what it adds to the bill is a sum, not a proof.
"""

import attrs
from dp_accounting import DpEvent

from dpx.accounting.checks import Relation
from dpx.accounting.pld.losses import SampledGaussian
from dpx.accounting.releases import Released, register


@attrs.frozen
class CorrelatedGaussianDpEvent(DpEvent):
    """The first steps of a run of correlated noise.

    noise_multiplier: of one step, s: the standard deviation of z over the clip norm. sensitivity: of C for these steps.
    steps: int. noise_weights: d, floats. dp-accounting's accountants refuse this event.
    """

    noise_multiplier: float
    sensitivity: float
    steps: int
    noise_weights: tuple[float, ...]


def _read(event: CorrelatedGaussianDpEvent, relation: Relation) -> SampledGaussian:
    if relation != "zero_out":
        words = "one example replaced by a null in all its steps"
        raise ValueError(f'correlated noise is billed under relation "zero_out" only, {words}; got {relation!r}')
    return SampledGaussian(event.noise_multiplier / event.sensitivity, 1.0, relation)


register(CorrelatedGaussianDpEvent, _read, released=lambda event: Released(event.steps, float(event.steps)))


def of_bits(event: DpEvent) -> tuple[str, ...]:
    """What a report says of an event that holds correlated noise anywhere, one sentence; () for others."""
    if CorrelatedGaussianDpEvent.__name__ not in repr(event):
        return ()
    return (
        "The guarantee is for noise of real numbers only: the noise is correlated over the steps, and there is "
        "no proof for the bits of the released numbers.",
    )

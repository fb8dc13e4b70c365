"""The events of runs of correlated noise. The noise multiplier s is before the factor of the sensitivity.

* Cyclic Poisson sampling (arXiv:2306.08153, theorem 4): the examples are in `groups` groups, fixed for the run; step t
  draws each example of group t mod `groups` with the probability `groups` * batch_size / examples. C has at most
  `groups` bands, and the noise z of a step has the deviation s * clip norm * `column_norm`. The columns of C at the
  steps of one group are orthogonal, so a run is ceil(steps / groups) releases of a Poisson-sampled Gaussian.
* A fixed order: the noise z has the deviation s * clip norm * `sensitivity`. The whole run is ONE Gaussian release.

Both hold for gradients that depend on all earlier releases, and for zero-out neighbors: a null takes the place of an
example in all of its steps. The number of steps is fixed in advance.
"""

from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from dpx.strategies.strategy import Strategy
from dpx.validation import require_number, require_whole


def cyclic_poisson_event(
    strategy: Strategy, *, examples: int, batch_size: float, groups: int, steps: int, noise_multiplier: float
) -> DpEvent:
    """The event of a whole run with a banded C and cyclic Poisson sampling.

    examples: int. batch_size: expected, above 0. groups: int, at least the bands of C. steps: of the run, int.
    noise_multiplier: the deviation of z is this times the clip norm times `column_norm(strategy, steps=steps)`.

    Raises ValueError for a C with more bands than groups (a banded inverse has a full C), and if
    groups * batch_size > examples, because a probability is at most 1.
    """
    groups, examples = require_whole("groups", groups), require_whole("examples", examples)
    batch_size = require_number("batch_size", batch_size, minimum=0, exclusive=True)
    bands = strategy.bands
    if bands is None or bands > groups:
        words = "a full C, of a banded inverse" if bands is None else f"{bands} bands"
        raise ValueError(f"C must have at most {groups} bands, the number of groups, got {words}")
    if groups * batch_size > examples:
        raise ValueError(f"groups * batch_size must be at most {examples} examples, got {groups} * {batch_size}")
    noise = GaussianDpEvent(require_number("noise_multiplier", noise_multiplier, minimum=0))
    sampled = PoissonSampledDpEvent(groups * batch_size / examples, noise)
    releases = -(-require_whole("steps", steps) // groups)
    return SelfComposedDpEvent(sampled, releases) if releases > 1 else sampled


def fixed_order_event(*, noise_multiplier: float) -> DpEvent:
    """The event of a whole run in a fixed order: one Gaussian release.

    noise_multiplier: the deviation of z is this times the clip norm times `sensitivity`, for the participations and the
    separation of the order.
    """
    return GaussianDpEvent(require_number("noise_multiplier", noise_multiplier, minimum=0))

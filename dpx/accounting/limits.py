"""Why no noise multiplier meets a budget, or none that uses all of it: what the arithmetic of the noise adds at any."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping

from dpx.accounting.arithmetic import Answer

_NEARLY = 0.9  # of a budget: a calibration that ends below has met a cost that jumps to infinity


@contextlib.contextmanager
def explained(budget: float, answers: Mapping[float, Answer]) -> Iterator[None]:
    """Adds to the message of a budget that no noise multiplier meets what most of it is spent on.

    answers: the costs that were found, by noise multiplier.
    """
    try:
        yield
    except ValueError as error:
        most = answers[max(answers)].of_epsilon if answers else 0.0
        if budget / 2 < most < math.inf:
            words = f"at any noise, {most:.3g} of epsilon is for the rounding of so many releases (docs/exact.md)"
            error.args = (f"{error}; {words}",)
        raise


def warn_of_a_jump(budget: float, found: float, answers: Mapping[float, Answer]) -> None:
    """Warns the user, two calls up, if the least noise multiplier of a finite cost leaves much of the budget."""
    below = [noise for noise in answers if noise < found]
    if below and (cost := answers[found].epsilon) < _NEARLY * budget and answers[max(below)].epsilon == math.inf:
        warnings.warn(
            f"epsilon={budget} buys no less noise than {cost:.6g}: below noise_multiplier={found:.6g} an example could "
            "move a release to where the noise of a program ends, so no cost is known at this delta",
            stacklevel=3,
        )

"""The epsilon of a DP-SGD run from its numbers alone: no mechanism, no key, and a run of any library."""

from typing import Any, Literal

import numpy as np

from dpx.accounting import checks
from dpx.accounting.bill import of_records
from dpx.accounting.checks import Accountant
from dpx.accounting.events import billed
from dpx.keys.noise import LARGEST_RELEASE
from dpx.sampling.poisson import PoissonSampling
from dpx.sampling.schemes import FixedSizeSampling, FullBatch, Sampling, ShuffledEpochs
from dpx.scalars import over
from dpx.trees import described
from dpx.validation import require_number, require_whole

SamplingName = Literal["poisson", "fixed", "shuffled"]
_RECORDS: dict[str, Any] = {"poisson": PoissonSampling, "fixed": FixedSizeSampling, "shuffled": ShuffledEpochs}


def dp_sgd_epsilon(
    *,
    examples: int,
    batch_size: float,
    noise_multiplier: Any,
    delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: SamplingName = "poisson",
    accountant: Accountant = "tightest",
    records: int = 1,
    numbers: int = LARGEST_RELEASE,
    exact_noise: bool = False,
) -> float:
    """An upper bound of epsilon at `delta` for a run of DP-SGD, also one that is over or of another library.

        >>> run = {"examples": 60_000, "batch_size": 256, "noise_multiplier": 1.1, "epochs": 15}
        >>> dpx.accounting.dp_sgd_epsilon(**run, delta=1e-5)
        1.134...
        >>> dpx.accounting.dp_sgd_epsilon(**run, delta=1e-5, sampling="shuffled")
        20.562...

    examples: int, of the data set. batch_size: the expected one, in (0, examples]; whole unless sampling is "poisson".
    noise_multiplier: the standard deviation of the noise on the SUM of the clipped gradients of a batch, divided by the
        clip norm: a float of at least 0, where 0 bills infinity; a function of the step; or one for each step, float
        (steps,), in place of steps and epochs. With "shuffled", it is a number, or the smallest one of each epoch,
        float (epochs,).
    delta: in (0, 1), best far below 1 / examples. A larger one warns.
    steps: int, at least 0: give it if you know it. epochs: float, positive, in place of steps, which are then
        epochs * examples / batch_size, rounded up.
    sampling: how the batches were REALLY drawn, and what epsilon then protects against.
        "poisson": each example takes part in a step by a coin of its own; nulling one example.
        "fixed": a new random subset of `batch_size` examples at every step; replacing one example.
        "shuffled": the usual data loader, where each example takes part at most once an epoch, in any order. Then no
        amplification is proved; setting one example's contribution to zero. Needs epochs, because loaders differ in
        the steps of an epoch.
    accountant: as for `dpx.epsilon`, which says the same of such a run of dpx (up to the rounding of the noise
        multiplier to float32, in which dpx adds it).
    records: int, at least 1, how many of the examples one person owns at most whom epsilon is for, as for
        `dpx.epsilon`. Above 1, sampling must be "poisson".
    numbers: int, at most 2^32, how many numbers a step releases at most: the parameters that are trained.
    exact_noise: whether the noise counts as real numbers. False adds what the arithmetic of dpx's noise costs, which is
        not true of another library: of its noise in floating point, no cost is proved. For a run of one, say True.

    Raises ValueError for arguments outside these ranges, and for several records with another sampling.
    """
    if sampling not in _RECORDS:
        raise ValueError(f"sampling must be one of {tuple(_RECORDS)}, got {described(sampling)}")
    record: Sampling = _RECORDS[sampling](examples=examples, batch_size=batch_size)
    drawn, records = record, require_whole("records", records)
    if sampling == "shuffled":
        if steps is not None or callable(noise_multiplier):
            raise ValueError(
                'sampling "shuffled" needs epochs, and a noise multiplier that is a number or the smallest of each '
                "epoch, because loaders differ in the steps of an epoch"
            )
        record = FullBatch(examples=record.examples)  # an epoch costs as much as one step on all examples
    multipliers = _multipliers(noise_multiplier, record, steps, epochs)
    checks.warn_of_large_delta(delta, record)
    relation = checks.require_relation(record.relation)
    event = of_records(record.event(multipliers), drawn, relation, records)
    numbers = checks.require_numbers(numbers, exact_noise)
    return billed(event, accountant=accountant, relation=relation, numbers=numbers).epsilon(delta)


def _multipliers(noise: Any, record: Sampling, steps: Any, epochs: Any) -> np.ndarray:
    """The noise multiplier of each step, float64 (steps,)."""
    checks.require_concrete("noise_multiplier", noise)
    each = not callable(noise) and np.ndim(noise) > 0
    if (steps is not None) + (epochs is not None) + each != 1:
        given = f"steps {described(steps)}, epochs {described(epochs)} and {described(noise)}"
        raise ValueError(f"exactly one of steps, epochs and an array of noise multipliers must be given, got {given}")
    if each:
        return checks.require_schedule(noise, 1.0, None)[0]
    length = require_whole("steps", steps, minimum=0) if epochs is None else record.steps(epochs=epochs)
    if callable(noise):
        return checks.require_schedule(over(noise, length), 1.0, None)[0]
    return np.broadcast_to(require_number("noise_multiplier", noise, minimum=0), (length,))

"""What is the same for every event of dp-accounting: a form that can be a key, and whether it costs nothing."""

from typing import Any

import attrs
import dp_accounting
import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent


def hashable(value: Any) -> Any:
    """An event with tuples in place of the lists and arrays in it, and in the events in it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(hashable(item) for item in value)
    if not isinstance(value, DpEvent) or not attrs.has(type(value)):
        return value
    try:
        hash(value)
        return value
    except TypeError:
        return attrs.evolve(value, **{a.alias: hashable(getattr(value, a.name)) for a in attrs.fields(type(value))})


def is_free(event: Any) -> bool:
    """Whether nothing is released, or nobody takes part."""
    if isinstance(event, MixtureOfGaussiansDpEvent):
        alike = np.shape(event.sensitivities) == np.shape(event.sampling_probs)
        return alike and not np.any(np.multiply(event.sensitivities, event.sampling_probs))
    free = isinstance(event, PoissonSampledDpEvent) and event.sampling_probability == 0
    free |= isinstance(event, SampledWithoutReplacementDpEvent) and event.sample_size == 0
    return free or isinstance(event, dp_accounting.NoOpDpEvent)

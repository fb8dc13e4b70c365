"""Shares facts and errors among the processes of one run.

Every process must call these functions at the same points of the run. With one process, nothing is sent.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpx.values import number_for_json

BLOCK = 1024  # bytes; texts are padded to multiples of it, because each new length is compiled again


def from_every_process(value: Any) -> list[Any]:
    """Returns the `value` of every process, in order. value: anything that JSON can hold."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value, default=number_for_json).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(text), np.int32))
    longest = -(-int(lengths.max()) // BLOCK) * BLOCK
    texts = multihost_utils.process_allgather(np.pad(text, (0, longest - len(text))))
    return [json.loads(row[:length].tobytes()) for row, length in zip(texts, lengths, strict=True)]


@contextlib.contextmanager
def raising_together() -> Iterator[None]:
    """Raises one process's error in all processes, because the others would otherwise wait forever."""
    try:
        yield
    except Exception as error:
        from_every_process(str(error) or type(error).__name__)
        raise
    for number, said in enumerate(from_every_process(None)):
        if said is not None:
            raise ValueError(f"process {number} ended the run: {said}")


def from_first_process(make: Callable[[], Any]) -> Any:
    """Calls `make` in process 0 only and returns its result, which JSON must be able to hold, in every process."""
    with raising_together():
        made = make() if jax.process_index() == 0 else None
    return from_every_process(made)[0]


def require_rows_in_every_process(sharding: Any):
    """Raises ValueError if a process holds no part of the batches: it would add the same noise to sums of its own."""
    devices = getattr(sharding, "device_set", ())
    if jax.process_count() > 1 and len({device.process_index for device in devices}) < jax.process_count():
        raise ValueError(
            f"sharding must have devices of all {jax.process_count()} processes, because they make one run; got "
            f"{sharding}. (For a run of its own in each process, do not call jax.distributed.initialize)"
        )


def require_same_in_processes(facts: dict[str, Any]):
    """Raises ValueError in every process if the facts of any process differ from those of process 0."""
    first, *others = from_every_process(facts)
    for number, theirs in enumerate(others, start=1):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            listing = "; ".join(f"{name} is {first.get(name)} in process 0, {theirs.get(name)}" for name in names)
            raise ValueError(f"every process must make the same run, but process {number} differs: {listing}")

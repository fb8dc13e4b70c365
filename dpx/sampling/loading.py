"""Loads the batches of a run ahead of its steps: cuts them into chunks, puts them on devices, and runs the thread that
reads them. With several processes, each draws the same batches from the key, and reads only the rows for its own
devices."""

import atexit
import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpx import keys
from dpx.sampling.batch import Batch, Draw, pad_draw, record_draw, round_up
from dpx.sampling.data import CheckedData
from dpx.states.record import DrawRecord, fingerprint
from dpx.values import described, require_whole

Piece = tuple[Draw, DrawRecord, bool]  # rows of a batch or chunk, how it was drawn, and whether it ends its step
SETTINGS = ("enable_x64", "default_device")  # jax settings that `with` sets for the current thread only


@dataclass(frozen=True, kw_only=True)
class LoadingSettings:
    """How batches are loaded: arguments of `Sampling.batches`. Raises ValueError if they contradict each other."""

    chunk_size: int | None
    sharding: jax.sharding.Sharding | None
    prefetch: int
    size: int | None

    def __post_init__(self):
        require_whole("prefetch", self.prefetch, minimum=0)
        for name in ("chunk_size", "size"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        if self.chunk_size is not None and self.size is not None:
            raise ValueError(
                f"size must be None with chunk_size, which fixes the rows of a chunk; got {described(self.size)}"
            )
        sharding, kinds = self.sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding
        if sharding is not None and (
            not isinstance(sharding, kinds)
            or (isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > 1)
        ):
            raise ValueError(
                "sharding must split axis 0 alone, such as NamedSharding(mesh, PartitionSpec('data')), because every "
                f"array of a batch has the examples there; got {described(sharding)}"
            )
        if sharding is not None and not sharding.addressable_devices:
            raise ValueError(f"sharding must have devices of this process, got {described(sharding)}")

    @property
    def shard_count(self) -> int:
        """The number of parts into which the rows are cut."""
        if self.sharding is None:
            return 1
        return self.sharding.num_devices // self.sharding.shard_shape((self.sharding.num_devices,))[0]


def load_batches(sampling: Any, data: Any, key: jax.Array, steps: range, loading: LoadingSettings) -> Generator[Any]:
    """Yields the batch of each of `steps`, drawn by a sampling, or an iterator over its chunks.

    Raises ValueError if the data's length is not the sampling's, and if processes that load a batch together differ in
    their sampling, data, key or steps.
    """
    examples = CheckedData(data, sampling.examples, key)
    require_same_run_in_processes(sampling, examples, steps, loading.sharding)

    def load():
        for step in steps:
            draw = sampling.draw(key, step, size=loading.size)
            whole = record_draw(sampling, key, step, draw.included, examples.unit)
            for some, drawn, last in split_draw(draw, whole, loading):
                yield load_batch(examples, some, drawn, loading.sharding), last

    loaded = prefetched(load(), loading.prefetch) if loading.prefetch else load()
    return yield_whole_batches(loaded) if loading.chunk_size is None else yield_batch_chunks(loaded, len(steps))


def require_same_run_in_processes(
    sampling: Any, examples: CheckedData, steps: range, sharding: jax.sharding.Sharding | None
):
    """Raises ValueError if the processes whose devices share a batch differ in their sampling, data, key or steps:
    then two of them could load the same example, which would count twice."""
    if sharding is None or len({device.process_index for device in sharding.device_set}) < max(2, jax.process_count()):
        return
    own = {"key": int(keys.mark_of_key(examples.key)), "first step": steps.start, "end": steps.stop}
    own |= {"sampling": fingerprint(sampling), "data": examples.keyed_hash()}
    everyone = np.asarray(multihost_utils.process_allgather(np.array(list(own.values()), np.uint32)))
    differ = [f"{name} {of.tolist()}" for name, of in zip(own, everyone.T, strict=True) if (of != of[0]).any()]
    if differ:
        raise ValueError(
            "every process must have the same key (dpx.secret_key(seed) with one seed), sampling, data in the same "
            f"order, state and steps; got these numbers or marks in the processes: {', '.join(differ)}"
        )


def split_draw(draw: Draw, drawn: DrawRecord, loading: LoadingSettings) -> Iterator[Piece]:
    """Yields what is loaded at once: the whole draw of a step, or one or more chunks of it, all of the same size."""
    if loading.chunk_size is None:
        yield pad_draw(draw, round_up(len(draw.indices), loading.shard_count)), drawn, True
        return
    size = round_up(loading.chunk_size, loading.shard_count)
    whole = pad_draw(draw, round_up(len(draw.indices), size))
    for start in range(0, len(whole.indices), size):
        own, rows = drawn._replace(first_row=np.uint32(start)), slice(start, start + size)
        yield Draw(whole.indices[rows], whole.included[rows]), own, start + size >= len(whole.indices)


def load_batch(examples: CheckedData, draw: Draw, drawn: DrawRecord, sharding: jax.sharding.Sharding | None) -> Batch:
    """Loads a batch onto its devices. If it is sharded, this process reads only the rows for its own devices."""
    if sharding is None:
        return jax.device_put(Batch(examples.read_included_rows(*draw, int(drawn.step)), draw.included, drawn))
    size = len(draw.indices)
    shards = sharding.addressable_devices_indices_map((size,)).values()
    own = np.unique(np.concatenate([np.arange(size)[shard] for shard in shards if shard is not None]))

    def spread(leaf):
        def shard(index):
            start, stop, _ = index[0].indices(size)
            first = np.searchsorted(own, start)
            return leaf[first : first + stop - start]

        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, shard, dtype)

    everywhere = sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    rows = jax.tree.map(np.asarray, examples.read_included_rows(draw.indices[own], draw.included[own], int(drawn.step)))
    whole = [jax.make_array_from_callback((), everywhere, lambda _, number=number: number) for number in drawn]
    return Batch(jax.tree.map(spread, rows), spread(draw.included[own]), DrawRecord(*whole))


def yield_whole_batches(loaded: Generator[tuple[Batch, bool]]) -> Generator[Batch]:
    """Yields the batches, and closes their loader at the end."""
    with contextlib.closing(loaded):
        yield from (batch for batch, _ in loaded)


def yield_batch_chunks(loaded: Generator[tuple[Batch, bool]], steps: int) -> Generator[Iterator[Batch]]:
    """Yields the chunks of each step. Raises ValueError if a step's chunks are not all used: the cost counts them."""

    complete = False

    def chunks():
        nonlocal complete
        for batch, complete in loaded:
            yield batch
            if complete:
                return
        raise ValueError("the chunks of a batch must be used before the iterator of the batches is closed")

    with contextlib.closing(loaded):
        for _ in range(steps):
            complete = False
            yield chunks()
            if not complete:
                raise ValueError("every chunk of a batch must be used before the next batch: the cost counts all")


def prefetched(items: Iterator[Any], depth: int) -> Generator[Any]:
    """Yields `items`; a thread prepares up to `depth` of them ahead, and stops when this generator is closed."""
    ready, room, stopped = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event()
    end = object()
    settings = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}

    def fill_queue():
        try:
            with contextlib.ExitStack() as stack:
                for name, value in settings.items():
                    stack.enter_context(getattr(jax, name)(value))
                while room.acquire() and not stopped.is_set():
                    ready.put((item := next(items, end), None))
                    if item is end:
                        return
        except BaseException as error:  # raised again by the consumer
            ready.put((end, error))

    thread = threading.Thread(target=fill_queue, name="dpx batches", daemon=True)

    def stop():
        stopped.set()
        room.release()
        if thread is not threading.current_thread():  # false if the garbage collector runs there
            thread.join(timeout=5)  # seconds, for an item that is being read

    thread.start()
    atexit.register(stop)
    try:
        while True:
            item, error = ready.get()
            room.release()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        if not stopped.is_set():  # already set when Python exits, and modules are gone
            atexit.unregister(stop)
            stop()

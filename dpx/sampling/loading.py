"""Reads rows of a data set, from arrays or from a source that gives one example at a time, and loads the batches of a
run ahead of its steps: cuts them into chunks, puts them on devices, and runs the thread that reads them.

A row may depend only on its number or, for random items, also on the step and the key of the batches. Then the coins of
one example cannot change the row of another, and a step that is repeated after a kill or an exception reads the same
rows. dpx cannot prove this of a source, so it reads some rows a second time, each one alone and the last one first.

With several processes, each draws the same batches from the key, and reads only the rows for its own devices.
"""

import atexit
import contextlib
import functools
import hashlib
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpx import keys
from dpx.sampling.batch import Batch, Draw, pad_draw, record_draw, round_up, zero_excluded_rows
from dpx.states.record import DrawRecord, fingerprint
from dpx.values import (
    Tree,
    advice_to_stack,
    batch_size,
    described,
    first_words,
    path_of,
    refuse_mask,
    require_arrays,
    require_whole,
)

Rows = Callable[[np.ndarray, np.ndarray, int], Tree]  # (indices int32 (B,), `included` bool (B,), step) -> rows

AGAIN = 16  # repeated readings: a random item flipped by a fair coin escapes them with probability 2^-16
FIRST, EVERY = 64, 256  # AGAIN readings per call for the first 64 rows of a source, then one reading per 256 rows
MARKED, MARKED_ITEMS = 64, 8  # how many rows of arrays, or items of a source, the mark reads, evenly spaced
_READ: dict[int, list[int]] = {}  # source id -> number of rows read so far, while the source is alive


def rows_of(data: Any, examples: int, key: jax.Array) -> Rows:
    """Returns a function (indices int32 (B,), `included` bool (B,), step) -> rows of `data`, a pytree of arrays with
    the B rows on axis 0, and zeros in the rows that are not included. So no program sees an example that was not drawn.

    data: a pytree of arrays with the examples on axis 0 of each, or a source as `Sampling.take` describes it.
    key: scalar key of the batches.
    Raises ValueError unless `data` holds `examples` examples. The returned function raises ValueError if the items of a
    source differ in structure, shape or dtype, and if a row differs when it is read again.
    """
    if (length := length_of(data)) != examples:
        users = ": for users, give the sampling examples=len(users)"
        hint = advice_to_stack(data) if unit_of(data) == "example" else users
        raise ValueError(f"data must hold the {examples} examples of the sampling, got {length}{hint}")
    if _is_data_source(data):
        read = _checking_repeats(data, _items_of(data, key))
    elif others := [leaf for leaf in jax.tree.leaves(data) if not isinstance(leaf, jax.Array | np.ndarray)]:
        # arrays in files, or computed when they are indexed
        read = _checking_repeats(
            others[0], lambda numbers, step: jax.tree.map(lambda leaf: read_rows(leaf, numbers), data)
        )
    else:

        def rows_of_arrays(indices, included, step):
            def of_leaf(leaf):
                if isinstance(leaf, jax.Array):
                    return _taken(leaf, indices, included)
                return _zero_excluded_in_place(read_rows(leaf, indices), included)

            return jax.tree.map(of_leaf, data)

        return rows_of_arrays
    return lambda indices, included, step: jax.tree.map(
        lambda leaf: _zero_excluded_in_place(leaf, included), read(indices, step)
    )


class CheckedData:
    """The examples of a run. rows: from `rows_of`, whose arguments and errors apply here. unit: from `unit_of`."""

    def __init__(self, data: Any, examples: int, key: jax.Array):
        self.data, self.examples, self.key = data, examples, key
        self.rows, self.unit = rows_of(data, examples, key), unit_of(data)

    def in_arrays(self) -> bool:
        return all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(self.data))

    @functools.cached_property
    def some_rows(self) -> Tree:
        """Returns MARKED rows of arrays, or MARKED_ITEMS of a source, whose items may be slow to read; on axis 0."""
        source = _is_data_source(self.data)
        places = np.unique(np.linspace(0, self.examples - 1, MARKED_ITEMS if source else MARKED).astype(np.int32))
        if source:
            return self.rows(places, np.ones(len(places), bool), 0)
        return jax.tree.map(lambda leaf: read_rows(leaf, places), self.data)

    def mark(self) -> int:
        """A keyed hash of some rows, and of who owns the rows of a source; it reveals nothing without `key`.
        Two data sets that differ in these have different marks, except with probability 2^-32.

        It detects processes that loaded different parts of the data or another order, and a run that continues with
        other data, which would reveal the difference without noise.
        """
        rows = jax.tree.leaves(self.some_rows)
        leaves = [np.asarray(jax.random.key_data(leaf) if keys.is_key(leaf) else leaf) for leaf in rows]
        parts = [part for leaf in leaves for part in (f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes())]
        if hasattr(self.data, "identity_of_units"):
            parts += [repr(self.data.identity_of_units()).encode()]
        secret = np.asarray(keys.key_words(keys.stream(self.key, "first example"))).tobytes()
        return int(hashlib.blake2b(b"".join(parts), digest_size=4, key=secret).hexdigest(), 16)


def _checking_repeats(source: Any, read: Callable[[np.ndarray, int], Tree]) -> Callable[[np.ndarray, int], Tree]:
    """Wraps `read` to read some rows a second time. source: the object by which earlier readings are counted."""
    count = _READ.get(id(source), [0])
    if id(source) not in _READ:
        with contextlib.suppress(TypeError):  # raised if it does not support weak references
            weakref.finalize(source, _READ.pop, id(source), None)
            _READ[id(source)] = count

    def rows(indices, step):
        numbers, inverse = np.unique(indices, return_inverse=True)
        found = read(numbers, step)
        before, count[0] = count[0], count[0] + len(numbers)
        often = AGAIN if before < FIRST else int(before // EVERY < count[0] // EVERY)
        for place in [-1 - turn % len(numbers) for turn in range(often)]:
            alone = read(numbers[[place]], step)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
                if not isinstance(one, jax.Array) and one[place].tobytes() != other[0].tobytes():
                    raise ValueError(
                        "an item of data must be a function of its number alone, but one that was read again "
                        "differed. For random items (augmentation), give the source a method random_item(number, "
                        "rng), and take all its random numbers from rng; or see dpx.augmented"
                    )
        return jax.tree.map(lambda leaf: leaf[inverse], found)

    return rows


def generators_of_items(key: jax.Array, step: int) -> Callable[[int], np.random.Generator]:
    """Returns a function from an item's number to its random generator, for one step of a run.

    The generator is numpy's Philox, with the 128-bit key of the "items" stream of the scalar `key` at this step; each
    item has its own 2^192 blocks. So the random numbers do not depend on which items are read, when or where. They may
    be public, because nothing else uses the stream, and it reveals nothing about `key` or its other streams.
    """
    words = np.asarray(keys.key_words(keys.stream(key, "items", step))).astype(">u4").tobytes()
    return lambda number: np.random.Generator(np.random.Philox(key=int.from_bytes(words), counter=number << 192))


_taken = jax.jit(lambda array, indices, included: zero_excluded_rows(array[indices], included))


def _zero_excluded_in_place(rows: Any, included: np.ndarray) -> Any:
    """Returns `zero_excluded_rows`; changes a numpy array in place, so the caller must hold the only reference."""
    if isinstance(rows, jax.Array):
        return zero_excluded_rows(rows, included)
    rows[~included] = 0
    return rows


def length_of(data: Any) -> int:
    """Returns how many examples `data`, arrays or a source, holds. Raises ValueError for anything else."""
    return len(data) if _is_data_source(data) else batch_size(data)


def unit_of(data: Any) -> str:
    """Returns the name of what one item of `data` is: its `privacy_unit`, which `dpx.UserData` has, or "example"."""
    unit = getattr(data, "privacy_unit", "example")
    return unit if isinstance(unit, str) else "example"


def _is_data_source(data: Any) -> bool:
    """Whether `data` is a source, read one item at a time. Raises ValueError unless it is one or holds arrays."""
    iterator = hasattr(data, "__next__")
    if not iterator:
        require_arrays(data)
    if not iterator and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(data)):
        return False
    gives = hasattr(data, "__getitem__") or hasattr(data, "random_item")
    one = jax.tree_util.all_leaves([data]) and not isinstance(data, str | bytes)
    if not iterator and one and hasattr(data, "__len__") and gives:
        return True
    advice = "convert lists of numbers to arrays, with numpy.asarray"
    if iterator or hasattr(data, "dataset") or (one and hasattr(data, "__iter__")):
        advice = "give what a loader or an iterator reads, because the sampling draws the batches"
    raise ValueError(
        "data must be a pytree of arrays with the examples on axis 0 of each, or a source with __len__ and "
        f"__getitem__(int); got {type(data)}: {advice}"
    )


def read_rows(array: Any, indices: np.ndarray) -> Any:
    """Reads rows of one array: a jax or numpy array, or one in a file."""
    if isinstance(array, jax.Array) or type(array) is np.ndarray:
        return array[indices]
    ascending, inverse = np.unique(indices, return_inverse=True)  # files read faster in order, or only then
    return np.asarray(array[ascending])[inverse]


def _copied(leaf: Any) -> np.ndarray:
    """Returns a copy, because a source may reuse its buffer. (torch tensors warn if they are given to `np.array`.)"""
    refuse_mask(leaf)
    return np.asarray(leaf).copy()


def _items_of(source: Any, key: jax.Array) -> Callable[[np.ndarray, int], Tree]:
    """Returns the function that reads items of a source. Reads item 0 at once, because all items must be like it."""
    chance, several = getattr(source, "random_item", None), getattr(source, "__getitems__", None)
    first = source[0] if chance is None else chance(0, generators_of_items(key, 0)(0))
    expected = _describe(jax.tree.map(np.asarray, first))
    kinds = [jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b" for _, dtype in expected[1]]
    if not kinds or not all(kinds):
        paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(first)]
        odd = first_words([path for path, good in zip(paths, kinds, strict=True) if not good])
        found = f", with no numbers in {odd}: encode words as numbers, or leave them out" * (odd != "")
        raise ValueError(f"an item of data must be a pytree of arrays and numbers, got {type(first)}{found}")

    def read(rows, step):
        numbers = rows.tolist()
        if chance is not None:
            random = generators_of_items(key, step)
            items = (chance(number, random(number)) for number in numbers)
        else:
            items = (source[number] for number in numbers) if several is None else several(numbers)
        items = [jax.tree.map(_copied, item) for item in items]
        if len(items) != len(numbers):
            raise ValueError(f"__getitems__ of data must give {len(numbers)} items, one for each row, got {len(items)}")
        for number, item in zip(numbers, items, strict=True):
            if (found := _describe(item)) != expected:
                raise ValueError(
                    "the items of data must be alike in structure, shapes and dtypes: row 0 has "
                    f"{_in_words(expected)}, row {number} has {_in_words(found)}"
                )
        return jax.tree.map(lambda *leaves: np.stack(leaves), *items)

    return read


def _describe(item: Tree) -> tuple[Any, list[tuple[tuple[int, ...], np.dtype]]]:
    leaves, structure = jax.tree.flatten(item)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _in_words(description: tuple[Any, list]) -> str:
    structure, leaves = description
    return str(jax.tree.unflatten(structure, [f"{dtype}{list(shape)}" for shape, dtype in leaves]))


Piece = tuple[Draw, DrawRecord, bool]  # rows of a batch or chunk, how it was drawn, and whether it ends its step
SETTINGS = ("enable_x64", "default_device")  # jax settings that `with` sets for the current thread only


@dataclass(frozen=True, kw_only=True)
class Loading:
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
    def shards(self) -> int:
        """The number of parts into which the rows are cut."""
        if self.sharding is None:
            return 1
        return self.sharding.num_devices // self.sharding.shard_shape((self.sharding.num_devices,))[0]


def batches(sampling: Any, data: Any, key: jax.Array, steps: range, loading: Loading) -> Generator[Any]:
    """Yields the batches of `steps`, drawn by a sampling record, or an iterator of chunks for each if chunked.

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
                yield on_devices(examples.rows, some, drawn, loading.sharding), last

    loaded = prefetched(load(), loading.prefetch) if loading.prefetch else load()
    return whole_batches(loaded) if loading.chunk_size is None else batch_chunks(loaded, len(steps))


def require_same_run_in_processes(
    sampling: Any, examples: CheckedData, steps: range, sharding: jax.sharding.Sharding | None
):
    """Raises ValueError if the processes whose devices share a batch differ in their sampling, data, key or steps:
    then two of them could load the same example, which would count twice."""
    if sharding is None or len({device.process_index for device in sharding.device_set}) < max(2, jax.process_count()):
        return
    own = {"key": int(keys.mark_of_key(examples.key)), "first step": steps.start, "end": steps.stop}
    own |= {"sampling": fingerprint(sampling), "data": examples.mark()}
    everyone = np.asarray(multihost_utils.process_allgather(np.array(list(own.values()), np.uint32)))
    differ = [f"{name} {of.tolist()}" for name, of in zip(own, everyone.T, strict=True) if (of != of[0]).any()]
    if differ:
        raise ValueError(
            "every process must have the same key (dpx.secret_key(seed) with one seed), sampling, data in the same "
            f"order, state and steps; got these numbers or marks in the processes: {', '.join(differ)}"
        )


def split_draw(draw: Draw, drawn: DrawRecord, loading: Loading) -> Iterator[Piece]:
    """Yields what is loaded at once: the whole draw of a step, or its chunks, at least one, all of the same size."""
    if loading.chunk_size is None:
        yield pad_draw(draw, round_up(len(draw.indices), loading.shards)), drawn, True
        return
    size = round_up(loading.chunk_size, loading.shards)
    whole = pad_draw(draw, round_up(len(draw.indices), size))
    for start in range(0, len(whole.indices), size):
        own, rows = drawn._replace(first_row=np.uint32(start)), slice(start, start + size)
        yield Draw(whole.indices[rows], whole.included[rows]), own, start + size >= len(whole.indices)


def on_devices(rows: Rows, draw: Draw, drawn: DrawRecord, sharding: jax.sharding.Sharding | None) -> Batch:
    """Loads a batch onto its devices. If it is sharded, this process reads only the rows for its own devices."""
    if sharding is None:
        return jax.device_put(Batch(rows(*draw, int(drawn.step)), draw.included, drawn))
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
    examples = jax.tree.map(np.asarray, rows(draw.indices[own], draw.included[own], int(drawn.step)))
    whole = [jax.make_array_from_callback((), everywhere, lambda _, number=number: number) for number in drawn]
    return Batch(jax.tree.map(spread, examples), spread(draw.included[own]), DrawRecord(*whole))


def whole_batches(loaded: Generator[tuple[Batch, bool]]) -> Generator[Batch]:
    """Yields the batches, and closes what loads them when it ends."""
    with contextlib.closing(loaded):
        yield from (batch for batch, _ in loaded)


def batch_chunks(loaded: Generator[tuple[Batch, bool]], steps: int) -> Generator[Iterator[Batch]]:
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

"""Reads rows of a data set, from arrays or a source that gives one example at a time, and loads the batches of a run
ahead of its steps: their chunks, their devices, and the thread that reads them.

A row is a function of its number, or of its number, the step and the key of the batches, and of nothing else. Then no
coin of one example moves the row of another, and a step that is made again, after a kill or an exception, has the rows
that it had. Nothing can prove that of a source, so some rows are read again, each alone and the last one first.

Every process of several draws the same batches from the key, and reads the rows of its own devices.
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

Rows = Callable[[np.ndarray, np.ndarray, int], Tree]  # from indices, int32 (B,), `included`, bool (B,), and a step

AGAIN = 16  # readings, in which a fair coin shows both sides, but with probability 2^-16
FIRST, EVERY = 64, 256  # AGAIN readings a call for the first 64 rows of a source, later one reading for 256 rows
MARKED, MARKED_ITEMS = 64, 8  # rows of arrays, and items of a source, evenly spaced
_READ: dict[int, list[int]] = {}  # how many rows of a source were read, by its id while it lives


def rows_of(data: Any, examples: int, key: jax.Array) -> Rows:
    """A function from indices, int32 (B,), `included`, bool (B,), and a step to these rows of `data`: a pytree of
    arrays with the B rows on axis 0, which are zeros where a row is not included. So no program sees an example that is
    not drawn.

    data: a pytree of arrays with the examples on axis 0 of each, or a source as `Sampling.take` describes it.
    key: of the batches, ().
    Raises ValueError unless `data` holds this number of examples. The function raises it for unlike items of a source,
    and for rows that are others when they are read again.
    """
    if (length := length_of(data)) != examples:
        users = ": for users, give the sampling examples=len(users)"
        hint = advice_to_stack(data) if unit_of(data) == "example" else users
        raise ValueError(f"data must hold the {examples} examples of the sampling, got {length}{hint}")
    if _is_data_source(data):
        read = _checking_repeats(data, _items_of(data, key))
    elif others := [leaf for leaf in jax.tree.leaves(data) if not isinstance(leaf, jax.Array | np.ndarray)]:
        # in files, or made when they are asked for
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
    """The examples of a run. rows: of `rows_of`, whose arguments and errors these are. unit: of `unit_of`."""

    def __init__(self, data: Any, examples: int, key: jax.Array):
        self.data, self.examples, self.key = data, examples, key
        self.rows, self.unit = rows_of(data, examples, key), unit_of(data)

    def in_arrays(self) -> bool:
        return all(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(self.data))

    @functools.cached_property
    def some_rows(self) -> Tree:
        """MARKED rows of arrays, or MARKED_ITEMS of a source, which may take long to read one; on axis 0."""
        source = _is_data_source(self.data)
        places = np.unique(np.linspace(0, self.examples - 1, MARKED_ITEMS if source else MARKED).astype(np.int32))
        if source:
            return self.rows(places, np.ones(len(places), bool), 0)
        return jax.tree.map(lambda leaf: read_rows(leaf, places), self.data)

    def mark(self) -> int:
        """A mark of some rows, and of who owns the rows of a source, which says nothing to those who do not know `key`.
        Two data sets that differ there have different marks, except with probability 2^-32.

        This tells apart processes that loaded a part each or the rows in another order, and a run that continues with
        other data, which would show the difference without noise.
        """
        rows = jax.tree.leaves(self.some_rows)
        leaves = [np.asarray(jax.random.key_data(leaf) if keys.is_key(leaf) else leaf) for leaf in rows]
        parts = [part for leaf in leaves for part in (f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes())]
        if hasattr(self.data, "identity_of_units"):
            parts += [repr(self.data.identity_of_units()).encode()]
        secret = np.asarray(keys.key_words(keys.stream(self.key, "first example"))).tobytes()
        return int(hashlib.blake2b(b"".join(parts), digest_size=4, key=secret).hexdigest(), 16)


def _checking_repeats(source: Any, read: Callable[[np.ndarray, int], Tree]) -> Callable[[np.ndarray, int], Tree]:
    """`read`, of which some rows are read again. source: by which it is known what was read of it before."""
    count = _READ.get(id(source), [0])
    if id(source) not in _READ:
        with contextlib.suppress(TypeError):  # it has no weak references
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
    """The random numbers of an item by its number, for one step of a run.

    They are those of numpy's Philox. Its key of 128 bits is that of the "items" stream of `key`, (), and the step, and
    each item has 2^192 blocks of its own. So they do not depend on which items are read, when and where, and they are
    public: the stream draws nothing else, and says nothing of `key` or of its other streams.
    """
    words = np.asarray(keys.key_words(keys.stream(key, "items", step))).astype(">u4").tobytes()
    return lambda number: np.random.Generator(np.random.Philox(key=int.from_bytes(words), counter=number << 192))


_taken = jax.jit(lambda array, indices, included: zero_excluded_rows(array[indices], included))


def _zero_excluded_in_place(rows: Any, included: np.ndarray) -> Any:
    """The same; in place for an array of numpy, which nobody else holds."""
    if isinstance(rows, jax.Array):
        return zero_excluded_rows(rows, included)
    rows[~included] = 0
    return rows


def length_of(data: Any) -> int:
    """How many examples `data` holds, as arrays or as a source. Raises ValueError for anything else."""
    return len(data) if _is_data_source(data) else batch_size(data)


def unit_of(data: Any) -> str:
    """The name of what an item of `data` is: its `privacy_unit`, as of `dpx.UserData`, or "example"."""
    unit = getattr(data, "privacy_unit", "example")
    return unit if isinstance(unit, str) else "example"


def _is_data_source(data: Any) -> bool:
    """Whether `data` is asked for examples one at a time. Raises ValueError unless it is that or holds arrays."""
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
    """The rows of one array of jax, of numpy or in a file."""
    if isinstance(array, jax.Array) or type(array) is np.ndarray:
        return array[indices]
    ascending, inverse = np.unique(indices, return_inverse=True)  # because files are read faster in order, or only so
    return np.asarray(array[ascending])[inverse]


def _copied(leaf: Any) -> np.ndarray:
    """An array of its own, because a source may reuse its buffer. (torch's tensors warn of `np.array`.)"""
    refuse_mask(leaf)
    return np.asarray(leaf).copy()


def _items_of(source: Any, key: jax.Array) -> Callable[[np.ndarray, int], Tree]:
    """How the items of a source are read. Reads item 0 at once, because all others must be like it."""
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


Piece = tuple[Draw, DrawRecord, bool]  # rows of a batch or chunk, how it was drawn, and whether its step ends with it
SETTINGS = ("enable_x64", "default_device")  # of jax, which `with` sets for one thread alone


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are loaded; the arguments of `Sampling.batches`. Raises ValueError for those that do not fit."""

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
        """The number of parts that the rows are cut into."""
        if self.sharding is None:
            return 1
        return self.sharding.num_devices // self.sharding.shard_shape((self.sharding.num_devices,))[0]


def batches(sampling: Any, data: Any, key: jax.Array, steps: range, loading: Loading) -> Generator[Any]:
    """The batches of `steps`, drawn by a sampling record; with a chunk size, an iterator of chunks for each.

    Raises ValueError for data of another length than the sampling's, and if several processes load a batch together,
    but not with one sampling, data and key from one step on.
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
    """Raises ValueError unless all processes have the same sampling, data, key and steps, if their devices share a
    batch: otherwise one example could be in the rows of two processes, and count twice."""
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
    """What is loaded at once: the whole draw of a step, or its chunks, of equal sizes and at least one."""
    if loading.chunk_size is None:
        yield pad_draw(draw, round_up(len(draw.indices), loading.shards)), drawn, True
        return
    size = round_up(loading.chunk_size, loading.shards)
    whole = pad_draw(draw, round_up(len(draw.indices), size))
    for start in range(0, len(whole.indices), size):
        own, rows = drawn._replace(first_row=np.uint32(start)), slice(start, start + size)
        yield Draw(whole.indices[rows], whole.included[rows]), own, start + size >= len(whole.indices)


def on_devices(rows: Rows, draw: Draw, drawn: DrawRecord, sharding: jax.sharding.Sharding | None) -> Batch:
    """The batch on its devices. Of a sharded one, the rows of the devices of this process are read."""
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
    """The batches, which end together with what loads them."""
    with contextlib.closing(loaded):
        yield from (batch for batch, _ in loaded)


def batch_chunks(loaded: Generator[tuple[Batch, bool]], steps: int) -> Generator[Iterator[Batch]]:
    """The chunks of each step. Raises ValueError where some of a step were left out, because they are paid for too."""

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
    """`items`, of which a thread makes up to `depth` before they are asked for. It ends with this generator."""
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
        except BaseException as error:  # raised again where the item is asked for
            ready.put((end, error))

    thread = threading.Thread(target=fill_queue, name="dpx batches", daemon=True)

    def stop():
        stopped.set()
        room.release()
        if thread is not threading.current_thread():  # as it is if the garbage collector runs there
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
        if not stopped.is_set():  # as it is when Python exits, where modules are gone
            atexit.unregister(stop)
            stop()

"""The batches of a run, loaded ahead: those of `take`, of one shape, from any source, on any devices."""

import gc
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import dpx
from dpx.sampling import batch as draws
from dpx.sampling import loading
from tests.conftest import threads
from tests.problems import dp_sgd, normal, poisson, same

KEY = jax.random.key(5)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
SAMPLINGS = {
    "poisson": poisson(60, 6),
    "fixed size": dpx.FixedSizeSampling(examples=60, batch_size=7),
    "shuffled": dpx.ShuffledEpochs(examples=60, batch_size=8),
    "full": dpx.FullBatch(examples=60),
    "truncated": poisson(60, 6, most_rows=7),
    "weighted": poisson(60, 6, weights=1.0 + np.arange(60) % 4),
    "cyclic": dpx.sampling.CyclicPoissonSampling(examples=60, batch_size=6, bands=3),
    "ordered": dpx.sampling.FixedOrder(examples=60, batch_size=8),
    "allocated": dpx.sampling.RandomAllocation(examples=60, steps_per_epoch=10),
}
pytestmark = pytest.mark.usefixtures("no_thread_is_left")
POISSON = SAMPLINGS["poisson"]
DATA = {"x": normal(0, 60, 3), "y": np.arange(60) % 2}


def mechanism(sampling=POISSON, noise_multiplier=1.0):
    return dp_sgd(sampling, noise_multiplier, key=KEY)


def loss(params, example):
    return (example["x"] @ params["w"] + params["b"] - example["y"].astype(jnp.float32)) ** 2


def after(made, steps):
    """A state after some steps on empty batches."""
    state = made.init(PARAMS)
    for _ in range(steps):
        _, state = made.release((PARAMS,), state, PARAMS)
    return state


@pytest.fixture
def read_once(monkeypatch):
    """No item is read again to see whether it is the same: to count the others."""
    monkeypatch.setattr("dpx.sampling.data.FIRST", 0)


class Source:
    """A map-style source in the way of torch.utils.data.Dataset, which counts the rows that are read."""

    def __init__(self, data=DATA):
        self.data, self.read = data, []

    @classmethod
    def of(cls, **methods):
        return type("Changed", (cls,), methods)()

    def __len__(self):
        return len(self.data["y"])

    def __getitem__(self, number):
        assert type(number) is int
        self.read.append(number)
        return {"x": self.data["x"][number], "y": int(self.data["y"][number])}


class AllAtOnce(Source):
    def __getitems__(self, numbers):
        return [Source.__getitem__(self, number) for number in numbers]

    def __getitem__(self, number):
        assert number == 0  # the first item, from which the shapes come
        return Source.__getitem__(self, number)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.long_cases(
    "allocated-0", "cyclic-0", "full-0", "ordered-0", "shuffled-0", "truncated-0", "weighted-0", "fixed size-0"
)
def test_the_batches_are_those_of_take(name, prefetch):
    sampling = SAMPLINGS[name]
    made = mechanism(sampling)
    state = after(made, 2)
    batches = list(sampling.batches(DATA, KEY, state, steps=10, prefetch=prefetch))
    assert len(batches) == 10
    for batch in batches:
        expected = sampling.take(DATA, KEY, state)
        same(batch, expected)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
        _, state = made.release((PARAMS,), state, PARAMS)


def test_settings_of_the_main_thread_hold_in_the_thread_that_loads():
    state = mechanism().init(PARAMS)
    with jax.enable_x64(True):
        expected = POISSON.take(DATA, KEY, state)
        (batch,) = POISSON.batches(DATA, KEY, state, steps=1)
        same(batch, expected)
    assert batch.examples["y"].dtype == np.int64


def test_every_kind_of_data_gives_the_same_batches(tmp_path):
    state = mechanism().init(PARAMS)
    expected = list(POISSON.batches(DATA, KEY, state, steps=3))
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(60, 3))
    mapped[:] = DATA["x"]
    kinds = {
        "jax": jax.tree.map(jnp.asarray, DATA),
        "memory map": {**DATA, "x": mapped},
        "items": Source(),
        "all at once": AllAtOnce(),
    }
    for data in kinds.values():
        for batch, other in zip(expected, POISSON.batches(data, KEY, state, steps=3), strict=True):
            same(batch, other)
        same(expected[0], POISSON.take(data, KEY, state))


def test_a_memory_map_is_read_row_by_row(tmp_path, monkeypatch):
    state, asked = mechanism().init(PARAMS), []

    class Watched(np.memmap):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

        def __array__(self, *args, **kwargs):
            raise AssertionError("the whole memory map was copied")

    data = np.memmap(tmp_path / "x", np.float32, "w+", shape=(60, 3)).view(Watched)
    (batch,) = POISSON.batches(data, KEY, state, steps=1, prefetch=0)
    (rows,) = asked
    chosen = POISSON.draw(KEY, 0)
    assert rows.tolist() == sorted({*chosen.indices[chosen.included], 0}) and len(rows) < 20
    assert batch.examples.shape == (len(chosen.indices), 3)


def test_a_real_grain_source():
    import grain

    class Records:  # grain.sources.RandomAccessDataSource
        def __len__(self):
            return 60

        def __getitem__(self, record_key):
            return Source().__getitem__(record_key)

    assert isinstance(Records(), grain.sources.RandomAccessDataSource)
    state = mechanism().init(PARAMS)
    expected = POISSON.take(DATA, KEY, state)
    for source in (Records(), grain.MapDataset.source(Records()).map(lambda item: {**item, "y": item["y"]})):
        (batch,) = POISSON.batches(source, KEY, state, steps=1)
        same(batch, expected)
    numbers = POISSON.take(grain.sources.RangeDataSource(0, 60, 1), KEY, state)
    np.testing.assert_array_equal(numbers.examples, POISSON.draw(KEY, 0).indices)


def test_a_real_torch_dataset():
    """Where torch is installed, as for the benchmarks; it is too large for the tests alone."""
    torch = pytest.importorskip("torch")

    class Examples(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            return Source().__getitem__(index)

    state = mechanism().init(PARAMS)
    expected = POISSON.take(DATA, KEY, state)
    same(POISSON.take(Examples(), KEY, state), expected)
    tensors = torch.utils.data.TensorDataset(torch.tensor(DATA["x"]), torch.tensor(DATA["y"]))
    (batch,) = POISSON.batches(tensors, KEY, state, steps=1)
    same(batch.examples, (expected.examples["x"], expected.examples["y"]))


class OneBuffer(Source):
    """A source that writes every item into the same memory."""

    buffer = np.zeros(3, np.float32)

    def __getitem__(self, number):
        self.buffer[:] = self.data["x"][number]
        return {"x": self.buffer, "y": int(self.data["y"][number])}


class LazyBuffer(OneBuffer):
    def __getitems__(self, numbers):
        return (self[number] for number in numbers)


def test_a_source_may_reuse_its_memory():
    state = mechanism().init(PARAMS)
    expected = POISSON.take(DATA, KEY, state)
    same(POISSON.take(OneBuffer(), KEY, state), expected)
    same(POISSON.take(LazyBuffer(), KEY, state), expected)


class Labeled:
    """Like a Series of pandas: with a shape and a dtype, but its rows are read by label."""

    shape, dtype, iloc = (60,), np.dtype(np.float32), None

    def __len__(self):
        return 60

    def __getitem__(self, label):
        return DATA["y"][::-1][label]


class Frame(Labeled):
    """Like a DataFrame of pandas, which has no dtype."""

    def __getattribute__(self, name):
        if name == "dtype":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("data", [Labeled(), Frame()], ids=["series", "frame"])
def test_rows_that_are_read_by_label_are_refused(data):
    state = mechanism().init(PARAMS)
    for given in (data, {"x": DATA["x"], "y": data}):
        for use in (
            lambda given: POISSON.take(given, KEY, state),
            lambda given: dpx.UserData(given, np.arange(60)),
            POISSON.draw_ahead(KEY, state, 1).batch,
        ):
            with pytest.raises(ValueError, match="table with labeled rows, got .* as series.to_numpy"):
                use(given)


@pytest.mark.parametrize("column", [["Zanzibar", 1.5], ["Zanzibar"], np.array(["1999-12-31"], "M8[D]")], ids=str)
def test_columns_without_numbers_are_refused_without_showing_them(column):
    """As frame.to_numpy() of pandas makes them: `jax` would show the rows in its message."""
    column = np.array(column, column.dtype if hasattr(column, "dtype") else object)
    made, gradient = mechanism(), dpx.private_updates(loss, mechanism())
    state, data = made.init(PARAMS), np.broadcast_to(column, (60, len(column)))
    for use in (
        lambda: dpx.UserData(data, np.arange(60)),
        lambda: POISSON.take(data, KEY, state),
        lambda: next(POISSON.batches(data, KEY, state, steps=1)),
        lambda: dpx.fit(loss, made, PARAMS, data, steps=1, delta=1e-5),
        lambda: gradient(PARAMS, dpx.Batch(data[:4], np.ones(4, bool)), state),
        lambda: made.update(data[:4], state, PARAMS, included=np.ones(4, bool)),
        lambda: made.init(data),
        lambda: made.init(["Zanzibar"]),
    ):
        with pytest.raises(
            ValueError,
            match=r"must hold numbers, got (an array \S*\[|<class 'str'>)|must be a pytree of float arrays, got",
        ) as raised:
            use()
        said = "".join(traceback.format_exception(raised.value))
        assert "Zanzibar" not in said.replace('["Zanzibar"]', "") and "1999" not in said  # but in the line above


class Broken(Source):
    """Row 7 is broken by `change`, or raises what it raises."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __getitem__(self, number):
        item = super().__getitem__(number)
        return self.change(item) if number == 7 else item


REFUSED = {
    "length": (lambda: Source({"x": DATA["x"][:50], "y": DATA["y"][:50]}), "data must hold the 60 examples .* got 50"),
    "no source": (lambda: iter([1, 2]), "data must be a pytree of arrays .*, or a source"),
    "sparse": (lambda: DATA | {"x": scipy.sparse.csr_array(DATA["x"])}, "must hold dense arrays, .*csr_array.*toarray"),
    "a sparse matrix": (lambda: scipy.sparse.csr_matrix(DATA["x"]), "data must hold dense arrays"),
    "a mask": (
        lambda: DATA | {"x": np.ma.array(DATA["x"], mask=DATA["x"] > 0)},
        "data must hold arrays without a mask",
    ),
    "items with a mask": (lambda: Broken(lambda item: item | {"x": np.ma.array(item["x"])}), "arrays without a mask"),
    "texts": (lambda: ["text"] * 60, "data must be a pytree of arrays"),
    "a text": (lambda: "x" * 60, "data must be a pytree of arrays .* got <class 'str'>"),
    "items that are texts": (
        lambda: Source.of(__getitem__=lambda self, n: {"x": DATA["x"][n], "t": "Zanzibar"}),
        "arrays and numbers, got <class 'dict'>, with no numbers in t: encode words as numbers",
    ),
    "a list of pairs": (
        lambda: [*zip(DATA["x"], DATA["y"], strict=True)],
        r"0/0 \[3\], 0/1 \[\],.* more: stack a list",
    ),
    "a list of rows": (lambda: [*DATA["x"]], "must hold the 60 examples .* got 3: stack a list of examples"),
    "nothing": (lambda: None, "got no array"),
    "items without arrays": (lambda: Source.of(__getitem__=lambda self, n: None), "an item of data"),
    "another shape": (lambda: Broken(lambda item: {**item, "x": item["x"][:2]}), r"alike .*\[3\].*, row 7 has .*\[2\]"),
    "another dtype": (lambda: Broken(lambda item: {**item, "y": 0.5}), r"row 0 has .*int64.*, row 7 has .*float64"),
    "another structure": (lambda: Broken(lambda item: {"x": item["x"]}), "row 0 has .*'y'.*, row 7 has {'x'"),
    "too few items": (lambda: Source.of(__getitems__=lambda self, numbers: [self[0]]), "must give .* got 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_data(name):
    make, message = REFUSED[name]
    full = SAMPLINGS["full"]
    state = mechanism(full).init(PARAMS)
    with pytest.raises(ValueError, match=message):
        full.take(make(), KEY, state)
    with pytest.raises(ValueError, match=message):
        list(full.batches(make(), KEY, state, steps=1))


# shapes


def test_a_jitted_step_is_compiled_once():
    made = mechanism()
    gradient = jax.jit(dpx.private_updates(loss, made))
    params, state = PARAMS, made.init(PARAMS)
    for batch in POISSON.batches(DATA, KEY, state, steps=50):
        updates, state, _ = gradient(params, batch, state)
        params = jax.tree.map(jnp.add, params, updates)
    assert gradient._cache_size() == 1
    assert dpx.epsilon(made, state, delta=1e-5) == pytest.approx(dpx.epsilon(made, 50, delta=1e-5), rel=1e-4)


@pytest.mark.parametrize("examples, batch_size", [(1000, 100), (60_000, 1024), (10**6, 10), (10, 3), (10**9, 0.01)])
def test_a_batch_exceeds_the_usual_rows_once_in_a_billion_steps(examples, batch_size):
    from scipy import stats

    usual = draws.usual_row_count(examples, batch_size / examples)
    assert examples >= 10**6 or len(poisson(examples, batch_size).draw(KEY, 0).indices) == usual
    assert stats.binom.sf(usual, examples, batch_size / examples) < 1e-9
    assert usual == examples or usual == 8 or stats.binom.sf(usual - 8, examples, batch_size / examples) >= 1e-9


# the steps of the budget


def test_without_steps_the_batches_are_those_of_the_budget():
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=5)
    made = mechanism(noise_multiplier=budget)
    assert len(list(POISSON.batches(DATA, KEY, made.init(PARAMS)))) == 5
    state = after(made, 3)
    assert [int(batch.drawn.step) for batch in POISSON.batches(DATA, KEY, state)] == [3, 4]
    with pytest.raises(ValueError, match="spent before 3 more steps: .* calibrated for 5 steps, and 3 were taken"):
        POISSON.batches(DATA, KEY, state, steps=3)
    assert len(list(POISSON.batches(DATA, KEY, state, steps=3, beyond_budget=True))) == 3
    assert list(POISSON.batches(DATA, KEY, after(made, 5))) == []
    for unlimited, more in ((mechanism().init(PARAMS), {}), (state, {"beyond_budget": True})):
        with pytest.raises(ValueError, match="steps must be given"):
            POISSON.batches(DATA, KEY, unlimited, **more)
    with pytest.raises(ValueError, match="counts another sampling than"):
        SAMPLINGS["full"].batches(DATA, KEY, state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1"),
        ({"size": 0}, "size must be a whole number of at least 1"),
        ({"size": 40, "chunk_size": 8}, "size must be None with chunk_size"),
    ],
    ids=str,
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        POISSON.batches(DATA, KEY, mechanism().init(PARAMS), **({"steps": 2} | options))


# the thread


@pytest.mark.usefixtures("read_once")
def test_batches_are_loaded_ahead_but_not_further():
    source = Source()
    batches = SAMPLINGS["full"].batches(source, KEY, mechanism(SAMPLINGS["full"]).init(PARAMS), steps=9, prefetch=2)
    next(batches)
    wait_until(lambda: len(source.read) == 1 + 3 * 60)  # the one that was given, and two ahead
    time.sleep(0.05)
    assert len(source.read) == 1 + 3 * 60 and len(threads()) == 1
    batches.close()
    assert not threads()


def wait_until(condition):
    stop = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.005)


def test_the_thread_ends_with_the_loop():
    state = mechanism().init(PARAMS)

    def leave(how):
        for batch in POISSON.batches(DATA, KEY, state, steps=50):
            assert len(threads()) == 1
            how(batch)

    for error in (KeyboardInterrupt, RuntimeError):

        def fail(batch, error=error):
            raise error

        with pytest.raises(error):
            leave(fail)
        if threads():
            gc.collect()
        assert not threads()
    for _ in POISSON.batches(DATA, KEY, state, steps=50):
        break
    assert not threads()
    unused = POISSON.batches(DATA, KEY, state, steps=50)
    assert not threads()
    del unused
    assert len(list(POISSON.batches(DATA, KEY, state, steps=3))) == 3 and not threads()


def test_the_thread_ends_with_python(monkeypatch):
    at_exit = []
    monkeypatch.setattr(loading.atexit, "register", at_exit.append)
    batches = POISSON.batches(DATA, KEY, mechanism().init(PARAMS), steps=50)
    next(batches)
    (stop,) = at_exit
    stop()
    assert not threads()
    monkeypatch.setattr(loading, "atexit", None)  # as Python leaves a module when it exits
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_source_arrives_with_its_traceback(prefetch):
    def broken_row(item):
        raise OSError("the disk is gone")

    full = SAMPLINGS["full"]
    batches = full.batches(Broken(broken_row), KEY, mechanism(full).init(PARAMS), steps=3, prefetch=prefetch)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert "broken_row" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert next(batches, None) is None


# chunks


def test_the_chunks_of_a_step_are_its_batch():
    made = mechanism()
    state = made.init(PARAMS)
    steps = POISSON.batches(DATA, KEY, state, steps=6, chunk_size=4)
    for batch, chunks in zip(POISSON.batches(DATA, KEY, state, steps=6), steps, strict=True):
        size = len(batch.included)
        chunks = list(chunks)
        assert len(chunks) == -(-size // 4)  # also those that hold padding alone, because their number is public
        for number, chunk in enumerate(chunks):
            assert chunk.examples["x"].shape == (4, 3) and chunk.included.shape == (4,)
            assert chunk.drawn == batch.drawn._replace(first_row=4 * number)
            assert {leaf.dtype for leaf in chunk.drawn} == {np.dtype(np.uint32)}
        chunks = [chunk._replace(drawn=None) for chunk in chunks]
        together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)
        same(together.included[:size], batch.included)
        for name in DATA:
            rows = batch.examples[name][np.asarray(batch.included)]
            same(together.examples[name][together.included], rows)


@pytest.mark.filterwarnings("ignore:batch_size = ")  # most batches are empty here
def test_an_empty_draw_is_chunks_of_padding():
    rare = poisson(60, 1e-6)
    ((chunk, *_),) = (
        list(chunks) for chunks in rare.batches(DATA, KEY, mechanism(rare).init(PARAMS), steps=1, chunk_size=4)
    )
    assert chunk.included.tolist() == [False] * 4
    assert chunk.drawn.step == chunk.drawn.rows == chunk.drawn.first_row == 0


def test_a_chunk_alone_is_no_batch():
    full = SAMPLINGS["full"]
    made = mechanism(full)
    gradient = jax.jit(dpx.private_updates(loss, made))
    for chunks in full.batches(DATA, KEY, made.init(PARAMS), steps=1, chunk_size=30):
        for chunk in chunks:
            state = gradient(PARAMS, chunk, made.init(PARAMS)).state
            with pytest.raises(ValueError, match="not those that `take` drew"):
                dpx.epsilon(made, state, delta=1e-5)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("prefetch", [0, 3])
def test_chunks_are_loaded_ahead_and_all_of_them_are_used(prefetch):
    full, source = SAMPLINGS["full"], Source()
    state = mechanism(full).init(PARAMS)
    steps = full.batches(source, KEY, state, steps=3, chunk_size=10, prefetch=prefetch)
    first = next(steps)
    next(first)
    wait_until(lambda: len(source.read) == 1 + 10 * (1 + prefetch))
    for _ in first:
        pass
    assert next(first, None) is None
    second = next(steps)
    next(second)
    second.close()
    with pytest.raises(ValueError, match="every chunk of a batch must be used"):
        next(steps)
    assert not threads()
    assert [len(list(chunks)) for chunks in full.batches(source, KEY, state, steps=2, chunk_size=25)] == [3, 3]
    for chunks in full.batches(source, KEY, state, steps=2, chunk_size=25):
        next(chunks)
        break
    assert not threads()
    with pytest.raises(ValueError, match="before the iterator of the batches is closed"):
        next(chunks)


# devices


def test_a_sharded_batch_lies_where_it_is_asked_for():
    """On one device; tests/test_processes.py has eight in two processes."""
    state = mechanism().init(PARAMS)
    expected = POISSON.take(DATA, KEY, state)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec("data"))
    for sharding in (spread, SingleDeviceSharding(jax.devices()[0])):
        (batch,) = POISSON.batches(Source(), KEY, state, steps=1, sharding=sharding)
        same(batch, expected)
        for leaf in jax.tree.leaves(batch):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    everything = NamedSharding(mesh, PartitionSpec("data", "model"))
    for wrong in (everything, NamedSharding(mesh, PartitionSpec(None, "model")), "data", PartitionSpec("data")):
        with pytest.raises(ValueError, match="sharding must split axis 0 alone"):
            POISSON.batches(DATA, KEY, state, steps=1, sharding=wrong)


# loops inside jit


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.long_cases("fixed", "full", "weighted")
def test_draws_ahead_are_those_of_every_step(name):
    sampling = SAMPLINGS[name]
    made = mechanism(sampling)
    state = after(made, 2)
    ahead = sampling.draw_ahead(KEY, state, 9)
    wide = sampling.draw_ahead(KEY, state, 9, size=64)
    assert (ahead.indices.dtype, ahead.included.dtype) == (np.int32, np.bool_)
    assert {leaf.dtype for leaf in ahead.drawn} == {np.dtype(np.uint32)}
    for step in range(9):
        for drawn in (ahead, wide):
            batch = sampling.take(DATA, KEY, state, size=drawn.indices.shape[1])
            for leaf, found in zip(jax.tree.leaves(DATA), jax.tree.leaves(batch.examples), strict=True):
                expected = np.asarray(leaf)[drawn.indices[step]]
                expected[~drawn.included[step]] = 0  # no example that is not drawn is in a batch
                same(expected, found)
            same(drawn.included[step], batch.included)
            same(jax.tree.map(lambda leaf, step=step: leaf[step], drawn).batch(DATA), batch)
        _, state = made.release((PARAMS,), state, PARAMS)
    assert wide.indices.shape == wide.included.shape == (9, 64)


@pytest.mark.parametrize("of", [dict, Source, AllAtOnce, lambda data: jax.tree.map(jnp.asarray, data)])
def test_an_undrawn_example_is_in_no_batch(of):
    data = DATA | {"x": np.where(np.arange(60)[:, None] == 0, np.nan, DATA["x"]).astype(np.float32)}
    state = mechanism().init(PARAMS)
    taken = POISSON.take(of(data), KEY, state, size=24)
    (loaded,) = POISSON.batches(of(data), KEY, state, steps=1, size=24)
    assert not taken.included.all() and 0 not in POISSON.draw(KEY, 0).indices[POISSON.draw(KEY, 0).included]
    for batch in (taken, loaded):
        assert all(not np.asarray(leaf)[~taken.included].any() for leaf in jax.tree.leaves(batch.examples))


def test_a_scan_over_draws_ahead_is_the_loop():
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=5)
    made = mechanism(noise_multiplier=budget)
    gradient = dpx.private_updates(loss, made)
    data = jax.tree.map(jnp.asarray, DATA)

    def body(carry, row):
        params, state = carry
        updates, state, _ = gradient(params, row.batch(data), state)
        return (jax.tree.map(jnp.add, params, updates), state), None

    begin = PARAMS, made.init(PARAMS)
    rows = POISSON.draw_ahead(KEY, begin[1], 5)
    (params, state), _ = jax.jit(lambda carry, rows: jax.lax.scan(body, carry, rows))(begin, rows)
    step, (by_hand, carry) = jax.jit(gradient), begin
    for batch in POISSON.batches(DATA, KEY, carry):
        updates, carry, _ = step(by_hand, batch, carry)
        by_hand = jax.tree.map(jnp.add, by_hand, updates)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), params, by_hand)
    assert dpx.epsilon(made, state, delta=1e-5) == dpx.epsilon(made, 5, delta=1e-5, numbers=4) <= 2.0
    (_, twice), _ = jax.jit(lambda carry, rows: jax.lax.scan(body, carry, rows))((params, state), rows)
    with pytest.raises(ValueError, match="another step than it was drawn for"):
        dpx.epsilon(made, twice, delta=1e-5)
    with pytest.raises(ValueError, match="the budget is spent"):
        POISSON.draw_ahead(KEY, state, 1)
    assert POISSON.draw_ahead(KEY, state, 1, beyond_budget=True).drawn.step[0] == 5


def test_a_scan_over_data_of_another_length_is_refused():
    """There, jax would read the last example in place of all that are missing."""
    rows = POISSON.draw_ahead(KEY, mechanism().init(PARAMS), 3)
    for length in (50, 61):
        data = jax.tree.map(lambda leaf, length=length: jnp.asarray(np.resize(leaf, (length, *leaf.shape[1:]))), DATA)
        with pytest.raises(ValueError, match=f"data must hold the 60 examples of the sampling, got {length}"):
            jax.lax.scan(lambda carry, row, data=data: (carry, row.batch(data).included), 0, rows)
    with pytest.raises(ValueError, match=r"those of one step, \(size,\); got indices of \(3,"):
        rows.batch(DATA)


TRACED = {
    "draw, step": lambda sampling, key, state: jax.jit(lambda step: sampling.draw(key, step))(1),
    "draw, key": lambda sampling, key, state: jax.jit(lambda key: sampling.draw(key, 1))(key),
    "draw, inside": lambda sampling, key, state: jax.jit(lambda x: sampling.draw(key, 1).indices + x)(1),
    "take, state": lambda sampling, key, state: jax.jit(lambda state: sampling.take(DATA, key, state))(state),
    "take, key": lambda sampling, key, state: jax.jit(lambda key: sampling.take(DATA, key, state))(key),
    "take, inside": lambda sampling, key, state: jax.lax.scan(
        lambda carry, _: (carry, sampling.take(DATA, key, state).included), 0, None, length=2
    ),
    "batches": lambda sampling, key, state: jax.jit(lambda state: sampling.batches(DATA, key, state, steps=2))(state),
    "ahead": lambda sampling, key, state: jax.jit(lambda key: sampling.draw_ahead(key, state, 2))(key),
    "vmap": lambda sampling, key, state: jax.vmap(lambda step: sampling.draw(key, step))(jnp.arange(2)),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_draw_inside_jit_is_refused_with_the_way_to_draw_ahead(name):
    for sampling in SAMPLINGS.values():
        with pytest.raises(
            ValueError, match=r"outside of jit.*sampling\.draw_ahead\(key, state, steps\), then jax\.lax\.scan"
        ):
            TRACED[name](sampling, KEY, mechanism(sampling).init(PARAMS))

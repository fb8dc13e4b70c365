"""Items that are made by chance: from the random numbers of the item and the step, or refused.

Each kind below breaks the bill: a step that is made again has other sums under the same noise, or a coin of one example
moves the items of others.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import keys
from dpx.sampling import data as reading
from tests.problems import dp_sgd, normal, poisson

KEY = dpx.secret_key(2**90 + 1)
X = normal(0, 40, 3)
SAMPLING = poisson(40)
PARAMS = {"w": jnp.zeros(3)}


def made(sampling=SAMPLING, key=KEY):
    return dp_sgd(sampling, key=key)


STATE = made().init(PARAMS)
OPTIMIZER = dpx.chain(made(), optax.sgd(1.0))


class Steady:
    """Each item is a function of its number."""

    def __init__(self, seed=None):
        self.rng, self.read = np.random.default_rng(seed), []

    def __len__(self):
        return 40

    def __getitem__(self, number):
        self.read.append(number)
        return X[number]


class Scaled(Steady):
    def __getitem__(self, number):
        return X[number] * np.float32(self.rng.uniform(0.5, 1.5))


class Flipped(Steady):
    """By a fair coin, which two readings may share."""

    def __getitem__(self, number):
        return X[number] * np.float32(self.rng.choice([-1, 1]))


class InPlace(Steady):
    def __init__(self):
        super().__init__(0)
        self.x = X.copy()

    def __getitem__(self, number):
        item = self.x[number]
        item += np.float32(1)
        return item


class Together(Steady):
    def __getitems__(self, numbers):
        return [Flipped.__getitem__(self, number) for number in numbers]


class EachCallAnew(Steady):
    """The random numbers of a call are always the same, so an item depends on its place in the list."""

    def __getitems__(self, numbers):
        return list(X[numbers] * np.random.default_rng(0).uniform(0.5, 1.5, (len(numbers), 1)).astype(np.float32))


class Mixed(Steady):
    def __getitems__(self, numbers):
        return list(X[numbers] - X[numbers].mean(0))


class Counted(Steady):
    """By the order of the readings, without a generator."""

    def __getitem__(self, number):
        self.read.append(number)
        return X[number] * np.float32((-1) ** len(self.read))


class Users(Flipped):
    privacy_unit = "person"


class InFile:
    """Like an array in a file, whose rows are made when they are asked for."""

    shape, dtype, ndim = X.shape, X.dtype, 2
    random = np.random.default_rng(1)

    def __len__(self):
        return 40

    def __getitem__(self, numbers):
        return X[numbers] * self.random.choice(np.float32([-1, 1]), (len(numbers), 1))


class Unasked(Steady):
    """Has the random numbers of the item, but takes others."""

    def random_item(self, number, rng):
        return Flipped.__getitem__(self, number)


class Kept(Steady):
    """Takes those of the item that was read first."""

    def random_item(self, number, rng):
        self.rng = rng if not self.read else self.rng
        self.read.append(number)
        return Scaled.__getitem__(self, number)


def wrapped():
    import grain

    return grain.MapDataset.source(Flipped(0)).map(lambda item: 2 * item)


RANDOM = {
    "unseeded": Scaled,
    "seeded": lambda: Scaled(0),
    "a coin": Flipped,
    "a seeded coin": lambda: Flipped(0),
    "in place": InPlace,
    "of many": lambda: Together(0),
    "of many, each call anew": EachCallAnew,
    "minus their mean": Mixed,
    "counted": Counted,
    "users": lambda: Users(0),
    "an array in a file": InFile,
    "one of several arrays": lambda: {"x": X, "z": InFile()},
    "rows of users": lambda: dpx.UserData(InFile(), np.arange(40), most=1),
    "wrapped": wrapped,
    "other random numbers": Unasked,
    "the first random numbers": Kept,
}
WAYS = {
    "take": lambda data: SAMPLING.take(data, KEY, STATE),
    "batches": lambda data: list(SAMPLING.batches(data, KEY, STATE, steps=1)),
    "not ahead": lambda data: list(SAMPLING.batches(data, KEY, STATE, steps=1, prefetch=0)),
    "chunks": lambda data: [list(chunks) for chunks in SAMPLING.batches(data, KEY, STATE, steps=1, chunk_size=4)],
    "fit": lambda data: dpx.fit(lambda p, x: p["w"].sum(), OPTIMIZER, PARAMS, data, steps=1, delta=1e-5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RANDOM)
def test_items_that_are_no_function_of_their_number_are_refused(kind, way):
    with pytest.raises(ValueError, match="must be a function of its number alone, but .* random_item.number, rng"):
        WAYS[way](RANDOM[kind]())


def test_one_item_of_a_batch_is_enough():
    """A batch of padding and one example, whose items are fair coins."""
    few = dpx.FixedSizeSampling(examples=40, batch_size=1)
    for seed in range(20):
        with pytest.raises(ValueError, match="function of its number alone"):
            few.take(Flipped(seed), KEY, made(few).init(PARAMS))


def test_a_rare_change_is_seen_later(monkeypatch):
    """One of 500 readings is another, which the first readings miss."""

    class Rarely(Steady):
        def __getitem__(self, number):
            return X[number] * np.float32(self.rng.uniform() if self.rng.uniform() < 0.002 else 1)

    monkeypatch.setattr(reading, "EVERY", 4)
    source, asked = Rarely(1), itertools.count()
    with pytest.raises(ValueError, match="function of its number alone"):
        for _ in SAMPLING.batches(source, KEY, STATE, steps=600, prefetch=0):
            next(asked)
    assert next(asked) > 2


@pytest.mark.parametrize("one_call", [True, False])
def test_what_reading_again_costs(one_call):
    """16 rows in each of the first calls, and one of 256 later, also where every call is a new one."""
    source, state = Steady(), STATE
    if one_call:
        assert len(list(SAMPLING.batches(source, KEY, state, steps=60, prefetch=0))) == 60
    else:
        for _ in range(60):
            SAMPLING.take(source, KEY, state)
    read = [SAMPLING.draw(KEY, step if one_call else 0).indices for step in range(60)]
    wanted = sum(len(np.unique(numbers)) for numbers in read)
    again = len(source.read) - wanted - (1 if one_call else 60)  # item 0, which says what an item looks like
    first = -(-reading.FIRST // min(len(np.unique(numbers)) for numbers in read))
    assert 16 + wanted // reading.EVERY - 1 <= again <= 16 * first + wanted // reading.EVERY


class Augmented(Steady):
    def random_item(self, number, rng):
        self.read.append(number)
        return np.append(X[number] * rng.normal(), number).astype(np.float32)


def by_number(batch):
    """The items of a batch by the number that each of them holds."""
    items = np.asarray(batch.examples)[np.asarray(batch.included)]
    return {int(item[3]): item.tobytes() for item in items}


def test_an_item_depends_on_its_number_the_step_and_the_key():
    """Not on what else is drawn, nor on the thread, the chunks or the rows that are read."""
    more = poisson(40, 30)
    one, all_of_them = (by_number(s.take(Augmented(), KEY, made(s).init(PARAMS))) for s in (SAMPLING, more))
    both = one.keys() & all_of_them.keys()
    assert len(both) > 3 and len(all_of_them) > len(both)
    assert all(one[number] == all_of_them[number] for number in both)
    full = dpx.FullBatch(examples=40)
    first, again = (by_number(b) for b in full.batches(Augmented(), KEY, made(full).init(PARAMS), steps=2))
    assert all(first[number] == one[number] for number in one)
    assert not set(first.values()) & set(again.values())  # in the next epoch
    other = full.take(Augmented(), dpx.secret_key(2**90 + 2), made(full).init(PARAMS))
    assert not set(first.values()) & set(by_number(other).values())
    (chunks,) = map(list, full.batches(Augmented(), KEY, made(full).init(PARAMS), steps=1, chunk_size=7, prefetch=0))
    assert {number: item for chunk in chunks for number, item in by_number(chunk).items()} == first
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    (batch,) = full.batches(Augmented(), KEY, made(full).init(PARAMS), steps=1, sharding=spread, prefetch=0)
    assert by_number(batch) == first


def test_the_random_numbers_are_a_public_stream_of_their_own():
    words = np.asarray(keys.key_words(keys.stream(KEY, "items", 3)))
    state = reading.generators_of_items(KEY, 3)(5).bit_generator.state["state"]
    number = sum(int(word) << 32 * (3 - place) for place, word in enumerate(words))
    assert sum(int(word) << 64 * place for place, word in enumerate(state["key"])) == number
    assert state["counter"].tolist() == [0, 0, 0, 5]
    drawn = [
        reading.generators_of_items(KEY, step)(item).integers(2**62) for step in range(3) for item in (0, 1, 2**31 - 1)
    ]
    assert len(set(drawn)) == 9


def test_a_source_without_getitem_is_one():
    class Alone:
        def __len__(self):
            return 40

        def random_item(self, number, rng):
            return X[number] + np.float32(rng.normal())

    assert SAMPLING.take(Alone(), KEY, STATE).examples.shape[1:] == (3,)


def test_random_numbers_of_grain_are_those_of_the_item():
    import grain

    source = grain.MapDataset.source(Steady()).seed(3).random_map(lambda x, rng: x * np.float32(rng.normal()))
    assert np.array_equal(SAMPLING.take(source, KEY, STATE).examples, SAMPLING.take(source, KEY, STATE).examples)


@pytest.mark.long
def test_a_run_with_random_items_continues_bit_for_bit(tmp_path):
    """After an exception, in another source: no step has other sums under the same noise."""

    def run(folder, stop=None):
        seen = {}

        def look(progress):
            seen[progress.step] = np.asarray(progress.params["w"])
            if progress.step == stop:
                raise OSError("disk full")

        optimizer = dpx.chain(made(), optax.sgd(1.0))
        loss = lambda params, x: 0.1 * params["w"] @ x[:3]  # noqa: E731
        given = dict(steps=8, delta=1e-5, accountant="rdp", evaluate_every=1, checkpoint_every=3, callbacks=[look])
        try:
            dpx.fit(loss, optimizer, PARAMS, Augmented(), checkpoints=folder, **given)
        except OSError:
            assert stop is not None
        return seen

    whole, before, rest = run(None), run(tmp_path, stop=5), run(tmp_path)
    assert list(before) == [1, 2, 3, 4, 5] and list(rest) == [4, 5, 6, 7, 8]
    for part in (before, rest):
        for step, params in part.items():
            np.testing.assert_array_equal(params, whole[step])


def test_a_run_does_not_continue_on_other_data(tmp_path):
    """Not even where the items are cached, so that reading one again shows nothing."""

    class Cached(Steady):
        def __init__(self):
            self.x = np.random.default_rng().normal(size=(40, 3)).astype(np.float32)

        def __getitem__(self, number):
            return self.x[number]

    def run(data, steps, name="source"):
        loss = lambda params, x: 0.1 * params["w"] @ x  # noqa: E731
        given: dict = {"delta": 1e-5, "accountant": "rdp", "checkpoints": tmp_path / name}
        return dpx.fit(loss, OPTIMIZER, PARAMS, data, steps=steps, **given)

    data = Cached()
    run(data, 1)
    assert run(data, 2).steps == 2
    run(X, 1, "arrays")
    with pytest.raises(ValueError, match="the data. To"):
        run(X[np.r_[0, np.random.default_rng(0).permutation(np.arange(1, 40))]], 3, "arrays")  # in another order
    later = Cached()
    later.x = data.x[np.r_[0, 2:40, 1]]  # only the first item is as before
    for other in (Cached(), X, later):
        with pytest.raises(ValueError, match="another one: the data. To"):
            run(other, 3)


class Elementwise:
    """As torch's tensors: compared element by element, and hashed by identity."""

    shape, dtype = (40, 3), np.dtype(np.float32)
    __hash__ = object.__hash__

    def __eq__(self, other):
        return np.zeros(40, bool)

    def __len__(self):
        return 40

    def __getitem__(self, rows):
        return np.ones((40, 3), np.float32)[rows]


def test_a_source_is_known_by_its_identity():
    key = dpx.secret_key(2**99)
    state, data = made(key=key).init(jnp.zeros(3)), Elementwise()
    for _ in range(2):
        batch = SAMPLING.take(data, key, state)
        assert batch.examples[batch.included].all()

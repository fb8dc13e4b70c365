"""Users in place of examples: one item a user, and the contract of privacy with a user as the unit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.checking import plan
from dpx.states.record import unit_mark

OWNERS = ["bo", "al", "bo", "cy", "bo", "al", "bo"]  # al has rows 1 and 5, bo 0, 2, 4 and 6, cy 3
DATA = {"x": np.arange(1, 15, dtype=np.float32).reshape(7, 2), "label": np.arange(10, 17, dtype=np.int8)}
ITEMS = {"al": [1, 5], "bo": [0, 2, 4, 6], "cy": [3]}
KEY = jax.random.key(3)


def rows_of(item):
    """The rows of the data that an item holds, by their labels; and the item's padding is zero."""
    examples, included = item
    count = int(included.sum())
    np.testing.assert_array_equal(included, np.arange(len(included)) < count)
    assert not any(np.any(leaf[count:]) for leaf in jax.tree.leaves(examples))
    rows = [int(label) - 10 for label in examples["label"][:count]]
    np.testing.assert_array_equal(examples["x"][:count], DATA["x"][rows])
    return rows


@pytest.mark.parametrize("kind", ["numpy", "jax", "memory map"])
@pytest.mark.parametrize("most", [None, 2, 1, 6])
def test_an_item_is_the_rows_of_a_user(kind, most, tmp_path):
    data = DATA
    if kind == "jax":
        data = jax.tree.map(jnp.asarray, DATA)
    elif kind == "memory map":
        np.save(tmp_path / "x.npy", DATA["x"])
        data = DATA | {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}
    users = dpx.UserData(data, OWNERS, most=most)
    assert len(users) == 3 and users.most == (most or 4)
    items = [rows_of(item) for item in users]
    assert items == [rows[:: max(1, len(rows) // users.most)] for rows in ITEMS.values()]  # evenly spaced
    assert [rows_of(item) for item in users.__getitems__([2, 0])] == [items[2], items[0]]
    assert users.__getitems__([]) == [] and [str(users[0][0][name].dtype) for name in DATA] == ["float32", "int8"]
    assert all(item[1].shape == (users.most,) == item[0]["label"].shape for item in users)
    with pytest.raises(IndexError):
        users[3]


def test_a_batch_holds_users_and_the_bill_counts_them():
    sampling = dpx.PoissonSampling(examples=3, batch_size=2)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=KEY)
    step = dpx.private_updates_from(lambda params, user: params, mechanism)
    params = jnp.zeros(2)
    state = mechanism.init(params)
    for batch in sampling.batches(dpx.UserData(DATA, OWNERS), KEY, state, steps=2):
        expected = sampling.draw(KEY, dpx.accounting.steps_taken(state))
        (examples, included), counted, _ = batch
        for row, user in enumerate(expected.indices):
            item = jax.tree.map(lambda leaf, row=row: leaf[row], (examples, included))
            assert rows_of(item) == (list(ITEMS.values())[user] if expected.included[row] else [])
        np.testing.assert_array_equal(counted, expected.included)
        state = step(params, batch, state).state
    of_users = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(4))
    assert dpx.epsilon(mechanism, state, delta=1e-3) == pytest.approx(dpx.epsilon(of_users, 2, delta=1e-3), rel=1e-4)
    with pytest.raises(ValueError, match="data must hold the 7 examples of the sampling, got 3"):
        of_rows = dpx.PoissonSampling(examples=7, batch_size=2)
        mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=of_rows, key=KEY)
        of_rows.take(dpx.UserData(DATA, OWNERS), KEY, mechanism.init(params))


def test_a_check_counts_users():
    found = [plan.data_length(dpx.UserData(DATA, OWNERS), dpx.FullBatch(examples=n)).severity for n in (3, 7)]
    assert found == ["ok", "error"]


NAN = float("nan")


@pytest.mark.parametrize(
    ("owners", "most", "message"),
    [
        (OWNERS[:6], None, "one owner for each of the 7 examples, got 6"),
        ([], None, r"\(N,\) with N of at least 1; got shape \(0,\)"),
        (np.zeros((7, 1), int), None, r"got shape \(7, 1\)"),
        (OWNERS, 0, "most must be a whole number of at least 1, got 0"),
        (OWNERS, 2.0, "most must be a whole number of at least 1, got 2.0"),
        ([*OWNERS[:6], None], None, r"none of them missing; got \['NoneType', 'str'\]"),
        ([*OWNERS[:6], NAN], None, r"none of them missing; got \['float', 'str'\]"),
        (np.array([*OWNERS[:6], NAN]), None, "some look missing"),
        ([3, -1, 3, 4, 5, 3, -1], None, "some look missing: a mask, a number below 0, or one of"),
        (np.ma.masked_array(np.arange(7), np.arange(7) == 2), None, "some look missing"),
        (np.asarray([*OWNERS[:6], NAN], object), None, r"got \['float', 'str'\]"),
        (np.asarray([1, 2, 1, 2, 1, 2, NAN]), None, r"got \['float'\]"),
        (["1", 1, 1, 1, 1, 1, 1], None, r"got \['int', 'str'\]"),
    ],
)
def test_refused_owners(owners, most, message):
    with pytest.raises(ValueError, match=message):
        dpx.UserData(DATA, owners, most=most)


@pytest.mark.parametrize("word", ["unknown", "NULL", "n/a", 9999])
def test_an_owner_of_too_many_rows_is_noticed_and_not_named(word):
    people = [type(word)(number) for number in range(10, 30)] * 3
    with pytest.warns(UserWarning, match="more than a tenth of all rows") as warned:
        dpx.UserData(np.zeros(100), people + [word] * 40)
    assert str(word) not in str(warned[0].message).replace("'unknown'", "")
    with pytest.warns(UserWarning, match="more than a tenth of all rows"):
        dpx.UserData(np.zeros(41), [word] * 19 + people[:11] * 2)


@pytest.mark.parametrize("counts", [[40] * 11, [9] + [1] * 9, [30, *[3] * 98], [1] * 11, [11, *[2] * 50]])
def test_owners_of_some_rows_are_people(counts):
    dpx.UserData(np.zeros(sum(counts)), np.repeat(np.arange(len(counts)), counts))  # a warning would be an error


def test_owners_of_every_type_are_the_same_users():
    numbers = [7, 2, 7, 9, 7, 2, 7]
    for owners in (numbers, np.asarray(numbers, object), jnp.asarray(numbers), [np.int64(n) for n in numbers]):
        assert [rows_of(item) for item in dpx.UserData(DATA, owners)] == list(ITEMS.values())
    for owners in (np.asarray(OWNERS), np.asarray(OWNERS, object), [np.str_(owner) for owner in OWNERS]):
        assert [rows_of(item) for item in dpx.UserData(DATA, owners)] == list(ITEMS.values())
    with pytest.raises(ValueError, match="every leaf must have the examples on axis 0"):
        dpx.UserData(DATA | {"x": DATA["x"][:6]}, OWNERS)


# The contract, with a user as its unit.

CLIP = 0.5
PARAMS = {"w": jnp.full((2, 3), 0.1), "b": jnp.zeros(3)}
HOSTILE = np.array([1e-30, 1.0, -1e4, 3e38, np.inf, np.nan], np.float32)


def mean_loss(params, user):
    """Over the user's rows that count."""
    examples, included = user
    logits = examples["x"] @ params["w"] + params["b"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, examples["label"].astype(jnp.int32) % 3)
    return jnp.sum(losses, where=included) / jnp.sum(included, dtype=jnp.float32)


def local_steps(params, user):
    """Two local steps, which diverge for large inputs."""

    def local_step(moved, _):
        return jax.tree.map(lambda p, g: p - 0.3 * g, moved, jax.grad(mean_loss)(moved, user)), None

    moved, _ = jax.lax.scan(local_step, params, length=2)
    return jax.tree.map(jnp.subtract, params, moved)


@functools.cache
def step_of(users, most):
    """(mechanism, jitted step) without noise, whose update is the sum of what the users contribute."""
    sampling = dpx.PoissonSampling(examples=users, batch_size=1)
    mechanism = dpx.dp_sgd(clip_norm=CLIP, noise_multiplier=0.0, sampling=sampling, key=KEY)
    return mechanism, jax.jit(dpx.private_updates_from(local_steps, mechanism))


def sum_of(data, owners, *, most, rows=4):
    """The sum over all users, drawn with padding up to `rows` of them."""
    users = dpx.UserData(data, owners, most=most)
    mechanism, step = step_of(4, most)
    items = users.__getitems__(list(range(len(users))) + [0] * (rows - len(users)))
    batch = dpx.Batch(jax.tree.map(lambda *leaves: np.stack(leaves), *items), np.arange(rows) < len(users))
    return step(PARAMS, batch, mechanism.init(PARAMS)).updates


def distance(one, other):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, one, other)))


@pytest.mark.parametrize("seed", range(5))
def test_leaving_out_a_user_moves_the_sum_by_at_most_the_clip_norm(seed):
    """A user of several hostile rows, among others; and one that is large, but finite, does move it by all of it."""
    rng = np.random.default_rng(seed)
    owners = rng.permutation([*rng.integers(0, 4, 6), *range(4), *range(4)])
    hostile = rng.integers(4)
    x = rng.normal(size=(14, 2)).astype(np.float32)
    shape = (owners == hostile).sum(), 2
    x[owners == hostile] = 1e3 * rng.normal(size=shape) if seed == 0 else rng.choice(HOSTILE[: seed + 2], shape)
    data = {"x": x, "label": rng.integers(0, 3, 14)}
    without = jax.tree.map(lambda leaf: leaf[owners != hostile], data), owners[owners != hostile]
    for most in (3, 14):
        moved = distance(sum_of(data, owners, most=most), sum_of(*without, most=most))
        assert moved <= CLIP * (1 + 1e-5)
        assert seed > 0 or moved >= 0.99 * CLIP


def test_neither_padding_nor_other_users_change_a_user():
    """More padding of rows or of users, rows beyond `most`, and the order of the rows of different users."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(9, 2)).astype(np.float32), "label": rng.integers(0, 3, 9)}
    owners = np.array([2, 0, 0, 1, 0, 2, 0, 0, 0])
    expected = sum_of(data, owners, most=3)
    kept = [0, 1, 3, 4, 5, 7]  # every other row of user 0
    order = [3, 1, 4, 0, 7, 5]  # that of each user's rows is as before
    for rows, most in ((kept, 3), (order, 3), (kept, 14)):
        found = sum_of(jax.tree.map(lambda leaf, rows=rows: leaf[rows], data), owners[rows], most=most)
        assert distance(found, expected) < 1e-6
    assert distance(sum_of(data, owners, most=14), expected) > 1e-3  # with all six rows of user 0


def test_two_items_of_one_user_would_be_seen():
    """The test of the bound can fail: a user who is split in two moves the sum by twice the clip norm."""
    data = {"x": np.full((2, 2), 1e3, np.float32), "label": np.zeros(2, int)}
    assert distance(sum_of(data, [0, 1], most=3), jax.tree.map(jnp.zeros_like, PARAMS)) >= 1.99 * CLIP


def test_the_report_says_user():
    mechanism, _ = step_of(4, 3)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=mechanism.sampling, key=KEY)
    report = dpx.privacy_report(mechanism, 1, delta=1e-3, unit="user")
    assert report.unit == "one user" and "| unit of privacy | one user |" in report.to_markdown()
    limits = "\n".join(report.caveats)
    for words in ("nulling one user", "of one user are not private", "they mean user"):
        assert words in limits
    assert "user" not in str(dpx.privacy_report(mechanism, 1, delta=1e-3))


def test_the_report_says_the_unit_that_the_state_records():
    mechanism, _ = step_of(4, 3)
    for recorded, said, refused in (
        ("user", "one user", "example"),
        ("home", None, "user"),
        ("example", "one example", "user"),
    ):
        state = mechanism.init(PARAMS)._replace(unit=jnp.uint32(unit_mark(recorded)))
        assert dpx.privacy_report(mechanism, state, delta=1e-3, unit=recorded).unit == f"one {recorded}"
        if said is not None:
            assert dpx.privacy_report(mechanism, state, delta=1e-3).unit == said
        for unit in (refused, None) if said is None else (refused,):
            with pytest.raises(ValueError, match="unit must be that of the batches"):
                dpx.privacy_report(mechanism, state, delta=1e-3, unit=unit)

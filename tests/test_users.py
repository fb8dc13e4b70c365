"""Users in place of examples, one item a user, who are the unit of privacy; and records that several people own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.audit.setup import static_findings
from dpx.sampling import records_to_keep
from dpx.states.record import unit_fingerprint
from tests.problems import KEY, dp_sgd, poisson

OWNERS = ["bo", "al", "bo", "cy", "bo", "al", "bo"]  # al has rows 1 and 5, bo 0, 2, 4 and 6, cy 3
DATA = {"x": np.arange(1, 15, dtype=np.float32).reshape(7, 2), "label": np.arange(10, 17, dtype=np.int8)}
ITEMS = {"al": [1, 5], "bo": [0, 2, 4, 6], "cy": [3]}


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
    sampling = poisson(3, 2)
    mechanism = dp_sgd(sampling)
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
    assert dpx.epsilon(mechanism, state, delta=1e-3) == pytest.approx(dpx.epsilon(mechanism, 2, delta=1e-3), rel=1e-4)
    with pytest.raises(ValueError, match="data must hold the 7 examples of the sampling, got 3: .*len.users"):
        poisson(7, 2).take(dpx.UserData(DATA, OWNERS), KEY, dp_sgd(poisson(7, 2)).init(params))


def test_a_check_counts_users():
    found = [
        static_findings.find_length_mismatch(dpx.UserData(DATA, OWNERS), dpx.FullBatch(examples=n)).severity
        for n in (3, 7)
    ]
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
        ([*OWNERS[:6], NAN], None, r"none of them missing; got \['float', 'str'\]; drop the rows without an owner"),
        (np.array([*OWNERS[:6], NAN]), None, "some look missing"),
        (np.array([*map(str, OWNERS[:6]), ""], "S3"), None, "some look missing"),
        ([3, -1, 3, 4, 5, 3, -1], None, "some look missing: a mask, a number below 0, or one of"),
        (np.ma.masked_array(np.arange(7), np.arange(7) == 2), None, "some look missing"),
        (np.asarray([*OWNERS[:6], NAN], object), None, r"got \['float', 'str'\]"),
        (np.asarray([1, 2, 1, 2, 1, 2, NAN]), None, r"got \['float'\]; drop .* then use .astype"),
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
    with pytest.raises(ValueError, match="every leaf must have the same number of examples"):
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
    mechanism = dp_sgd(poisson(users, 1), 0.0, clip_norm=CLIP)
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
    mechanism = dp_sgd(mechanism.sampling, 2.0)
    report = dpx.privacy_report(mechanism, 1, delta=1e-3, unit="user")
    assert report.unit == "one user" and "| who is protected | one user |" in report.to_markdown()
    limits = "\n".join((*report.conditions, *report.caveats))
    for words in ("nulling one user", "computed from one user is not private", "they mean user"):
        assert words in limits
    assert "user" not in str(dpx.privacy_report(mechanism, 1, delta=1e-3))


def test_a_loss_of_one_record_is_refused_in_words():
    """Only where it accepts a record: another error of a loss of users stays what it is."""
    params, mechanism = {"w": jnp.zeros(2)}, dp_sgd(dpx.FullBatch(examples=3))
    (batch,) = mechanism.sampling.batches(dpx.UserData(DATA, OWNERS), KEY, mechanism.init(params), steps=1)

    def step(function, build=dpx.private_updates):
        return build(function, mechanism)(params, batch, mechanism.init(params))

    for build, called in ((dpx.private_updates, "loss"), (dpx.private_updates_from, "update")):
        with pytest.raises(ValueError, match=f"the {called} must take all rows of one user, but it takes one row"):
            step(lambda params, record: record["x"] @ params["w"], build)
    with pytest.raises(TypeError, match="can only concatenate tuple"):
        step(lambda params, user: user + "of no kind")


@pytest.mark.filterwarnings("ignore:the state has taken no step:UserWarning")
def test_the_report_says_the_unit_that_the_state_records():
    mechanism, _ = step_of(4, 3)
    for recorded, said, refused in (
        ("user", "one user", "example"),
        ("home", None, "user"),
        ("example", "one example", "user"),
    ):
        state = mechanism.init(PARAMS).with_fields(unit=unit_fingerprint(recorded))
        assert dpx.privacy_report(mechanism, state, delta=1e-3, unit=recorded).unit == f"one {recorded}"
        if said is not None:
            assert dpx.privacy_report(mechanism, state, delta=1e-3).unit == said
        for unit in (refused, None) if said is None else (refused,):
            with pytest.raises(ValueError, match="unit must be that of the batches"):
                dpx.privacy_report(mechanism, state, delta=1e-3, unit=unit)


# Records of several owners: nobody owns more than k of those that are kept, and the owners alone decide.

ORDERS = ("order", "fewest_owners")


def random_owners(rng, records=12, people=6):
    return [tuple(rng.choice(people, rng.integers(1, 4), replace=False).tolist()) for _ in range(records)]


def most_of_one(owners, kept):
    counts = {}
    for record in kept:
        for owner in set(owners[record]):
            counts[owner] = counts.get(owner, 0) + 1
    return max(counts.values(), default=0)


@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_nobody_owns_more_and_no_record_fits_beside_them(first, most):
    rng = np.random.default_rng(most)
    for _ in range(40):
        owners = random_owners(rng)
        kept = records_to_keep(owners, most_records=most, first=first)
        assert kept.dtype == np.int64 and np.all(np.diff(kept) > 0)
        assert most_of_one(owners, kept) <= most
        left = set(range(len(owners))) - set(kept.tolist())
        assert all(most_of_one(owners, [*kept, record]) > most for record in left)


def test_greedy_choices_are_a_share_of_the_most():
    """With at most w owners a record, a kept record keeps out at most w of the best, so at least 1 / w are kept."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        owners = random_owners(rng, records=9)
        subsets = itertools.chain.from_iterable(itertools.combinations(range(9), size) for size in range(10))
        most = max(len(subset) for subset in subsets if most_of_one(owners, subset) <= 1)
        for first in ORDERS:
            assert most / 3 <= len(records_to_keep(owners, most_records=1, first=first)) <= most


def test_both_orders_by_hand():
    owners = [("al", "bo", "cy"), ("al",), ("bo", "bo"), ("cy", "di"), ("di",)]
    assert records_to_keep(owners, most_records=1).tolist() == [0, 4]
    assert records_to_keep(owners, most_records=1, first="fewest_owners").tolist() == [1, 2, 4]
    assert records_to_keep(owners, most_records=2).tolist() == [0, 1, 2, 3, 4]
    flat = np.array([owner for one in owners for owner in one])
    starts = np.array([0, 3, 4, 6, 8, 9])
    assert records_to_keep((flat, starts), most_records=1).tolist() == [0, 4]


@pytest.mark.parametrize("first", ORDERS)
def test_neighbors_of_a_fixed_graph_keep_the_same_records(first):
    """A null keeps the place and the owners of a record. So one person changes at most k of the rows of a run."""
    rng = np.random.default_rng(1)
    owners, data = random_owners(rng, records=60, people=15), rng.standard_normal((60, 2))
    kept = records_to_keep(owners, most_records=3, first=first)
    for person in range(15):
        nulled = np.where([[person in one] for one in owners], 0.0, data)
        again = records_to_keep(owners, most_records=3, first=first)
        assert np.any(nulled != data, axis=1)[again].sum() <= 3 and np.array_equal(again, kept)


@pytest.mark.parametrize("length", [3, 9])
def test_private_owners_would_have_no_bill(length):
    """A chain of people, each with a record beside the next one: without its first record, all others change."""
    chain = [(person, person + 1) for person in range(length)]
    kept = set(records_to_keep(chain, most_records=1).tolist())
    without = {record + 1 for record in records_to_keep(chain[1:], most_records=1).tolist()}
    assert not kept & without and len(kept | without) == length


def test_the_bill_of_the_kept_records():
    owners = [(person, person // 2) for person in range(40)]
    kept = records_to_keep(owners, most_records=2)
    bills = [dpx.epsilon(dp_sgd(poisson(len(kept), 4), 4.0), 5, delta=1e-4, records=records) for records in (1, 2)]
    assert bills[0] < bills[1] < 3 * bills[0]


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([("al",), ()], "at least one owner for each record"),
        ([], "at least one owner for each record"),
        (["al", "bo"], "a collection of owners for each record"),
        ("al", "a collection of owners for each record"),
        ([("al", None)], "must be all integers or all strings"),
        ([("al", 1)], "must be all integers or all strings"),
        ([(1, -1)], "some look missing"),
        ([("al", "")], "some look missing"),
        ((np.ma.masked_array([1, 2], mask=[False, True]), np.array([0, 1, 2])), "some look missing: a mask"),
        ((np.array([1, 2]), np.array([0, 1])), "rise from 0 to the number of owners, 2"),
        ((np.array([1, 2]), np.array([0, 2, 1, 2])), "rise from 0 to the number of owners, 2"),
        ((np.array([1, 2]), np.array([0, 0, 2])), "at least one owner for each record"),
        ((np.array([1, 2]), np.array([0.0, 2.0])), "starts must be integers"),
    ],
)
def test_owners_of_records_that_are_refused(owners, words):
    with pytest.raises(ValueError, match=words):
        records_to_keep(owners, most_records=1)


def test_other_arguments_of_records_that_are_refused():
    with pytest.raises(ValueError, match="most_records must be a whole number of at least 1"):
        records_to_keep([(1,)], most_records=0)
    with pytest.raises(ValueError, match='first must be "order" or "fewest_owners"'):
        records_to_keep([(1,)], most_records=1, first="random")

"""Records of several owners: nobody owns more than k of those that are kept, and the owners alone decide."""

import itertools

import numpy as np
import pytest

import dpx
from dpx.sampling import records_to_keep

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
    sampling = dpx.PoissonSampling(examples=len(kept), batch_size=4)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=4.0, sampling=sampling, key=dpx.secret_key(2**100))
    bills = [dpx.epsilon(mechanism, 5, delta=1e-4, records=records) for records in (1, 2)]
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
def test_what_is_refused(owners, words):
    with pytest.raises(ValueError, match=words):
        records_to_keep(owners, most_records=1)


def test_other_arguments_that_are_refused():
    with pytest.raises(ValueError, match="most_records must be a whole number of at least 1"):
        records_to_keep([(1,)], most_records=0)
    with pytest.raises(ValueError, match='first must be "order" or "fewest_owners"'):
        records_to_keep([(1,)], most_records=1, first="random")

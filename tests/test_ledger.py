"""The ledger of a data set: what it allows, what it writes before a release, and what a second program sees."""

import json
import math

import jax
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)

import dpx
from dpx.accounting.events import billed
from dpx.accounting.loss import hashable
from dpx.ledgers.lines import decoded, encoded
from tests.mechanisms import MECHANISMS

RUN = SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.6)), 600)
MEAN = GaussianDpEvent(40.0)


def key(number: int) -> jax.Array:
    return jax.random.key(number)


@pytest.fixture
def ledger(tmp_path):
    return dpx.PrivacyLedger(tmp_path / "ledger.jsonl", epsilon=2.0, delta=1e-5)


def test_releases_compose_exactly_where_they_are_planned(ledger):
    events = [MEAN, RUN, GaussianDpEvent(20.0)]
    for number, event in enumerate(events):
        ledger.reserve(event, key=key(number), words=f"release {number}")
    together = billed(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert ledger.epsilon == pytest.approx(together, rel=1e-12)
    for number, event in enumerate(events):
        assert ledger.spend(event, key=key(number), words="made").planned
    assert ledger.epsilon == pytest.approx(together, rel=1e-12)
    assert [entry.made for entry in ledger.entries] == [True] * 3


def test_releases_that_are_chosen_later_cost_a_little_more(ledger):
    events = [MEAN, RUN, MEAN]
    for number, event in enumerate(events):
        ledger.spend(event, key=key(number), words=f"release {number}")
    together = billed(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert [entry.planned for entry in ledger.entries] == [True, False, False]
    assert together < ledger.epsilon < 1.03 * together
    assert ledger.epsilon < sum(billed(event, relation="zero_out").epsilon(1e-5) for event in events)


def test_what_the_budget_does_not_allow_is_refused_and_leaves_no_line(ledger):
    ledger.spend(RUN, key=key(0), words="a run")
    before = ledger.path.read_text()
    for event in (SelfComposedDpEvent(RUN, 10), GaussianDpEvent(0.5), NonPrivateDpEvent(), GaussianDpEvent(0.0)):
        assert not ledger.affords(event)
        with pytest.raises(ValueError, match="must allow a release before it is made"):
            ledger.spend(event, key=key(1), words="too much")
    assert ledger.path.read_text() == before
    assert ledger.affords(MEAN)


def test_a_run_may_have_the_whole_budget(tmp_path):
    alone = billed(RUN, relation="zero_out").epsilon(1e-5)
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=1.000001 * alone, delta=1e-5)
    ledger.spend(RUN, key=key(0), words="a run")
    assert ledger.epsilon == alone
    assert not ledger.affords(GaussianDpEvent(1e6), numbers=1)
    later = dpx.PrivacyLedger(tmp_path / "later", epsilon=1.03 * alone, delta=1e-5)
    assert later.affords(RUN)
    later.spend(GaussianDpEvent(1e3), key=key(1), words="first", numbers=1)
    assert later.affords(RUN)


def test_a_budget_is_used_up_and_never_exceeded(tmp_path):
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=0.5, delta=1e-5)
    made = 0
    while ledger.affords(GaussianDpEvent(12.0), numbers=1):
        ledger.spend(GaussianDpEvent(12.0), key=key(made), words="a mean", numbers=1)
        made += 1
    assert 0.4 < ledger.epsilon <= 0.5
    assert made == pytest.approx(144 * ledger.terms.filter.most.precision, abs=1)


def test_one_key_makes_one_release(ledger):
    ledger.spend(MEAN, key=[key(0), key(1)], words="noise and batches")
    other = dpx.PrivacyLedger(ledger.path)  # of another program
    for event, keys in [(MEAN, [key(0), key(1)]), (MEAN, key(1)), (RUN, key(0)), (RUN, [key(2), key(0)])]:
        with pytest.raises(ValueError, match="made with this key|must have a key of its own"):
            other.spend(event, key=keys, words="again")
    assert len(ledger.entries) == 1


def test_a_run_that_continues_in_its_folder_pays_once(ledger):
    first = ledger.spend(RUN, key=key(0), words="a run", holder="folder")
    assert ledger.spend(RUN, key=key(0), words="a run", holder="folder") == first
    assert len(ledger.path.read_text().splitlines()) == 3
    for event, holder in ((RUN, "another"), (RUN, ""), (SelfComposedDpEvent(RUN, 2), "folder")):
        with pytest.raises(ValueError, match="made with this key|must have a key of its own"):
            ledger.spend(event, key=key(0), words="a run", holder=holder)


def test_parts_of_a_public_partition_cost_their_members_alone(ledger):
    whole = ledger.spend(MEAN, key=key(0), words="of all")
    alone = ledger.epsilon
    for number, part in enumerate(["north", "south", "north"], 1):
        ledger.spend(GaussianDpEvent(20.0), key=key(number), words="of a part", part=part, numbers=1)
    events = [MEAN, GaussianDpEvent(20.0), GaussianDpEvent(20.0)]
    together = billed(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert whole.part is None
    assert alone < together < ledger.epsilon < 1.02 * together


def test_a_second_program_must_know_the_same_budget(ledger, tmp_path):
    assert dpx.PrivacyLedger(ledger.path).terms == ledger.terms
    for given in ({"epsilon": 3.0}, {"delta": 1e-6}, {"unit": "user"}, {"records": 2}, {"relation": "replace_one"}):
        with pytest.raises(ValueError, match=f"must stay as it is, but in .* {next(iter(given))} is"):
            dpx.PrivacyLedger(ledger.path, **given)
    with pytest.raises(ValueError, match="must be given for a new ledger"):
        dpx.PrivacyLedger(tmp_path / "other")
    (tmp_path / "words").write_text("words")
    with pytest.raises(ValueError, match="must be a ledger of dpx or no file"):
        dpx.PrivacyLedger(tmp_path / "words", epsilon=1.0, delta=1e-5)


def test_releases_must_be_for_the_unit_of_the_ledger(ledger, tmp_path):
    with pytest.raises(ValueError, match="for the unit of the ledger, 'example', got 'user'"):
        ledger.spend(MEAN, key=key(0), words="of users", unit="user")
    for words in ("", "two\nlines", 3):
        with pytest.raises(ValueError, match="words must be printable words in one line"):
            ledger.spend(MEAN, key=key(0), words=words)
    replaced = dpx.PrivacyLedger(tmp_path / "replaced", epsilon=1.0, delta=1e-5, relation="replace_one")
    with pytest.raises(ValueError, match="part must be None"):
        replaced.spend(MEAN, key=key(0), words="of a part", part="north")
    assert ledger.entries == replaced.entries == ()
    replaced.spend(MEAN, key=key(0), words="of all")
    ledger.spend(MEAN, key=key(0), words="of all")
    assert replaced.epsilon > 1.9 * ledger.epsilon


def test_events_are_written_exactly():
    for case in MECHANISMS:
        event = hashable(case.make(key(0)).event(3))
        assert decoded(json.loads(json.dumps(encoded(event)))) == event, case.name


def test_floats_keep_their_bits():
    for value in (0.1, math.pi * 1e-300, math.inf, -0.0, 5e-324):
        found = decoded(json.loads(json.dumps(encoded(GaussianDpEvent(value))))).noise_multiplier
        assert found.hex() == value.hex()
    with pytest.raises(ValueError, match="every event of a ledger must be known"):
        decoded({"type": "PathDpEvent"})
    with pytest.raises(ValueError, match="event must hold numbers"):
        encoded(GaussianDpEvent(object()))  # pyrefly: ignore

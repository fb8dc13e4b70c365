"""The ledger of a data set: what it allows, what it writes before a release, and what a second program sees."""

import contextlib
import functools
import itertools
import json
import math
import os
import random
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import attrs
import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

import dpx
from dpx import statistics
from dpx.accounting import gdp
from dpx.accounting.cost import event_epsilon, event_profile, profile_of_run
from dpx.accounting.filters import NOTHING, credit_for_untaken_steps, dominating_mu
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import as_hashable
from dpx.accounting.pld.losses import SampledGaussian
from dpx.ledgers import files
from dpx.ledgers.entries import decode_value, encode_value
from dpx.values import rounded_up
from dpx.xla.place import tracing_for_place
from tests import kills
from tests.mechanisms import MECHANISMS
from tests.problems import dp_sgd, normal, poisson, run_page, squared_distance

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
    together = profile_of_run(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert ledger.epsilon == pytest.approx(together, rel=1e-12)
    for number, event in enumerate(events):
        assert ledger.spend(event, key=key(number), words="made").planned
    assert ledger.epsilon == pytest.approx(together, rel=1e-12)
    assert [entry.made for entry in ledger.entries] == [True] * 3


@pytest.mark.parametrize(
    ("relation", "events"),
    [
        ("zero_out", [GaussianDpEvent(8.0), SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 20)]),
        ("zero_out", [GaussianDpEvent(3.0), SelfComposedDpEvent(GaussianDpEvent(9.0), 4), GaussianDpEvent(2.5)]),
        (
            "add_or_remove",
            [GaussianDpEvent(9.0), PoissonSampledDpEvent(0.3, GaussianDpEvent(1.5)), GaussianDpEvent(5.0)],
        ),
    ],
)
@pytest.mark.long_cases("add_or_remove")
def test_planned_releases_cost_what_dp_accounting_says(relation, events, tmp_path):
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=4.0, delta=1e-5, relation=relation)
    names = {"zero_out": "REPLACE_SPECIAL", "add_or_remove": "ADD_OR_REMOVE_ONE"}
    theirs = PLDAccountant(dp_accounting.NeighboringRelation[names[relation]])
    for number, event in enumerate(events):
        assert ledger.reserve(event, key=key(number), words="planned", numbers=1).planned
        theirs.compose(event)
    assert ledger.epsilon == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-4)


def test_releases_that_are_chosen_later_cost_a_little_more(ledger):
    events = [MEAN, RUN, MEAN]
    for number, event in enumerate(events):
        ledger.spend(event, key=key(number), words=f"release {number}")
    together = profile_of_run(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert [entry.planned for entry in ledger.entries] == [True, False, False]
    assert together < ledger.epsilon < 1.03 * together
    assert ledger.epsilon < sum(profile_of_run(event, relation="zero_out").epsilon(1e-5) for event in events)


def test_what_the_budget_does_not_allow_is_refused_and_leaves_no_line(ledger):
    ledger.spend(RUN, key=key(0), words="a run")
    before = ledger.path.read_text()
    for event in (SelfComposedDpEvent(RUN, 10), GaussianDpEvent(0.5), NonPrivateDpEvent(), GaussianDpEvent(0.0)):
        assert not ledger.affords(event)
        with pytest.raises(
            ValueError, match="within the budget .*with it, epsilon is (inf|1?[0-9][.0-9]+); without it, "
        ):
            ledger.spend(event, key=key(1), words="too much")
    assert ledger.path.read_text() == before
    assert ledger.affords(MEAN)


def test_a_run_may_have_the_whole_budget(tmp_path):
    alone = profile_of_run(RUN, relation="zero_out").epsilon(1e-5)
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
    assert made == pytest.approx(144 * ledger.terms.filter.limits.precision, abs=1)


def test_one_key_makes_one_release(ledger):
    ledger.spend(MEAN, key=[key(0), key(1)], words="noise and batches")
    other = dpx.PrivacyLedger(ledger.path)  # of another program
    for event, keys in [(MEAN, [key(0), key(1)]), (MEAN, key(1)), (RUN, key(0)), (RUN, [key(2), key(0)])]:
        with pytest.raises(ValueError, match="made with this key|must have a key of its own"):
            other.spend(event, key=keys, words="again")
    assert len(ledger.entries) == 1


def test_what_was_reserved_is_made_with_as_many_numbers_and_no_other_arithmetic(tmp_path):
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=1.0, delta=1e-20)
    ledger.reserve(GaussianDpEvent(50.0), key=key(0), words="of one number", numbers=1)
    assert (
        ledger.epsilon < 0.2 and profile_of_run(GaussianDpEvent(50.0), relation="zero_out").epsilon(1e-20) == math.inf
    )
    with pytest.raises(ValueError, match="of up to 1 numbers, got"):
        ledger.spend(GaussianDpEvent(50.0), key=key(0), words="of many")
    with tracing_for_place(platform="tpu"), pytest.raises(ValueError, match="of up to 1 numbers, got"):
        ledger.spend(GaussianDpEvent(50.0), key=key(0), words="in integers", numbers=1)
    assert ledger.spend(GaussianDpEvent(50.0), key=key(0), words="of one number", numbers=1).made


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
    together = profile_of_run(ComposedDpEvent(events), relation="zero_out").epsilon(1e-5)
    assert whole.part is None
    assert alone < together < ledger.epsilon < 1.02 * together


def test_a_second_program_must_know_the_same_budget(ledger, tmp_path):
    assert dpx.PrivacyLedger(ledger.path).terms == ledger.terms
    for given in ({"epsilon": 3.0}, {"delta": 1e-6}, {"unit": "user"}, {"records": 2}, {"relation": "replace_one"}):
        with pytest.raises(ValueError, match=f"must not change, but in .* {next(iter(given))} is .*: leave it out"):
            dpx.PrivacyLedger(ledger.path, **given)
    with pytest.raises(ValueError, match="must be given for a new ledger"):
        dpx.PrivacyLedger(tmp_path / "other")
    (tmp_path / "words").write_text("words")
    (tmp_path / "json").write_text('{"ledgers": {}}')
    for other in (tmp_path / "words", tmp_path / "json", tmp_path):
        with pytest.raises(ValueError, match="must be a dpx ledger, or not exist"):
            dpx.PrivacyLedger(other, epsilon=1.0, delta=1e-5)
    for none in ([], ()):  # nothing would show that the next release has the same noise
        with pytest.raises(ValueError, match="at least one key"):
            ledger.spend(MEAN, key=none, words="by no key")


def test_a_link_to_a_ledger_is_the_same_ledger(ledger, tmp_path):
    """Whatever writes a line replaces the file; a link in its place would become a second ledger, each with half."""
    (tmp_path / "link").symlink_to(ledger.path)
    linked = dpx.PrivacyLedger(tmp_path / "link", epsilon=2.0, delta=1e-5)
    linked.spend(MEAN, key=key(0), words="by the link")
    ledger.spend(MEAN, key=key(1), words="by the file")
    linked.spend(MEAN, key=key(2), words="by the link")
    assert [len(each.entries) for each in (ledger, linked)] == [3, 3]
    assert linked._lock.lock_file == ledger._lock.lock_file
    (tmp_path / "hard").hardlink_to(ledger.path)
    for one in (ledger, dpx.PrivacyLedger(tmp_path / "hard")):
        with pytest.raises(ValueError, match="must have one name, but .* has another one, a hard link"):
            one.spend(MEAN, key=key(3), words="by one of two names")


def test_releases_must_be_for_the_unit_of_the_ledger(ledger, tmp_path):
    with pytest.raises(ValueError, match="protect the unit of the ledger, 'example', got 'user'"):
        ledger.spend(MEAN, key=key(0), words="of users", unit="user")
    for words in ("", "two\nlines", 3):
        with pytest.raises(ValueError, match="words must be one line of printable text"):
            ledger.spend(MEAN, key=key(0), words=words)
    replaced = dpx.PrivacyLedger(tmp_path / "replaced", epsilon=1.0, delta=1e-5, relation="replace_one")
    with pytest.raises(ValueError, match="part must be None"):
        replaced.spend(MEAN, key=key(0), words="of a part", part="north")
    persons = dpx.PrivacyLedger(tmp_path / "persons", epsilon=1.0, delta=1e-5, records=2)
    with pytest.raises(ValueError, match="part must be None in a ledger for persons with 2 records"):
        persons.reserve(MEAN, key=key(0), words="of a part", part="north")
    for other in (replaced, persons):  # and does not say that it affords what it would refuse
        with pytest.raises(ValueError, match="part must be None"):
            other.affords(MEAN, part="north")
        with pytest.raises(ValueError, match="part must be None"):
            other.least_noise(GaussianDpEvent, part="north")
    rich = dpx.PrivacyLedger(tmp_path / "rich", epsilon=9.0, delta=1e-5)
    rich.spend(MEAN, key=key(0), words="of a part", part="Île 1")
    for part in ("Île 1 ", "île  1", "I\u0302le 1"):  # one part with two budgets
        for ask in (rich.affords, lambda event, part: rich.reserve(event, key=key(1), words="of a part", part=part)):
            with pytest.raises(ValueError, match="part must be written as before, 'Île 1', got"):
                ask(MEAN, part=part)
    rich.spend(MEAN, key=key(1), words="of another part", part="Île 2")
    assert ledger.entries == replaced.entries == persons.entries == ()
    replaced.spend(MEAN, key=key(0), words="of all")
    ledger.spend(MEAN, key=key(0), words="of all")
    assert replaced.epsilon > 1.9 * ledger.epsilon


@attrs.frozen
class MadeTwice(DpEvent):
    """By attrs, which leaves the class without slots, until it is collected as garbage: here, it never is."""

    value: float


WITHOUT_SLOTS = [kind for kind in DpEvent.__subclasses__() if kind.__name__ == "MadeTwice" and kind is not MadeTwice]


def test_an_event_is_read_as_its_class_and_not_as_one_that_attrs_left():
    assert WITHOUT_SLOTS
    assert decode_value(encode_value(MadeTwice(0.5))) == MadeTwice(0.5)


def test_events_are_written_exactly():
    for case in MECHANISMS:
        event = as_hashable(case.make(key(0)).event(3))
        assert decode_value(json.loads(json.dumps(encode_value(event)))) == event, case.name


def test_floats_keep_their_bits():
    for value in (0.1, math.pi * 1e-300, math.inf, -0.0, 5e-324):
        found = decode_value(json.loads(json.dumps(encode_value(GaussianDpEvent(value))))).noise_multiplier
        assert found.hex() == value.hex()
    with pytest.raises(ValueError, match="every event of a ledger must be known"):
        decode_value({"type": "PathDpEvent"})
    with pytest.raises(ValueError, match="event must hold numbers"):
        encode_value(GaussianDpEvent(object()))  # pyrefly: ignore


# Runs


POINTS = normal(0, 40, 3)


def trained(ledger, number=0, *, folder=None, steps=12, ends=None, data=POINTS, noise=2.0, sampling=None, **options):
    """A run of `fit` that a callback ends after a step."""
    sampling = dpx.PoissonSampling(examples=40, batch_size=8) if sampling is None else sampling
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=key(number))
    options |= {"steps": steps, "delta": 1e-5, "evaluate_every": 1, "checkpoint_every": 4, "checkpoints": folder}
    options = {"callbacks": [lambda progress: progress.step == ends], "accountant": "rdp"} | options
    begin = {"w": jnp.zeros(3)}
    return dpx.fit(squared_distance, dpx.chain(mechanism, optax.sgd(0.1)), begin, data, ledger=ledger, **options)


def of_run(steps: int):
    return SelfComposedDpEvent(PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0)), steps)


@pytest.fixture
def rich(tmp_path):
    return dpx.PrivacyLedger(tmp_path / "ledger.jsonl", epsilon=20.0, delta=1e-5)


def test_fit_pays_for_all_its_steps_before_the_first(rich, tmp_path):
    run = trained(rich, words="the first run", accountant="tightest")
    (entry,) = rich.entries
    assert (entry.words, entry.event, entry.numbers, entry.steps) == ("the first run", of_run(12), 3, None)
    assert rich.epsilon == run.epsilon
    trained(rich, 1, steps=1, part="north")
    assert rich.entries[1].part == "north"
    poor = dpx.PrivacyLedger(tmp_path / "poor", epsilon=0.5, delta=1e-5)
    made = []
    with pytest.raises(ValueError, match="every release must stay within the budget"):
        trained(poor, 2, data=Watched(POINTS, made))
    assert {*made} <= {0} and not poor.entries  # example 0 tells whose run it is
    with pytest.raises(ValueError, match=r"ledger must be a dpx.PrivacyLedger, got"):
        trained("ledger")


class Watched:
    """Examples, with a list of those that were read."""

    def __init__(self, rows, read):
        self.rows, self.read = rows, read

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.read.append(number)
        return self.rows[number]


def test_a_run_that_is_continued_pays_once_and_another_one_is_refused(rich, tmp_path):
    def dies(progress):
        if progress.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(rich, folder=tmp_path / "run", callbacks=[dies])
    before = rich.path.read_text()
    whole = trained(rich, folder=tmp_path / "run")
    assert whole.steps == 12 and rich.path.read_text() == before
    assert trained(None, folder=tmp_path / "run").steps == 12
    with pytest.raises(ValueError, match="ledger must be given for a run of 13 steps .* paid for 12 of them"):
        trained(None, folder=tmp_path / "run", steps=13)
    with pytest.raises(ValueError, match="must have a key of its own"):
        trained(rich, folder=tmp_path / "run", steps=13)
    assert trained(rich, folder=tmp_path / "run").steps == 12  # what was refused is not planned
    shutil.rmtree(tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "another", None):
        with pytest.raises(ValueError, match="was made with this key"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the key
            trained(rich, folder=folder)
    assert rich.path.read_text() == before


def test_a_run_that_ends_early_costs_what_it_made(rich, tmp_path):
    rich.spend(GaussianDpEvent(500.0), key=key(9), words="before", numbers=1)
    run = trained(rich, folder=tmp_path / "run", ends=5)
    entry = rich.entries[1]
    assert run.steps == entry.steps == 5 and run.report.spent > 1.1 * rich.epsilon
    made = profile_of_run(of_run(5), relation="zero_out").epsilon(1e-5)
    assert made < rich.epsilon < profile_of_run(of_run(12), relation="zero_out").epsilon(1e-5) < rich.odometer
    said = " ".join(run.report.caveats)
    adds_up = "entry 1 of the ledger ledger.jsonl, which adds up all releases of the data"
    assert f"{adds_up}: epsilon {rounded_up(rich.epsilon, 4)}" in said
    assert "The ledger gave back at most what the steps after step 5 would have cost; the epsilon of this" in said
    assert run.report.epsilon["rdp"] == run.epsilon
    text = rich.path.read_text()
    for ledger in (rich, None):
        with pytest.warns(UserWarning, match="ended by a callback after step 5, .* so this call makes none"):
            assert trained(ledger, folder=tmp_path / "run").steps == 5
    assert rich.path.read_text() == text
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace('"ended": 5', '"ended": null'))
    with pytest.raises(ValueError, match="has ended after step 5"):  # a copy of the folder from before
        trained(rich, folder=tmp_path / "run")


@pytest.mark.parametrize("make", [dpx.ShuffledEpochs, functools.partial(dpx.sampling.CyclicPoissonSampling, bands=5)])
def test_an_epoch_that_has_begun_is_not_given_back(rich, make):
    """It costs its least noise, that of its last step, even if this was not made. Two of three epochs have begun."""
    sampling = make(examples=40, batch_size=8)
    run = trained(rich, ends=7, sampling=sampling, noise=lambda step: 9.0 - step / 4)
    (entry,) = rich.entries
    assert run.steps == entry.steps == 7 and entry.credit == (pytest.approx(6.25**-2), 0)


def test_a_run_for_persons_ends_with_any_schedule(tmp_path):
    """The plan and the steps that were made round 40 noise multipliers to other ones."""
    ledger = dpx.PrivacyLedger(tmp_path / "persons", epsilon=20.0, delta=1e-5, records=2)
    full = {"sampling": dpx.FullBatch(examples=40), "noise": lambda step: 70.0 - step}
    run = trained(ledger, ends=5, steps=40, records=2, **full)
    assert run.steps == ledger.entries[0].steps == 5
    assert "for one person with up to 2 records when the run ended" in " ".join(run.report.caveats)


def test_a_run_on_the_batches_of_another_one_is_refused(rich):
    """Its releases would not be amplified apart from those of the other one."""
    trained(rich, 1, steps=2)
    with pytest.raises(ValueError, match="must have a key of its own"):
        trained(rich, 2, steps=2, key=key(1))


def test_steps_that_may_have_been_made_are_not_given_back(rich, tmp_path):
    """A program that was killed after step 7 may have shown it, whatever the next one decides at step 5."""

    def dies(progress):
        if progress.step == 7:
            raise OSError

    with pytest.raises(OSError):
        trained(rich, folder=tmp_path / "run", callbacks=[dies])
    assert trained(rich, folder=tmp_path / "run", ends=5).steps == 5
    assert rich.entries[0].steps == 8  # for which the folder had room


def deltas_of_a_step(rate: float, sigma: float, epsilon: float) -> tuple[float, float]:
    """Of a Gaussian on a Poisson sample, by its densities, in both directions."""
    above, below = (math.exp(sign * epsilon) - 1 + rate for sign in (1, -1))
    here = sigma**2 * math.log(above / rate) + 0.5
    mixed = (1 - rate) * norm.sf(here / sigma) + rate * norm.sf((here - 1) / sigma)
    removed, added = mixed - math.exp(epsilon) * norm.sf(here / sigma), 0.0
    if below > 0:
        there = sigma**2 * math.log(below / rate) + 0.5
        mixed = (1 - rate) * norm.cdf(there / sigma) + rate * norm.cdf((there - 1) / sigma)
        added = norm.cdf(there / sigma) - math.exp(epsilon) * mixed
    return removed, added


@pytest.mark.parametrize(("rate", "sigma", "coins"), [(0.5, 2.0, 1e-4), (0.1, 1.0, 1e-2), (0.9, 1.0, 1e-6)])
def test_what_is_given_back_is_bounded_by_steps_that_were_not_made(rate, sigma, coins):
    gained = credit_for_untaken_steps({SampledGaussian(sigma, rate, "zero_out"): 1}, coins)
    assert gained.delta == 2 * coins

    def fits(mu):
        rest = [(epsilon, min(deltas_of_a_step(rate, sigma, epsilon))) for epsilon in np.linspace(0, 6, 400).tolist()]
        return all(gdp.delta(mu, epsilon=epsilon) <= coins + (1 - coins) * delta + 1e-13 for epsilon, delta in rest)

    assert fits(gained.precision**0.5) and not fits(1.03 * gained.precision**0.5)


def test_gaussians_that_were_not_made_are_given_back_whole():
    assert credit_for_untaken_steps({SampledGaussian(4.0, 1.0, "zero_out"): 8}, 0.0) == pytest.approx((0.5, 0.0))
    assert credit_for_untaken_steps({SampledGaussian(4.0, 0.1, "zero_out"): 8}, 0.0) == NOTHING


def test_what_is_given_back_was_paid_for():
    """The steps that were made, a Gaussian of what is given back, and its coin: at most the whole run."""
    step = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.2))
    gained = credit_for_untaken_steps(from_event(SelfComposedDpEvent(step, 200)).losses("zero_out"), 1e-6)
    whole = event_profile(SelfComposedDpEvent(step, 300), curve=True)
    made = [SelfComposedDpEvent(step, 100), GaussianDpEvent(gained.precision**-0.5)]
    both = event_profile(ComposedDpEvent(made), curve=True)
    for epsilon in np.linspace(0, whole.epsilon(1e-8), 20).tolist():
        assert both.delta(epsilon) <= 1.001 * whole.delta(epsilon) + 1e-6
    assert gained.precision > 0.5 * dominating_mu(whole, 1e-6) ** 2 * (1 - 100 / 300)


def test_the_odometer_ends_at_the_budget(ledger):
    for number in range(3):
        before = ledger.odometer
        ledger.spend(GaussianDpEvent(4.0), key=key(number), words="a mean", numbers=1)
        assert ledger.epsilon < ledger.odometer and before < ledger.odometer <= 2
    assert ledger.odometer == 2


def test_numbers_of_numpy_are_written(rich, tmp_path):
    """JSON refused them, so such a run could have no folder, and its report could not be saved."""
    entry = rich.spend(of_run(3), key=key(0), words="a run", numbers=np.int64(3))
    rich.end(entry, of_run(1), steps=np.int64(1))
    numbers = {"steps": np.int64(2), "delta": np.float32(1e-5), "evaluate_every": np.int64(1)}
    run = trained(rich, 1, folder=tmp_path / "run", **numbers)
    assert [(entry.numbers, entry.steps) for entry in rich.entries] == [(3, 1), (3, None)]
    budget = dpx.Budget(epsilon=np.float32(1.9999999), delta=Fraction(1, 10**5), steps=np.int64(2))
    report = replace(run.report, budget=budget)
    assert json.loads(report.to_json())["budget"]["steps"] == 2 and "epsilon 2 at delta" in str(report)


def test_the_odometer_does_not_go_back(rich):
    rich.spend(MEAN, key=key(0), words="before")
    entry = rich.spend(of_run(12), key=key(1), words="a run")
    before, spent = rich.odometer, rich.epsilon
    rich.end(entry, of_run(5), steps=5)
    assert rich.odometer == before > spent > rich.epsilon


def test_a_run_ends_once_and_with_its_own_steps(rich):
    entry = rich.reserve(of_run(12), key=key(0), words="a run")
    with pytest.raises(ValueError, match="must be a run that has not ended"):
        rich.end(entry, of_run(5), steps=5)
    entry = rich.spend(of_run(12), key=key(0), words="a run")
    spent = rich.epsilon
    with pytest.raises(ValueError, match="must hold its own steps"):
        rich.end(entry, of_run(13), steps=13)
    ended = rich.end(entry, of_run(5), steps=5)
    left, coins = from_event(of_run(7)).losses("zero_out"), rich.terms.filter.limits.delta / 8
    assert ended.credit == credit_for_untaken_steps(left, coins)
    assert rich.end(entry, of_run(5), steps=5) == ended == rich.entries[0]
    assert rich.epsilon == spent  # what was given back is for later releases
    with pytest.raises(ValueError, match="that has not ended"):
        rich.end(entry, of_run(6), steps=6)
    pure = rich.spend(SelfComposedDpEvent(LaplaceDpEvent(20.0), 4), key=key(7), words="of another noise")
    assert rich.end(pure, LaplaceDpEvent(20.0), steps=1).credit == NOTHING
    with pytest.raises(ValueError, match="was made with this key"):
        rich.spend(of_run(12), key=key(0), words="a run")


def test_the_page_says_what_was_promised_and_released(rich):
    rich.spend(MEAN, key=key(0), words="mean of the age", part="north")
    rich.reserve(MEAN, key=key(1), words="mean of the height")
    rich.end(rich.spend(of_run(12), key=key(2), words="a run"), of_run(4), steps=4)
    page = " ".join(str(rich).split())
    assert "epsilon 20 and delta 1e-05" in page and "2 made, 1 reserved" in page and "for one example" in page
    assert (
        f"spent epsilon {rounded_up(rich.epsilon, 4)}," in page
        and f"moment epsilon {rounded_up(rich.odometer, 4)}," in page
    )
    for words in (
        "mean of the age; of part 'north'; 1 x Gaussian, noise multiplier 40; composed exactly",
        "mean of the height; 1 x Gaussian, noise multiplier 40; reserved, not made; counted as a Gaussian of mu 0.025",
        "a run; 12 x Gaussian on a Poisson sample of rate 0.2, noise multiplier 2; counted as",
        "; ended after step 4, which gave a Gaussian of mu 0.",
    ):
        assert words in page, words
    assert "# Privacy ledger ledger.jsonl" in rich._repr_markdown_()


@pytest.mark.long
def test_noise_batches_and_steps_follow_what_was_released(rich):
    """Consecutive runs that go on with the momentum: together they cost about what they would, had all been fixed."""
    metric = statistics.PrivateMetric(
        lambda params: np.asarray(params["w"]).sum() < normal(9, 40),
        noise_multiplier=9.0,
        key=next(SECRETS),
        ledger=rich,
    )
    params, momentum, sgd, batch_size, noise = {"w": jnp.zeros(3)}, None, optax.sgd(0.1, momentum=0.9), 8, 4.0
    for number, steps in enumerate((2, 3)):
        after = sgd if momentum is None else optax.GradientTransformation(lambda _, old=momentum: old, sgd.update)
        mechanism = dp_sgd(poisson(40, batch_size), noise, key=key(number))
        optimizer = dpx.chain(mechanism, after)
        began = optimizer.init(params).transforms[0]
        run = dpx.fit(squared_distance, optimizer, params, POINTS, steps=steps, delta=1e-5, ledger=rich)
        moved = np.abs(jax.tree.leaves(began)[0]).max() > 0
        assert moved == (momentum is not None) and (
            not moved or jax.tree.all(jax.tree.map(np.array_equal, began, momentum))
        )
        params, (momentum,) = run.params, run.state.transforms
        if steps == 2:
            batch_size, noise = (16, 3.0) if metric(params) < 2 else (8, 2.0)
    assert [entry.event for entry in rich.entries][::2] == [
        SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
        for rate, sigma, steps in ((0.2, 4.0, 2), (0.4, 3.0, 3))
    ]
    exact = event_epsilon(ComposedDpEvent([entry.event for entry in rich.entries]), delta=1e-5, relation="zero_out")
    assert exact < rich.epsilon < 1.2 * exact


# Attacks, kills and several programs


RUNS = 16_000  # of an attack
SECRETS = map(dpx.secret_key, itertools.count(2**40))


def of_a_mean(present: bool, sigma: float) -> np.ndarray:
    """What RUNS releases of a mean say of a canary, float64 (RUNS,): 1 if it is there, and noise of sigma.

    Each of as many equal columns is a run of its own, so the noise is larger by the effect on all of them.
    """
    column = np.append(np.arange(19.0) % 2, 1.0 if present else np.nan)[:, None]
    given = {"low": 0, "high": 1, "complete": True, "noise_multiplier": sigma / math.sqrt(RUNS)}
    found = statistics.release_mean(np.repeat(column, RUNS, axis=1), key=next(SECRETS), **given)
    return 2 * (20 * found.value - 9.5)


def of_a_run(present: bool, sigma: float, steps: int) -> np.ndarray:
    """The same of the steps of RUNS runs of DP-SGD on Poisson samples of rate 1 / 2, float64 (RUNS, steps)."""
    taken = present & (np.random.default_rng(1).random((RUNS, steps)) < 0.5)

    def run(run_key, taken):
        mechanism = dp_sgd(poisson(20, 10), sigma, key=run_key)

        def step(state, included):
            updates, state = mechanism.update({"w": jnp.full((1, 1), 1e3)}, state, params, included=included[None])
            return state, 10 * updates["w"][0]

        return jax.lax.scan(step, mechanism.init(params), taken)[1]

    params = {"w": jnp.zeros(1)}
    run_keys = jax.random.split(dpx.keys.public_key(key(5 + present)), RUNS)
    return np.asarray(jax.jit(jax.vmap(run))(run_keys, taken), np.float64)


def test_an_attack_on_a_whole_ledger_stays_below_its_epsilon(tmp_path):
    """It sees all that one record moves, of a statistic, a run and an evaluation, and asks again if that may pay."""
    ledger, delta = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=3.0, delta=1e-3), 1e-3
    run = dp_sgd(poisson(20, 10), 2.0).event(3)
    events = [GaussianDpEvent(2.0), run, GaussianDpEvent(1.8)]
    for number, event in enumerate(events):
        ledger.spend(event, key=key(number), words="one", numbers=16)
    scores = []
    for present in (True, False):
        score = (2 * of_a_mean(present, 2.0) - 1) / (2 * 2.0**2)
        score += np.log(0.5 + 0.5 * np.exp((2 * of_a_run(present, 2.0, 3) - 1) / (2 * 2.0**2))).sum(axis=1)
        for _ in range(2):  # as two releases of half the precision; the second one only if that may show more
            score += np.where(score > -1, (2 * of_a_mean(present, 2**0.5 * 1.8) - 1) / (4 * 1.8**2), 0)
        scores.append(score)
    found = dpx.audit.lower_bound_from_scores(*scores, delta=delta, cost=ledger.epsilon)
    assert max(event_epsilon(event, delta=delta, relation="zero_out") for event in events) < found.epsilon
    assert not found.exceeds_cost and ledger.epsilon <= 3


@pytest.mark.long
def test_one_run_audits_a_whole_ledger(tmp_path):
    """Canaries in a histogram, a run and an evaluation, each of which pays; epsilon of all but the run is refuted."""
    canaries = 600
    ledger = dpx.PrivacyLedger(tmp_path / "ledger", epsilon=20.0, delta=1e-5)
    members = dpx.audit.draw_members(key(5), canaries=canaries)
    own, pays = np.where(members, np.arange(canaries), -1), {"ledger": ledger, "key": next(SECRETS)}
    counts = statistics.release_histogram(own, categories=np.arange(canaries), noise_multiplier=4.0, **pays).value
    metric = statistics.PrivateMetric(
        lambda params: np.where(members, params["w"] < 0, np.nan),
        noise_multiplier=8.0,
        key=next(SECRETS),
        ledger=ledger,
    )
    loss = dpx.audit.canary_loss(lambda params, nothing: 0 * params["w"].sum(), lambda params: params["w"])
    mechanism = dp_sgd(poisson(canaries, canaries / 2), 0.7, key=next(SECRETS))
    run = dpx.fit(
        loss,
        dpx.chain(mechanism, optax.sgd(canaries / 2)),
        {"w": jnp.zeros(canaries)},
        (np.zeros(canaries, np.float32), own.astype(np.int32)),
        steps=4,
        delta=1e-5,
        evaluate_private=metric,
        evaluate_every=2,
        ledger=ledger,
    )
    fallen = -np.asarray(run.params["w"])
    scores = (2 * counts - 1) / (2 * 4.0**2) + (fallen - 1) / (2 * 0.7**2)
    found = dpx.audit.one_run(scores, members, delta=1e-5, cost=ledger.epsilon)
    others = [entry.event for entry in ledger.entries if entry.event != mechanism.event(4)]
    assert len(others) == 3 and not found.exceeds_cost
    assert event_epsilon(ComposedDpEvent(others), delta=1e-5, relation="zero_out") < found.epsilon < ledger.epsilon


class Killed(BaseException):
    """In place of a kill, which runs no handler."""


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_while_a_line_is_written_leaves_a_whole_ledger(ledger, monkeypatch, place, after):
    ledger.spend(MEAN, key=key(0), words="before")
    real, released = getattr(os, place), []

    def killed(*arguments):
        if after:
            real(*arguments)
        raise Killed

    monkeypatch.setattr(files.os, place, killed)
    with pytest.raises(Killed):
        ledger.spend(MEAN, key=key(1), words="in between")
        released.append("in between")
    monkeypatch.undo()
    written = after and place == "replace"
    assert not released and len(dpx.PrivacyLedger(ledger.path).entries) == 1 + written
    if written:
        with pytest.raises(ValueError, match="counts even if a program was killed"):
            ledger.spend(MEAN, key=key(1), words="again")
    ledger.spend(MEAN, key=key(2), words="after")
    assert [entry.number for entry in ledger.entries] == [*range(2 + written)]


def test_the_lines_of_two_ledgers_are_no_ledger(ledger, tmp_path):
    """The entry of the second would stay reserved, so its noise could be released again."""
    other = dpx.PrivacyLedger(tmp_path / "other", epsilon=2.0, delta=1e-5)
    for number, one in enumerate((ledger, other)):
        one.spend(MEAN, key=key(number), words="made")
    _, *lines = other.path.read_text().splitlines(keepends=True)
    ledger.path.write_text(ledger.path.read_text().rstrip())  # as some editors do
    ledger.spend(MEAN, key=key(3), words="made")
    assert len(ledger.entries) == 2
    ledger.path.write_text(ledger.path.read_text() + "".join(lines))
    with pytest.raises(ValueError, match="must be those of one file, in their order"):
        ledger.spend(MEAN, key=key(1), words="again")


def spends(path: str, first: int, sender):
    """A program that pays for one release after another, and says which it made."""
    other = dpx.PrivacyLedger(path)
    for number in itertools.count(first):
        other.spend(GaussianDpEvent(100.0), key=key(number), words=f"release {number}", numbers=1)
        sender.send(number)


def started(path: Path, first: int):
    receiver, sender = kills.server().Pipe(duplex=False)
    process = kills.server().Process(target=spends, args=(str(path), first, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def stopped(process, receiver) -> list[int]:
    """What a program made until it was killed."""
    process.kill()
    process.join()
    made = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            made.append(receiver.recv())
    return made


def require_whole_ledger(ledger, made: list[int]):
    """Every line is there once, with those of all that was made."""
    entries = ledger.entries
    assert [entry.number for entry in entries] == [*range(len(entries))]
    assert {f"release {number}" for number in made} <= {entry.words for entry in entries}
    assert len({entry.marks for entry in entries}) == len(entries)
    assert sum(entry.planned for entry in entries) == 1 and ledger.epsilon <= ledger.terms.epsilon


def test_programs_that_share_a_ledger_write_every_line(ledger):
    """Each has its own lock, as of another program."""

    def pay(number):
        other = dpx.PrivacyLedger(ledger.path)
        other.spend(GaussianDpEvent(100.0), key=key(number), words=f"release {number}", numbers=1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(pay, range(8)))
    assert len(ledger.entries) == 8
    require_whole_ledger(ledger, [*range(8)])


@pytest.mark.long
def test_two_programs_write_every_line(ledger):
    programs = [started(ledger.path, first) for first in (0, 10_000)]
    for _, receiver in programs:
        assert receiver.poll(60) and receiver.recv() in (0, 10_000) and receiver.poll(60)
    require_whole_ledger(ledger, [number for program in programs for number in stopped(*program)])


@pytest.mark.long
def test_twenty_kills_lose_nothing_and_count_everything(ledger):
    chance, made = random.Random(0), []
    for first in range(0, 20_000, 1000):
        process, receiver = started(ledger.path, first)
        assert receiver.poll(60)
        time.sleep(0.3 * chance.random())
        made += stopped(process, receiver)
        words = [entry.words for entry in ledger.entries if entry.made]
        assert {f"release {number}" for number in made} <= {*words} and len(words) <= len(made) + 20
    assert len(made) >= 20 and ledger.epsilon <= 2


def test_the_least_noise_is_what_the_budget_allows(ledger):
    ledger.spend(MEAN, key=key(1), words="a mean", numbers=1)
    noise = ledger.least_noise(GaussianDpEvent, numbers=1)
    assert ledger.affords(GaussianDpEvent(noise), numbers=1)
    assert not ledger.affords(GaussianDpEvent(0.998 * noise), numbers=1)
    with pytest.raises(ValueError, match="must allow some noise multiplier"):
        ledger.least_noise(lambda noise: GaussianDpEvent(1e-9 * noise), numbers=1)


def test_a_refused_quantile_says_why_and_which_event_fits(ledger):
    ledger.spend(GaussianDpEvent(50.0), key=dpx.secret_key(), words="mean")
    refused = (
        r"A quantile.* counts as the Gaussian .*least_noise\(lambda noise: dpx\.accounting\.PureDpEvent\(1 / noise"
    )
    with pytest.raises(ValueError, match=refused):
        ledger.spend(dpx.accounting.PureDpEvent(ledger.terms.epsilon), key=dpx.secret_key(), words="median")
    with pytest.raises(ValueError, match="`ledger.least_noise` finds"):
        ledger.spend(GaussianDpEvent(0.1), key=dpx.secret_key(), words="sum")


@pytest.mark.long
def test_the_page_runs_as_it_stands(promoting, capsys):
    ledger = run_page("docs/ledger.md")["ledger"]
    assert [entry.words for entry in ledger.entries] == ["mean", "first run", "second run"]
    assert ledger.entries[1].steps == 20
    assert "first run" in capsys.readouterr().out

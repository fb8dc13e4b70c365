"""A person with several records as the unit: one number of records in the budget, in every bill, and in every word."""

import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

import dpx
from dpx import accounting, reports
from dpx.accounting.cost import profile_of_run
from dpx.accounting.flat_event import from_event
from dpx.audit.setup import static_findings
from dpx.reports import curves
from dpx.reports.report import report_sections
from tests.problems import squared_distance as loss

DELTA, STEPS, RECORDS = 1e-4, 6, 3
SAMPLING = dpx.PoissonSampling(examples=60, batch_size=6)
FULL = dpx.FullBatch(examples=60)
BUDGET = dpx.Budget(epsilon=2.0, delta=DELTA, steps=STEPS, records=RECORDS)
UNIT = "person with up to 3 records"
DATA = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)


def made(noise, *, sampling=SAMPLING, seed=3):
    return dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=sampling, key=dpx.secret_key(2**100 + seed))


MECHANISM = made(BUDGET)
PLAIN = made(MECHANISM.noise_multiplier)  # of the same noise, without a budget


def fit(optimizer=MECHANISM, **options):
    return dpx.fit(loss, dpx.chain(optimizer, optax.sgd(0.1)), {"w": jnp.zeros(2)}, DATA, **options)


def test_the_noise_is_the_least_for_all_records():
    bill = dpx.epsilon(PLAIN, STEPS, delta=DELTA, records=RECORDS)
    assert 2.0 * (1 - 1e-4) <= bill <= 2.0
    assert dpx.epsilon(made(0.999 * MECHANISM.noise_multiplier), STEPS, delta=DELTA, records=RECORDS) > 2.0
    one, several = (
        made(dpx.Budget(epsilon=2.0, delta=DELTA, steps=STEPS, records=records), sampling=FULL).noise_multiplier
        for records in (1, RECORDS)
    )
    assert several == pytest.approx(RECORDS * one, rel=1e-3)  # every record takes part in every step
    assert made(dpx.Budget(epsilon=2.0, delta=DELTA, epochs=1, records=RECORDS)).budget.records == RECORDS


BILLS = {
    "epsilon": lambda m, **of: dpx.epsilon(m, STEPS, delta=DELTA, **of),
    "delta": lambda m, **of: accounting.delta(m, STEPS, epsilon=1.0, **of),
    "steps": lambda m, **of: -accounting.max_steps(m, epsilon=1.0, delta=DELTA, **of),
    "attack": lambda m, **of: reports.attack_bounds(m, STEPS, delta=DELTA, **of).advantage,
    "over steps": lambda m, **of: curves.epsilon_over_steps(m, STEPS, delta=DELTA, points=2, **of).epsilon[-1],
    "over epsilon": lambda m, **of: curves.delta_over_epsilon(m, STEPS, epsilons=[1.0], **of).delta[0],
    "trade-off": lambda m, **of: -curves.trade_off(m, STEPS, points=3, **of).type_two[1],
    "runs": lambda m, **of: dpx.compose_runs((m, STEPS), shared_batches=False, **of).epsilon(delta=DELTA),
    "search": lambda m, **of: accounting.best_of((m, STEPS), trials=4, score_on="public", **of).epsilon(delta=DELTA),
    "report": lambda m, **of: dpx.privacy_report(m, STEPS, delta=DELTA, **of).spent,
}


@pytest.mark.parametrize("bill", BILLS.values(), ids=BILLS)
def test_every_bill_is_of_the_unit_of_the_budget(bill):
    one, several = bill(PLAIN), bill(PLAIN, records=RECORDS)
    assert bill(MECHANISM) == bill(dpx.chain(MECHANISM, optax.sgd(0.1))) == several > one
    assert bill(MECHANISM, records=1) == one


def test_the_report_is_about_the_person():
    report = dpx.privacy_report(MECHANISM, STEPS, delta=DELTA)
    assert report.unit == f"one {UNIT}" and report.records == RECORDS
    plain = [
        section for section in report_sections(report) if section.title not in ("In the words of the code", "Mechanism")
    ]
    sentences = [sentence for section in plain for sentence in section.sentences]
    assert all(UNIT in sentence for sentence in sentences if any(letter.isdigit() for letter in sentence))
    assert "example" not in " ".join(sentences)
    rows = dict(row for section in report_sections(report) for row in section.rows)
    assert rows["who is protected"] == f"one {UNIT}" and rows[f"epsilon of one {UNIT}, target"] == "2"
    assert float(rows[f"epsilon of one {UNIT}, spent"]) == pytest.approx(2.0, rel=1e-4)
    sigma = f"{MECHANISM.noise_multiplier:.6g}"
    assert (
        rows[f"release for a {UNIT}"]
        == f"6 x Gaussian on a Poisson sample of rate 0.1 of each record, noise multiplier {sigma}"
    )
    assert f"epsilon by pld for a {UNIT}" in rows and "epsilon by pld" not in rows
    assert "by at most 0.001 of the clip norm (eta) for each record." in report.to_markdown()
    assert "and the run kept it." in report.to_markdown()
    read = json.loads(report.to_json())
    assert (read["unit"], read["records"], read["budget"]["records"]) == (f"one {UNIT}", RECORDS, RECORDS)


def test_a_target_for_others_is_no_target():
    one = str(dpx.privacy_report(MECHANISM, STEPS, delta=DELTA, records=1))
    assert "who is protected                one example" in one and "target  none" in one
    assert f"The target was epsilon 2 at delta 0.0001 for a {UNIT}, not for one example." in " ".join(one.split())
    person = str(
        dpx.privacy_report(made(dpx.Budget(epsilon=2.0, delta=DELTA, steps=2)), 2, delta=DELTA, records=RECORDS)
    )
    assert f"for one record, not for one {UNIT}." in " ".join(person.split()) and "the run kept it" not in person
    named = dpx.privacy_report(PLAIN, STEPS, delta=DELTA, unit="document", records=RECORDS)
    assert named.unit == f"one {UNIT} (each one document)"


REFUSED = "records must be 1, because the cost of several is known for|the event must have only Gaussian releases"


@pytest.mark.parametrize(
    "build",
    [
        lambda noise, key: dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=SHUFFLED, key=key),
        lambda noise, key: dpx.dp_sgd(clip_norm=1.0, noise_multiplier=noise, sampling=CUT, key=key),
        lambda noise, key: dpx.methods.lambda_cgd(
            clip_norm=1.0, correlation=0.9, noise_multiplier=noise, sampling=FULL, key=key
        ),
        lambda noise, key: dpx.methods.dice_sgd(
            clip_norm=1.0, feedback_norm=1.0, outer_clip_norm=1.1, noise_multiplier=noise, sampling=SAMPLING, key=key
        ),
    ],
    ids=["shuffled", "cut", "correlated noise", "error feedback"],
)
def test_what_has_no_bill_is_refused_before_the_run(build):
    with pytest.raises(ValueError, match=REFUSED):
        build(BUDGET, dpx.secret_key())


SHUFFLED = dpx.ShuffledEpochs(examples=60, batch_size=6)
CUT = dpx.PoissonSampling(examples=60, batch_size=6, most_rows=12)


def test_other_arguments_are_refused():
    for records in (0, 1.5, True):
        with pytest.raises(ValueError, match="records must be a whole number of at least 1"):
            dpx.Budget(epsilon=2.0, delta=DELTA, steps=2, records=records)
    with pytest.raises(ValueError, match="cannot be met"):
        made(dpx.Budget(epsilon=1e-3, delta=DELTA, steps=2, records=10**9), sampling=FULL)
    with pytest.raises(ValueError, match='records must be 1 for relation "replace_one"'):
        dpx.epsilon(MECHANISM, STEPS, delta=DELTA, relation="replace_one")
    assert dpx.epsilon(MECHANISM, STEPS, delta=DELTA, relation="replace_one", records=1) < 2.0


def test_runs_are_composed_for_one_number_of_records():
    again = made(PLAIN.noise_multiplier, seed=4)
    both = dpx.compose_runs((MECHANISM, STEPS), (again, STEPS), shared_batches=False, records=RECORDS)
    assert both.records == RECORDS and f"records={RECORDS}" in repr(both)
    assert both.epsilon(delta=DELTA) == dpx.epsilon(PLAIN, 2 * STEPS, delta=DELTA, records=RECORDS)
    alone = dpx.compose_runs((MECHANISM, STEPS), shared_batches=False)
    for runs in ([(MECHANISM, STEPS), (again, STEPS)], [alone, (again, STEPS)]):
        with pytest.raises(ValueError, match=r"the same number of records, got \[1, 3\]"):
            dpx.compose_runs(*runs, shared_batches=False)
    with pytest.raises(ValueError, match=r"got \[2, 3\]"):
        dpx.compose_runs(alone, shared_batches=False, records=2)
    with pytest.raises(ValueError, match="its records, 'zero_out' and 3; do not pass them again"):
        reports.attack_bounds(alone, delta=DELTA, records=1)


def test_several_records_on_shared_batches():
    """Two releases of one batch are one of more precision, and the coins of the records are the same in both."""
    runs = [(made(4.0, seed=seed), STEPS) for seed in (1, 2)]
    shared = dpx.compose_runs(*runs, shared_batches=True, records=RECORDS).epsilon(delta=DELTA)
    single = dpx.epsilon(made(4.0 / math.sqrt(2)), STEPS, delta=DELTA, records=RECORDS)
    assert shared == pytest.approx(single, rel=1e-3)
    with pytest.raises(ValueError, match="records must be 1, because"):
        dpx.compose_runs(*[(made(4.0, sampling=CUT, seed=s), 2) for s in (1, 2)], shared_batches=True, records=2)


def test_a_search_is_billed_for_all_records():
    bill = accounting.best_of((MECHANISM, STEPS), trials=3, score_on=GaussianDpEvent(12.0))
    by_hand = accounting.best_of((PLAIN, STEPS), trials=3, score_on=GaussianDpEvent(4.0), records=RECORDS)
    assert bill.records == RECORDS and bill.epsilon(delta=DELTA) < by_hand.epsilon(delta=DELTA)
    assert GaussianDpEvent(4.0) in bill.event.event.events  # the score of three records moves three times as far
    with pytest.raises(ValueError, match="must have only Gaussian releases"):
        accounting.best_of((MECHANISM, STEPS), trials=3, score_on=LaplaceDpEvent(1.0))
    report = dpx.privacy_report(MECHANISM, STEPS, delta=DELTA, tuning=bill)
    assert report.spent == bill.epsilon(delta=DELTA) and report.unit == f"one {UNIT}"
    with pytest.raises(ValueError, match="the run must be one that the search counted"):
        dpx.privacy_report(MECHANISM, STEPS, delta=DELTA, tuning=bill, records=1)


@pytest.mark.filterwarnings("ignore:the state has taken no step")
def test_a_budget_of_a_search_is_for_the_person():
    found = dpx.tuning.search(
        lambda trial: ({}, trial.optimizer.init({"w": jnp.zeros(2)})),
        configurations=[1.0],
        score=lambda params: 0.0,
        optimizer=lambda clip, key, *, noise_multiplier: dpx.dp_sgd(
            clip_norm=clip, noise_multiplier=noise_multiplier, sampling=SAMPLING, key=key
        ),
        key=dpx.secret_key(2**100),
        trials=3,
        distribution="geometric",
        score_on="public",
        budget=BUDGET,
    )
    assert found.cost.records == RECORDS and 1.999 <= found.epsilon <= 2.0
    assert found.report.unit == f"one {UNIT}" and found.report.spent == found.epsilon


def test_fit_bills_the_person(tmp_path):
    said = []
    found = fit(checkpoints=tmp_path / "run", callbacks=[lambda seen: said.append(seen.epsilon)], evaluate_every=3)
    bills = [found.epsilon] * 2
    assert found.epsilon == pytest.approx(dpx.epsilon(PLAIN, STEPS, delta=DELTA, records=RECORDS), rel=1e-4)
    assert said == bills == [row["epsilon"] for row in found.history]
    assert found.epsilon == found.report.spent == bills[1] and found.report.unit == f"one {UNIT}"
    with pytest.raises(ValueError, match="records of a person"):
        fit(checkpoints=tmp_path / "run", evaluate_every=3, records=1)
    given = fit(PLAIN, steps=2, delta=DELTA, records=2)
    assert given.epsilon == pytest.approx(dpx.epsilon(PLAIN, 2, delta=DELTA, records=2), rel=1e-4)
    assert given.report.unit == "one person with up to 2 records"
    with pytest.raises(ValueError, match="records must be 1, because"):
        fit(made(1.0, sampling=SHUFFLED), steps=2, delta=DELTA, records=2)


def test_the_drawn_target_is_for_the_same_unit(capsys):
    figure = pytest.importorskip("matplotlib.figure").Figure
    for records, legends in ((None, 1), (1, 0)):
        found = fit(records=records, progress=True)
        spent = found.plot(figure=figure()).axes[-1]
        assert (spent.get_legend() is not None) == bool(legends)
        assert (UNIT in spent.get_ylabel()) == (records is None)
        bar = capsys.readouterr().err
        assert not bar or (f"for a {UNIT}" in bar) == (records is None)


def test_a_plan_is_for_the_person():
    given = {"examples": 60, "epsilon": 2.0, "delta": DELTA, "epochs": 0.6, "batch_sizes": [6, 60]}
    planned = dpx.plan_noise(**given, records=RECORDS)
    assert planned.runs[0].noise_multiplier == pytest.approx(MECHANISM.noise_multiplier, rel=2e-4)
    whole = dpx.plan_noise(**given).runs[1].noise_multiplier
    assert planned.runs[1].noise_multiplier == pytest.approx(RECORDS * whole, rel=1e-3)
    assert f"epsilon 2 at delta 0.0001 for a {UNIT}, 60 examples" in str(planned).splitlines()[0]
    assert planned.sampling_plan.records == RECORDS and str(planned.sampling_plan) in str(planned)
    with pytest.raises(ValueError, match="records must be a whole number"):
        dpx.plan_noise(**given, records=0)


def test_a_plan_of_samplings_is_for_the_person():
    given = {"examples": 60, "epochs": 0.6, "epsilon": 2.0, "delta": DELTA}
    planned = reports.plan_samplings(**given, batch_size=6, records=RECORDS)
    (run,) = planned.runs
    assert run.sampling == SAMPLING and planned.recommended == run
    bill = dpx.epsilon(made(run.noise_multiplier), STEPS, delta=DELTA, records=RECORDS)
    assert 2.0 * (1 - 1e-3) <= bill <= 2.0 * (1 + 1e-6)
    assert f"delta 0.0001 for a {UNIT}:" in str(planned) and "several records with other samplings" in str(planned)
    assert reports.plan_samplings(**given, batch_size=60, records=2).runs[0].sampling == FULL
    with pytest.raises(ValueError, match="records must be a whole number"):
        reports.plan_samplings(**given, batch_size=6, records=0)


@pytest.mark.parametrize("accountant", ["tightest", "rdp"])
def test_numbers_alone_are_billed_for_the_person(accountant):
    """At rate 0.1 and at 1: what the mechanism of these numbers says, and more for more records."""
    of = {"delta": DELTA, "accountant": accountant}
    for sampling, size in ((SAMPLING, 6), (FULL, 60)):
        said = []
        for records in (1, 2, RECORDS):
            bill = dpx.epsilon(made(4.0, sampling=sampling), STEPS, **of, records=records)
            run = {"examples": 60, "batch_size": size, "steps": STEPS, "noise_multiplier": 4.0}
            found = accounting.schedule_epsilon([4.0], counts=[STEPS], sampling_rate=size / 60, **of, records=records)
            assert accounting.dp_sgd_epsilon(**run, **of, records=records) == found.upper == bill >= found.lower
            said.append(bill)
        assert said == sorted(set(said))
    one = accounting.schedule_epsilon([4.0], counts=[STEPS], sampling_rate=0.1, **of)
    assert one == accounting.schedule_epsilon([4.0], counts=[STEPS], sampling_rate=0.1, **of, records=1)


def test_schedules_of_numbers_are_billed_for_the_person():
    noise, rates = np.linspace(3.0, 4.0, 6), np.where(np.arange(6) < 4, 0.05, 1.0)
    events = [PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)) for sigma, rate in zip(noise, rates, strict=True)]
    event = from_event(ComposedDpEvent(events)).of_records(RECORDS)
    found = accounting.schedule_epsilon(noise, sampling_rate=rates, delta=DELTA, records=RECORDS)
    assert found.upper == profile_of_run(event, relation="zero_out").epsilon(DELTA) > found.lower
    assert accounting.schedule_epsilon(noise, sampling_rate=rates, delta=DELTA, records=2).upper < found.upper
    delta = accounting.schedule_delta(noise, sampling_rate=rates, epsilon=found.upper, records=RECORDS)
    assert delta.lower < delta.upper == pytest.approx(DELTA, rel=0.01)
    alone = accounting.schedule_epsilon([4.0], sampling_rate=1.0, delta=DELTA, records=RECORDS)
    assert alone.lower == pytest.approx(alone.upper, rel=1e-3)  # of a full batch, all records are in the lower end


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_numbers_without_a_bill_for_the_person_are_refused(rate):
    given = {"sampling_rate": rate, "delta": DELTA}
    with pytest.raises(ValueError, match='records must be 1 for relation "replace_one", got 3'):
        accounting.schedule_epsilon([4.0], **given, relation="replace_one", records=RECORDS)
    with pytest.raises(ValueError, match="records must be a whole number"):
        accounting.schedule_epsilon([4.0], **given, records=0)
    run = {"examples": 60, "batch_size": round(60 * rate), "epochs": 1, "noise_multiplier": 4.0, "delta": DELTA}
    for name in ("shuffled", "fixed"):
        with pytest.raises(ValueError, match="records must be 1, because the cost of several is known for"):
            accounting.dp_sgd_epsilon(**run, sampling=name, records=RECORDS)
    with pytest.raises(ValueError, match="records must be a whole number"):
        accounting.dp_sgd_epsilon(**run, records=1.5)


def test_a_check_says_whom_epsilon_is_for():
    assert f"for a {UNIT}, rounding" in static_findings.find_epsilon_of_run(MECHANISM, STEPS, DELTA).words
    assert UNIT not in static_findings.find_epsilon_of_run(PLAIN, STEPS, DELTA).words


def test_bounds_of_attacks_are_on_the_person():
    found = reports.attack_bounds(MECHANISM, STEPS, delta=DELTA)
    assert all(f"one {UNIT}" in sentence for sentence in found.sentences())
    runs = dpx.compose_runs((MECHANISM, STEPS), shared_batches=False)
    assert reports.attack_bounds(runs, delta=DELTA) == found
    report = dpx.privacy_report(MECHANISM, STEPS, delta=DELTA)
    assert report.attacks == found and json.loads(report.to_json())["attacks"]["records"] == RECORDS
    one = reports.attack_bounds(MECHANISM, STEPS, delta=DELTA, records=1)
    assert one == reports.attack_bounds(PLAIN, STEPS, delta=DELTA) and "one example" in one.sentences()[0]


def test_the_axes_of_curves_say_whom_they_are_for():
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots(4)
    for one, (curve, plot) in zip(
        axes,
        (
            (curves.epsilon_over_steps(MECHANISM, 2, delta=DELTA, points=2), curves.plot_epsilon_over_steps),
            (curves.delta_over_epsilon(MECHANISM, 2, epsilons=[1.0]), curves.plot_delta_over_epsilon),
            (curves.trade_off(MECHANISM, 2, points=3), curves.plot_trade_off),
            (reports.attack_bounds(MECHANISM, 2, delta=DELTA), reports.plot_attack_bounds),
        ),
        strict=True,
    ):
        plot(curve, axes=one)
        assert curve.records == RECORDS and UNIT in one.get_xlabel() + one.get_ylabel()

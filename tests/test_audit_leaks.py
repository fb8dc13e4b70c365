"""Exposure and membership: counted as they say, bounds as often right as they say, and blind models give nothing."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

import dpx
from dpx import audit

RNG = np.random.default_rng


def test_exposure_is_that_of_the_ranks():
    references = np.arange(1.0, 8.0)[None]  # 7 others: 3 bits at most
    for loss, rank in ((0.5, 1), (2.5, 3), (9.0, 8), (3.0, 4)):  # a tie counts against the attacker
        found = audit.exposure([loss], references, delta=1e-5)
        assert found.ranks.tolist() == [rank] and found.exposures[0] == pytest.approx(3 - math.log2(rank))
    assert found.largest == 3 and found.references == 7


def test_a_model_that_knows_nothing_has_the_mean_of_uniform_ranks():
    losses = RNG(0).normal(size=(4000, 256))
    found = audit.exposure(losses[:, 0], losses[:, 1:], delta=1e-5)
    exact = np.mean(8 - np.log2(np.arange(1, 257)))
    assert found.exposures.mean() == pytest.approx(exact, abs=0.08) and exact == pytest.approx(1.44, abs=0.05)


def test_the_bound_of_exposure_is_a_bound():
    """Randomized response: the model knows a secret, or shows a random one, with a known epsilon.

    With n candidates the true one comes out with probability e^epsilon / (e^epsilon + n - 1).
    """
    epsilon, count, canaries, trials, rng = 1.5, 100, 5, 2000, RNG(1)
    right = math.exp(epsilon) / (math.exp(epsilon) + count - 1)
    exceeds = 0
    for _ in range(trials):
        knows = rng.random(canaries) < right
        losses = np.ones((canaries, count))  # the released value is one candidate, which has loss 0
        shown = np.where(knows, 0, rng.integers(1, count, canaries))
        losses[np.arange(canaries), shown] = 0
        exceeds += audit.exposure(losses[:, 0], losses[:, 1:], delta=0.001, confidence=0.9, cost=epsilon).exceeds_cost
    assert exceeds / trials <= 0.1 + 3 * math.sqrt(0.09 / trials)
    certain = audit.exposure([0.0], np.ones((1, 9999)), delta=1e-5, cost=8.0)
    assert certain.epsilon == pytest.approx(math.log((0.05 - 1e-5) * 10_000)) and not certain.exceeds_cost
    assert audit.exposure([0.0], np.ones((1, 9999)), delta=1e-5, cost=3.0).exceeds_cost
    assert "the stated cost is WRONG" in str(audit.exposure([0.0], np.ones((1, 9999)), delta=1e-5, cost=3.0))
    several = audit.exposure(np.zeros(5), np.ones((5, 9999)), delta=1e-5)
    assert several.epsilon == pytest.approx(math.log((0.01 - 1e-5) * 10_000))
    assert audit.exposure([0.0], np.ones((1, 9999)), delta=0.1).epsilon == 0


def test_printed_bounds_are_no_larger_than_proved_ones():
    roc = audit.Roc(np.zeros(1), np.ones(1))
    of: dict[str, Any] = {"epsilon": 1.23456, "delta": 1e-5, "confidence": 0.95, "cost": 1.23444}
    one = audit.OneRun(**of, trade_off_epsilon=1.23456, gaussian_epsilon=0.0, canaries=16, guesses=2, right=2)
    many = audit.LowerBound(**of, gaussian_epsilon=math.inf, runs=(2, 2), roc=roc)
    secrets = audit.Exposure(**of, exposures=np.ones(1), ranks=np.ones(1), references=1)
    for found, least in ((one, ["1.234", "1.234", "0"]), (many, ["1.234", "inf"]), (secrets, ["1.234"])):
        assert re.findall(r"at least (\S+?),? ", str(found)) == least and "cost is 1.235: " in str(found)


def test_the_limit_is_where_the_bill_puts_it():
    found = audit.exposure([0.0], np.ones((1, 255)), delta=1e-3)
    assert found.limit(epsilon=0.0, probability=0.501) == pytest.approx(1.0)
    assert found.limit(epsilon=math.log(4), probability=0.501) == pytest.approx(3.0)
    assert found.limit(epsilon=1.0, probability=1e-3) == math.inf
    for change in ({"epsilon": -1.0}, {"epsilon": 1.0, "probability": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            found.limit(**change)


@pytest.mark.parametrize("ties", [False, True])
def test_membership_is_what_scikit_learn_counts(ties):
    rng = RNG(2)
    members, others = rng.normal(1.0, 1, 900), rng.normal(0, 1, 1000)
    if ties:
        members, others = np.round(members), np.round(others)
    found = audit.membership(members, others, false_positive_rates=(0.001, 0.01, 0.3))
    labels, scores = np.repeat([1, 0], [900, 1000]), np.concatenate([members, others])
    wrong, right, _ = roc_curve(labels, scores, drop_intermediate=False)
    expected = [right[wrong <= rate].max() for rate in (0.001, 0.01, 0.3)]
    assert found.true_positive_rates == pytest.approx(expected)
    assert found.area == pytest.approx(roc_auc_score(labels, scores))
    assert found.advantage == pytest.approx((right - wrong).max())
    assert all(low <= rate <= high for low, rate, high in zip(found.lower, expected, found.upper, strict=True))
    assert sorted(1 - found.roc.type_two) == pytest.approx(sorted(right))


def test_membership_beside_the_bill():
    sampling = dpx.FullBatch(examples=10)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=4.0, sampling=sampling, key=jax.random.key(0))
    bill = dpx.reports.attack_bounds(mechanism, 2, delta=1e-5)
    scores = RNG(3).normal(size=(2, 2000))
    blind = audit.membership(*scores, cost=bill)
    assert blind.limits == bill.true_positive_rates and "the stated cost allows" in str(blind)
    assert not blind.exceeds_cost
    assert blind.area == pytest.approx(0.5, abs=0.03)
    assert audit.membership(scores[0] + 3, scores[1], cost=bill).exceeds_cost
    assert not audit.membership(scores[0] + 3, scores[1]).exceeds_cost
    assert "allows" not in str(audit.membership(*scores))
    with pytest.raises(ValueError, match="cost must have the false_positive_rates"):
        audit.membership(*scores, false_positive_rates=(0.1,), cost=bill)
    few = audit.membership([1.0, 2.0], [0.0, 1.5], false_positive_rates=(0.999999,))
    assert few.true_positive_rates == (1.0,) and few.members == few.others == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: audit.exposure([], np.ones((0, 3)), delta=1e-5), "losses must hold one loss for each canary"),
        (lambda: audit.exposure([1.0], np.ones((2, 3)), delta=1e-5), r"references must have shape \(1, n\)"),
        (lambda: audit.exposure([1.0], np.ones((1, 0)), delta=1e-5), r"references must have shape \(1, n\)"),
        (lambda: audit.exposure([math.nan], np.ones((1, 3)), delta=1e-5), "must hold no NaN"),
        (lambda: audit.exposure(["a"], np.ones((1, 3)), delta=1e-5), "losses must hold numbers"),
        (lambda: audit.exposure([1.0], np.ones((1, 3)), delta=0.0), "delta must be in"),
        (lambda: audit.exposure([1.0], np.ones((1, 3)), delta=1e-5, confidence=1.0), "confidence must be in"),
        (lambda: audit.exposure([1.0], np.ones((1, 3)), delta=1e-5, cost=-1.0), "epsilon must be"),
        (lambda: audit.membership([1.0], [1.0, 2.0]), "members must hold one score for each of at least 2"),
        (lambda: audit.membership([1.0, 2.0], [1.0, math.nan]), "others must hold no NaN"),
        (lambda: audit.membership([1.0, 2.0], [1.0, 2.0], false_positive_rates=(0.0,)), "must be numbers in"),
        (lambda: audit.membership([1.0, 2.0], [1.0, 2.0], confidence=0.0), "confidence must be in"),
    ],
)
def test_misuse_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.long
def test_the_page(capsys):
    """The code of docs/auditing.md about what a trained model leaks."""
    page, names = (Path(__file__).parents[1] / "docs" / "auditing.md").read_text(), {}
    for block in re.findall(r"```python\n(.*?)```", page.split("\n## What a trained model leaks\n")[1], re.DOTALL):
        exec(block, names)
    said = capsys.readouterr().out
    assert (
        "exposure of 20 canaries: mean 1." in said and "less than 8.7 bits" in said and "the stated cost allows" in said
    )

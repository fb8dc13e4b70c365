"""The comparison of samplings: every method is built within its budget, and a killed command continues."""

import json
import math

import pytest

import dpx
from examples import samplings
from examples.samplings import METHODS, Cell, Setting, Sizes, Trainer

KEY = dpx.secret_key(2**100)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long_cases("band-mf")
def test_every_method_meets_its_budget(method):
    mechanism, own = METHODS[method](Sizes(600, 20, 2.0, 0.7), 2.0, clip_norm=1.0, key=KEY)
    assert 1.9 < dpx.epsilon(mechanism, mechanism.sampling.steps(epochs=2), delta=samplings.DELTA) <= 2.0
    assert bool(own) == (method in ("lambda-cgd", "band-mf"))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    setting = Setting({"model": "linear_from_zero"}, 1.0, 1.0, 1.0, (0.5, 0.5), 8)
    monkeypatch.setattr(samplings, "MODELS", {"linear": setting})
    monkeypatch.setattr(samplings, "BATCHES", (8,))
    return tmp_path / "runs.jsonl"


@pytest.mark.long
def test_a_killed_command_continues(tiny, capsys):
    words = ["--models", "linear", "--methods", "poisson", "--epsilons", "2", "--seeds", "0", "--batch-sizes", "8"]
    words += ["--dataset", "random:4x4x1x2", "--runs", str(tiny), "--results", str(tiny.with_suffix(".md"))]
    assert samplings.main(words) == 0
    lines = tiny.read_text().splitlines()
    assert len(lines) in (4, 5, 6) and f"{100 * json.loads(lines[-1])['accuracy']:.2f}" in capsys.readouterr().out
    tiny.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    assert samplings.main(words) == 0
    again = [json.loads(line) for line in tiny.read_text().splitlines()]
    assert capsys.readouterr().out.count("s of CPU") == 1 and len(again) == len(lines)
    assert again[-1]["accuracy"] == json.loads(lines[-1])["accuracy"]
    assert samplings.main([*words, "--table"]) == 0
    assert "| Poisson sampling | 8 | not run | **" in tiny.with_suffix(".md").read_text()


@pytest.mark.parametrize(("best", "trials"), [(0, 3), (1, 3), (-1, 4), (2, 4), (9, 5), (-9, 5)])
def test_trials_climb_to_the_best_rate(tiny, monkeypatch, best, trials):
    tried = []

    def run(self, cell, seed, factor):
        tried.append(factor)
        assert seed == samplings.TUNING_SEED
        return {"accuracy": -abs(math.log2(factor) - best)}

    monkeypatch.setattr(Trainer, "run", run)
    trainer = Trainer(tiny, data_dir=None, cache_dir=tiny)
    factor = trainer.factor(Cell("linear", "poisson", 8, 2.0))
    assert len(tried) == trials
    assert factor == 2.0 ** min(max(best, -3), 4)

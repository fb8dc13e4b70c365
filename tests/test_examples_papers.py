"""Every experiment of the papers is a command that works; its page has the paper's figures beside ours."""

import json
import types
from typing import Any

import pytest

from examples.papers import Experiment, Row, ada_dpigu, dynamic, experiments, page, rows
from examples.papers import __main__ as command
from examples.runs import Runs


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of the runs: experiments that differ in their data alone share them."""
    return tmp_path_factory.mktemp("papers")


@pytest.mark.parametrize("name", experiments())
@pytest.mark.long
def test_smoke(name, capsys, promoting, undrawn, folder):
    assert command.main(["--smoke", name, "--runs", str(folder)]) == 0
    assert f"{name}: its program works" in capsys.readouterr().out


@pytest.mark.parametrize("name", experiments())
@pytest.mark.long
def test_every_row_has_a_configuration(name):
    """Every trial, of the stand-in, the paper's data and smoke: `Config` refuses at construction what cannot run."""
    ours = experiments()[name]
    real = ours.on_real_data
    for experiment, changes in ((ours, {}), (ours, ours.smoke), (real, {})):
        found = [
            experiment.config(row, choice, 0, changes, epsilon=row.claimed)
            for row in experiment.rows
            for choice in row.grid
        ]
        assert [config.epsilon for config in found] == [row.claimed for row in ours.rows for _ in row.grid]
    # What the rows vary here, they vary with the paper's data too.
    kinds = [len({repr(one.config(row, row.grid[0], 0, {}, epsilon=1.0)) for row in one.rows}) for one in (ours, real)]
    assert kinds[0] == kinds[1]
    assert not ours.real or real.common["dataset"] == ours.real.get("dataset", ours.common["dataset"])


def test_all_are_listed(capsys):
    assert command.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(experiments())
    assert command.main(["dynamic-table-9"]) == 2
    assert "unknown experiment dynamic-table-9; known: dynamic-table-1" in capsys.readouterr().err


GRID = ({"learning_rate": 1.0}, {"learning_rate": 2.0})
TINY = Experiment(
    name="tiny",
    title="two methods",
    common={"dataset": "random:8x8x1x4", "epochs": 1.0},
    rows=(
        Row(label="DP-SGD", claimed=2.0, published=80.0, noise=1.0, grid=GRID),
        Row(label="ours", config={"activation": "relu"}, claimed=2.0, published=85.5, grid=GRID),
    ),
    truth="",
    smoke={},
    tune_at=2.0,
    over_epochs=True,
)
ACCURACIES = {0: (0.6, 0.5), 1: (0.6, 0.7), 2: (0.6, 0.6), 100: (0.6, 0.5)}  # of DP-SGD and ours, by seed


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Runs whose results are from the table above, 0.1 better at the second learning rate."""

    def run(config, *, output_dir, **places):
        accuracy = ACCURACIES[config.seed][config.activation == "relu"] + 0.1 * (config.learning_rate == 2.0)
        result = {"headline": "test_accuracy", "metrics": {"test_accuracy": accuracy}, "epsilon": 2.5}
        output_dir.mkdir(parents=True)
        own = {name: value for name, value in config.as_dict().items() if name != "seed"}
        result |= {"noise_multiplier": config.noise_multiplier or 0.9}
        stored = {"result": result, "config": own, "versions": {}}
        (output_dir / "result.json").write_text(json.dumps(stored))
        lines = [{"epoch": epoch, "test_accuracy": epoch * accuracy / 2} for epoch in (1.0, 2.0)]
        (output_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return types.SimpleNamespace(**result, seconds=0.0)

    monkeypatch.setattr("examples.runs.run", run)
    return Runs(tmp_path)


def test_the_table_has_the_papers_figures_beside_ours(runs, tmp_path):
    outcomes = rows.run(TINY, runs, range(3))
    _, _, first, second = page.table(TINY, outcomes).splitlines()
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    each = "**70.00** (70.00, 70.00, 70.00)"
    assert cells == ["DP-SGD", "2", "80.00", "1", "**2.500**", each, "0.9", each, "", "learning rate 2"]
    cells = [cell.strip() for cell in second.split("|")[1:-1]]
    assert cells[:4] == ["ours", "2", "85.50", ""] and cells[7] == "**70.00** (60.00, 80.00, 70.00)"
    assert cells[8] == "+0.00 ± 5.77"  # -10, 10, 0: standard deviation 10, divided by sqrt(3)
    for found, expected in zip(
        page.by_epoch(outcomes[1].at_epsilon), ([1, 2], [35, 70], [30, 60], [40, 80]), strict=True
    ):
        assert found == pytest.approx(expected)
    for shown, lines in ((outcomes, 2), ([], 0)):
        page.draw(TINY, shown, tmp_path / "plot.svg")
        assert (tmp_path / "plot.svg").read_text().count("epsilon 2</text>") == lines


def test_runs_that_are_missing_are_said_to_be(runs):
    rows.run(TINY, runs, range(1))
    late = Runs(runs.folder, minutes=0)
    table = page.table(TINY, rows.run(TINY, late, range(3)))
    assert "**70.00** (70.00)" in table and "-10.00" in table
    table = page.table(TINY, rows.run(TINY, Runs(runs.folder / "none", minutes=0), range(3)))
    assert table.count("not run") == 5  # 2 rows, 2 choices, and the paper's noise


def test_a_run_of_other_settings_is_refused(runs):
    made = [TINY.config(TINY.rows[0], GRID[0], 0, {}, noise_multiplier=noise) for noise in (1.0, 2.0)]
    assert runs.result("one", made[0]) == runs.result("one", made[0])
    with pytest.raises(ValueError, match="must hold a run of these settings, got another run"):
        runs.result("one", made[1])


def test_runs_are_shared_for_equal_data_only(monkeypatch, tmp_path):
    """CIFAR-10 and CIFAR-100 have one stand-in, but their own runs with --real."""
    folders = []
    (tmp_path / "page").write_text("")
    monkeypatch.setattr(rows, "run", lambda experiment, runs, seeds: folders.append(runs.folder.name) or [])
    monkeypatch.setattr(command, "write", lambda *given: tmp_path / "page")
    for words in ([], ["--real"]):
        assert command.main(["dice-table-3-cifar100", "--runs", str(tmp_path), "--results", str(tmp_path), *words]) == 0
    assert folders == ["dice-table-3", "dice-table-3-cifar100-real"]


@pytest.mark.long
def test_the_noise_of_the_papers_own_accounting():
    config: dict[str, Any] = dict(dataset="digits", seed=0, epsilon=2.0, delta=1 / 600_000)
    plain = dynamic.Config(**config)
    falling = dynamic.Config(**config, method="dynamic_dp_sgd", method_options={"rho_mu": 1 / 0.3, "rho_c": 1.0})
    assert dynamic.noise_by_clt(falling, 0.01, 500) == pytest.approx(1 / 0.54503058, abs=1e-6)
    assert dynamic.noise_by_clt(plain, 0.01, 500) < dynamic.noise_by_tcdp(plain, 0.01, 500)
    assert dynamic.noise_by_tcdp(plain, 0.01, 500) < dynamic.noise_by_zcdp(plain, 0.01, 50_000)
    assert dynamic.noise_by_zcdp(plain, 1.0, 1) == pytest.approx(2.67275, abs=1e-4)
    table_3 = ada_dpigu.Config(dataset="digits", seed=0, epsilon=4.0)
    assert ada_dpigu.noise_by_moments(table_3, 1 / 60, 12_000) == pytest.approx(2.49, abs=0.005)

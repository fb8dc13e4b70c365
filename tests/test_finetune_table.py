"""The table of examples.finetune: each run is made once, and the page says what the rows say."""

import json
import math

import pytest

from examples.finetune import table

RESULT = dict(
    base_test_loss=1.9,
    test_loss=1.8,
    delta=1e-5,
    steps=25,
    noise_multiplier=0.9,
    units=140,
    parameters=1000,
    trained=100,
    exposure=1.5,
    members=400,
    others=300,
) | {"unreleased_membership_" + name: 0.5 for name in ("tpr_at_0.01", "tpr_at_0.001", "area")}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The settings of the runs that were made."""
    seen = []

    def run(settings, **options):
        seen.append(settings)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return RESULT | {"epsilon": settings.epsilon}

    monkeypatch.setattr(table, "run", run)
    monkeypatch.setattr(table, "small_base", lambda *arguments, **options: tmp_path / "base")
    return seen


def test_an_interrupted_table_continues_where_it_was(made, tmp_path, undrawn):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        table.main(["--rows", str(file)])
    assert len(table.rows_in(file)) == 4
    assert table.main(["--rows", str(file)]) == 0
    assert len(table.rows_in(file)) == 54 and len(made) == 5 + 50
    assert table.main(["--rows", str(file)]) == 0 and len(made) == 5 + 50
    finished = made[:4] + made[5:]
    assert len({settings.seed for settings in finished}) == 54  # two runs with one key would share their noise
    page = (tmp_path / "rows.md").read_text()
    assert page.count("\n| DP-") == 18 and "54 of 54 runs" in page and "100 modules" in page
    assert "| DP-Adam, LoRA 4 | 100 | 1.000 | 0.900 | 1.8000 (1.8000 to 1.8000) |" in page
    assert max(map(len, page[: page.index("| |")].splitlines())) <= 120


def test_no_run_is_started_after_the_time_is_over(made, tmp_path, undrawn):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="no run is finished"):
        table.main(["--rows", str(file), "--minutes", "-1"])
    assert not made
    row = RESULT | dict(name="one", optimizer="sgd", rank=0, asked="8.0", seed=2, epsilon=7.9999, date="2026-11-24")
    file.write_text(json.dumps(row | {"versions": {"dpx": "1"}}) + "\n")
    assert table.main(["--rows", str(file), "--page"]) == 0 and not made
    assert "DP-SGD, full | 100 | 8.000 |" in (tmp_path / "rows.md").read_text()
    assert table.EPSILONS[-1] == math.inf
    with pytest.raises(KeyboardInterrupt):
        table.main(["--rows", str(file), "--only", "300 units"])
    assert {(settings.units, settings.lora_rank) for settings in made} == {(300, 0)}


def test_runs_of_two_corpora_are_no_table(tmp_path, undrawn):
    row = RESULT | dict(optimizer="sgd", rank=0, asked="8.0", epsilon=7.9999, date="2026-11-24", versions={"dpx": "1"})
    other = {"units": 150}, {"base_test_loss": 1.8}, {"few": 300, "units": 340}
    pages = [[row | {"name": "one", "seed": 0}, row | change | {"name": "two", "seed": 1}] for change in other]
    for rows, fine in zip(pages, (False, False, True), strict=True):
        if fine:
            assert table.page(rows)
            continue
        with pytest.raises(ValueError, match="one base model and one corpus, got 2"):
            table.page(rows)

"""The programs of the README and of the pages run as they stand, are short, and do what the page says."""

import json
import re

import jax
import numpy as np
import pytest

import dpx
from benchmarks import report
from benchmarks.peers.__main__ import HERE, PROGRAMS, counted
from dpx.gradients.ghost import plan
from tests.devices import on_eight_devices
from tests.problems import ROOT, as_a_user, dp_sgd, poisson, python_of, run_page

PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))


def lines_of(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def test_readme(capsys):
    (code,) = python_of("README.md")
    assert lines_of(code) <= 23
    run_page("README.md")
    _, accuracy, *_, epsilon = capsys.readouterr().out.split()
    assert float(epsilon) == pytest.approx(2.0, abs=0.02) and float(epsilon) <= 2.0
    assert float(accuracy.removesuffix("%")) > 90


@pytest.mark.long
def test_index():
    """The program of the home page is ten lines and defines every name."""
    names = run_page("docs/index.md")
    assert np.abs(names["run"].params - 3).max() < 0.2 and 1.9 < names["run"].epsilon <= 2


@pytest.mark.long
def test_epsilon():
    """The table of the attacker's bet: the worst case of an epsilon, and a run that has it; rounded up."""
    rows = [
        line.split("|")[1:-1] for line in (ROOT / "docs" / "epsilon.md").read_text().splitlines() if "rate 0.01" in line
    ]
    sampling = poisson(10_000, 100)
    for budget, shown in zip((0.1, 1.0, 8.0), np.array(rows[0][1:], float)[[0, 2, 5]], strict=True):
        made = dp_sgd(sampling, dpx.Budget(epsilon=budget, delta=1e-5, steps=1000))
        right = 50 + 50 * dpx.reports.attack_bounds(made, 1000, delta=1e-5).advantage
        assert right <= shown < right + 0.11
    (worst,) = [line for line in (ROOT / "docs" / "epsilon.md").read_text().splitlines() if "any run" in line]
    for budget, shown in zip((0.1, 0.5, 1, 2, 4, 8), worst.split("|")[2:-1], strict=True):
        right = 50 + 50 * (np.exp(budget) - 1 + 2e-5) / (np.exp(budget) + 1)
        assert right <= float(shown) < right + 0.11


@pytest.mark.long
def test_choose(capsys):
    """The page prints what it says that it prints."""
    run_page("docs/choose.md")
    printed = capsys.readouterr().out
    for block in re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "choose.md").read_text(), re.DOTALL):
        assert block in printed


def recipes():
    """(heading, program) of each recipe; one is quick, and the others are long."""
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        heading, quick = section.splitlines()[0], section.startswith("Several")
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            yield pytest.param(code, id=heading, marks=[] if quick else pytest.mark.long)


@pytest.mark.parametrize("code", [*recipes()])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long_cases("Several runs on the same data1", "Several runs on the same data2")
def test_recipes(code, monkeypatch):
    """Each runs after the first lines of the page, and is short; a package that is not installed skips it."""
    assert lines_of(code) <= 24
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # which the first import of keras reads
    for names in re.findall(r"^(?:from|import) ([\w, ]+)", code, re.MULTILINE):
        for name in re.findall(r"\w+(?=,|$)", names.split(" import ")[0].split(" as ")[0]):
            pytest.importorskip(name)
    with as_a_user():
        exec(python_of("docs/recipes.md")[0] + code, {})


@pytest.mark.long
def test_coming_from():
    names = run_page("docs/coming_from.md")
    assert names["run"].epsilon <= 3.0 and jax.tree.structure(names["private"]) == jax.tree.structure(names["noisy"])


@pytest.mark.long
def test_correlated_noise(capsys):
    names = run_page("docs/correlated_noise.md")
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "correlated_noise.md").read_text(), re.DOTALL)
    assert " ".join(shown.split()) in " ".join(capsys.readouterr().out.split())
    assert dpx.epsilon(names["mechanism"], 2344, delta=1e-5) <= 8


def test_every_program_of_a_page_runs():
    """A page with a block that begins with ```python is named in a test; ```py is for what needs other libraries."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md") if "```python" in path.read_text()]
    named = [page for page in pages if re.search(rf'"docs/{page.name}|"{page.name}"', tests)]
    assert len(pages) > 15 and not {*pages} - {*named} - {path.relative_to(ROOT) for path in PAPERS}


@pytest.mark.long
def test_loops():
    """The blocks state by themselves what they hold; later blocks use the names of earlier ones."""
    run_page("docs/loops.md")
    assert sum(line.startswith("assert ") for line in "".join(python_of("docs/loops.md")).splitlines()) >= 7


@pytest.mark.long
def test_papers():
    """Every method of the pages meets the budget that it was given, and has a key that no other one has."""
    values = [value for page in PAPERS for value in run_page(page).values()]
    mechanisms = [value for value in values if isinstance(value, dpx.Mechanism)]
    costs = [dpx.epsilon(mechanism, mechanism.budget.steps, delta=1e-5) for mechanism in mechanisms]
    assert len(costs) == 8 and 1.9 < min(costs) and max(costs) <= 2.0
    assert len({jax.random.key_data(mechanism.key).tobytes() for mechanism in mechanisms}) == 8


@pytest.mark.parametrize("page", PAPERS, ids=lambda path: path.stem)
def test_pages_of_papers_have_the_same_parts(page):
    text = page.read_text()
    parts = ["Claim", "What holds", "The cost", "Our evidence", "When to use it"]
    assert [name for name in re.findall(r"^\*\*([A-Z][^.*]*)\.?\*\*", text, re.MULTILINE) if name in parts][:5] == parts
    assert "../../benchmarks/results/" in text and page.name in (ROOT / "docs" / "papers.md").read_text()


@pytest.mark.long
def test_ship_it():
    """The folder holds the parameters, the report and a state without unreleased values and keys."""
    names = run_page("docs/ship_it.md")
    folder, result = names["folder"], names["result"]
    reports = {f"privacy_report.{ending}" for ending in ("json", "md", "html")}
    assert {path.name for path in folder.iterdir()} == {"params.npz", "state.npz"} | reports
    stored = np.load(folder / "params.npz")
    assert all(np.array_equal(stored[name], leaf) for name, leaf in result.params.items())
    shipped = json.loads((folder / "privacy_report.json").read_text())
    assert shipped["epsilon"]["pld"] == result.epsilon and "on public data" in shipped["tuning"]
    state = np.load(folder / "state.npz", allow_pickle=False)
    assert state.files and not any("unreleased" in name for name in state.files)


def run_devices():
    exec("".join(python_of("docs/devices.md")), {})


@pytest.mark.long
def test_devices():
    printed = on_eight_devices("from tests import test_pages; test_pages.run_devices()")
    assert "devices was 8, now 4" in printed and "how the arrays lie on the devices" in printed
    assert "bytes of temporary memory on each device" in printed


@pytest.mark.long
def test_fine_tuning(capsys, monkeypatch):
    from tests.conftest import LEAST_SAVED  # not above, because processes that import this file are not strict

    monkeypatch.setattr(plan, "LEAST_SAVED", LEAST_SAVED)  # the page shows a user's choices
    (model, *rest), names = python_of("docs/fine_tuning.md"), {}
    assert lines_of("".join(rest)) <= 50
    with as_a_user():
        exec(model + rest[0], names)
        before = jax.tree.map(np.copy, names["params"])
        exec("".join(rest[1:]), names)
    *table, rounding, last = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "fine_tuning.md").read_text(), re.DOTALL)
    first = [" ".join(line.split()) for line in table if "['blocks'][0]" in line or "head" in line]
    assert first == [" ".join(line.split()) for line in shown.splitlines()]

    def is_trained(path, _):
        return names["is_trained"](jax.tree_util.keystr(path, simple=True, separator="/"))

    assert "rounding" in rounding
    flags = jax.tree.leaves(jax.tree_util.tree_map_with_path(is_trained, before))
    ways = [re.sub(r"^\S+\s+", "", line) for line in table]
    assert [way == "not trained" for way in ways] == [not flag for flag in flags] and len(table) == len(flags)
    assert {way for way in ways if way != "not trained"} == {"per-example gradients  cheaper than ghost norms"}

    after, state = names["params"], names["state"]
    moved = [(old != new).any() for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert moved == flags and sum(flags) == 5
    trained = sum(leaf.size for leaf, flag in zip(jax.tree.leaves(before), flags, strict=True) if flag)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.transforms) if leaf.ndim) == 2 * trained
    accuracy, epsilon = (float(number) for number in re.findall(r"\d\.\d+", last))
    assert accuracy > 0.7 and epsilon == pytest.approx(3.0, abs=0.02)
    assert dpx.epsilon(names["optimizer"], state, delta=1e-5) <= 3


@pytest.mark.long
def test_language_models(capsys):
    blocks = python_of("docs/language_models.md")
    assert len(blocks) == 4 and lines_of("".join(blocks)) <= 62
    names = run_page("docs/language_models.md")
    said = capsys.readouterr().out
    assert "(2, 17) [17 17] [ True  True]" in said and "one page" in said
    assert 0 < names["result"].epsilon <= 8 and len(names["texts"]) == 3
    moved = jax.tree_util.tree_map_with_path(
        lambda path, old, new: bool((old != new).any()) == ("lora_" in jax.tree_util.keystr(path)),
        names["params"],
        names["result"].params,
    )
    assert all(jax.tree.leaves(moved))


def test_the_programs_of_the_peers_are_those_that_were_counted(tmp_path):
    page, results = (ROOT / "docs" / "coming_from.md").read_text(), (report.RESULTS / "peers.md").read_text()
    sizes = {name: counted(HERE / f"{program}.py") for name, program in PROGRAMS.items()}
    for name, (lines, statements) in sizes.items():
        (row,) = [line for line in results.splitlines() if line.startswith(f"| {name} | {lines} | {statements} | ")]
        assert row in page
    assert all(sizes["dpx"][0] < lines for name, (lines, _) in sizes.items() if name != "dpx")
    code = '"""Docstring."""\n\nimport os  # a comment\n\nx = [\n    1,\n]\n\n\ndef f():\n    return x\n'
    (tmp_path / "program.py").write_text(code)
    assert counted(tmp_path / "program.py") == (6, 4)

"""`make release-check`: its parts are there, and it says which it left out, and which failed."""

import re
import sys

import pytest

from tests import release
from tests.problems import ROOT
from tests.release import Part


@pytest.fixture
def outcomes(monkeypatch, tmp_path, capsys):
    """What is printed for parts, and the exit status."""
    monkeypatch.setattr(release, "FOLDER", tmp_path)
    monkeypatch.setattr(release, "ROOT", tmp_path)

    def of(*parts):
        monkeypatch.setattr(release, "parts", lambda: list(parts))
        monkeypatch.setattr(sys, "argv", ["release"])
        return release.main(), capsys.readouterr().out

    return of


def test_a_part_that_cannot_run_is_named_with_its_reason(outcomes):
    status, said = outcomes(Part("never", ["false"], "no such device"), Part("fine", ["echo", "all well"]))
    assert status == 0 and re.search(r"skipped +never .* no such device", said) and re.search(r"fine .* all well", said)
    assert said.endswith("1 passed, 0 failed, 1 skipped\n")


def test_one_part_that_fails_fails_all(outcomes):
    status, said = outcomes(Part("broken", ["false"]), Part("fine", ["true"]), Part("tag", lambda: "not committed"))
    assert status == 1 and "1 passed, 2 failed" in said and "not committed" in said


def test_every_part_is_a_target_and_every_python_of_the_package_is_tried():
    parts = {part.name: part for part in release.parts()}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {part.command[1] for part in parts.values() if not callable(part.command) and part.command[0] == "make"}
    assert {"test", "long", "nightly", "docs", "wheel", "mutants", "quick"} <= made <= targets
    stated = re.findall(r":: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text())
    assert set(stated) == set(release.PYTHONS) and all(f"quick-{version}-newest" in parts for version in stated)

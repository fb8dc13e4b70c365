"""What a release says of itself: one version, ranges that were tried at both ends, a changelog, papers to cite."""

import re
import tomllib
from pathlib import Path

import pytest

import dpx

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_one_version():
    """The newest entry of the changelog is of this version, and no other file has a version of its own."""
    assert "version" not in PROJECT and PROJECT["name"] == "dpx-jax"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == dpx.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_lower_bounds_are_those_that_were_tried():
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "tests" / "oldest.txt").read_text(), re.MULTILINE)[::-1])
    for requirement in PROJECT["dependencies"]:
        name, lower = requirement.split(",")[0].split(">=")
        assert oldest[name] == lower or oldest[name].startswith(f"{lower}."), requirement


def test_extras_name_this_package():
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert not [line for line in extras if re.match(r"dpx(?!-jax)", line)]


def test_workflows_know_the_pythons():
    """Each Python of the classifiers is tried, and a tag that is not the version is not published."""
    pythons = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "3." in line]
    for name in ("test", "release"):
        jobs = yaml.safe_load(WORKFLOWS[name])["jobs"]
        tried = [job["strategy"]["matrix"]["python"] for job in jobs.values() if "strategy" in job]
        assert tried == [pythons], name
    release = yaml.safe_load(WORKFLOWS["release"])
    assert set(release["jobs"]["publish"]["needs"]) == {"wheel", "tests"}
    assert release["jobs"]["wheel"]["needs"] == "build" and "--tag" in WORKFLOWS["release"]
    assert [name for name, text in WORKFLOWS.items() if "id-token" in text and "permissions" not in text] == []


def test_every_paper_of_the_methods_can_be_cited():
    cited = {entry["url"] for entry in yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]}
    methods = (ROOT / "README.md").read_text().split("## Methods")[1].split("## Speed")[0]
    named = set(re.findall(r"https://arxiv.org/abs/[\d.]+", methods))
    assert len(named) == 9 and named <= cited

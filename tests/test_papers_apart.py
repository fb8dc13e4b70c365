"""Each paper can be deleted: only the lists of names change, and the rest keeps its layout and its costs."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layout import FACES, GUESTS_OF, ROOT, modules

PAPERS = sorted(path.stem for path in (ROOT / "dpx" / "papers").iterdir() if path.name[0] != "_")  # folders and files
STAYS = """
import attrs, dp_accounting, dpx, dpx.catalog
from tests import test_layout

rules = [test for name, test in vars(test_layout).items() if name.startswith("test_")]
assert len(rules) >= 7
for rule in rules:
    rule()
assert not [word for word in dpx.catalog.methods_page().split() if "papers/PAPER" in word]
sampling = dpx.PoissonSampling(examples=1_000, batch_size=50)
mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=dpx.secret_key(0))
assert "4.76" in str(dpx.privacy_report(mechanism, 200, delta=1e-5).spent)
gone = attrs.make_class("Gone", ["noise_multiplier"], bases=(dp_accounting.DpEvent,), frozen=True)
try:
    raise SystemExit(f"an event of a paper that is gone costs {dpx.accounting.event_epsilon(gone(1.0), delta=1e-5)}")
except ValueError as error:
    assert "knows no cost of Gone(noise_multiplier=1.0)" in str(error)
"""


class Without(ast.NodeTransformer):
    """A list of public names without those of the papers: their imports, and every element or line with such a name."""

    def __init__(self, papers: set[str]):
        self.papers, self.names = papers, set()

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.module and node.module.startswith("dpx.papers.") and node.module.split(".")[2] in self.papers:
            self.names |= {alias.asname or alias.name for alias in node.names}
            return None
        return node

    def stays(self, element: ast.expr) -> bool:
        if isinstance(element, ast.Constant):
            return element.value not in self.names
        return not (isinstance(element, ast.Call) and getattr(element.args[0], "attr", None) in self.names)

    def visit_List(self, node: ast.List):
        node.elts = [element for element in node.elts if self.stays(element)]
        return node

    def visit_Tuple(self, node: ast.Tuple):
        node.elts = [element for element in node.elts if self.stays(element)]
        return node


@pytest.mark.long
@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_can_be_deleted(paper, tmp_path):
    gone = {paper} | {guest for guest, hosts in GUESTS_OF.items() if paper in hosts}
    shutil.copytree(ROOT / "dpx", tmp_path / "dpx", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_layout.py", tmp_path / "tests")
    without = Without(gone)
    for name in gone:
        folder = tmp_path / "dpx" / "papers" / name
        shutil.rmtree(folder) if folder.is_dir() else folder.with_suffix(".py").unlink()
    for module in sorted(FACES) + ["dpx.catalog"]:  # the catalog last, because it has the names of all lists
        path = tmp_path / modules()[module].relative_to(ROOT)
        path.write_text(ast.unparse(without.visit(ast.parse(path.read_text()))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STAYS.replace("PAPER", paper)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stderr[-3000:]

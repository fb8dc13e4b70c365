"""Which part of the library may import which: no circle, no import upwards."""

import ast
import inspect
from pathlib import Path

import dpx

ROOT = Path(__file__).parents[1]

# A part may import those in its row, and itself. Rows further down stand on the rows above.
ROWS = """
values
flax: values
xla: values
sums: values xla
keys: values xla sums
states: values xla keys
schedules: values
sampling: values keys states
accounting: values xla keys states schedules sampling
reports: values sums keys states sampling accounting
ledgers: values xla keys states sampling accounting reports
mechanism: values xla sums keys states schedules sampling accounting
gradients: values xla sums keys states sampling mechanism
audit: values xla sums keys states schedules sampling accounting reports mechanism gradients
statistics: values sums keys sampling accounting
fitting: values xla keys states schedules sampling accounting reports ledgers mechanism gradients audit
    statistics
tuning: values sums keys states accounting reports ledgers mechanism statistics fitting
papers: values xla sums keys states schedules sampling accounting mechanism gradients
faces: mechanism papers
catalog: sampling faces
"""
MAY_IMPORT = {
    part: set(below.split())
    for part, _, below in (row.partition(":") for row in ROWS.replace("\n    ", " ").strip().split("\n"))
}

# Public names, which look up to the papers.
FACES = {"dpx.coordinates", "dpx.mechanisms", "dpx.methods", "dpx.strategies"}
GUESTS_OF = {"gep_sgd": {"random_freeze"}}  # a paper that stands on another one


def modules() -> dict[str, Path]:
    paths = (ROOT / "dpx").rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the library that a file imports anywhere, also inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            children = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [child if child in known else node.module for child in children]
        found |= {name for name in names if name.split(".")[0] == "dpx"}
    return found


def part_of(module: str) -> str:
    return "faces" if module in FACES else module.split(".")[1]


def test_every_part_imports_only_what_it_may():
    known = modules()
    for module, path in known.items():
        if module == "dpx":
            continue
        for other in imports(path, known) - {"dpx"}:
            part, imported = part_of(module), part_of(other)
            assert part == imported or imported in MAY_IMPORT[part], f"{module} imports {other}"
        assert "dpx" not in imports(path, known), f"{module} imports the whole library"


def test_the_parts_are_a_ladder():
    seen = set()
    for part, below in MAY_IMPORT.items():
        assert below <= seen, f"{part} may import {below - seen}, which stand above it"
        seen.add(part)
    assert seen == {part_of(module) for module in modules() if module != "dpx"}


def test_a_paper_imports_no_other_paper():
    known = modules()
    for module in (module for module in known if module.startswith("dpx.papers.")):
        paper = module.split(".")[2]
        others = {name.split(".")[2] for name in imports(known[module], known) if name.startswith("dpx.papers.")}
        assert others <= {paper, *GUESTS_OF.get(paper, ())}, f"{module} imports {others}"


def test_no_circle_among_modules():
    known = modules()
    needs = {module: {name for name in imports(path, known) if name in known} for module, path in known.items()}
    packages = {module for module, path in known.items() if path.name == "__init__.py"}
    left = {module: below - packages for module, below in needs.items() if module not in packages}
    while left:
        free = {module for module, below in left.items() if not below & left.keys()}
        assert free, f"these modules import each other in a circle: {sorted(left)}"
        left = {module: below for module, below in left.items() if module not in free}


def functions(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_functions_are_short():
    for module, path in modules().items():
        for function in functions(ast.parse(path.read_text())):
            code = function.body[1:] if ast.get_docstring(function) else function.body
            assert not code or (function.end_lineno or 0) - code[0].lineno < 55, f"{module}.{function.name}"


def test_no_six_lines_stand_twice_in_papers():
    seen = {}
    for path in sorted((ROOT / "dpx" / "papers").rglob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("import ", "from "))]
        for start in range(len(lines) - 5):
            block = tuple(lines[start : start + 6])
            place = f"{path.name}, from {block[0]!r}"
            assert block not in seen, f"{place} as in {seen[block]}"
            seen[block] = place


def test_the_public_names_are_few_and_documented():
    assert dir(dpx) == sorted(dpx.__all__) and len(dpx.__all__) <= 40
    for name in dpx.__all__:
        assert inspect.getdoc(getattr(dpx, name)), name
        assert name in (dpx.__doc__ or ""), name
    for package in (dpx.accounting, dpx.coordinates, dpx.mechanisms, dpx.methods):
        assert "To add one: " in (package.__doc__ or ""), package
        for name in package.__all__:
            assert inspect.getdoc(getattr(package, name)), f"{package.__name__}.{name}"
    assert (ROOT / "dpx" / "py.typed").exists()

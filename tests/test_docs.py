"""The site is complete: each public name is in its reference, each page is in its menu, and each link leads somewhere.

Sphinx is not needed for these tests; `make docs` builds the site.
"""

import doctest
import importlib
import inspect
import itertools
import re

import pytest

import dpx
from docs._site import errors, search
from tests.problems import ROOT, run_page

DOCS = ROOT / "docs"
SITE = [*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *DOCS.glob("papers/*.md")]
PAGES = sorted([*SITE, *ROOT.glob("*.md")])
PACKAGES = [
    "dpx",
    *(
        f"dpx.{name}"
        for name in ("accounting", "audit", "audit.setup", "coordinates", "fitting", "gradients", "keys", "ledgers")
    ),
    *(f"dpx.{name}" for name in ("mechanisms", "methods", "reports", "sampling", "schedules", "strategies", "tuning")),
    "dpx.flax",
    "dpx.statistics",
    "dpx.accounting.gdp",
    "dpx.reports.curves",
    "dpx.papers.dynamic_dp_sgd.claims",
]


def public_names(package: str) -> dict[str, object]:
    """Of a package, its `__all__`, and otherwise the functions and classes that were written in it."""
    module = importlib.import_module(package)
    written = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(package)
    ]
    names = getattr(module, "__all__", written)
    return {f"{package}.{name}": getattr(module, name) for name in names if not inspect.ismodule(getattr(module, name))}


def listed_names() -> list[str]:
    pages = "".join(path.read_text() for path in DOCS.glob("api/*.md"))
    return re.findall(r"^\.\. auto(?:function|class):: (\S+)$", pages, re.MULTILINE)


def found(path: str) -> object:
    value: object = dpx
    for name in path.split(".")[1:]:
        value = getattr(value, name, None) or importlib.import_module(f"{value.__name__}.{name}")  # type: ignore
    return value


def test_every_public_name_is_in_the_reference():
    listed = listed_names()
    assert len(listed) == len(set(listed)) > 100
    objects = [found(path) for path in listed]
    assert len({id(value) for value in objects}) == len(objects), "one object is listed under two names"
    for package in PACKAGES:
        for path, value in public_names(package).items():
            assert any(value is other for other in objects), f"add {path} to a page of docs/api/"
    for path, value in zip(listed, objects, strict=True):
        assert inspect.getdoc(value), path


def test_every_argument_is_explained():
    """By its name, or by "arguments ... as for" another function."""
    for path in listed_names():
        text, function = inspect.getdoc(found(path)) or "", found(path)
        if path.rsplit(".", 1)[1][0].isupper() and "Sampling" not in path and not path.endswith(("Epochs", "Order")):
            continue  # the fields of a result have a meaning of their own
        if re.search(r"arguments(, \w+)*( and errors)? (are|as)", text):
            continue
        missing = [name for name in inspect.signature(function).parameters if not re.search(rf"\b{name}\b", text)]
        assert not missing, path


@pytest.fixture(scope="module")
def beginning():
    """The names that the examples of the docstrings begin with, as the first page of the reference makes them."""
    return run_page("docs/api/index.md")


WITH_EXAMPLES = {path: value for path in listed_names() if ">>> " in (inspect.getdoc(value := found(path)) or "")}


@pytest.mark.parametrize("path", WITH_EXAMPLES)
@pytest.mark.long_cases("dpx.coordinates.row_updates", "dpx.plan_noise")
def test_examples_of_docstrings_are_true(path, beginning, promoting):
    text = inspect.getdoc(WITH_EXAMPLES[path]) or ""
    example = doctest.DocTestParser().get_doctest(text, dict(beginning), path, None, 0)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append)
    assert not output, "".join(output)


def test_the_names_of_the_first_page_have_examples():
    accounting = "delta dp_sgd_epsilon event_epsilon calibrate max_steps best_of schedule_epsilon".split()
    names = {value for value in public_names("dpx").values()} | {getattr(dpx.accounting, name) for name in accounting}
    names.add(dpx.reports.attack_bounds)
    without = [value for value in names if not any(value is other for other in WITH_EXAMPLES.values())]
    assert len(names) == 33 and not without


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain} | set(
        re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = page.read_text()
    assert "\n<<<<<<< " not in text, "an unfinished merge"
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other.read_text()), target


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "examples" / "README.md"], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_programs_fit_in_a_column(page):
    """Of 80 characters, as wide as the site shows them. What a program prints may be wider: ```text."""
    blocks = re.findall(r"^ *```(.*?)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    programs = [program for language, program in blocks if language in ("", "python", "py", "bash")]
    assert not [line for program in programs for line in program.splitlines() if len(line) > 80]


def in_menu(page):
    """A page and all below it, in the order in which the site's buttons lead through them."""
    text = page.read_text() if page.suffix == ".md" else ""
    names = re.findall(r"^(?!:)[^*\n]+$", "".join(re.findall(r"^```{toctree}\n(.*?)^```", text, re.S | re.M)), re.M)
    below = [next(page.parent.glob(f"{name}.[mi]*")).resolve() for name in names]
    return [page, *(path for entry in below for path in in_menu(entry))]


def test_every_page_is_in_the_menu_and_says_what_is_next():
    menu = in_menu(DOCS / "index.md")
    assert {*SITE} <= {*menu}
    for page, after in itertools.pairwise(menu[1:]):
        *text, end = page.read_text().rstrip().split("\n\n")
        if page.parent == DOCS:
            targets = re.findall(r"\]\(([^)]*)\)", end)
            assert end.startswith("Next: [") and [(DOCS / target).resolve() for target in targets] == [after], page
        assert not any(paragraph.startswith("Next: [") for paragraph in text), page


def test_the_files_that_the_makefile_tests_are_there():
    text = (ROOT / "Makefile").read_text()
    (some,) = re.findall(r"addprefix tests/test_, ([^)]*)\)", text)
    names = [f"tests/test_{name}.py" for name in some.replace("\\\n", " ").split()]
    missing = [name for name in names + re.findall(r"tests/test_\w+\.py", text) if not (ROOT / name).exists()]
    assert len(names) > 15 and not missing


def test_the_site_hides_no_line():
    """A line that begins with a percent sign is a comment for MyST."""
    hidden = [
        page
        for page in PAGES
        if re.search(r"^%", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    ]
    assert not hidden


def test_every_sharp_edge_says_how_bad_it_is():
    """With a word that the first paragraphs explain, and the worst of a group first."""
    first, *groups = re.split(r"^## ", (DOCS / "sharp_edges.md").read_text(), flags=re.MULTILINE)
    words = re.findall(r"^\* \*([\w ]+)\*: ", first, re.MULTILINE)
    assert words[0] == "False epsilon" and len(groups) == 4
    for group in groups:
        said = re.findall(r"^\* (?:\*([\w ]+)\.\* \*\*)?", group, re.MULTILINE)
        assert said and set(said) <= set(words) and said == sorted(said, key=words.index), group[:60]


# What a newcomer types into the search box, and the page that must hold all of these words.
TASKS = {
    "nnx dropout": "docs/flax.md",
    "linen tied embeddings": "docs/flax.md",
    "lora fine-tuning": "docs/fine_tuning.md",
    "several devices sharding mesh fsdp": "docs/devices.md",
    "several processes distributed host": "docs/devices.md",
    "federated averaging users": "docs/loops.md",
    "user column table": "examples/notebooks/table_of_users.ipynb",
    "user-level privacy": "examples/notebooks/table_of_users.ipynb",
    "fedavg": "examples/README.md",
    "epsilon of your old run": "examples/notebooks/accounting.ipynb",
    "compute epsilon existing run": "examples/notebooks/accounting.ipynb",
    "compose_runs": "docs/api/accounting.md",
    "resume checkpoint": "docs/loops.md",
    "add a method": "CONTRIBUTING.md",
    "custom mechanism": "CONTRIBUTING.md",
    "audit lower bounds": "docs/auditing.md",
}


@pytest.mark.parametrize("words", TASKS)
def test_tasks_are_found(words):
    """By their words, and in two clicks: the home page links to the start, and that to the page."""
    path = ROOT / TASKS[words]
    text = path.read_text().lower()
    assert all(word in text for word in words.split())
    linked = re.findall(r"\]\(([^)#]+)", (DOCS / "start.md").read_text())
    assert path in [(DOCS / target).resolve() for target in linked]


def test_a_word_that_people_type_finds_one_heading():
    """If a page or a heading gets another name, its words must move along."""
    found = []
    for page, headings in search.WORDS.items():
        source = [(ROOT / f"{page}.md").read_text()]
        search.add_entries(None, page, source)
        for heading, words in headings.items():
            found += words.split(", ")
            assert f"# {heading}\n\n```{{index}} ! {words.split(', ')[0]}" in source[0], heading
    assert len(found) == len(set(found)) > 80


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_sound(path):
    """They are executed by `make docs`. Here: they are valid, each cell can be compiled, and none shows an error."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.startswith("# ") and notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            lines = ["" if line.startswith("%") else line for line in cell.source.splitlines()]
            compile("\n".join(lines), path.name, "exec")
            assert not any(output.output_type == "error" for output in cell.outputs)


def test_every_message_has_a_way_out():
    """If this fails: python -m docs._site.errors > docs/errors.md"""
    assert (DOCS / "errors.md").read_text() == errors.page()
    assert all(own for _, own in errors.placed()), "a way out without a message"
    assert all(way.text and way.patterns for way in errors.ways_out())


def test_what_docstrings_name_is_there():
    """Names of code in backquotes, and files: a renamed one leaves no word behind."""
    texts = {path: path.read_text() for folder in ("dpx", "tests") for path in (ROOT / folder).rglob("*.py")}
    words = set(re.findall(r"\w+", re.sub(r"`[\w.]+`", "", "".join(texts.values()))))
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[bdet]*/**/*.py")]
    for path in (ROOT / "dpx").rglob("*.py"):
        quoted = [name.strip(".") for name in re.findall(r"`([A-Za-z_][\w.]*)`", texts[path])]
        gone = {name for name in quoted if name.split(".")[-1] not in words and not name.startswith("jax.")}
        named = re.findall(r"(?<![\w./-])((?:\w+/)*\w+\.py)\b", texts[path])
        gone |= {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
        assert not gone, f"{path.relative_to(ROOT)}: {sorted(gone)}"

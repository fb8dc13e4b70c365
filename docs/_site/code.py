"""Links from pages to files of the repository that are not pages: each file becomes a page that shows it.

A link to a folder leads to its first file that is a page, or to the list of its files.
"""

import os
import posixpath
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.util import logging

ROOT = Path(__file__).parents[2]
SHOWN = {".py", ".txt", ".json", ".cff", ".toml", ".yml", ".ipynb", ".md", ""}
logger = logging.getLogger(__name__)


def page_of(path: str) -> str:
    return f"code/{path or 'repository'}"


def target_of(app, docname: str, target: str) -> str | None:
    """The path of a file or folder of the repository, relative to its root, to which a link of a page leads."""
    target = target.split("#")[0]
    if not target or "://" in target:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(docname), target))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def link_to_code(app, doctree) -> None:
    """Replaces each reference to a file or folder that is not a page by a link to the page that shows it."""
    docname = app.env.docname
    shown = app.env.__dict__.setdefault("shown_code", {})
    shown[docname] = set()
    references = [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]
    for reference in references:
        if reference.get("refdomain") == "std" or reference.get("reftype") not in ("myst", None):
            continue
        written = reference.get("reftarget", "")
        if written == "README":  # the home page says what the README says
            uri = app.builder.get_relative_uri(docname, app.config.root_doc)
            reference.replace_self(nodes.reference("", "", *reference.children, internal=True, refuri=uri))
            continue
        path = target_of(app, docname, written)
        if path is None or (ROOT / path).suffix not in SHOWN or posixpath.splitext(path)[0] in app.env.found_docs:
            continue
        uri = app.builder.get_relative_uri(docname, page_of(path))
        link = nodes.reference("", "", *reference.children, internal=True, refuri=uri)
        reference.replace_self(link)
        shown[docname].add(path)


def contents(path: Path) -> str:
    """HTML of a file, or of the list of a folder's files."""
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith((".", "__pyc")))
        return "<ul>" + "".join(f"<li><code>{name}</code></li>" for name in names) + "</ul>"
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = get_lexer_for_filename("file.txt")
    text = highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre>{text}</pre></div>'


def code_pages(app):
    for path in sorted(set().union(*app.env.__dict__.get("shown_code", {}).values())):
        yield page_of(path), {"title": path, "body": f"<h1>{path}</h1>" + contents(ROOT / path)}, "page.html"


def title_of_results(app, docname, source) -> None:
    """A page of results begins with its command; its name is its title. The search of the site leaves it out."""
    name = docname.removeprefix("benchmarks/results/")
    if docname != name != "README":
        title = "" if source[0].startswith("# ") else f"# {name.rsplit('/', 1)[-1].replace('_', ' ')}\n\n"
        source[0] = f"---\nnosearch: true\n---\n\n{title}{source[0]}"


def merge(app, env, docnames, other) -> None:
    """What another process has read: its pages alone, because it holds an older copy of all others."""
    read = other.__dict__.get("shown_code", {})
    env.__dict__.setdefault("shown_code", {}).update({name: read[name] for name in docnames if name in read})


def setup(app):
    app.connect("source-read", title_of_results)
    app.connect("doctree-read", link_to_code)
    app.connect("html-collect-pages", code_pages)
    app.connect("env-merge-info", merge)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": os.path.basename(__file__)}

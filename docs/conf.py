"""The site: the repository's Markdown as it is, notebooks that are executed, and a reference made of docstrings.

The source folder is the root of the repository, because the pages link to results and to code:
`sphinx-build -c docs . runs/site` (`make docs`).
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import dpx  # noqa: E402

project, author, copyright = "dpx", "The dpx authors", "The dpx authors"
version = release = dpx.__version__
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx_copybutton"]
extensions += ["_site.code", "_site.docstrings", "_site.menu", "_site.names", "_site.search"]
include_patterns = ["docs/**", "benchmarks/results/**", "examples/README.md", "examples/notebooks/*", "*.md"]
exclude_patterns = ["README.md", ".venv", ".git", "runs", "dist", "tests", "dpx", "docs/_site", "**.ipynb_checkpoints"]

# The same forms as on GitHub, whose anchors the pages use.
myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
myst_dmath_double_inline = False
default_role = "code"
highlight_language = "none"  # of blocks that name none: formulas, commands
autodoc_typehints = "none"  # the docstrings have the meaning, the shape and the unit of each argument
autodoc_member_order = "bysource"
nitpicky = False  # names in docstrings are links where the reference has them

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "runs" / "notebooks")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True
# Notebooks share the programs that JAX compiled. Each has one thread, because several run at once.
os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / "runs" / "compiled"), "OMP_NUM_THREADS": "1"}
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Without the internet, names of other libraries are not links. It is a line of the log, and not a warning.
intersphinx_timeout = 5
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest/", None),
    "optax": ("https://optax.readthedocs.io/en/latest/", None),
    "flax": ("https://flax.readthedocs.io/en/latest/", None),
    "numpy": ("https://numpy.org/doc/stable/", None),
}
if not os.environ.get("DPX_DOCS_INTERSPHINX"):
    intersphinx_mapping = {}  # `make docs` works without the internet; the workflow of the site sets the variable

html_theme = "sphinx_book_theme"
html_title = f"dpx {version}"
html_static_path = ["_static"]
html_css_files = ["dpx.css"]
html_extra_path = ["_site/root"]  # index.html, which leads to the home page
html_show_sourcelink = False
html_domain_indices = False  # one module has a page, and the index has its names
html_theme_options = {"home_page_in_toc": True, "show_toc_level": 2, "use_download_button": False}
html_theme_options["navbar_persistent"] = []  # the search box of the menu is enough
# No menu of versions: the theme's fetches a file, which browsers refuse for a site on a disk, and would have one entry. Read
# the Docs adds its own.
# Where GitHub builds the site, each page links to its source, and a notebook to Colab. The address is not written down.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options |= {
        "repository_url": f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}",
        "repository_branch": "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _deal_pages(app, env, names):
    """Deals the pages out to the parts that processes read: in the order of names, one process executes all notebooks."""
    parts = len(list((ROOT / "examples/notebooks").glob("*.ipynb")))
    names[:] = [name for part in range(parts) for name in names[part::parts]]


def setup(app):
    app.connect("env-before-read-docs", _deal_pages)

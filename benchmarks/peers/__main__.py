"""Runs the same job with each library, counts the lines of its program, and writes benchmarks/results/peers.md.

    pip install '.[benchmarks]' keras && python -m benchmarks.peers

With `--head`, it runs what the repository of jax_privacy has in place of its release, and writes peers_head.md: install
that, with optax and dp-accounting from their repositories.

Counted is all but the data and the model: no blank lines, comments or docstrings. Statements are counted too, because
they do not depend on how the lines are broken.
"""

import argparse
import ast
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import dpx
from benchmarks import report

HERE = Path(__file__).parent
PROGRAMS = {
    "dpx": "dpx_cnn",
    "jax_privacy, JAX": "jax_privacy_cnn",
    "jax_privacy, Keras": "jax_privacy_keras_cnn",
    "Opacus": "opacus_cnn",
}
HEAD = PROGRAMS | {"jax_privacy, JAX": "jax_privacy_trainer_cnn"}
PACKAGES = ("jax", "optax", "flax", "dp-accounting", "jax-privacy", "keras", "opacus", "torch", "numpy", "scikit-learn")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def counted(path: Path) -> tuple[int, int]:
    """The lines that hold code, and the statements. The docstring of the file is neither."""
    tree = ast.parse(path.read_text())
    documented = tree.body[0].end_lineno or 0 if ast.get_docstring(tree) else 0
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1) if line > documented}
    return len(lines), sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - (documented > 0)


def printed(program: str) -> str:
    """The last line that the program prints, or the error that stopped it."""
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.peers.{program}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each program, with fresh weights, batches and noise")
    parser.add_argument("--head", action="store_true", help="jax_privacy is installed from its repository")
    given = parser.parse_args()
    runs = given.runs
    versions = ", ".join([f"python {platform.python_version()}", f"dpx {dpx.__version__}", *map(version, PACKAGES)])
    table, outputs = [], []
    for name, program in (HEAD if given.head else PROGRAMS).items():
        lines, statements = counted(HERE / f"{program}.py")
        said = [printed(program) for _ in range(runs)]
        accuracies = ", ".join(found[1] if (found := re.search(r"accuracy (\S+),", line)) else "-" for line in said)
        epsilon = found[1] if (found := re.search(r"epsilon (\S+)", said[-1])) else "-"
        table.append(f"| {name} | {lines} | {statements} | {accuracies} | {epsilon} |")
        outputs += [f"{program}: {line}" for line in said]
    name = "peers_head" if given.head else "peers"
    command = f"python -m benchmarks.peers --runs {runs}{' --head' * given.head}"
    head = f"`{command}`, {datetime.date.today()}, {report.processor()}. {versions}."
    text = [
        head,
        "The same CNN on scikit-learn's digits (1,400 to train, 397 to test), Poisson sampling at rate 0.1, 100 steps "
        "of Adam, clip norm 1, delta 1e-5, target epsilon 3. Lines and statements are those of the program beyond the "
        "data and the model. The Keras program prints the epsilon that it asked for.",
        "| program | lines | statements | test accuracy | epsilon |\n|---|---|---|---|---|\n" + "\n".join(table),
        "Printed:\n\n```text\n" + "\n".join(outputs) + "\n```",
    ]
    (report.RESULTS / f"{name}.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()

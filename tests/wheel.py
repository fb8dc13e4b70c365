"""`python -m tests.wheel`: does the built package hold what it must, and does the README's program run on it?

Each wheel goes into a new environment, and its program runs in an empty folder, so nothing of the checkout is found.
Constraints for pip give the oldest versions: `--constraint tests/oldest.txt`.
"""

import argparse
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECK = """
from importlib import metadata
assert metadata.version("dpx-jax") == dpx.__version__, dpx.__version__
assert "site-packages" in dpx.__file__, dpx.__file__
assert f"dpx {dpx.__version__}" in str(run.report), run.report
assert float(run.epsilon) <= 2.0 and accuracy(run.params) > 0.9
print(*(f"{name} {metadata.version(name)}" for name in ("jax", "optax", "dp-accounting", "numpy", "scipy")), sep=", ")
"""


def metadata_of(wheel: Path) -> email.message.Message:
    """The metadata of a wheel; raises AssertionError if a file that it must hold is missing, or one is too many."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(described).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"dpx"}, "only dpx is in the wheel"
    assert "dpx/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dpx").rglob("*.py")}
    assert tracked <= set(names), f"not in the wheel: {sorted(tracked - set(names))}"
    return email.message_from_string(text)


def run_readme(wheel: Path, constraint: Path | None) -> None:
    """Install the wheel into a new environment, and run the README's program in an empty folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    with tempfile.TemporaryDirectory() as folder:
        environment, empty = Path(folder) / "environment", Path(folder) / "empty"
        empty.mkdir()
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        limits = ["--constraint", str(constraint.resolve())] if constraint else []
        subprocess.run([python, "-m", "pip", "install", "--quiet", *limits, str(wheel.resolve())], check=True)
        subprocess.run([python, "-m", "pip", "check"], check=True)
        subprocess.run([python, "-c", code + CHECK], check=True, cwd=empty, env=inherited)
        assert not any(empty.iterdir()), "the program left files"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder of the sdist and the wheel")
    parser.add_argument("--constraint", type=Path, help="constraints for pip, such as tests/oldest.txt")
    parser.add_argument("--tag", help="the tag of the release, which must be v and the version")
    arguments = parser.parse_args()
    (wheel,), (sdist,) = arguments.dist.glob("*.whl"), arguments.dist.glob("*.tar.gz")
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "dpx-jax" and "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert arguments.tag in (None, f"v{metadata['Version']}"), f"the version is {metadata['Version']}"
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"dpx/py.typed", "LICENSE", "README.md", "tests/oldest.txt", "hatch_build.py"} <= names
    start = time.monotonic()
    run_readme(wheel, arguments.constraint)
    print(
        f"python {sys.version.split()[0]}: installed, and ran the README's program, in {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()

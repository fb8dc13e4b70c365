"""The programs of docs/peers.md are those that were counted and run, and dpx's is the shortest."""

from benchmarks import report
from benchmarks.peers.__main__ import HERE, PROGRAMS, counted

PAGE = (HERE.parents[1] / "docs" / "peers.md").read_text()
RESULTS = (report.RESULTS / "peers.md").read_text()


def test_the_counts(tmp_path):
    sizes = {name: counted(HERE / f"{program}.py") for name, program in PROGRAMS.items()}
    for name, (lines, statements) in sizes.items():
        (row,) = [line for line in RESULTS.splitlines() if line.startswith(f"| {name} | {lines} | {statements} | ")]
        assert row in PAGE
    assert all(sizes["dpx"][0] < lines for name, (lines, _) in sizes.items() if name != "dpx")
    code = '"""Docstring."""\n\nimport os  # a comment\n\nx = [\n    1,\n]\n\n\ndef f():\n    return x\n'
    (tmp_path / "program.py").write_text(code)
    assert counted(tmp_path / "program.py") == (6, 4)

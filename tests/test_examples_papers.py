"""Every experiment of the papers is a command that works; its page has the paper's figures beside ours."""

import pytest

from examples.papers import __main__ as command
from examples.papers import experiments


@pytest.mark.parametrize("name", experiments())
def test_smoke(name, capsys, promoting):
    assert command.main(["--smoke", name]) == 0
    assert f"{name}: its program works" in capsys.readouterr().out


def test_all_are_listed(capsys):
    assert command.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(experiments())


def test_unknown_names_are_refused(capsys):
    assert command.main(["dynamic-table-9"]) == 2
    assert "unknown experiment dynamic-table-9; known: dynamic-table-1" in capsys.readouterr().err

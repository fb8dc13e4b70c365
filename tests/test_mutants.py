"""The list of deliberate faults fits the sources; `make mutants` runs it."""

import ast

import pytest

from tests.faults import FAULTS
from tests.mutants import ROOT, red_tests, source_of


def test_every_fault_fits_its_file():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    for fault in FAULTS:
        assert source_of(fault) != (ROOT / fault.file).read_text(), fault.name


@pytest.mark.long
def test_every_fault_is_a_program():
    for fault in FAULTS:
        ast.parse(source_of(fault), fault.name)


def test_a_fault_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must occur once"):
        source_of(FAULTS[0]._replace(old="no such text"))


def test_red_tests_are_read():
    said = "F\nFAILED tests/test_a.py::test_b[one, two] - assert 1 == 2\nERROR tests/test_a.py::test_c\n1 failed"
    assert red_tests(said) == ["tests/test_a.py::test_b[one, two]", "tests/test_a.py::test_c"]

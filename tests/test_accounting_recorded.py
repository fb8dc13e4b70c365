"""Bills as they were recorded (`python -m tests.record_bills`), to a relative 1e-6."""

import json

import pytest

from tests.record_bills import PATH, bills

RECORDED = {name: float(value) for name, value in json.loads(PATH.read_text()).items()} if PATH.exists() else {}
BILLS = bills()


def test_every_bill_is_recorded():
    assert RECORDED.keys() == BILLS.keys() and len(RECORDED) >= 200


@pytest.mark.parametrize("name", BILLS)
def test_a_bill_is_what_it_was(name):
    assert float(BILLS[name]()) == pytest.approx(RECORDED[name], rel=1e-6, abs=1e-300)

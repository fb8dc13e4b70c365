"""The code of docs/devices.md runs as it stands, on eight devices."""

import re
from pathlib import Path

import pytest

from tests.devices import on_eight_devices

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"


def run():
    exec("".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), {})


@pytest.mark.long
def test_devices():
    printed = on_eight_devices("from tests import test_devices_page; test_devices_page.run()")
    assert "devices was 8, now 4" in printed and "one: layout of the arrays (its fingerprint) was" in printed
    assert "bytes of temporary memory on each device" in printed

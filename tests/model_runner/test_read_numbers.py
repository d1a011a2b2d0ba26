"""Numbers in text that strangers wrote."""

import re
from pathlib import Path

import pytest

from model_runner.read_numbers import LARGEST, decimal_number, whole_number

_ROOT = Path(__file__).parents[2]
_CODE = ("server", "scheduler", "model_runner", "samewise")
NO_NUMBERS = ("", "²", "٣", "1_0", " 1", "1 ", "1\n", "0x1", "one", "９")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_texts_that_are_no_numbers(text: str) -> None:
    assert whole_number(text) is None
    assert decimal_number(text) is None


def test_numbers() -> None:
    assert [whole_number(text) for text in ("0", "007", "12", "0" * 9000 + "5")] == [0, 7, 12, 5]
    assert [whole_number(text) for text in (str(LARGEST), str(LARGEST + 1), "9" * 5000, "-1", "+1", "1.5")] == [
        LARGEST, *[None] * 5
    ]  # fmt: skip
    assert [whole_number(text, 10) for text in ("10", "11", "9")] == [10, None, 9]
    assert [decimal_number(text) for text in ("12", "-1.5", "2e3", "1e999", "nan", "inf", "9" * 5000)] == [
        12.0, -1.5, 2000.0, *[None] * 4
    ]  # fmt: skip


def test_no_other_reader_asks_whether_text_is_digits() -> None:
    paths = [path for package in _CODE for path in (_ROOT / package).rglob("*.py")]
    found = [path for path in paths if re.search(r"\.is(digit|decimal|numeric)\b", path.read_text())]
    assert found == [_ROOT / "model_runner/read_numbers.py"]

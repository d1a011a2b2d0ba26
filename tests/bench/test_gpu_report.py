"""The report of the GPU's benchmark, and what it makes of the tests' results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from bench.on_gpu.report import Figure, Goal, SavedReport
from bench.on_gpu.tests import summary


def _raises(error: Exception) -> Callable[[], NoReturn]:
    def measure() -> NoReturn:
        raise error

    return measure


def test_the_report_has_what_was_measured_and_what_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = SavedReport({"device": "none"}, tmp_path / "new" / "gpu.json")
    goals = Goal("of limit", 0.83, 0.8, at_least=True), Goal("outside", 0.07, 0.05, at_least=False)
    report.attempt("decode", "exact", lambda: Figure("decode", "exact", 5.0, of_limit=0.83, plain=20.0, goals=goals))
    report.attempt("serving", "", _raises(ModuleNotFoundError("No module named 'msgspec.json'", name="msgspec.json")))
    assert not report.has_failures
    report.attempt("kernels", "", _raises(ModuleNotFoundError("gone", name="model_runner.attention.triton")))
    assert report.has_failures
    report.attempt("fast", "", _raises(ValueError("first line\nsecond")))
    content = json.loads((tmp_path / "new" / "gpu.json").read_text())
    decode, serving, kernels, fast = content["figures"]
    assert [goal["is_met"] for goal in decode["goals"]] == [True, False]
    assert serving["note"] == "skipped: not installed: msgspec"
    assert not serving["is_failure"]
    assert kernels["is_failure"]
    assert fast["note"] == "FAILED: ValueError: first line"
    assert "raise error" in fast["details"]["traceback"]
    assert "Traceback" in capsys.readouterr().out
    report.print_table(Console(width=200))
    table = capsys.readouterr().out
    assert "4.00 x" in table
    assert "of limit 83.0% >= 80%: met; outside 7.0% <= 5%: MISSED" in table


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    report = SavedReport({}, tmp_path / "gpu.json", budget_s=20)
    report.attempt("late", "", _raises(AssertionError("never called")), needs_s=21)
    assert not report.has_failures
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"][0]["note"] == "skipped: needs 21 s"


def test_nan_meets_no_goal() -> None:
    assert not Goal("", float("nan"), 0.5, at_least=True).is_met
    assert not Goal("", float("nan"), 0.5, at_least=False).is_met


def test_the_summary_of_tests() -> None:
    case = '<testcase classname="tests.gpu.test_x" name="test_{}">{}</testcase>'
    passed, failed = case.format("a", ""), case.format("b", "<failure>no</failure>")
    skipped, broken = case.format("c", "<skipped/>"), case.format("d", "<error>no</error>")

    def of(*cases: str) -> Figure:
        return summary(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")

    assert of(passed, skipped).note == "1 passed, 1 skipped"
    assert not of(passed, skipped).is_failure
    both = of(passed, failed, skipped, broken, failed)
    assert both.is_failure
    assert both.note == "2 FAILED, 1 passed, 1 skipped: test_x::test_b, test_x::test_d"
    assert of(skipped).is_failure  # nothing was tested

"""Results of each test: passed, failed with the first line of its error, or not applicable with the reason."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from foreign_suites.served import SERVED

NO_REQUEST = "asks no server: a test of the other server's own code"


class Report:
    """A pytest plugin that sorts outcomes and writes them as JSON, one list for the suite."""

    def __init__(self, not_applicable: dict[str, str]) -> None:
        self._not_applicable = not_applicable
        self._rows: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what the suite's table of reasons matches; a pattern is a part of the test's id."""
        for item in items:
            reason = next((why for part, why in self._not_applicable.items() if part in item.nodeid), None)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        """Later tests of a module find its server started, so their fixtures tell that they use it."""
        SERVED.used = any("server" in name or "client" in name for name in item.fixturenames)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._rows[report.nodeid] = ("not applicable", why.removeprefix("Skipped: "))
        elif report.failed and not SERVED.used:
            self._rows[report.nodeid] = ("not applicable", NO_REQUEST)
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._rows[report.nodeid] = ("failed", crash.message if crash else str(report.longrepr))
        elif report.when == "call":
            self._rows[report.nodeid] = ("passed", "") if SERVED.used else ("not applicable", NO_REQUEST)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._rows[report.nodeid] = (
                "not applicable",
                f"cannot be imported: {str(report.longrepr).splitlines()[-1]}",
            )

    def pytest_runtest_logfinish(self) -> None:
        """After each test, so that the report of a run in progress can be read."""
        rows = [{"test": test, "outcome": outcome, "why": why} for test, (outcome, why) in self._rows.items()]
        Path(os.environ.get("SAMEWISE_SUITE_REPORT", "samewise.json")).write_text(json.dumps(rows, indent=1))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("outcomes")
        for test, (outcome, why) in self._rows.items():
            if outcome == "failed":
                terminalreporter.line(f"{test}: {why[:200]!r}")
        for outcome, count in Counter(outcome for outcome, _ in self._rows.values()).items():
            terminalreporter.line(f"{count} {outcome}")

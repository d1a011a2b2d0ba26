"""Processes of the GPU benchmark for its parts, tests and clients, tested without a GPU."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.local_server import environment
from bench.on_gpu.clients import Load, put_load
from bench.on_gpu.process import Part, run_apart
from bench.on_gpu.report import Report
from bench.on_gpu.serving import figure
from bench.on_gpu.tests import command, run_limited
from server.cli.loadtest.load import summarize
from tests.bench.acting_parts import Acting
from tests.cli.fake_openai import FakeOpenAI, running


def test_what_a_part_does_to_its_process_costs_the_others_nothing() -> None:
    report = Report()
    names = ("first", "dies", "hangs", "faults", "last")
    run_apart(report, [Part(name, 1) for name in names], Acting, silence_s=12)
    assert [(found.part, found.what, found.note) for found in report.figures] == [
        ("first", "found", ""),
        ("dies", "found", ""),
        ("dies", "", "FAILED: its process exited with code -11"),
        ("hangs", "found", ""),
        ("hangs", "", "FAILED: no figure for 12 s"),
        ("faults", "found", ""),
        ("faults", "in it", "FAILED: ZeroDivisionError: division by zero"),
        ("faults", "", "FAILED: its process exited with code 1"),
        ("last", "found", ""),
    ]
    assert [found.value for found in report.figures if found.what == "found"] == [0, 1, 3, 5, 8]  # all know all


def test_parts_that_come_too_late_are_named() -> None:
    report = Report(budget_s=0)
    run_apart(report, [Part("late", 1)], Acting)
    assert [found.note for found in report.figures] == ["skipped: no time left"]


def test_a_program_in_time() -> None:
    assert run_limited([sys.executable, "-c", "import os; assert os.environ['OMP_NUM_THREADS'] == '2'"], 60)


def test_a_program_that_takes_too_long_writes_what_it_has_and_is_gone_with_all_it_has_started(tmp_path: Path) -> None:
    program = """
import pathlib, subprocess, sys, time
deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
folder = pathlib.Path(sys.argv[1])
(folder / "child").write_text(str(child.pid))
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    (folder / "results").write_text("some")
"""
    start = time.perf_counter()
    assert not run_limited([sys.executable, "-c", program, str(tmp_path)], 5)
    assert time.perf_counter() - start < 30
    assert (tmp_path / "results").read_text() == "some"
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_the_tests_of_the_gpu_are_found() -> None:
    """And none of them has errors where there is no GPU."""
    found = subprocess.run([*command(), "--collect-only"], capture_output=True, text=True, check=True)
    assert "tests/gpu/test_sameness.py" in found.stdout
    assert "tests/model_runner/test_row_sums.py" in found.stdout


@pytest.mark.parametrize("clients", [3, 128])
def test_clients_share_a_load(clients: int) -> None:
    fake = FakeOpenAI(delay_s=0.01)
    with running(fake.app()) as url:
        load = Load(url, "fake-1", 50, clients, 2 * clients, prompt=7, answer=4, seed=5)
        report = summarize(asyncio.run(put_load(load)))
    assert (report.num_requests, report.num_completed) == (2 * clients, 2 * clients)
    assert report.output_tokens == 2 * clients * 4
    assert len(fake.bodies) == 3 * clients  # with those to warm up
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 3 * clients
    assert fake.most_in_flight <= clients
    assert fake.bodies[0]["ignore_eos"]
    served = figure(clients, report, plain=report.output_tokens_per_s / 2)
    assert served.cells()[:2] == ("serving", f"{clients} clients")
    assert served.cells()[5] == "2.00 x"
    failed = figure(clients, replace(report, num_completed=clients), plain=None)
    assert failed.is_failure
    assert f"{clients} FAILED" in failed.note


def test_clients_that_cannot_run_are_an_error() -> None:
    load = Load("http://127.0.0.1:1/v1", "none", 0, 1, 1, prompt=7, answer=4, seed=5)
    with pytest.raises(RuntimeError, match="before it was ready"):
        asyncio.run(put_load(load))


def test_a_server_finds_the_repository_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "something_else.py").touch()
    program = [sys.executable, "-P", "-c", "import bench, server.engine.worker, something_else"]
    subprocess.run(program, cwd=tmp_path, env=environment(), check=True)
    assert os.environ["PYTHONPATH"] == str(tmp_path)

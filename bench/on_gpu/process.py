"""Runs parts in a separate process, so that a device fault or a hang affects only the current part.

One process runs part after part. If it ends, another continues with the next part.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from bench.on_gpu.report import Figure, Report

SILENCE_S = 150.0
"""A part that reports no figure for this long hangs; loading a model and compiling its kernels takes longest."""
GRACE_S = 10.0
"""Time that a part may exceed the budget."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run."""

    name: str
    needs_s: float
    """Seconds that the part needs; it is skipped if less time is left."""
    is_quick: bool = False
    """Whether the part belongs to a quick run."""


class Parts(Protocol):
    """Measures parts by name."""

    def measure(self, name: str, needs_s: float) -> None:
        """Measure and report a part; skip it if less than `needs_s` seconds are left."""
        ...


class SentReport(Report):
    """The report of a measuring process, which sends all figures to its parent."""

    def __init__(self, connection: Connection, budget_s: float, earlier: Sequence[Figure]) -> None:
        super().__init__(budget_s, earlier)
        self._connection = connection

    def add(self, figure: Figure) -> None:
        """Send a figure. After a device fault the process exits, because it cannot compute any more."""
        super().add(figure)
        self._connection.send(figure)
        if figure.is_failure and not _is_device_well():
            raise SystemExit(1)


def run_apart(
    report: Report, parts: Sequence[Part], make: Callable[[Report], Parts], silence_s: float = SILENCE_S
) -> None:
    """Run the parts in order and report their figures. `make` is called once in each process."""
    left = list(parts)
    while left and report.left_s > 0:
        reason = _run(report, left, make, silence_s)
        if left:
            failed = left.pop(0)
            report.add(Figure(failed.name, "", note=f"FAILED: {reason}", is_failure=True))
    for part in left:
        report.add(Figure(part.name, "", note="skipped: no time left"))


def _run(report: Report, left: list[Part], make: Callable[[Report], Parts], silence_s: float) -> str:
    """Run parts in one process and remove finished ones from the list; returns why the process ended."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    arguments = sender, tuple(left), make, report.left_s, tuple(report.figures)
    process = context.Process(target=_work, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        while receiver.poll(min(silence_s, report.left_s + GRACE_S)):
            message = receiver.recv()
            if isinstance(message, Figure):
                report.add(message)
            else:
                print(f"[{max(report.left_s, 0):.0f} s left] {message} done", flush=True)
                left.pop(0)
        return f"no figure for {silence_s:.0f} s" if report.left_s > 0 else "no time left"
    except (EOFError, OSError):
        process.join(GRACE_S)
        return f"its process exited with code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _work(
    connection: Connection,
    parts: Sequence[Part],
    make: Callable[[Report], Parts],
    budget_s: float,
    earlier: Sequence[Figure],
) -> None:
    report = SentReport(connection, budget_s, earlier)
    measured = make(report)
    for part in parts:
        measured.measure(part.name, part.needs_s)
        connection.send(part.name)


def _is_device_well() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True

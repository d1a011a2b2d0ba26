"""Parts of the run in a process of their own: a fault of the device, or a hang, costs the part that meets it.

The process goes from part to part; where it ends, another takes its place from the next part on.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from bench.on_gpu.report import Figure, Report

SILENCE_S = 150.0
"""No part goes longer without a figure, unless it hangs: loading a model and compiling its kernels takes longest."""
GRACE_S = 10.0
"""Beyond the budget."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run."""

    name: str
    needs_s: float
    """Left out if less is left."""
    is_quick: bool = False
    """Whether a quick run has it."""


class Parts(Protocol):
    """Measures parts."""

    def measure(self, name: str, needs_s: float) -> None:
        """Report one."""
        ...


class SentReport(Report):
    """Of a process that measures: all it finds goes to the one that has started it."""

    def __init__(self, connection: Connection, budget_s: float, earlier: Sequence[Figure]) -> None:
        super().__init__(budget_s, earlier)
        self._connection = connection

    def add(self, figure: Figure) -> None:
        """Send it. After a fault of the device nothing more can be computed in this process, so it ends."""
        super().add(figure)
        self._connection.send(figure)
        if figure.is_failure and not _is_device_well():
            raise SystemExit(1)


def run_apart(
    report: Report, parts: Sequence[Part], make: Callable[[Report], Parts], silence_s: float = SILENCE_S
) -> None:
    """Run the parts in order and report what they find. `make` is called in each process that is needed."""
    left = list(parts)
    while left and report.left_s > 0:
        reason = _run(report, left, make, silence_s)
        if left:
            failed = left.pop(0)
            report.add(Figure(failed.name, "", note=f"FAILED: {reason}", is_failure=True))
    for part in left:
        report.add(Figure(part.name, "", note="left out: no time"))


def _run(report: Report, left: list[Part], make: Callable[[Report], Parts], silence_s: float) -> str:
    """Run parts in one process, and remove from the list those that it gets done. Returns how it ended."""
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
        return "it hangs" if report.left_s > 0 else "there was no time left"
    except (EOFError, OSError):
        process.join(GRACE_S)
        return f"its process ended with code {process.exitcode}"
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

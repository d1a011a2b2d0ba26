"""Parts of a run that do as they are called; in a module of their own, which the processes import quickly."""

import os
import signal
import time
from dataclasses import dataclass

import torch

from bench.on_gpu.report import Figure, Report


def _fault() -> None:
    raise RuntimeError("an illegal memory access")


@dataclass
class Acting:
    """Implements bench.on_gpu.process.Parts. Each part first reports how many figures it knows."""

    report: Report

    def measure(self, name: str, needs_s: float) -> None:
        self.report.add(Figure(name, "found", len(self.report.figures)))
        if name == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif name == "hangs":
            time.sleep(600)
        elif name == "faults":
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = _fault
            self.report.attempt(name, "in it", lambda: Figure(name, "", 1 / 0))
            self.report.add(Figure(name, "after it"))

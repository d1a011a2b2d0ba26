"""The report of `bench.gpu`: a line for each figure at once, a table at the end, and a JSON file with all numbers."""

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HEADINGS = ("part", "what", "measured", "of the limit", "plain", "faster", "goals")
WIDTH = 132
_LONGEST_NOTE = 200
_OWN = ("bench", "model_runner", "scheduler", "server", "tests")


@dataclass(frozen=True, slots=True)
class Goal:
    """A fraction that must be above or below a bound."""

    what: str
    found: float
    bound: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the goal is met; NaN never meets it."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.what} {self.found:.1%} {sign} {self.bound:.0%}: {verdict}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity, or a note why it was not measured."""

    part: str
    what: str
    value: float | None = None
    """The median; None if there is only a note."""
    unit: str = "ms"
    of_limit: float | None = None
    """Fraction of the machine's measured limit, 0 to 1."""
    plain: float | None = None
    """Result of plain transformers or torch, in the same run and unit."""
    goals: tuple[Goal, ...] = ()
    note: str = ""
    """Why there is no number, or a remark."""
    is_failure: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """Details for the JSON file only."""

    def cells(self) -> tuple[str, ...]:
        """The table's cells, in the order of HEADINGS."""
        faster = self.plain / self.value if self.plain and self.value else None
        if faster is not None and self.unit.endswith("/s"):
            faster = 1 / faster
        return (
            self.part,
            self.what,
            "" if self.value is None else f"{_number(self.value)} {self.unit}",
            "" if self.of_limit is None else f"{self.of_limit:.1%}",
            "" if self.plain is None else _number(self.plain),
            "" if faster is None else f"{faster:.2f} x",
            "; ".join([*map(str, self.goals), *([self.note] if self.note else [])]),
        )


class Report:
    """All figures so far."""

    def __init__(self, budget_s: float = math.inf, earlier: Sequence[Figure] = ()) -> None:
        """The budget starts now; measurements that do not fit are skipped. `earlier` are figures already reported."""
        self._ends_at = time.perf_counter() + budget_s
        self.figures = list(earlier)

    @property
    def has_failures(self) -> bool:
        return any(figure.is_failure for figure in self.figures)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._ends_at - time.perf_counter()

    def plain(self, part: str) -> float | None:
        """Plain transformers' result for this part in an earlier figure."""
        return next((figure.plain for figure in self.figures if figure.part == part and figure.plain is not None), None)

    def add(self, figure: Figure) -> None:
        """Add a figure."""
        self.figures.append(figure)

    def attempt(self, part: str, what: str, measure: Callable[[], Figure], needs_s: float = 5.0) -> None:
        """Add the figure that `measure` returns; if it raises, print the traceback and add a failure.

        The measurement is skipped, without a failure, if too little time is left or a package is not installed.
        """
        if self.left_s < needs_s:
            self.add(Figure(part, what, note=f"skipped: needs {needs_s:.0f} s"))
            return
        try:
            figure = measure()
        except ModuleNotFoundError as error:
            name = (error.name or "").split(".")[0]
            figure = _failure(part, what, error) if name in _OWN else skipped(part, what, [name])
        except Exception as error:  # noqa: BLE001  (a failure must not prevent the other parts)
            figure = _failure(part, what, error)
        self.add(figure)


class SavedReport(Report):
    """Prints each figure and rewrites the file at once, so that an aborted run keeps its results."""

    def __init__(self, machine: Mapping[str, Any], output: Path, budget_s: float = math.inf) -> None:
        super().__init__(budget_s)
        self._machine = machine
        self._output = output

    def add(self, figure: Figure) -> None:
        """Add, print and save a figure."""
        super().add(figure)
        print("  " + " | ".join(cell for cell in figure.cells() if cell), flush=True)
        content = {"machine": dict(self._machine), "figures": [_as_dict(one) for one in self.figures]}
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"Cannot write {self._output}: {error}", flush=True)

    def print_table(self, console: Console | None = None) -> None:
        """Print all figures and the file's path."""
        lines = Table(*HEADINGS, box=None, padding=(0, 2, 0, 0))
        for column in lines.columns[2:6]:
            column.justify = "right"
        for figure in self.figures:
            lines.add_row(*figure.cells())
        console = console or Console(width=WIDTH)
        console.print(", ".join(f"{name} {value}" for name, value in self._machine.items()))
        console.print(lines)
        console.print(f"All numbers are in {self._output}", soft_wrap=True)


def skipped(part: str, what: str, packages: Sequence[str]) -> Figure:
    """The figure of a measurement that is skipped because packages are missing."""
    return Figure(part, what, note=f"skipped: not installed: {', '.join(packages)}")


def _failure(part: str, what: str, error: Exception) -> Figure:
    text = "".join(traceback.format_exception(error))
    print(text, flush=True)
    last = str(error).strip().splitlines()
    note = f"FAILED: {type(error).__name__}: {last[0] if last else ''}"
    return Figure(part, what, note=note[:_LONGEST_NOTE], is_failure=True, details={"traceback": text})


def _as_dict(figure: Figure) -> dict[str, Any]:
    content = asdict(figure)
    for entry, goal in zip(content["goals"], figure.goals, strict=True):
        entry["is_met"] = goal.is_met
    return content


def _number(value: float) -> str:
    """A number with four significant digits, or without decimals if it is larger."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

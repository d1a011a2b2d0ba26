"""What `bench.gpu` finds: a line for each figure as it comes, one table in the end, and a JSON file of every number."""

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

HEADINGS = ("part", "what", "found", "of the limit", "plain", "faster", "goals")
WIDTH = 132
_LONGEST_NOTE = 200
_OWN = ("bench", "model_runner", "scheduler", "server", "tests")


@dataclass(frozen=True, slots=True)
class Goal:
    """A share that should be above or below a bound."""

    what: str
    found: float
    bound: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """NaN meets nothing."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.what} {self.found:.1%} {sign} {self.bound:.0%}: {verdict}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured, or one that was not."""

    part: str
    what: str
    value: float | None = None
    """A median; None where there is only a note."""
    unit: str = "ms"
    of_limit: float | None = None
    """Share of what the machine's measured limits allow, 0 to 1."""
    plain: float | None = None
    """What plain transformers or torch takes for the same, in the same run and unit."""
    goals: tuple[Goal, ...] = ()
    note: str = ""
    """Why there is no number, or what to know about it."""
    is_failure: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """For the JSON file only."""

    def cells(self) -> tuple[str, ...]:
        """As HEADINGS has them."""
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
        """The budget counts from now on; what does not fit into it is left out. `earlier` figures are known already."""
        self._ends_at = time.perf_counter() + budget_s
        self.figures = list(earlier)

    @property
    def has_failures(self) -> bool:
        return any(figure.is_failure for figure in self.figures)

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._ends_at - time.perf_counter()

    def plain(self, part: str) -> float | None:
        """What plain transformers took for it in an earlier figure."""
        return next((figure.plain for figure in self.figures if figure.part == part and figure.plain is not None), None)

    def add(self, figure: Figure) -> None:
        """Keep it."""
        self.figures.append(figure)

    def attempt(self, part: str, what: str, measure: Callable[[], Figure], needs_s: float = 5.0) -> None:
        """Add what it returns; if it raises, add that instead, and go on. The traceback is printed.

        Left out, and no failure: what needs more seconds than are left, or a package that is not installed.
        """
        if self.left_s < needs_s:
            self.add(Figure(part, what, note=f"left out: needs {needs_s:.0f} s"))
            return
        try:
            figure = measure()
        except ModuleNotFoundError as error:
            name = (error.name or "").split(".")[0]
            figure = _failure(part, what, error) if name in _OWN else left_out(part, what, [name])
        except Exception as error:  # noqa: BLE001  (whatever it is, the other parts are worth their time)
            figure = _failure(part, what, error)
        self.add(figure)


class SavedReport(Report):
    """Prints each figure, and writes the file again with it: a run that is ended early leaves what it has found."""

    def __init__(self, machine: Mapping[str, Any], output: Path, budget_s: float = math.inf) -> None:
        super().__init__(budget_s)
        self._machine = machine
        self._output = output

    def add(self, figure: Figure) -> None:
        """Print and save it."""
        super().add(figure)
        print("  " + " | ".join(cell for cell in figure.cells() if cell), flush=True)
        content = {"machine": dict(self._machine), "figures": [_as_dict(one) for one in self.figures]}
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._output.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"{self._output} cannot be written: {error}", flush=True)

    def print_table(self, console: Console | None = None) -> None:
        """All figures, and where the file is."""
        lines = Table(*HEADINGS, box=None, padding=(0, 2, 0, 0))
        for column in lines.columns[2:6]:
            column.justify = "right"
        for figure in self.figures:
            lines.add_row(*figure.cells())
        console = console or Console(width=WIDTH)
        console.print(", ".join(f"{name} {value}" for name, value in self._machine.items()))
        console.print(lines)
        console.print(f"Every number is in {self._output}", soft_wrap=True)


def left_out(part: str, what: str, packages: Sequence[str]) -> Figure:
    """For want of packages."""
    return Figure(part, what, note=f"left out: not installed: {', '.join(packages)}")


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
    """Four digits, or as many as there are before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

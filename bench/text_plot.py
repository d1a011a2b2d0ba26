"""Plots the text quality of decoding strategies: perplexity against repetition, with a labelled point for each."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench.text_quality import THE_TEXT_ITSELF, TextQuality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_PLACES = (
    ((8, 0), "left", "center"),
    ((-8, 0), "right", "center"),
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((7, 7), "left", "bottom"),
    ((7, -7), "left", "top"),
    ((14, 16), "left", "bottom"),
    ((14, -16), "left", "top"),
)
"""Positions of a label, in order of preference: offset from its point, horizontal and vertical alignment."""


def require_matplotlib() -> None:
    """Exit with an explanation if matplotlib, which only plots need, is not installed."""
    if find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib, which is not installed. Install it with: pip install -e '.[bench]'")


def draw(results: Sequence[TextQuality], path: Path) -> None:
    """Write the plot to an SVG file."""
    from matplotlib import rc_context  # noqa: PLC0415  (optional)
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    with rc_context({"svg.hashsalt": "samewise"}):  # the same results give the same file
        figure = Figure(figsize=(7.2, 4.5), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.set(xlabel="4-grams that repeat an earlier one (%)", ylabel="perplexity, log scale", yscale="log")
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.margins(0.12)
        for result in results:
            axes.scatter(100 * result.repeated_4grams, result.perplexity, s=36, color=_color(result))
            if result.strategy == THE_TEXT_ITSELF:
                axes.axhline(result.perplexity, color=_color(result), linewidth=0.8, linestyle="--", zorder=1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        figure.draw_without_rendering()
        _label(axes, results)
        figure.savefig(path, metadata={"Date": None})


def _label(axes: "Axes", results: Sequence[TextQuality]) -> None:
    """Label each point within the axes, without overlapping other labels or points if there is room."""
    points = [(100 * result.repeated_4grams, result.perplexity) for result in results]
    taken = [_around(axes, point) for point in points]
    for result, point in zip(results, points, strict=True):
        for offset, horizontal, vertical in _PLACES:
            label = axes.annotate(
                result.strategy,
                point,
                offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # covers grid and line
                color=_color(result),
            )
            box = label.get_window_extent()
            is_inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if (is_inside and not box.count_overlaps(taken)) or (offset, horizontal, vertical) == _PLACES[-1]:
                break
            label.remove()
        taken.append(box)


def _color(result: TextQuality) -> str:
    return "#b03a2e" if result.strategy == THE_TEXT_ITSELF else "#1f5fa8"


def _around(axes: "Axes", point: tuple[float, float]) -> "Bbox":
    """The area that a point covers, in pixels."""
    from matplotlib.transforms import Bbox  # noqa: PLC0415

    x, y = axes.transData.transform(point)
    return Bbox.from_extents(x - 5, y - 5, x + 5, y + 5)

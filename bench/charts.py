"""Draws the bar charts of docs/benchmarks.md from the tables that follow them: python -m bench.charts

A chart is an image of the page, `![title, unit](images/NAME.svg)`. The next table has a row for each group of bars and
a column for each colour; cells may have a unit after the number.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path("docs/benchmarks.md")
CHART = re.compile(r"!\[([^\]]+)\]\((images/[\w-]+\.svg)\)\n+((?:\|.*\n)+)")
COLOURS = ("#3f51b5", "#ff9800", "#90a4ae")
WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 720, 300, 56, 36, 16
"""Size of a drawing and of the space around its bars, in pixels."""


@dataclass(frozen=True, slots=True)
class Bars:
    """One chart: `values[group][series]`."""

    title: str
    groups: Sequence[str]
    series: Sequence[str]
    values: Sequence[Sequence[float]]


def charts_of(page: str) -> Iterator[tuple[str, Bars]]:
    """The file name and content of each chart in the page."""
    for title, file, table in CHART.findall(page):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()]
        values = [[float(cell.replace(",", "").split()[0]) for cell in row[1:]] for row in rows]
        yield file, Bars(title, [row[0] for row in rows], header[1:], values)


def draw(chart: Bars) -> str:
    """The chart as SVG."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
            ' font-size="13" fill="#222222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
            f'<text x="{SIDE}" y="24" font-weight="bold">{chart.title}</text>',
            *_legend(chart.series),
            *_bars(chart),
            "</svg>\n",
        ]
    )


def _legend(series: Sequence[str]) -> Iterator[str]:
    for index, name in enumerate(series):
        x = SIDE + 130 * index
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{COLOURS[index]}"/>'
        yield f'<text x="{x + 18}" y="45">{name}</text>'


def _bars(chart: Bars) -> Iterator[str]:
    base, group_width = HEIGHT - BOTTOM, (WIDTH - 2 * SIDE) / len(chart.groups)
    bar_width = min(64.0, group_width * 0.8 / len(chart.series))
    scale = (base - TOP - 20) / max(max(row) for row in chart.values)
    yield f'<path d="M{SIDE} {base}H{WIDTH - SIDE}" stroke="#b0b0b0"/>'
    for group, (name, row) in enumerate(zip(chart.groups, chart.values, strict=True)):
        middle = SIDE + group_width * (group + 0.5)
        yield f'<text x="{middle:.1f}" y="{base + 22}" text-anchor="middle">{name}</text>'
        for index, value in enumerate(row):
            x, height = middle + bar_width * (index - len(row) / 2), value * scale
            yield (
                f'<rect x="{x + 2:.1f}" y="{base - height:.1f}" width="{bar_width - 4:.1f}" height="{height:.1f}"'
                f' fill="{COLOURS[index]}"/>'
            )
            label = f'x="{x + bar_width / 2:.1f}" y="{base - height - 5:.1f}" text-anchor="middle"'
            yield f"<text {label}>{value:,g}</text>"


def main() -> None:
    """Write the file of each chart."""
    for file, chart in charts_of(PAGE.read_text()):
        (PAGE.parent / file).write_text(draw(chart))


if __name__ == "__main__":
    main()

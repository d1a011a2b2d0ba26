"""What the browser draws: plain data with all words and numbers in it. Scales and shares are found here, too."""

from collections.abc import Sequence

import msgspec

_STEPS_OF_SCALES = (1, 2, 5, 10)


class Figure(msgspec.Struct, frozen=True):
    """A number with its name."""

    name: str
    value: str


class Part(msgspec.Struct, frozen=True):
    """Of a bar."""

    kind: str
    """Its colour's name in load.css."""
    name: str
    value: str
    percent: float
    """Of the whole bar."""


class Bar(msgspec.Struct, frozen=True):
    """A whole and its parts, from left to right."""

    title: str
    summary: str
    """For those who do not see it."""
    parts: list[Part]


class Series(msgspec.Struct, frozen=True):
    """Of a chart: one number a second, the oldest first."""

    kind: str
    name: str
    now: str
    values: list[float]


class Chart(msgspec.Struct, frozen=True):
    """Columns over time, in which the series lie upon each other: the first at the bottom."""

    title: str
    summary: str
    top: float
    """Where the scale ends."""
    series: list[Series]


class Table(msgspec.Struct, frozen=True):
    """Rows of texts; the first of each is its name."""

    columns: list[str]
    rows: list[list[str]]


def part(kind: str, name: str, value: str, share: float) -> Part:
    """Of a bar, of which it takes this share."""
    return Part(kind, name, value, round(100 * share, 2))


def bar(title: str, parts: Sequence[Part]) -> Bar:
    """Says what all of its parts are."""
    return Bar(title, f"{title}: {', '.join(f'{one.name} {one.value}' for one in parts)}", list(parts))


def chart(title: str, series: Sequence[Series]) -> Chart:
    """Says what its series are now, and has a scale for the highest of its columns."""
    highest = max(map(sum, zip(*(one.values for one in series), strict=True)), default=0.0)
    summary = f"{title}, the last minute. Now: {', '.join(f'{one.name} {one.now}' for one in series)}"
    return Chart(title, summary, scale_of(highest), list(series))


def scale_of(highest: float) -> float:
    """The least round number that is not below it, and at least 1."""
    decade = 1.0
    while decade * 10 < highest:
        decade *= 10
    return next((decade * step for step in _STEPS_OF_SCALES if decade * step >= highest), decade * 10)

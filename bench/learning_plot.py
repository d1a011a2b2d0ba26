"""Plots tokens per step over the answers, with and without learning."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench.learning_report import Answer, Turn, tokens_per_step

_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 704, 16, 288
_SMOOTHED = 50
"""Number of preceding answers that a point averages."""
_COLORS = {"heads that learn": "#b03a2e", "the same heads": "#1f5fa8"}
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Possible distances of grid lines in tokens per step; the first that needs at most six lines is used."""


def smoothed(answers: Sequence[Answer]) -> list[float]:
    """Moving average of tokens per step, over each answer and the ones before it."""
    return [tokens_per_step(answers[max(0, end - _SMOOTHED) : end]) for end in range(1, len(answers) + 1)]


def draw(results: Sequence[Turn], path: Path) -> None:
    """Write the plot to an SVG file."""
    path.write_text("\n".join(_svg(results)) + "\n", encoding="utf-8")


def _svg(results: Sequence[Turn]) -> Iterator[str]:
    sides = [turn.learning for turn in results], [turn.plain for turn in results]
    lines = [smoothed([answer for answers in side for answer in answers]) for side in sides]
    count, highest = len(lines[0]), max(map(max, lines))
    step = next((step for step in _STEPS if (highest - 1) / step <= 6), _STEPS[-1])
    top = 1 + step * (int((highest - 1) / step) + 1)

    def across(number: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * number / count

    def up(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - 1) / (top - 1)

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    yield ' font-family="sans-serif" font-size="12">'
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    for mark in range(round((top - 1) / step) + 1):
        value = 1 + mark * step
        yield f'<path d="M{_LEFT} {up(value):.1f}H{_RIGHT}" stroke="#e4e4e4"/>'
        yield _text(_LEFT - 6, up(value) + 4, f"{value:.1f}", "end")
    for part in range(6):
        number = count * part // 5
        yield _text(across(number), _BOTTOM + 18, f"{number:,}", "middle")
    for number, subject in _changes(results):
        yield f'<path d="M{across(number):.1f} {_TOP}V{_BOTTOM}" stroke="#9a9a9a" stroke-dasharray="4 3"/>'
        yield _text(across(number) + 5, _TOP + 12, subject)
    for place, ((name, color), values) in enumerate(zip(_COLORS.items(), lines, strict=True)):
        points = " ".join(f"{across(end):.1f},{up(value):.1f}" for end, value in enumerate(values, start=1))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        yield _text(_RIGHT, _BOTTOM - 26 + 16 * place, name, "end", color)
    yield _text((_LEFT + _RIGHT) / 2, _HEIGHT - 12, "answers", "middle")
    middle = (_TOP + _BOTTOM) / 2
    label = f"tokens per step, of {_SMOOTHED} answers"
    yield f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, label, "middle")}</g>'
    yield "</svg>"


def _changes(results: Sequence[Turn]) -> list[tuple[int, str]]:
    """Number of the first answer of each subject, with its name."""
    return [
        (turn.first, turn.subject)
        for number, turn in enumerate(results)
        if number == 0 or turn.subject != results[number - 1].subject
    ]


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'

"""Progress of downloads."""

import io

from rich.console import Console

from model_runner.hub.limits import size_text
from model_runner.hub.progress import Lines, open_progress


def test_lines_now_and_then() -> None:
    console, now = Console(file=io.StringIO(), width=200), [0.0]
    lines = Lines(console, 10 << 20, lambda: now[0])
    lines.start("a[b]", 8 << 20, 4 << 20)
    lines.start("c", 2 << 20, 0)
    for seconds, name in ((5, "c"), (10, "c"), (11, "a[b]"), (20, "a[b]")):
        now[0] = seconds
        lines.advance(name, 1 << 20)
    lines.finish("c")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "a[b]: resuming after 4.0 MiB",
        "Downloading: 6.0 MiB of 10.0 MiB, 204.8 KiB/s, 20 s left",
        "Downloading: 8.0 MiB of 10.0 MiB, 204.8 KiB/s, 10 s left",
        "c: 2.0 MiB",
    ]


def test_bars_are_for_large_files() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with open_progress(console, 10 << 20) as bars:
        bars.start("large[red]", 8 << 20, 2 << 20)
        bars.start("small", 10, 0)
        bars.advance("large[red]", 6 << 20)
        bars.start("large[red]", 8 << 20, 0)
        bars.advance("large[red]", 4 << 20)
        bars.finish("large[red]")
        bars.note("[b]waiting")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "large[red]" in text
    assert "4.0/8.0 MiB" in text
    assert "[b]waiting" in text
    assert "small" not in text


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 1023, 1 << 10, 3 << 19, 5 << 30)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "1.5 MiB", "5.0 GiB")
    ]

"""What `samewise train-heads` shows while it works."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_lines(console: Console) -> Iterator[Progress]:
    """A line for each stage, and above them the log, which is all there is where the output is no terminal."""
    logger = logging.getLogger("samewise")
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            yield progress
    finally:
        logger.removeHandler(handler)

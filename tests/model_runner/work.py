"""How much a call does, counted rather than timed."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import model_runner

_FOLDER = str(Path(model_runner.__file__).parent)


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of this package's Python the call runs; every round of a loop counts anew."""
    count = 0

    def in_function(_frame: FrameType, event: str, _argument: object) -> object:
        nonlocal count
        count += event == "line"
        return in_function

    def on_call(frame: FrameType, _event: str, _argument: object) -> object:
        return in_function if frame.f_code.co_filename.startswith(_FOLDER) else None

    before = sys.gettrace()
    sys.settrace(on_call)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
    return count

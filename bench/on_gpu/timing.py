"""Time on a device: by events in its stream, so that the host's own time stays out of it."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

WARM_UPS = 3
REPEATS = 5
LEAST_SPAN_MS = 10.0
"""What is repeated within a span is repeated for so long, so that the launch of the first, some 10 us, is no matter."""
MOST_REPLAYS = 32


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Spans:
    """Adds up stretches of a device's time; of the host's where that is the device. Waits for nothing meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun: Any = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Before what is given to the device."""
        if self.device.type == "cuda":
            self._begun = _recorded()
        else:
            self._begun = time.perf_counter()

    def end(self) -> None:
        """After it."""
        if self.device.type == "cuda":
            self._events.append((self._begun, _recorded()))
        else:
            self._seconds.append(time.perf_counter() - self._begun)

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Around it."""
        self.begin()
        yield
        self.end()

    def clear(self) -> None:
        """Forget all."""
        self._events.clear()
        self._seconds.clear()

    def take_ms(self) -> float:
        """The sum of all since the last call, once the device is done with them."""
        synchronize(self.device)
        total: float = sum(start.elapsed_time(end) for start, end in self._events) + 1e3 * sum(self._seconds)
        self.clear()
        return total


def watch(model: nn.Module, spans: Spans) -> None:
    """Make a span of every call of the model, but of none in the capture of a graph, where there is nothing to time."""

    def is_captured() -> bool:
        return spans.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def begin(*_: Any) -> None:
        if not is_captured():
            spans.begin()

    def end(*_: Any) -> None:
        if not is_captured():
            spans.end()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def median_ms(action: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Of one run of the action, which must be long beside a launch."""
    for _ in range(WARM_UPS):
        action()
    spans = Spans(device)
    times = []
    for _ in range(repeats):
        with spans.span():
            action()
        times.append(spans.take_ms())
    return statistics.median(times)


def back_to_back_ms(action: Callable[[], object], device: torch.device) -> float:
    """Of one run of an action that may be short: the median over spans in which one follows the other."""
    once = median_ms(action, device, REPEATS)
    count = max(1, min(MOST_REPLAYS, math.ceil(LEAST_SPAN_MS / once)))

    def several() -> None:
        for _ in range(count):
            action()

    return median_ms(several, device, REPEATS) / count


def graph_ms(actions: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median milliseconds of one of several short actions, which follow each other in a CUDA graph without gaps.

    Together they should touch more memory than the cache holds; each runs before the graph is recorded.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for action in actions:
            action()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    return back_to_back_ms(graph.replay, device) / len(actions)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

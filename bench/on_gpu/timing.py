"""Measures time on a device with events in its stream, so that the host's time is not included."""

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
"""Minimum length of a span of repeated runs, so that the first launch, about 10 us, does not matter."""
MOST_REPLAYS = 32


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Spans:
    """Sums time spans on a device (on the host if that is the device) without synchronising."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begun: Any = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Start a span, before the measured work is launched."""
        if self.device.type == "cuda":
            self._begun = _recorded()
        else:
            self._begun = time.perf_counter()

    def end(self) -> None:
        """End the span, after the measured work was launched."""
        if self.device.type == "cuda":
            self._events.append((self._begun, _recorded()))
        else:
            self._seconds.append(time.perf_counter() - self._begun)

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Measure the block as a span."""
        self.begin()
        yield
        self.end()

    def clear(self) -> None:
        """Drop all spans."""
        self._events.clear()
        self._seconds.clear()

    def take_ms(self) -> float:
        """Wait for the device; returns the sum of all spans since the last call."""
        synchronize(self.device)
        total: float = sum(start.elapsed_time(end) for start, end in self._events) + 1e3 * sum(self._seconds)
        self.clear()
        return total


def watch(model: nn.Module, spans: Spans) -> None:
    """Measure every call of the model as a span, except calls that are only captured in a graph."""

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
    """Median milliseconds of one run of an action, which must take much longer than its launch."""
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
    """Milliseconds of one run of an action that may be short: the median over spans of consecutive runs."""
    once = median_ms(action, device, REPEATS)
    count = max(1, min(MOST_REPLAYS, math.ceil(LEAST_SPAN_MS / once)))

    def several() -> None:
        for _ in range(count):
            action()

    return median_ms(several, device, REPEATS) / count


def graph_ms(actions: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Median milliseconds of one of several short actions, which run without gaps in a CUDA graph.

    Together they should use more memory than the cache holds. Each runs once before the graph is captured.
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

"""Time on a device: by events in its stream, so that the host's own time stays out of it."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

WARM_UPS = 3
REPLAYS = 10


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Spans:
    """Adds up stretches of a device's time; of the host's where that is the device."""

    device: torch.device
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _seconds: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Around what is given to the device. Waits for nothing."""
        if self.device.type == "cuda":
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - began)

    def take_ms(self) -> float:
        """The sum of all since the last call, once the device is done with them."""
        synchronize(self.device)
        total: float = sum(start.elapsed_time(end) for start, end in self._events) + 1e3 * sum(self._seconds)
        self._events.clear()
        self._seconds.clear()
        return total


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
    return median_ms(graph.replay, device, REPLAYS) / len(actions)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

"""The statistics of a model over all its loads, so that its counters never fall. Each engine counts from 0."""

from collections.abc import Collection
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TypeVar

from model_runner.runner_interface import ImageStats, LearningStats, SpeculationStats
from scheduler.interface import EngineLoad, EngineStats

_Stats = TypeVar("_Stats", EngineStats, SpeculationStats, LearningStats, ImageStats)
_LOAD = frozenset(one.name for one in fields(EngineLoad))
_OF_IMAGES = ("waiting", "held_bytes", "cached_bytes")
_OF_HEADS = ("tokens_per_step_first", "tokens_per_step_current")
_PARTS = ("speculation", "learning", "images")


def at_rest(stats: EngineStats) -> EngineStats:
    """The final statistics of a stopped engine: its counters, without anything that is only true while it runs."""
    learning, images = stats.learning, stats.images
    if learning is not None:
        learning = replace(learning, tokens_per_step_first=None, tokens_per_step_current=None)
    if images is not None:
        images = replace(images, waiting=0, held_bytes=0, cached_bytes=0)
    return replace(stats.ended(), learning=learning, images=images)


def total(earlier: EngineStats, now: EngineStats) -> EngineStats:
    """The statistics of an engine, with the counters of earlier ones added. `earlier` is at rest."""
    speculation = {one.method: one for one in earlier.speculation}
    for one in now.speculation:
        before = speculation.get(one.method)
        speculation[one.method] = one if before is None else _sum(before, one, but=("method",))
    learning, images = now.learning or earlier.learning, now.images or earlier.images
    if now.learning is not None and earlier.learning is not None:
        learning = _sum(earlier.learning, now.learning, but=_OF_HEADS)
    if now.images is not None and earlier.images is not None:
        images = _sum(earlier.images, now.images, but=_OF_IMAGES)
    summed = _sum(earlier, now, but=_LOAD.union(_PARTS))
    return replace(summed, speculation=tuple(speculation.values()), learning=learning, images=images)


def _sum(earlier: _Stats, now: _Stats, but: Collection[str]) -> _Stats:
    """Add all fields, but take these from `now`. Tuples are added value by value."""
    sums = {}
    for field in fields(now):
        before, after = getattr(earlier, field.name), getattr(now, field.name)
        if field.name in but:
            sums[field.name] = after
        elif isinstance(after, tuple):
            sums[field.name] = tuple(a + b for a, b in zip_longest(before, after, fillvalue=0))
        else:
            sums[field.name] = before + after
    return replace(now, **sums)

"""All that there is to see at one moment."""

import msgspec

from server.client.load import Load
from server.page.load.figures import (
    cache_bar,
    latency_figures,
    queue_figures,
    rate_figures,
    server_figures,
    speculation_table,
)
from server.page.load.requests import Row
from server.page.load.shapes import Bar, Chart, Figure, Table


class Group(msgspec.Struct, frozen=True):
    """Figures about one thing."""

    title: str
    figures: list[Figure]


class Reading(msgspec.Struct, frozen=True):
    """What there is to see of a server at one moment."""

    problem: str = ""
    """Why there is nothing, or not all."""
    groups: list[Group] = []
    cache: Bar | None = None
    speculation: Table | None = None
    charts: list[Chart] = []
    requests: list[Row] | None = None
    """The newest first; None where the server tells of none."""


class About(msgspec.Struct, frozen=True):
    """What is known of a server beside its load."""

    models: str
    version: str
    up_s: float | None
    block_size: int | None
    """Of its KV cache, in tokens."""


def groups_of(load: Load, about: About, of_steps: list[Figure]) -> list[Group]:
    """Those that have anything to tell."""
    groups = (
        Group("Server", server_figures(load, about.models, about.version, about.up_s)),
        Group("Work", queue_figures(load)),
        Group("Throughput", rate_figures(load)),
        Group("Latency", [*latency_figures(load), *of_steps]),
    )
    return [group for group in groups if group.figures]


def reading_of(
    load: Load, about: About, of_steps: list[Figure], charts: list[Chart], requests: list[Row] | None
) -> Reading:
    """Of a server that has metrics."""
    return Reading(
        groups=groups_of(load, about, of_steps),
        cache=cache_bar(load, about.block_size),
        speculation=speculation_table(load),
        charts=charts,
        requests=requests,
    )

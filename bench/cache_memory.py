"""The planned KV cache of models with windows: with blocks given back, and with all blocks kept in all layers.

    python -m bench.cache_memory --length 8192

Layers with a window hold the blocks that a request's next position sees, and as many for the prefix cache. A plan
needs no weights, only the numbers of published configurations.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from model_runner.config import RunnerConfig, Sizes
from model_runner.kv_cache import KVShape
from model_runner.platforms.cache_plan import NO_STATES, CacheDivider

STEP_TOKENS = 512


def layers(full: KVShape, window: int, num_layers: int, every: int) -> list[KVShape]:
    """Layers of which one in `every` sees all positions, and the others a window."""
    return [full if layer % every == every - 1 else replace(full, window=window) for layer in range(num_layers)]


FORMS = {
    "Gemma 3 270M": layers(KVShape(1, 256, 256), 512, 18, 6),
    "Gemma 3 1B": layers(KVShape(1, 256, 256), 512, 26, 6),
    "Gemma 3 4B": layers(KVShape(4, 256, 256), 1024, 34, 6),
    "Gemma 3 27B": layers(KVShape(16, 128, 128), 1024, 62, 6),
    "gpt-oss-20b": layers(KVShape(8, 64, 64), 128, 24, 2),
    "gpt-oss-120b": layers(KVShape(8, 64, 64), 128, 36, 2),
}


def planned_mib(kv: Sequence[KVShape], length: int, requests: int, dtype: torch.dtype) -> float:
    """MiB of the cache with which so many requests of this length run at a time."""
    config = RunnerConfig(Path(), max_num_seqs=requests)
    divider = CacheDivider(kv, dtype, NO_STATES, length, config, Sizes(requests, STEP_TOKENS))
    return divider.bytes_for(requests * length) / (1 << 20)


def main() -> None:
    """Print a table of the forms."""
    parser = argparse.ArgumentParser(description="Plan the KV cache of models with windows.")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each request")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="requests at a time")
    length = parser.parse_args().length
    table = Table("model", "requests", "all layers full, MiB", "windows given back, MiB", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, kv in FORMS.items():
        for requests in parser.parse_args().requests:
            whole = [replace(shape, window=None) for shape in kv]
            before, after = (planned_mib(shapes, length, requests, torch.bfloat16) for shapes in (whole, kv))
            table.add_row(name, f"{requests}", f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()

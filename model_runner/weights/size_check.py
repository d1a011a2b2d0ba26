"""Compares the sizes that a configuration names with the tensors of its checkpoint. Imports no torch.

A plan makes modules, lists and tables of these sizes before it sees a weight, so that one wrong number would keep it
busy until memory is full.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from model_runner.json_files import find_object
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.safetensors_head import read_safetensors_head, weight_files

_LAYERS = re.compile(r"(^|_)(n?layers?|depths?|blocks?|block_count|loops?|cycles|passes|repeats|iters|iterations)$")
"""Names of numbers of layers, and of passes through them. Each layer has a tensor."""
_SIZES = re.compile(
    r"(^|[_.])("
    r"sizes?|dims?|headdim|heads?|experts?|ranks?|widths?|channels|features|groups?|labels|classes|queries|embd|embed|"
    r"embeddings|inner|model|ff|ffn|kv|ssm|conv|kernel|states?|codebooks|latents|streams|per_tok|per_token|top_?k|"
    r"expand|mult|per_layer_input|count|key_length|value_length|embedding_length|feed_forward_length"
    r")$"
)
"""Names of numbers that are, or whose product is, a dimension of a tensor. Names in GGUF files have dots."""
_POSITIONS = re.compile(r"window|chunk|batch|context|position|cache|segment|seq|max_size|max_length")
"""Names of numbers that no tensor has a dimension of."""
_PER_DIMENSION = 64
"""How much larger than every dimension a size may be: quantised weights have up to 32 numbers in one."""
_LEAST_LAYERS, _LEAST_SIZE, _LEAST_VOCABULARY = 256, 1 << 16, 1 << 20
"""Numbers that are harmless without any tensor. Parts of a model that have no tokens name a default vocabulary."""


def check_sizes(entries: Mapping[str, Any], shapes: Collection[Collection[int]], name: str) -> None:
    """Compare a configuration, at all its levels, with the shapes of a checkpoint's tensors.

    It refuses what cannot be true, not everything that is wrong: modules and checkpoint are compared exactly later.

    Raises:
        UnsupportedModelError: if a number is larger than the checkpoint can have; it begins with `name`.
    """
    largest = max((size for shape in shapes for size in shape), default=0)
    layers = max(_LEAST_LAYERS, len(shapes))
    size = max(_LEAST_SIZE, _PER_DIMENSION * max(largest, len(shapes)))
    for key, number in _numbers(entries):
        most = layers if _LAYERS.search(key) else max(size, _LEAST_VOCABULARY) if "vocab" in key else size
        if not math.isfinite(number) or abs(number) > most:
            raise UnsupportedModelError(
                f"{name} has {key} = {number:g}, and its checkpoint has {len(shapes):,} tensors with up to {largest:,} "
                "rows or columns; download it again"
            )


def check_folder(folder: Path) -> None:
    """Compare config.json of a folder with its safetensors. The sizes of a GGUF file are compared as it is read.

    Raises:
        UnsupportedModelError: if they cannot belong together, or a file is damaged.
        OSError: if a file cannot be read.
    """
    shapes = [entry["shape"] for path in weight_files(folder) for entry in read_safetensors_head(path)[0].values()]
    check_sizes(find_object(folder / "config.json"), shapes, str(folder / "config.json"))


def _numbers(entries: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each number of layers and each size, with its key, from all levels."""
    waiting: list[tuple[str, Any]] = list(entries.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((key, item) for item in value)
        elif isinstance(value, (int, float)) and _is_size(key):
            yield key, value


def _is_size(key: str) -> bool:
    return (_LAYERS.search(key) or _SIZES.search(key)) is not None and _POSITIONS.search(key) is None

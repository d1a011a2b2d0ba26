"""Has towers compute the tiles of an image one after the other.

All tiles of a large image at once make tensors of hundreds of megabytes. The system gives their memory fresh for each
operation, which takes longer than most operations do; the tensors of one tile stay in the processor's caches.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.torch_private import flatten, unflatten

_NAMES = ("vision_tower", "vision_model", "vision_encoder")
"""Names of towers that take tiles [n, 3, height, width]. Other towers take all patches in one sequence."""
_DIMENSIONS = 4
"""Dimensions of a tensor of tiles."""


def takes_tiles(model: nn.Module) -> bool:
    """Whether a model has a tower of this kind."""
    return bool(_towers(model))


def compute_one_by_one(model: nn.Module) -> None:
    """Have a model's tower compute each tile in a call of its own. Changes no tower of another kind."""
    for tower in _towers(model):
        _split_calls(tower)
        if isinstance(embeddings := getattr(tower, "embeddings", None), nn.Module):
            embeddings.register_forward_hook(_in_rows)


def _towers(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in _NAMES if hasattr(model, name)]


def _split_calls(tower: nn.Module) -> None:
    compute = tower.forward

    def forward(pixel_values: Tensor, **arguments: Any) -> Any:
        num_tiles = len(pixel_values)
        if pixel_values.dim() != _DIMENSIONS or num_tiles == 1:
            return compute(pixel_values, **arguments)
        tiles = [slice(tile, tile + 1) for tile in range(num_tiles)]
        return _joined([compute(pixel_values[tile], **_of_tile(arguments, tile, num_tiles)) for tile in tiles])

    tower.forward = forward


def _of_tile(arguments: Mapping[str, Any], tile: slice, num_tiles: int) -> dict[str, Any]:
    """The arguments for a tile: its row of tensors that have one for each tile, and all else."""
    return {
        name: value[tile] if isinstance(value, Tensor) and value.shape[:1] == (num_tiles,) else value
        for name, value in arguments.items()
    }


def _joined(outputs: list[Any]) -> Any:
    """The output for all tiles. Tensors of the tiles, such as the states of all layers, are freed one by one."""
    flat, structures = zip(*map(flatten, outputs), strict=True)
    outputs.clear()
    joined = []
    for place in range(len(flat[0])):
        parts = [leaves[place] for leaves in flat]
        for leaves in flat:
            leaves[place] = None
        joined.append(None if parts[0] is None else torch.cat(parts))
    return unflatten(joined, structures[0])


def _in_rows(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Embeddings as rows in memory. SigLIP makes columns, which each layer's norms would turn again."""
    return output.contiguous() if isinstance(output, Tensor) else output

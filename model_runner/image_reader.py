"""Decides, from a model folder's files, whether its prompts may have images, and loads the tower. Imports no torch."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_runner.config import RunnerConfig
from model_runner.images.features import FeatureCache
from model_runner.images.layouts import Layout, read_layout
from model_runner.refusal import UnsupportedModelError

if TYPE_CHECKING:
    from model_runner.images.cores import TowerCores
    from model_runner.images.tower import TowerShape
    from model_runner.platforms.platform import Platform

logger = logging.getLogger("samewise.runner")

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How a model reads images, before its tower is loaded."""

    layout: Layout
    shape: "TowerShape"
    num_bytes: int
    """Memory of the tower and of all features."""
    limit: int
    """Memory of all features."""
    loading_bytes: int
    """Memory that loading the tower takes in addition to `num_bytes`, after the models were loaded."""

    def load(self, config: RunnerConfig, platform: "Platform") -> "LoadedReader | None":
        """Load the tower; None, with a warning, if its weights are not what transformers expects."""
        try:
            tower = platform.load_tower(config.model, self.layout)
        except UnsupportedModelError as error:
            logger.warning("images     not served: %s", error)
            return None
        row_bytes = self.shape.row_bytes(platform.types.compute)
        features = FeatureCache(tower.encode, row_bytes, self.limit)
        return LoadedReader(features, tower.cores, sees_images=self.shape.sees_images)


@dataclass(frozen=True, slots=True)
class LoadedReader:
    """The features of a model's images."""

    features: FeatureCache[Any]
    cores: "TowerCores | None"
    """The cores that features are computed with, if these depend on whether steps are computed."""
    sees_images: bool
    """Whether the rows of an image see each other in the decoder."""


def find_reader(config: RunnerConfig, platform: "Platform") -> ImageReader | None:
    """How a model reads images; None, with the reason in the log, if its prompts have none.

    Raises:
        OSError, ValueError: if a file of the folder cannot be read.
    """
    layout = layout_of(config.model) if config.images else None
    if layout is None:
        return None
    shape = platform.inspect_tower(config.model, layout)
    limit = int(config.image_cache_gib * _GIB)
    pixels = config.max_image_pixels if platform.device.type == "cpu" else 0  # otherwise not in the planned memory
    dtype = platform.types.compute
    num_bytes = shape.num_bytes(dtype, pixels) + limit
    return ImageReader(layout, shape, num_bytes, limit, max(shape.loading_bytes(dtype) - num_bytes, 0))


def layout_of(folder: Path) -> Layout | None:
    """How images stand in the prompts of a model; None if the model, its files or this machine cannot read images."""
    layout = read_layout(folder)
    if layout is None:
        return None
    if not any(folder.glob("*.safetensors")):
        logger.info("images     not served: the tower's weights are not in safetensors files")
        return None
    if find_spec("PIL") is None:
        logger.warning("images     not served: run `pip install pillow`")
        return None
    return layout

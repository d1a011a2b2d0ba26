"""The part of an image-text model that turns one image into feature rows: image processor, tower and projector.

It is loaded by transformers, without the language model. The processor is always the one on Pillow and numpy: with
torchvision installed, transformers would choose another one, whose pixels differ.
"""

import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from torch import Tensor
from transformers import AutoImageProcessor, PretrainedConfig

from model_runner.image import Image
from model_runner.images.cores import SharedAttention, TowerCores, linears_of, pack_tower
from model_runner.images.decoding import decode
from model_runner.images.layouts import SEVERAL, Layout
from model_runner.images.tiles import compute_one_by_one, takes_tiles
from model_runner.kernels.library import WeightKind
from model_runner.kernels.memory import return_freed_memory
from model_runner.modules.loading import check_report, quiet
from model_runner.modules.text_model import model_class, text_only, without_missing_towers
from model_runner.modules.transformers_private import from_config, ignore_tied_weights
from model_runner.native.packer import NativePacker
from model_runner.refusal import describe_model, refused
from model_runner.spec.model_shape import rotated
from model_runner.weights.damage import naming_damage

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

logger = logging.getLogger("samewise.runner")

_ATTENTION = "sdpa"
_NUMBERS_PER_PATCH = 21
"""Numbers that a layer of a tower has in memory at a time for each patch, as a multiple of the width."""
_NUMBERS_WITH_FRAMES = 34
"""The same for towers with frames, which turn queries and keys by rotary positions (Qwen, GLM)."""
_NUMBERS_OF_TILES = 11
"""The same for patches of tiles that are computed before or after: their pixels and results, in several copies."""
_COPIES_OF_BIASES = 2
"""Copies in memory at a time of the numbers that relative positions add to attention, as measured."""
_BYTES_PER_PIXEL = 17
"""Memory of decoding and scaling a large image, by any image processor on Pillow and numpy."""
_PROBED = (640, 480)
_ASPECTS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Aspects of images, of which some have the most feature rows."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes that decide how much memory a tower and its features need."""

    num_parameters: int
    num_multiplied: int
    """Weights of linear layers."""
    num_rotated: int
    """`num_multiplied` with inputs padded for the rotation."""
    hidden: int
    levels: int
    """Decoder layers after which further features are added."""

    widest: int
    """Width of the tower's hidden states."""
    num_patches: int
    """Patches of the largest image."""
    patches_per_tile: int
    """Patches of a tile; all patches, if the tower takes no tiles."""
    numbers_per_patch: int
    """Numbers in memory at a time for each patch that is computed, as a multiple of the width."""
    kept_per_patch: int
    """The same for patches of tiles that are not computed at the time."""
    num_biases: int
    """Numbers that a tower with relative positions adds to the scores of attention between the patches of a tile."""
    sees_images: bool
    """Whether the rows of an image see each other in the decoder."""
    packed_as: WeightKind | None = None
    """The kind of integers that the weights of linear layers are packed as; None: they are not."""

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Memory of a feature row."""
        return (1 + self.levels) * self.hidden * dtype.itemsize

    def num_bytes(self, dtype: torch.dtype, max_pixels: int) -> int:
        """Memory of the weights, and about what is needed to decode an image of so many pixels, and then for it."""
        at_a_time = self.num_patches if self.packed_as is None else self.patches_per_tile
        numbers = at_a_time * self.numbers_per_patch + (self.num_patches - at_a_time) * self.kept_per_patch
        numbers = numbers * self.widest + self.num_biases * _COPIES_OF_BIASES
        return self.weight_bytes(dtype) + max(numbers * dtype.itemsize, max_pixels * _BYTES_PER_PIXEL)

    def loading_bytes(self, dtype: torch.dtype) -> int:
        """Memory at most while the weights are loaded: they are packed after all of them were read."""
        return self.num_parameters * dtype.itemsize + (self.weight_bytes(dtype) if self.packed_as else 0)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of the weights."""
        if self.packed_as is None:
            return self.num_parameters * dtype.itemsize
        packed = self.num_rotated if self.packed_as == "int8_rotated" else self.num_multiplied
        return (self.num_parameters - self.num_multiplied) * dtype.itemsize + packed


def inspect_tower(folder: Path, config: PretrainedConfig, layout: Layout) -> TowerShape:
    """The sizes of a model's tower, before its weights are read."""
    with torch.device("meta"):
        model = from_config(_make_class(config), _tower_config(config), attn_implementation=_ATTENTION)
    text: Any = config.get_text_config()
    vision = _first_part(config)
    widest = getattr(vision, "embed_dim", None) or vision.hidden_size
    sees_images = getattr(text, "use_bidirectional_attention", None) == "vision" or config.model_type == "gemma3"
    num_parameters = sum(one.numel() for one in model.parameters())
    multiplied = [linear.weight for linear in linears_of(model)]
    num_patches, patches_per_tile = _count_patches(folder, config, layout)
    kept = _kept_states(config)
    return TowerShape(
        num_parameters=num_parameters,
        num_multiplied=sum(weight.numel() for weight in multiplied),
        num_rotated=sum(rotated(weight.numel(), weight.shape[-1]) for weight in multiplied),
        hidden=text.hidden_size,
        levels=levels_of(config),
        widest=widest,
        num_patches=num_patches,
        patches_per_tile=patches_per_tile if takes_tiles(model.base_model) else num_patches,
        numbers_per_patch=_NUMBERS_WITH_FRAMES if hasattr(vision, "temporal_patch_size") else _NUMBERS_PER_PATCH + kept,
        kept_per_patch=_NUMBERS_OF_TILES + kept,
        num_biases=vision.num_attention_heads * patches_per_tile**2 if getattr(vision, "use_rel_pos", False) else 0,
        sees_images=sees_images,
    )


def _first_part(config: Any) -> Any:
    """The configuration of the tower, or of its part that takes the patches (DeepSeek-OCR 2)."""
    return getattr(config.vision_config, "sam_config", config.vision_config)


def _kept_states(config: Any) -> int:
    """Hidden states of layers that a tower returns, for its projector to choose from."""
    return int(config.vision_config.num_hidden_layers) + 1 if hasattr(config, "vision_feature_layer") else 0


def _count_patches(folder: Path, config: Any, layout: Layout) -> tuple[int, int]:
    """Patches of the largest image, and of a tile, from the patches and feature rows of a small image.

    An image of one tile may have a larger tile than this one, so its tiles are not counted.
    """
    vision = _first_part(config)
    size = getattr(vision, "patch_size", 1)
    height, width = (size, size) if isinstance(size, int) else size
    frames = getattr(vision, "temporal_patch_size", 1)
    inputs = _processor_of(folder)(images=[PIL.Image.new("RGB", _PROBED)], return_tensors="pt", **layout.call)
    pixels: Tensor = inputs["pixel_values"]
    num_patches = pixels.numel() // (3 * height * width * frames)
    most_rows = max(layout.of(round(6000 * aspect), 6000).num_rows for aspect in _ASPECTS)
    most = -(-num_patches * most_rows // layout.of(*_PROBED).num_rows)
    if "num_local_patches" in inputs:  # the tiles are another input, and not larger than the whole image
        return most, num_patches
    num_tiles = pixels.shape[:-3].numel()
    return most, num_patches // num_tiles if num_tiles > 1 else most


def _processor_of(folder: Path) -> Any:
    loaded: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")  # type: ignore[no-untyped-call]
    return loaded


def levels_of(config: Any) -> int:
    """Decoder layers after which a model adds further features of images (Qwen3-VL's deepstack)."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


class Tower:
    """Computes feature rows of images, each alone: in a batch, they could depend on other images."""

    def __init__(
        self, folder: Path, config: PretrainedConfig, layout: Layout, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Loads the weights in this type. Raises UnsupportedModelError if they do not match the model."""
        self._model: Any = _load(folder, config, dtype, device)
        if config.model_type == "mistral3":
            self._model.base_model.multi_modal_projector.register_forward_hook(_with_batch)
        self._processor = _processor_of(folder)
        self._layout = layout
        self._levels = levels_of(config)
        is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._compute = self._model.base_model.get_image_features
        self._names = inspect.signature(self._compute).parameters.keys()
        self.cores: TowerCores | None = None
        """The cores that features are computed with; None leaves the choice to torch."""

    def pack(self, packer: NativePacker) -> None:
        """Pack the weights of the linear layers for the kernels of a CPU."""
        self.cores = TowerCores(packer.kernels)
        pack_tower(self._model, packer, self.cores)
        compute_one_by_one(self._model.base_model)
        return_freed_memory()

    def encode(self, image: Image) -> Tensor:
        """The feature rows [1 + levels, n, hidden] of an image, on the tower's device.

        Raises:
            ImageError: if the file cannot be decoded.
            ValueError: if the number of rows is another one than in the prompt.
        """
        if self.cores is not None:
            self.cores.take()
        rows = self._encode(self._read(image))
        if rows.shape[1] != image.num_rows:
            raise ValueError(f"an image has {rows.shape[1]} feature rows, but {image.num_rows} places in its prompt")
        return rows

    def features(self, pixels: "Pixels", detail: str = "") -> Tensor:
        """The feature rows [1 + levels, n, hidden] of an RGB image in this detail."""
        return self._encode(self._processed(pixels, detail))

    def _read(self, image: Image) -> dict[str, Any]:
        """The tower's inputs for an image. The pixels, of which there may be many, are not kept."""
        return self._processed(decode(image.data), image.detail)

    def _processed(self, pixels: "Pixels", detail: str) -> dict[str, Any]:
        images: list[Any] = [[pixels, pixels]] if detail == SEVERAL else [pixels]  # two stand for any number
        made = self._processor(images=images, return_tensors="pt", **self._layout.at(detail).call)
        inputs = {name: value for name, value in made.items() if name in self._names}
        if detail == SEVERAL:  # the first one, with the number of all
            inputs |= {name: inputs[name][:1] for name in ("pixel_values", "image_sizes")}
        return inputs

    @torch.inference_mode()
    def _encode(self, inputs: Mapping[str, Any]) -> Tensor:
        with self._device():
            rows = self._run(inputs)
        if self._stream is not None:
            self._stream.synchronize()
        return rows

    def _device(self) -> AbstractContextManager[Any]:
        if self._stream is not None:
            return torch.cuda.stream(self._stream)
        return nullcontext() if self.cores is None else SharedAttention(self.cores)

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        arguments = {name: self._place(value) for name, value in inputs.items()}
        output: Any = self._compute(**arguments, return_dict=True)
        rows = _flat(output.pooler_output)
        levels = [_flat(level) for level in getattr(output, "deepstack_features", None) or ()]
        if len(levels) != self._levels:
            raise ValueError(f"the tower has {len(levels)} levels of features, not {self._levels}")
        return torch.stack([rows, *levels])

    def _place(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self._model.dtype if value.is_floating_point() else value.dtype
        return value.to(self._model.device, dtype)


def _with_batch(module: Any, arguments: Any, output: Tensor) -> Tensor:
    """Give Mistral 3's projector a batch of one image: transformers takes a single row for one without its batch."""
    return output.unsqueeze(0)


def _flat(rows: Any) -> Tensor:
    """One tensor [n, hidden] of a tensor [..., n, hidden], or of a list of them."""
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([part.flatten(0, -2) for part in parts])


def _tower_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration without what concerns the language model: tied weights and quantisation."""
    own = deepcopy(config)
    own.tie_word_embeddings = own.get_text_config().tie_word_embeddings = False
    if hasattr(own, "quantization_config"):
        del own.quantization_config  # towers are not quantised; one that is has other weights, and is refused
    return own


def _make_class(config: PretrainedConfig) -> Any:
    """The model's class without its language model, whose weights are then never read."""
    with torch.device("meta"), without_missing_towers():
        model = from_config(model_class(config), _tower_config(config))
    text, head = type(config.get_text_config()), model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if module is head or (name and type(getattr(module, "config", None)) is text)
    ]
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    own = text_only(model_class(config), outer)
    ignore_tied_weights(own)
    own.left_out = outer
    return own


def _load(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    with refused(f"the image tower of {describe_model(config)} cannot be loaded"), naming_damage(folder), quiet():
        own = _make_class(config)
        loaded: Any = own.from_pretrained(
            folder,
            config=_tower_config(config),
            dtype=dtype,
            attn_implementation=_ATTENTION,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_report refuses them with the others
        )
        model, report = loaded
        check_report(folder, model, {**report, "unexpected_keys": _of_tower(report, own.left_out)})
    return model.eval().requires_grad_(requires_grad=False)


def _of_tower(report: Mapping[str, Any], left_out: list[str]) -> set[str]:
    """The weights of the checkpoint that belong neither to the tower nor to the language model."""
    prefixes = tuple(f"{name}." for name in left_out)
    return {key for key in report["unexpected_keys"] if not key.startswith(prefixes)}

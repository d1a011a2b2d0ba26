"""Tiny processors of image-text families: their files for a model folder, and transformers' processors as the truth."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from transformers.models.pixtral import image_processing_pil_pixtral

FIRST_IMAGE_ID = 300
"""The image token's id; the family's other tokens follow."""
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_IDEFICS3 = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES]
_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_V = {"hidden_size": 16, "patch_size": 14, "image_size": 56}
_NEXT: dict[str, Any] = {
    "image": {
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    },
    "processor": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "config": {"image_token_index": 300, "vision_config": {**_V, "model_type": "clip_vision_model"}},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "class": ("LlavaProcessor", "LlavaImageProcessor"),
        "image": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "processor": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "config": {"image_token_index": 300, "vision_config": {**_V, "model_type": "clip_vision_model"}},
        "tokens": ["<image>"],
    },
    "vipllava": {
        "class": ("LlavaProcessor", "CLIPImageProcessor"),
        "image": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "processor": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "config": {"image_token_index": 300, "vision_config": {**_V, "model_type": "clip_vision_model"}},
        "tokens": ["<image>"],
    },
    "llava_next": {"class": ("LlavaNextProcessor", "LlavaNextImageProcessor"), "tokens": ["<image>"], **_NEXT},
    "llava_next_video": {
        "class": ("LlavaNextVideoProcessor", "LlavaNextImageProcessor"),
        "tokens": ["<image>", "<video>"],
        "names": ["image_token", "video_token"],
        **_NEXT,
    },
    "llava_onevision": {
        "class": ("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessor"),
        "image": {
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 84]],
        },
        "processor": {
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        "config": {"image_token_id": 300, "vision_config": _V, "vision_aspect_ratio": "anyres_max_4"},
        "tokens": ["<image>", "<video>"],
        "names": ["image_token", "video_token"],
    },
    "granite_docling": {
        "class": ("GraniteDoclingProcessor", "GraniteDoclingImageProcessor"),
        "image": {
            "size": {"height": 64, "width": 64},
            "max_patches": 4,
            "dense_max_patches": 6,
            "dense_max_scale": 0.5,
            "dense_min_aspect": 1.2,
            "dense_max_aspect": 3.0,
        },
        "processor": {"image_seq_len": 4},
        "config": {"image_token_id": 300, "vision_config": _V},
        "tokens": _IDEFICS3,
    },
    "deepseek_vl": {
        "class": ("DeepseekVLProcessor", "DeepseekVLImageProcessor"),
        "image": {"size": {"height": 28, "width": 28}, "min_size": 14},
        "processor": {"num_image_tokens": 4},
        "config": {"image_token_id": 300, "vision_config": _V},
        "tokens": ["<image_placeholder>"],
    },
    "deepseek_ocr2": {
        "class": ("DeepseekOcr2Processor", "DeepseekOcr2ImageProcessor"),
        "image": {"size": {"height": 1024, "width": 1024}, "tile_size": 768},
        "config": {"image_token_id": 300, "vision_config": {}},
        "tokens": ["<image>"],
    },
    "minicpmv4_6": {
        "class": ("MiniCPMV4_6Processor", "MiniCPMV4_6ImageProcessor"),
        "image": {"scale_resolution": 112, "max_slice_nums": 4, "patch_size": 14},
        "config": {"image_token_id": 300},
        "tokens": [
            *("<|image_pad|>", "<|video_pad|>"),
            *("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
        ],
        "names": [
            *("image_token", "video_token"),
            *("image_start_token", "image_end_token", "slice_start_token", "slice_end_token"),
            *("image_id_start_token", "image_id_end_token"),
        ],
    },
    "aya_vision": {
        "class": ("AyaVisionProcessor", "GotOcr2ImageProcessor"),
        "image": {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        "processor": {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        "config": {"image_token_index": 300, "vision_config": _V},
        "tokens": ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"],
    },
    "qianfan_ocr": {
        "class": ("QianfanOCRProcessor", "GotOcr2ImageProcessor"),
        "image": {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        "processor": {"image_seq_length": 4},
        "config": {"image_token_id": 300, "vision_config": _V},
        "tokens": ["<IMG_CONTEXT>", "<img>", "</img>"],
        "names": ["context_image_token", "start_image_token", "end_image_token"],
    },
    "exaone4_5": {
        "class": ("Exaone4_5_Processor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 784, "longest_edge": 7056}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "qwen3_5_moe": {
        "class": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "patch_size": 16, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "pixtral": {
        "class": ("PixtralProcessor", "PixtralImageProcessor"),
        "image": {"size": {"longest_edge": 84}, "patch_size": {"height": 14, "width": 14}},
        "processor": {"patch_size": 14},
        "config": {"model_type": "llava", "image_token_index": 300, "vision_config": {**_V, "model_type": "pixtral"}},
        "tokens": _PIXTRAL,
    },
    "mistral3": {
        "class": ("PixtralProcessor", "PixtralImageProcessor"),
        "image": {"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        "processor": {"patch_size": 14, "spatial_merge_size": 2},
        "config": {"image_token_index": 300, "spatial_merge_size": 2, "vision_config": _V},
        "tokens": _PIXTRAL,
    },
    "lighton_ocr": {
        "class": ("LightOnOcrProcessor", "PixtralImageProcessor"),
        "image": {"size": {"longest_edge": 84}, "patch_size": {"height": 28, "width": 28}},
        "processor": {"patch_size": 14, "spatial_merge_size": 2},
        "config": {"image_token_id": 300, "spatial_merge_size": 2, "vision_config": _V},
        "tokens": ["<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"],
        "names": ["image_token", "image_break_token", "image_end_token"],
    },
    "idefics3": {
        "class": ("Idefics3Processor", "Idefics3ImageProcessor"),
        "image": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        "processor": {"image_seq_len": 4},
        "config": {"image_token_id": 300, "scale_factor": 2, "vision_config": _V},
        "tokens": _IDEFICS3,
    },
    "smolvlm": {
        "class": ("SmolVLMProcessor", "SmolVLMImageProcessor"),
        "image": {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}},
        "processor": {"image_seq_len": 4},
        "config": {"image_token_id": 300, "scale_factor": 2, "vision_config": _V},
        "tokens": _IDEFICS3,
    },
    "internvl": {
        "class": ("InternVLProcessor", "GotOcr2ImageProcessor"),
        "image": {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        "processor": {"image_seq_length": 4},
        "config": {"image_token_id": 300, "vision_config": _V},
        "tokens": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "names": ["context_image_token", "start_image_token", "end_image_token", "video_token"],
    },
    "qwen2_vl": {
        "class": ("Qwen2VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 784, "longest_edge": 7056}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "qwen2_5_vl": {
        "class": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"min_pixels": 784, "max_pixels": 14112, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "qwen3_vl": {
        "class": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "patch_size": 16, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "qwen3_vl_moe": {
        "class": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "patch_size": 16, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "glm4v": {
        "class": ("Glm4vProcessor", "Glm4vImageProcessor"),
        "image": {"size": {"shortest_edge": 1568, "longest_edge": 14112}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
    },
    "glm46v": {
        "class": ("Glm46VProcessor", "Glm46VImageProcessor"),
        "image": {"size": {"shortest_edge": 1568, "longest_edge": 14112}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
    },
    "glm_ocr": {
        "class": ("Glm46VProcessor", "Glm46VImageProcessor"),
        "image": {"size": {"shortest_edge": 1568, "longest_edge": 14112}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
    },
    "glm4v_moe": {
        "class": ("Glm4vProcessor", "Glm4vImageProcessor"),
        "image": {"size": {"shortest_edge": 1568, "longest_edge": 14112}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"],
    },
    "qwen3_5": {
        "class": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
        "image": {"size": {"shortest_edge": 1024, "longest_edge": 9216}, "patch_size": 16, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": _QWEN,
    },
    "paddleocr_vl": {
        "class": ("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor"),
        "image": {"size": {"shortest_edge": 784, "longest_edge": 7056}, "patch_size": 14, "merge_size": 2},
        "config": {"image_token_id": 300},
        "tokens": ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
        "names": ["image_token"],
    },
    "gemma3": {
        "class": ("Gemma3Processor", "Gemma3ImageProcessor"),
        "image": {"size": {"height": 56, "width": 56}},
        "processor": {"image_seq_length": 4},
        "config": {"image_token_index": 300, "mm_tokens_per_image": 4},
        "tokens": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "names": ["image_token", "boi_token", "eoi_token"],
    },
    "gemma4": {
        "class": ("Gemma4Processor", "Gemma4ImageProcessor"),
        "image": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        "config": {"image_token_id": 300},
        "tokens": ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
        "names": ["image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token", "video_token"],
    },
    "gemma4_small": {
        "class": ("Gemma4Processor", "Gemma4ImageProcessor"),
        "image": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        "config": {"model_type": "gemma4", "image_token_id": 300},
        "tokens": ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"],
        "names": ["image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token", "video_token"],
    },
}  # fmt: skip
"""By family: processor and image processor classes, settings, a part of config.json, and special tokens from id 300."""


def tokenizer_of(family: str, *more: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with the family's tokens from id 300 on and `more` from 257 on."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    specials = ["</s>", *more]
    fillers = [f"<filler_{index}>" for index in range(256 + len(specials), FIRST_IMAGE_ID)]
    tokens = FAMILIES[family]["tokens"]
    model.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials + fillers + tokens])
    names = FAMILIES[family].get("names", ["image_token"])
    named = dict(zip(names, tokens, strict=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=model, extra_special_tokens=named, eos_token="</s>", pad_token="</s>"
    )


def write_files(folder: Path, family: str, *more: str, template: str | None = None) -> None:
    """Write the tokenizer's and the image processor's files, with a chat template if there is one."""
    settings = FAMILIES[family]
    tokenizer = tokenizer_of(family, *more)
    tokenizer.save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    image = {"image_processor_type": settings["class"][1], **settings["image"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    processor = {"processor_class": settings["class"][0], **settings.get("processor", {})}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def write_config(folder: Path, family: str) -> None:
    """Write the part of config.json that layouts need, for a folder without a model."""
    config = {"model_type": family, **FAMILIES[family]["config"]}
    (folder / "config.json").write_text(json.dumps(config))


def processor_of(folder: Path, family: str) -> Any:
    """Transformers' own processor of a folder, without what it needs for videos."""
    pixtral = "transformers.models.pixtral.image_processing_pixtral"
    sys.modules.setdefault(pixtral, image_processing_pil_pixtral)  # the other one needs torchvision
    name = FAMILIES[family]["class"][0]
    paths = (Path(transformers.__file__).parent / "models").glob("*/processing_*.py")
    path = next(path for path in paths if f"class {name}(" in path.read_text())
    module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    if hasattr(module, "num2words"):
        module.num2words = str

    class Unchecked(getattr(module, name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("processor_class")
    of_videos = SimpleNamespace(merge_size=2, slice_mode=False, downsample_mode="16x")
    others = {"video_processor": of_videos, "feature_extractor": None}
    takes = getattr(module, name).__init__.__code__.co_varnames
    settings |= {key: value for key, value in others.items() if key in takes}
    return Unchecked(image_processor=image_processor, tokenizer=tokenizer, **settings)

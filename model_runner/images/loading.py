"""Decides, from a model folder's files alone, whether its prompts may have images. Imports no torch."""

import logging
from importlib.util import find_spec
from pathlib import Path

from model_runner.images.layouts import Layout, read_layout

logger = logging.getLogger("samewise.runner")

SERVED = frozenset(
    {
        *("idefics3", "internvl", "lighton_ocr", "llava", "mistral3", "smolvlm"),
        *("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
        *("gemma3", "gemma4", "qwen3_vl_moe"),
    }
)
"""Types of models whose images the engine computes as transformers does."""


def layout_of(folder: Path) -> Layout | None:
    """How images stand in the prompts of a model; None, with the reason in the log, if its prompts have none.

    Raises:
        OSError, ValueError: if a file of the folder cannot be read.
    """
    layout = read_layout(folder)
    if layout is None or layout.family not in SERVED:
        return None
    if not any(folder.glob("*.safetensors")):
        logger.info("images     not served: the tower's weights are not in safetensors files")
        return None
    if find_spec("PIL") is None:
        logger.warning("images     not served: run `pip install pillow`")
        return None
    return layout

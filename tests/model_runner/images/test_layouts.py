"""Layouts of images in prompts, compared with transformers' processors."""

import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from model_runner.images import layouts
from model_runner.images.decoding import ImageError
from model_runner.images.layouts import Layout, read_layout
from tests.image_processors import FAMILIES, FIRST_IMAGE_ID, processor_of, write_config, write_files

ODD_SIZES = [(1, 1), (1, 200), (90, 3), (3, 90), (56, 56), (57, 56), (300, 30), (31, 310), (1000, 700), (113, 112)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, Any]]:
    """The layout of a family, in which low resolution means squares of 50 pixels, and transformers' processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "_LOW_SIDE", 50)
        yield _family(request.param, tmp_path_factory.mktemp(request.param))


def _family(name: str, folder: Path) -> tuple[Layout, Any]:
    write_files(folder, name)
    write_config(folder, name)
    layout = read_layout(folder)
    assert layout is not None
    return pickle.loads(pickle.dumps(layout)), processor_of(folder, name)


def expanded(layout: Layout, processor: Any, before: str, size: tuple[int, int], after: str) -> list[int]:
    """The ids of a text with an image in it, by the layout."""
    number = "" if layout.number is None else "0".join(layout.number)
    text = [before, number, *layout.of(*size).pieces, after]
    runs = [layout_piece if isinstance(layout_piece, str) else [FIRST_IMAGE_ID] * layout_piece for layout_piece in text]
    ids: list[int] = []
    pending = ""
    for run in runs:
        if isinstance(run, str):
            pending += run
        else:
            ids += processor.tokenizer.encode(pending, add_special_tokens=False) + run
            pending = ""
    return ids + processor.tokenizer.encode(pending, add_special_tokens=False)


def sizes() -> list[tuple[int, int]]:
    draw = random.Random(5)
    return [*ODD_SIZES, *((draw.randint(1, 400), draw.randint(1, 400)) for _ in range(30))]


@pytest.mark.parametrize("detail", ["", "low"])
def test_same_ids_as_the_processor(family: tuple[Layout, Any], detail: str) -> None:
    whole, processor = family
    layout = whole.at(detail)
    options = {key: value for key, value in layout.call.items() if whole.call.get(key) != value}
    assert layout.image_token == FIRST_IMAGE_ID
    for width, height in sizes()[:: 3 if detail else 1]:
        if max(width, height) > 200 * min(width, height):
            continue
        image = Image.new("RGB", (width, height))
        text = f"a{layout.placeholder}b"
        try:
            ids = processor(images=[[image]], text=[text], images_kwargs=options)["input_ids"][0]
        except ValueError:  # scaled to nothing
            with pytest.raises(ImageError, match="too long and narrow"):
                layout.of(width, height)
            continue
        assert list(ids) == expanded(layout, processor, "a", (width, height), "b"), (width, height)
        if (grid := layout.of(width, height).grid) is not None:
            patches = processor.image_processor([image], **options)["image_grid_thw"][0]
            assert grid == (patches[0], patches[1] // 2, patches[2] // 2)


def test_low_resolution(family: tuple[Layout, Any]) -> None:
    """It has fewer rows, if the model's image processor has a choice."""
    layout, _ = family
    has_no_choice = layout.family in {"deepseek_ocr2", "deepseek_vl", "gemma3", "vipllava"}
    has_no_choice |= layout.family.startswith("llava_")
    has_no_choice |= layout.family == "llava" and "patch_size" not in layout.call
    assert layout.has_low != has_no_choice
    if layout.family != "gemma4" and not layout.family.startswith(
        "llava_"
    ):  # gemma4's tiny processor has the least number of rows already
        assert has_no_choice == (layout.at("low").of(400, 300).num_rows == layout.of(400, 300).num_rows)


def test_call_arguments(family: tuple[Layout, Any]) -> None:
    """With the layout's arguments, the image processor alone makes as many rows as the processor's text has."""
    layout, processor = family
    image = Image.new("RGB", (70, 50))
    made = processor.image_processor([image], return_tensors="pt", **layout.call)
    num_rows = layout.of(70, 50).num_rows
    if "image_sizes" in made and "patch_size" in layout.call:
        height, width = made["image_sizes"][0]
        assert num_rows == (height // layout.call["patch_size"]) * (width // layout.call["patch_size"])
    if layout.family == "deepseek_ocr2":
        assert num_rows == 16 * 16 + 1
    elif "crop_to_patches" in layout.call:
        assert num_rows == 4 * len(made["pixel_values"])


def test_unknown_families(tmp_path: Path) -> None:
    write_files(tmp_path, "llava")
    for config in ({"model_type": "llama"}, {"model_type": "gemma3n", "image_token_id": 5}, {"model_type": "llava"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_layout(tmp_path) is None
    write_config(tmp_path, "llava")
    assert read_layout(tmp_path) is not None
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_layout(tmp_path) is None


def test_nested_settings_win(tmp_path: Path) -> None:
    write_files(tmp_path, "qwen2_vl")
    write_config(tmp_path, "qwen2_vl")
    nested = {"image_processor": {"size": {"shortest_edge": 784, "longest_edge": 784}, "patch_size": 14}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    layout = read_layout(tmp_path)
    assert layout is not None
    assert layout.of(500, 500).num_rows == 1

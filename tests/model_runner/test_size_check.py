"""Tests that a size which the checkpoint cannot have ends a plan before anything is built."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from model_runner.config import RunnerConfig
from model_runner.gguf.architectures import read_config
from model_runner.gguf.header import read_gguf
from model_runner.planning import plan_model
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.size_check import check_sizes
from tests.conftest import tiny_config
from tests.model_runner.gguf_files import contents_of

HUGE = (2**31, 10**30, 1e300, -(2**31), float("inf"), float("nan"))


def plan(folder: Path, **settings: Any) -> None:
    plan_model(RunnerConfig(folder, device="cpu", **settings), 0, {"cpu": 8 << 30})


def sizes_in(entries: dict[str, Any]) -> list[str]:
    """Names of all numbers but positions, tokens and factors."""
    others = "position", "token", "theta", "eps", "range", "dropout", "window", "pretraining"
    return [key for key, value in entries.items() if type(value) is int and not any(word in key for word in others)]


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_every_size_is_compared_before_anything_is_built(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model(family), tmp_path / "model")
    entries = json.loads((folder / "config.json").read_bytes())
    sizes = sizes_in(entries)
    assert {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"} <= set(sizes)
    for key in sizes:
        for number in HUGE:
            (folder / "config.json").write_text(json.dumps(entries | {key: number}))
            with pytest.raises(UnsupportedModelError, match=rf"config\.json has {key} = \S+, and its checkpoint has"):
                plan(folder)
    (folder / "config.json").write_text(json.dumps({"text_config": entries, "depths": [2, 2**31]}))
    with pytest.raises(UnsupportedModelError, match=r"depths = 2\.14748e\+09"):
        plan(folder)


def test_a_draft_model_is_compared_too(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    target, folder = tiny_model("llama"), shutil.copytree(tiny_model("llama"), tmp_path / "model")
    entries = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(entries | {"num_hidden_layers": 2**31}))
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
        plan(target, draft_model=folder)


def test_metadata_are_compared_too(tmp_path: Path) -> None:
    contents = contents_of(tiny_config("llama"))
    sizes = [
        key
        for key, value in contents.keys.items()
        if key.startswith("llama.") and type(value) is int and "context" not in key
    ]
    assert "llama.block_count" in sizes
    for key in sizes:
        changed = contents.keys | {key: 2**31}
        path = type(contents)(contents.architecture, changed, contents.tensors, contents.raw).write(tmp_path / "m.gguf")
        with pytest.raises(UnsupportedModelError, match=rf"its metadata has {key.removeprefix('llama.')} = "):
            read_config(read_gguf(path))


def test_defaults_of_every_type_pass() -> None:
    """Sizes of published models are far below the limit, even with tensors of which none is as large."""
    for kind in ("llama", "deepseek_v3", "qwen3_moe", "gemma3n", "falcon_h1", "qwen2_5_vl", "llama4", "modernbert"):
        entries = CONFIG_MAPPING[kind]().to_dict()
        shapes = np.ones((200, 2), int) * 8192
        check_sizes(json.loads(json.dumps(entries, default=str)), shapes.tolist(), kind)

"""Configurations that are read without transformers, against what transformers reads."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from model_runner.spec.families import FAMILIES, Family
from model_runner.spec.known_config import MissingEntryError, read_known_config
from model_runner.spec.layer_family import head_dim
from model_runner.spec.model_folder import open_checkpoint
from model_runner.spec.model_spec import read_model_spec
from model_runner.weights.checkpoint import Checkpoint, TensorCheckpoint
from model_runner.weights.interleaved_experts import deinterleave_experts
from tests.model_runner.decoder_models import CASES, HYBRIDS, tiny_model

Change = Callable[[dict[str, Any]], None]
_OF_TRANSFORMERS = {"gemma3", "phi4_multimodal"}
"""Types whose files transformers always reads."""


class RecordingConfig:
    """A configuration of transformers that notes which entries are read."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "get_text_config":
            return lambda: self
        value = getattr(self.config, name)
        self.read[name] = value
        return value


def entries_that_are_read(case: str) -> tuple[dict[str, Any], Checkpoint]:
    """Entries of the whole configuration that matter, with the values that transformers has for them."""
    model = tiny_model(case)
    checkpoint = deinterleave_experts(TensorCheckpoint(model.state_dict()))
    recording = RecordingConfig(model.config.get_text_config())
    read_model_spec(recording, checkpoint)
    return recording.read, checkpoint


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_a_whole_file_says_what_transformers_reads(case: str, tmp_path: Path) -> None:
    expected, checkpoint = entries_that_are_read(case)
    config = tiny_model(case).config.get_text_config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    known = read_known_config(tmp_path)
    if known is None:
        assert case.startswith(("phi4_multimodal", "emu3"))
        return
    rope = expected.pop("rope_parameters", known.rope_parameters)
    in_json = json.loads(json.dumps(expected))
    assert {name for name, value in in_json.items() if getattr(known, name) != value} <= {"name_or_path"}
    assert {**rope, **known.rope_parameters} == rope
    assert read_model_spec(known, checkpoint) is not None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_absent_entry_is_never_guessed(model_type: str, tmp_path: Path) -> None:
    """Each entry in turn is left out: the same value as transformers has for it, or an error that asks transformers."""
    if model_type in _OF_TRANSFORMERS:
        return
    config = AutoConfig.for_model(model_type)
    whole = config.to_dict()
    for left_out in whole:
        entries = {name: value for name, value in whole.items() if name != left_out}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        known = read_known_config(tmp_path)
        expected = AutoConfig.from_pretrained(tmp_path) if "model_type" in entries else None
        for name in ("head_dim", "layer_types", "sliding_window", "rope_parameters", left_out):
            if known is None or not hasattr(expected, name):
                continue
            with contextlib.suppress(MissingEntryError):
                if name == "head_dim":
                    assert head_dim(known) == head_dim(expected)
                else:
                    assert (getattr(known, name) or None) == (getattr(expected, name) or None), (left_out, name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_windows_are_transformers(model_type: str, tmp_path: Path) -> None:
    """Each layer's window, with and without the flag and the kinds of layers, which some families need."""
    family = FAMILIES[model_type]
    if model_type in _OF_TRANSFORMERS or family.layer.recurrent is not None:  # its files list the layers
        return
    config = AutoConfig.for_model(model_type)
    whole = config.to_dict()
    for flag, kinds, window in product((..., True, False), (whole.get("layer_types"), None, ...), (..., 64)):
        changes = {"use_sliding_window": flag, "layer_types": kinds, "sliding_window": window}
        entries = {name: value for name, value in {**whole, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        with contextlib.suppress(MissingEntryError):
            if (known := read_known_config(tmp_path)) is not None:
                windows = windows_of(known, family)
                expected = AutoConfig.from_pretrained(tmp_path)
                assert windows == windows_of(expected, family), changes


def windows_of(config: Any, family: Family) -> list[int | None]:
    """The window of each layer; None for layers that see all positions, or do not attend."""
    layer = family.layer
    return [
        (layer.window(config, number) or None) if layer.attends(config, number) else None
        for number in range(config.num_hidden_layers)
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        ),
    ],
)
def test_files_of_older_versions(old: dict[str, Any], new: dict[str, Any], tmp_path: Path) -> None:
    entries = tiny_model("llama").config.to_dict()
    del entries["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(entries | old))
    known = read_known_config(tmp_path)
    assert known is not None
    assert known.rope_parameters == new
    assert {**AutoConfig.from_pretrained(tmp_path).rope_parameters, **new} | {"type": 0} == new | {"type": 0}


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.update(model_type="olmo2"),
        lambda entries: entries.update(text_config={}),
        lambda entries: entries.pop("rope_parameters"),
    ],
)
def test_other_files_are_left_to_transformers(change: Change, tmp_path: Path) -> None:
    entries = tiny_model("llama").config.to_dict()
    change(entries)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_known_config(tmp_path) is None


@pytest.mark.parametrize(
    ("case", "absent", "given"),
    [
        (
            "falcon_h1",
            {"time_step_limit"},
            {"rope_parameters": None, "rope_theta": 10000.0},
        ),
        (
            "granitemoehybrid with Mamba 2",
            {"time_step_limit"},
            {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
        ),
        ("gemma", {"tie_word_embeddings"}, {"rope_parameters": None, "rope_theta": 10000.0}),
        ("gemma2", {"tie_word_embeddings", "layer_types"}, {"rope_parameters": None, "rope_theta": 10000.0}),
        (
            "gemma3_text",
            {
                "tie_word_embeddings",
                "layer_types",
                "use_bidirectional_attention",
                "rope_parameters",
                "final_logit_softcapping",
            },
            {
                **{"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 10000},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        ("gpt_oss", {"swiglu_alpha"}, {}),
        ("lfm2_moe", {"tie_word_embeddings"}, {"tie_embedding": True}),
        ("nemotron_h", {"layers_block_type", "mamba_hidden_act"}, {"hybrid_override_pattern": "M-*E"}),
    ],
)
def test_published_files_need_no_transformers(
    case: str, absent: set[str], given: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(case)
    entries = {name: value for name, value in model.config.to_dict().items() if name not in absent}
    (tmp_path / "config.json").write_text(json.dumps(entries | given))
    known, checkpoint = read_known_config(tmp_path), deinterleave_experts(TensorCheckpoint(model.state_dict()))
    assert known is not None
    spec, expected = (read_model_spec(one, checkpoint) for one in (known, AutoConfig.from_pretrained(tmp_path)))
    assert spec is not None
    assert expected is not None
    assert spec.shape() == expected.shape()
    for name in ("embedding_scale", "rotary_kinds", "norm_eps", "logits_scale", "logits_softcap"):
        assert getattr(spec, name) == getattr(expected, name), name
    for kind, found in expected.frequencies.items():
        assert torch.equal(spec.frequencies[kind].angles, found.angles)


def test_infinite_numbers(tmp_path: Path) -> None:
    config = tiny_model("granitemoehybrid with Mamba 2").config
    config.time_step_limit = (0.0, float("inf"))
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    known = read_known_config(tmp_path)
    assert known is not None
    assert known.time_step_limit == [0.0, float("inf")]


def test_a_known_model_is_loaded_without_transformers(tmp_path: Path, kernels_library: Path) -> None:
    model = tiny_model("qwen3_5_text")
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    code = f"""
import sys
from pathlib import Path
from model_runner.config import RunnerConfig
import model_runner.runner
from model_runner.platforms.cpu import CpuPlatform
platform = CpuPlatform(RunnerConfig(model=Path({str(tmp_path)!r})))
folder = Path({str(tmp_path)!r})
platform.load(folder, platform.inspect(folder))
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="40KB")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint is not None
    spec = read_model_spec(model.config, checkpoint)
    expected = read_model_spec(model.config, TensorCheckpoint(model.state_dict()))
    assert spec is not None
    assert expected is not None
    for one, other in zip(spec.layers, expected.layers, strict=True):
        assert torch.equal(one.mixer_input.weight, other.mixer_input.weight)
        assert one.experts is not None
        assert other.experts is not None
        for expert, same in zip(one.experts.gate_up, other.experts.gate_up, strict=True):
            assert torch.equal(expert.weight, same.weight)
            expert.matrices[0].drop(0, 3)
            assert torch.equal(expert.weight, same.weight)

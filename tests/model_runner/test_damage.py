"""Damaged files of a model: one line that names the file and says what to do, wherever the damage is met."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from model_runner.config import RunnerConfig
from model_runner.gguf.header import read_gguf
from model_runner.hub.repository import ModelNotFoundError, resolve_model
from model_runner.modules.loading import load_config, load_model
from model_runner.refusal import UnsupportedModelError, other_task
from model_runner.runner import ModelRunner
from model_runner.weights.damage import find_damage
from server.generation.generation_config import load_defaults
from server.text.tokenizer import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"
PAGE = b"<!DOCTYPE html><html>Not found</html>\n"
BINARY = bytes(range(256)) * 40
DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "missing": (lambda whole: None, "is missing"),
    "empty": (lambda whole: b"", "is empty"),
    "truncated": (lambda whole: whole[:-9], "is not valid JSON|has [0-9,]+ bytes instead of"),
    "binary": (lambda whole: BINARY, "is not valid JSON|is damaged: it"),
    "a page": (lambda whole: PAGE, "is not valid JSON|is damaged: it"),
    "a pointer": (lambda whole: POINTER, "is a Git LFS pointer"),
    "another value": (lambda whole: b"[1]", "does not hold a JSON object|is damaged: it"),
}
SHARD, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX, SHARD)
OPTIONAL = {"generation_config.json", "tokenizer_config.json"}
"""Files without which a model is served."""


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in two shards."""
    folder = tmp_path_factory.mktemp("whole")
    source = tiny_model("llama")
    load_model(source, load_config(source), torch.float32).save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) == 2
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole model."""
    return shutil.copytree(whole, tmp_path / "model")


def damage_file(path: Path, damage: str) -> None:
    content = DAMAGES[damage][0](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_start_names_the_damaged_file(name: str, damage: str, folder: Path) -> None:
    console = Console(quiet=True)
    assert resolve_model(str(folder), console).path == folder
    damage_file(folder / name, damage)
    if damage == "missing" and name in OPTIONAL | {INDEX}:  # without an index, loading finds no weights
        assert find_damage(folder) is None
        return
    with pytest.raises(ModelNotFoundError) as failure:
        resolve_model(str(folder), console)
    message = str(failure.value)
    assert "\n" not in message
    assert len(message) < 400
    if (name, damage) == ("config.json", "missing"):
        assert message.endswith("has no config.json; give the folder of a model in the Hugging Face format")
    elif (name, damage) == ("tokenizer.json", "missing"):
        assert "cannot be converted: it has no tokenizer" in message
    else:
        assert pytest.RaisesExc(ModelNotFoundError, match=rf"/{name} ({DAMAGES[damage][1]})").matches(failure.value)
        assert "; download " in message or "; run `git lfs pull` in" in message


READERS: dict[str, Callable[[Path], object]] = {
    "the engine": lambda folder: ModelRunner.load(RunnerConfig(folder, device="cpu", kv_cache_gib=0.01)),
    "transformers": lambda folder: load_model(folder, load_config(folder), torch.float32),
    "the server": lambda folder: load_defaults(folder, Tokenizer.from_folder(folder)),
}
READ_BY = {
    "the engine": ("config.json", INDEX, SHARD),
    "transformers": ("config.json", INDEX, SHARD),
    "the server": ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
}


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage != "missing"])
@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, names in READ_BY.items() for name in names])
def test_files_that_change_after_the_start_are_named_too(reader: str, name: str, damage: str, folder: Path) -> None:
    if reader == "the server" and name == "config.json":
        (folder / "generation_config.json").write_text("{}")  # so that the EOS is looked up
    damage_file(folder / name, damage)
    with pytest.raises((UnsupportedModelError, ValueError), match=name) as failure:
        READERS[reader](folder)
    assert "\n" not in str(failure.value)


def test_a_large_file_is_only_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_runner.weights.damage._LARGE", 20)
    monkeypatch.setattr("model_runner.weights.damage._ENDS", 10)
    assert find_damage(folder) is None
    for damage in ("truncated", "binary", "a page"):
        whole = (folder / "tokenizer.json").read_bytes()
        damage_file(folder / "tokenizer.json", damage)
        assert "does not begin and end with braces" in (find_damage(folder) or "")
        (folder / "tokenizer.json").write_bytes(whole)


@pytest.mark.parametrize(("content", "said"), [(POINTER, "a Git LFS pointer.*git lfs pull"), (PAGE, "not a GGUF file")])
def test_a_file_that_is_no_gguf_says_what_it_is(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=f"^model.gguf is {said}"):
        read_gguf(path)


# -- models of another kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({}, r"has the model type 'None' in config\.json, which transformers \S+ does not know"),
        ({"model_type": "nope"}, "has the model type 'nope'"),
        ({"model_type": ["llama"]}, "has the model type"),
        ({"model_type": "vit"}, r"\(a vit model\) generates no text"),
        ({"model_type": "clip"}, r"\(a clip model\) generates no text"),
    ],
)
def test_an_unknown_model_is_refused_in_few_words(entries: dict[str, object], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match=reason) as failure:
        ModelRunner.load(RunnerConfig(tmp_path, device="cpu", kv_cache_gib=0.01))
    message = str(failure.value)
    assert message.endswith("; docs/reference/model-types.md lists the supported models")
    assert "\n" not in message
    assert len(message) < 300


def class_names(task: str) -> set[str]:
    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
    return {name for entry in names for name in ([entry] if isinstance(entry, str) else entry)}


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TEXT_ENCODING"])
def test_no_head_that_is_served_is_taken_for_another(task: str) -> None:
    assert [name for name in class_names(task) if other_task([name]) is not None] == []


@pytest.mark.parametrize("task", ["TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE"])
def test_heads_for_other_tasks_are_known(task: str) -> None:
    assert {name for name in class_names(task) if other_task([name]) is None} == set()


@pytest.mark.parametrize(
    "name",
    ["LlamaForTokenClassification", "Qwen2ForQuestionAnswering", "LlamaForMaskedLM", "GPT2DoubleHeadsModel",
     "Qwen2ForProcessRewardModel"],
)  # fmt: skip
def test_a_model_with_another_head_does_not_generate(name: str, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.architectures = [name]
    config.save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=rf"has a head for \w+ \({name}\); classes that end in ForCausalLM"):
        ModelRunner.load(RunnerConfig(folder, device="cpu", kv_cache_gib=0.01))

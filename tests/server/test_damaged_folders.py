"""Folders of models with wrong values in every file: a refusal is one short line, never another error."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from model_runner.config import RunnerConfig
from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.description import describe
from model_runner.hub.repository import resolve_model
from model_runner.hub.tokenizer_files import read_tokenizer
from model_runner.planning import plan_model
from model_runner.refusal import UnsupportedModelError
from server.assembly import StartError
from server.cli.models import _pairs
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer

OTHER: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [2], "temperature": 0.5, "top_k": 5, "max_new_tokens": 9},
    "tokenizer_config.json": {
        **{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max_length": int(1e30)},
        **{"chat_template": "{{ messages }}", "extra_special_tokens": {"image_token": "<s>"}},
    },
    "special_tokens_map.json": {"pad_token": {"content": "<unk>"}},
    "preprocessor_config.json": {"size": {"height": 28}, "patch_size": 14, "image_mean": [0.5]},
}
WRONG: tuple[Any, ...] = ("\x1b[31m\n" * 1000, -1, 0, 10**30, float("inf"), [1, [2]], {"a": 1}, None, True)
NESTED = b'{"model_type":' * 5000 + b"1" + b"}" * 5000
CONTENTS = (b"", b"[]", b"null", b"\xff\xfe", b'{"architectures": ["\\ud800"], "chat_template": "\\ud800"}', NESTED)


def changes(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and new contents of files: each key with each wrong value, and each file with each wrong content."""
    files = OTHER | {"config.json": json.loads((folder / "config.json").read_bytes())}
    turn = 0
    for name, entries in files.items():
        for key in entries:
            every = name == "config.json" and key in {"architectures", "model_type", "max_position_embeddings"}
            for wrong in WRONG if every else (WRONG[turn % len(WRONG)],):
                yield name, json.dumps(entries | {key: wrong}).encode()
            turn += 1
    for name in (*files, "tokenizer.json", "model.safetensors.index.json", "modules.json", "processor_config.json"):
        yield from ((name, content) for content in CONTENTS)


def show(folder: Path) -> object:
    found = describe(folder)
    return str(_pairs(found)).encode(), json.dumps(found.as_json())


def serve(folder: Path) -> object:
    try:
        path = resolve_model(str(folder), Console(quiet=True)).path
        ServedModel.from_folder(path, Tokenizer.from_folder(path), "m")
    except ValueError as error:  # as the command does
        raise StartError(str(error)) from error
    return plan_model(RunnerConfig(path, device="cpu"), 0, {"cpu": 8 << 30})


def refusal_of(use: Callable[[Path], object], folder: Path) -> str | None:
    """The message with which a folder is refused, if it is."""
    try:
        use(folder)
    except (ModelNotFoundError, StartError, ValueError, OSError) as error:
        return str(error)
    return None


def test_wrong_files_are_refused_in_one_short_line(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    for name, entries in OTHER.items():
        (folder / name).write_text(json.dumps(entries))
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    show(folder), serve(folder)
    refusals = []
    for name, content in changes(folder):
        (folder / name).write_bytes(content)
        refusals += [(name, content[:200], refusal_of(use, folder)) for use in (show, serve)]
        if name in whole:
            (folder / name).write_bytes(whole[name])
        else:
            (folder / name).unlink()
    assert len(refusals) > 150
    assert sum(message is not None for _, _, message in refusals) > 80
    assert [one for one in refusals if one[2] is not None and not (one[2].isprintable() and len(one[2]) < 2100)] == []


@pytest.mark.parametrize("outside", ["../secret", "/etc/passwd", "a/../../b", "a\x00b"])
def test_no_file_names_another_outside_of_its_folder(
    outside: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    target, folder = tiny_model("llama"), shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": outside}}))
    with pytest.raises(ValueError, match="outside of its folder"):
        plan_model(RunnerConfig(target, device="cpu", draft_model=folder), 0, {})
    with pytest.raises(ModelNotFoundError, match="outside of its folder"):
        show(folder)
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": outside}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"modules\.json names the folder .*, which is outside of the model's"):
        ServedModel.from_folder(folder, Tokenizer.from_folder(folder), "m")


def test_a_tokenizer_names_no_file_elsewhere(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "secret").write_text('{"secret": 0}')
    for key in ("vocab", "vocab_file"):
        (folder / "tokenizer_config.json").write_text(json.dumps({key: str(tmp_path / "secret")}))
        with pytest.raises(UnsupportedModelError, match=f"names the file .*secret as {key}; remove the entry"):
            read_tokenizer(folder)

"""The models that the settings name: found before the engine starts, handed to it, and told at the start."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from model_runner.config import RunnerConfig
from model_runner.hub.access import HubAccess, ModelNotFoundError
from model_runner.hub.repository import ModelFolder
from server.assembly import Checkpoints, engine_config, find_checkpoints, warn_if_unused
from server.cli.announcement import describe_speculation
from server.config import Settings

CONSOLE = Console(file=io.StringIO())


def make_model(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def settings_for(tmp_path: Path, **changes: object) -> Settings:
    return Settings(**{"model": str(make_model(tmp_path / "model")), **changes})


def test_all_are_found_and_handed_on(tmp_path: Path) -> None:
    draft, heads = make_model(tmp_path / "draft"), [tmp_path / "medusa", tmp_path / "eagle"]
    aux = make_model(tmp_path / "aux")
    for folder in heads:
        folder.mkdir()
    settings = settings_for(
        tmp_path,
        draft_model=str(draft),
        aux_model=str(aux),
        heads=[str(folder) for folder in heads],
        speculation="eagle",
        num_draft_tokens=5,
    )
    found = find_checkpoints(settings, CONSOLE)
    assert found == Checkpoints(ModelFolder(tmp_path / "model", "model"), draft, tuple(heads), ModelFolder(aux, "aux"))
    runner = engine_config(settings, found).runner
    assert runner.model == tmp_path / "model"
    assert (runner.speculation, runner.num_draft_tokens) == ("eagle", 5)
    assert (runner.draft_model, runner.heads, runner.aux_model) == (draft, tuple(heads), aux)


def test_none_are_needed(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    found = find_checkpoints(settings, CONSOLE)
    assert engine_config(settings, found).runner == RunnerConfig(tmp_path / "model", multiplies_stored_blocks=True)
    assert not engine_config(Settings(), found).runner.multiplies_stored_blocks


@pytest.mark.embedded
def test_the_embedded_model_brings_heads_unless_others_are_named(tmp_path: Path) -> None:
    own = find_checkpoints(Settings(), CONSOLE)
    assert own.heads == own.model.heads
    assert all((folder / "config.json").is_file() for folder in own.heads)
    (tmp_path / "others").mkdir()
    assert find_checkpoints(Settings(heads=[str(tmp_path / "others")]), CONSOLE).heads == (tmp_path / "others",)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("draft_model", r"^draft_model: .* has no config.json; give the folder of a model"),
        ("aux_model", r"^aux_model: .* has no config.json; give the folder of a model"),
        ("heads", r"^heads: .* is a file; give the"),
    ],
)
def test_errors_name_the_setting(tmp_path: Path, setting: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    value = [str(tmp_path / "file")] if setting == "heads" else str(tmp_path / "empty")
    with pytest.raises(ModelNotFoundError, match=message):
        find_checkpoints(settings_for(tmp_path, **{setting: value}), CONSOLE)


@pytest.mark.parametrize(
    ("setting", "methods", "text"),
    [
        ("auto", ("auto", "ngram"), "auto by default; auto, ngram; at most 16 draft tokens in a step"),
        ("off", ("auto", "ngram"), "off by default; auto, ngram; at most 16 draft tokens in a step"),
        ("auto", (), "none"),
    ],
)
def test_the_start_tells_the_methods(setting: str, methods: tuple[str, ...], text: str) -> None:
    assert describe_speculation(Settings(speculation=setting), methods) == text


@pytest.mark.parametrize(
    ("speculation", "is_told"), [("auto", False), ("hydra", False), ("off", True), ("suffix", True)]
)
def test_who_learns_what_few_will_use_is_told(
    caplog: pytest.LogCaptureFixture, speculation: str, is_told: bool
) -> None:
    warn_if_unused(Settings(learn=True, speculation=speculation))  # type: ignore[arg-type]
    warn_if_unused(Settings(speculation=speculation))  # type: ignore[arg-type]
    assert [f"speculation is {speculation}" in message for message in caplog.messages] == [True] * is_told


@pytest.mark.parametrize(("device", "is_limited"), [("cpu", True), ("cuda", False)])
def test_memory_limits_downloads_on_a_cpu(
    device: str, is_limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HubAccess] = []

    def resolve(name: str, console: Console, hub: HubAccess) -> ModelFolder:
        asked.append(hub)
        return ModelFolder(tmp_path, name)

    monkeypatch.setattr("server.assembly.resolve_model", resolve)
    find_checkpoints(Settings(model="x", device=device, revision="v1", hub_token="hush"), CONSOLE)  # type: ignore[arg-type]
    (access,) = asked
    assert (access.token, access.revision, access.updates) == ("hush", "v1", False)
    assert (access.max_bytes is not None) == is_limited

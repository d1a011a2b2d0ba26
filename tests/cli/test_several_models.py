"""Several models: entries of `models` in the settings file, and several names on the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from model_runner.hub.access import ModelNotFoundError
from server.assembly import budget_of, find_models
from server.config import GROUPS, Settings, load_settings
from server.model_settings import NOT_SHARED, OF_A_MODEL
from server.setting_errors import SettingsError

Read = Callable[..., Settings]
EMBEDDED = "SmolLM2-135M-Instruct"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "samewise.yaml"


@pytest.fixture
def read(file: Path) -> Read:
    def read(text: str, **flags: Any) -> Settings:
        file.write_text(text)
        return load_settings(flags, file)

    return read


TWO = """
quantization: int4
memory_gib: 4
models:
- name: small
  path: SmolLM2-135M-Instruct
  aliases: [gpt-4o-mini]
  threads: 1
- {name: org/large, quantization: none, pinned: true}
"""


def test_settings_outside_of_the_entries_are_their_defaults(read: Read) -> None:
    settings = read(TWO, port="9")
    first, second = (settings.of_model(entry) for entry in settings.models)
    assert (first.model, first.served_model_name) == (None, ("small", "gpt-4o-mini"))
    assert (second.model, second.served_model_name) == ("org/large", ("org/large",))
    assert [(one.quantization, one.threads, one.port) for one in (first, second)] == [("int4", 1, 9), ("none", None, 9)]
    assert (settings.memory_gib, first.memory_gib, first.models) == (4, None, ())


def test_the_first_is_loaded_at_the_start_unless_it_says_otherwise(read: Read) -> None:
    assert [entry.load for entry in read(TWO).models] == ["start", "demand"]
    lazy = read("models: [{name: a, load: demand}, {name: b, load: start}]")
    assert [entry.load for entry in lazy.models] == ["demand", "start"]


def test_names_on_the_command_line_are_entries(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x" / "folder").mkdir(parents=True)
    (tmp_path / "x" / "folder" / "config.json").write_text("{}")
    paths = [EMBEDDED, str(tmp_path / "x" / "folder"), "org/repo:Q4_K_M", "https://a.example/b/c.gguf"]
    monkeypatch.setenv("SAMEWISE_MODEL", "is-overruled")
    several = read("model: is-overruled-too", model=paths)
    assert [(entry.name, entry.path) for entry in several.models] == list(
        zip([EMBEDDED, "folder", "org/repo:Q4_K_M", "c"], paths, strict=True)
    )
    assert (several.model, several.models[0].load) == (None, "start")
    one = read("port: 1", model=["org/repo"])
    assert (one.model, one.models) == ("org/repo", ())


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("models: []", {}, "{file}: models: has no entry. Give each model one"),
        ("models: 3", {}, "{file}: models: expected a list (got 3)"),
        ("models: [a]", {}, "{file}: models: entry 1: expected keys and values such as `name: small` (got 'a')"),
        ("models: [{path: a, api_key: sk-1}]", {}, "{file}: models: entry 1: name: is required"),
        ("models: [{name: a}, {name: 3}]", {}, "{file}: models: entry 2: name: expected text; in a YAML file put"),
        ("models: [{name: ' a'}]", {}, "{file}: models: entry 1: name: is not a name; give letters or digits"),
        ("models: [{name: a, pinned: maybe}]", {}, "{file}: models: entry 1: pinned: expected true or false (got 'm"),
        ("models: [{name: a, idle_s: 0}]", {}, "{file}: models: entry 1: idle_s: must be more than 0 (got 0)"),
        ("models: [{name: a, pinned: true, idle_s: 9}]", {}, "{file}: models: entry 1 (a): pinned and idle_s exclude"),
        ("models: [{name: a}, {name: b, aliases: [a]}]", {}, "{file}: models: the name 'a' is given twice. Names and"),
        ("models: [{name: a, max_len: 3}]", {}, "{file}: models: entry 1 (a): unknown setting `max_len`; did you mean"),
        ("models: [{name: a, rows: 3}]", {}, "{file}: models: entry 1 (a): rows: expected 'auto', 'int8' or 'int16' ("),
        ("models: [{name: a, port: 3}]", {}, "{file}: models: entry 1 (a): `port` is a setting of the server, not of"),
        ("models: [{name: a, model: b}]", {}, "{file}: models: entry 1 (a): `model` is a setting of a server with one"),
        ("models: [{name: a, learn_threads: 1}]", {}, "{file}: models: entry 1 (a): learn_threads needs learn. Set"),
        (
            "speculation: draft_model\nmodels: [{name: a, draft_model: x}, {name: b}]",
            {},
            "{file}: models: entry 2 (b): speculation 'draft_model' needs draft_model. Set",
        ),
        ("models: [{name: a}]\nmodel: b", {}, "{file}: model: is a setting of one model. With `models`, set `path` in"),
        ("models: [{name: a}]", {"revision": "b"}, "--revision: is a setting of one model. With `models`, set `rev"),
        ("models: [{name: a, threads: 2}]", {"threads": "3"}, "--threads: has no effect, because every entry of `mod"),
        ("memory_gib: 3", {}, "memory_gib needs models. Set models too, or leave memory_gib out"),
        ("load_timeout_s: 600", {"model": ["a"]}, "load_timeout_s needs models. Set models too"),
        ("models: [{name: a}]", {"model": ["b"]}, "MODEL: the settings file has `models`. Name the models in one of"),
        ("port: 1", {"model": ["a/b", "http://c"]}, "MODEL: 'http://c' is not the URL of a GGUF file, or of a model"),
        ("port: 1", {"model": ["a/b", "a/b"]}, "MODEL: the name 'a/b' is given twice. Names and aliases must differ"),
        ("port: 1", {"model": ["a", "b"], "served_model_name": ["c"]}, "--served-model-name: is a setting of one mod"),
    ],
)
def test_errors_name_the_entry_and_the_key(
    text: str, flags: dict[str, Any], message: str, read: Read, file: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(text, **flags)
    assert str(caught.value).startswith(message.format(file=file))
    assert "sk-1" not in str(caught.value)


def test_there_is_no_variable_for_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_MODELS", "a,b")
    with pytest.raises(SettingsError, match="SAMEWISE_MODELS: several models are set in the YAML file, or named after"):
        load_settings({})


def test_each_setting_is_of_the_server_or_of_a_model() -> None:
    assert {*GROUPS["Device and precision"], *GROUPS["Speculation"]} <= OF_A_MODEL <= Settings.model_fields.keys()
    assert OF_A_MODEL.isdisjoint({*GROUPS["Network"], *GROUPS["Security"], *GROUPS["Stored data"]})
    unset = Settings()
    assert [name for name in NOT_SHARED if getattr(unset, name) not in (None, (), "")] == []


@pytest.mark.parametrize(("gib", "is_told"), [(1 / 1024, False), (1e6, True), (None, False)])
def test_more_memory_than_there_is_is_told(
    gib: float | None, is_told: bool, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    settings = read("models: [{name: a}]" + ("" if gib is None else f"\nmemory_gib: {gib}"))
    budget = budget_of(settings)
    assert budget == (None if gib is None else int(gib * (1 << 30)))
    assert ["memory_gib is 1e+06, but only " in message for message in caplog.messages] == [True] * is_told


def test_defaults_for_all_models_are_skipped_for_encoders_and_that_is_told(
    read: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, kind in (("chat", "llama"), ("texts", "bert"), ("own", "bert")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        (tmp_path / name / "tokenizer.json").write_text("{}")
    own = f"{{name: own, path: {tmp_path}/own, kv_cache_gib: 2}}"
    entries = f"models: [{{name: chat, path: {tmp_path}/chat}}, {{name: texts, path: {tmp_path}/texts}}, {own}]"
    shared = "\nkv_cache_gib: 1\nkv_cache_dtype: bfloat16\nmax_model_len: 4096\nthreads: 2"
    found = [own for own, _ in find_models(read(entries + shared), Console(quiet=True))]
    assert [(one.kv_cache_gib, one.kv_cache_dtype, one.max_model_len, one.threads) for one in found] == [
        (1, "bfloat16", 4096, 2), (None, "auto", None, 2), (2, "auto", None, 2),
    ]  # fmt: skip
    told = [message for message in caplog.messages if "is an encoder" in message]
    assert [message.partition(" ")[0] for message in told] == ["texts", "own"]
    assert "kv_cache_dtype, kv_cache_gib, max_model_len" in told[0]
    assert "kv_cache_gib" not in told[1], "what the entry itself asks for is refused when it is loaded"


def test_all_are_found_at_the_start_and_errors_name_the_entry(read: Read, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            (tmp_path / name / file).write_text("{}")
    entries = f"models: [{{name: a, path: {tmp_path}/one, threads: 2}}, {{name: b, path: {tmp_path}/two}}]"
    found = find_models(read(entries), Console(quiet=True))
    assert [(own.threads, one.model.path.name) for own, one in found] == [(2, "one"), (None, "two")]
    (tmp_path / "two" / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"^models: b: .* has no config.json"):
        find_models(read(entries), Console(quiet=True))

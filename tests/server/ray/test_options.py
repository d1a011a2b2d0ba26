"""Valid arguments of an application, and errors for invalid ones."""

from pathlib import Path
from typing import Any

import pytest

from server.config import Settings
from server.ray.options import Options, OptionsError, read_arguments


def test_nothing_need_be_said() -> None:
    deployment = read_arguments({})
    assert deployment.options == Options()
    assert deployment.options.most == 1
    assert deployment.settings == Settings(device="cpu", threads=1)


def test_words_of_the_command_line_are_options_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_MAX_WAITING", "7")
    monkeypatch.setenv("SAMEWISE_MAX_NUM_SEQS", "8")
    given = {"min_replicas": "2", "max_replicas": "4", "num_cpus": "2.5", "model": "some/model", "max_num_seqs": "16"}
    deployment = read_arguments(given)
    assert (deployment.options.min_replicas, deployment.options.most) == (2, 4)
    settings = deployment.settings
    assert (settings.model, settings.max_num_seqs, settings.max_waiting, settings.threads) == ("some/model", 16, 7, 2)


def test_values_of_yaml_are_taken_as_they_are() -> None:
    settings = read_arguments({"served_model_name": ["a", "b"], "strict": True, "threads": 3}).settings
    assert (settings.served_model_name, settings.strict, settings.threads) == (("a", "b"), True, 3)


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (0.5, "cuda"), (1, "cuda")])
def test_replicas_look_for_no_device_that_is_not_theirs(num_gpus: float, device: str) -> None:
    assert read_arguments({"num_gpus": num_gpus}).settings.device == device


CHAT: dict[str, Any] = {"name": "chat", "path": "org/chat"}
CODE: dict[str, Any] = {"name": "code", "path": "org/code", "aliases": ["coder"], "max_num_seqs": 4}


def test_each_of_several_models_has_replicas_of_its_own() -> None:
    replicas = {"chat": {"min_replicas": 2, "max_replicas": 3}, "code": {"num_gpus": 1}}
    given = {"models": [CHAT, CODE], "num_cpus": 2, "max_num_seqs": 8, "kv_cache_gib": 1, "replicas": replicas}
    deployment = read_arguments(given)
    chat, code = deployment.models
    assert (chat.names, code.names) == (("chat",), ("code", "coder"))
    assert (chat.options.min_replicas, chat.options.most, chat.options.num_gpus) == (2, 3, 0)
    assert (code.options.min_replicas, code.options.most, code.options.num_gpus) == (1, 1, 1)
    assert (chat.settings.model, chat.settings.max_num_seqs, chat.settings.threads) == ("org/chat", 8, 2)
    assert (code.settings.model, code.settings.max_num_seqs, code.settings.served_model_name) == (
        "org/code", 4, ("code", "coder"),
    )  # fmt: skip
    assert (chat.settings.device, code.settings.device, code.settings.kv_cache_gib) == ("cpu", "cuda", 1)
    assert deployment.has_many


def test_general_options_are_those_of_each_model() -> None:
    deployment = read_arguments({"models": [CHAT, CODE], "max_replicas": 4, "replicas": {"code": {"max_replicas": 1}}})
    assert [model.options.most for model in deployment.models] == [4, 1]


def test_a_single_entry_may_keep_things() -> None:
    deployment = read_arguments({"models": [{**CHAT, "load": "start", "pinned": True}], "data_dir": "/data"})
    assert not deployment.has_many
    assert deployment.models[0].names == ("chat",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": {"cod": {}}}, "replicas: cod: not the name of an entry of `models`; did you mean code?"),
        ({"replicas": {"coder": {}}}, "replicas: coder: not the name of an entry of `models`"),
        ({"replicas": {"code": {"max_replica": 2}}}, "replicas: code: max_replica: not an option of replicas; did you"),
        (
            {"replicas": {"code": {"ingress_replicas": 2}}},
            "replicas: code: ingress_replicas: not an option of replicas",
        ),
        ({"replicas": {"code": {"num_gpus": 2}}}, "replicas: code: num_gpus: input should be less than or equal to 1"),
        (
            {"max_replicas": 2, "replicas": {"code": {"min_replicas": 3}}},
            "replicas: code: max_replicas: must be at least min_replicas (3), got 2",
        ),
        ({"replicas": {"code": 2}}, "replicas: code: input should be a valid dictionary (got 2)"),
        ({"replicas": "code"}, "replicas: input should be a valid dictionary (got 'code')"),
        (
            {"models": [CHAT, {**CODE, "load": "demand"}]},
            "models: code: load: replicas are always loaded; set it to start",
        ),
        ({"models": [CHAT, {**CODE, "idle_s": 60}]}, "models: code: idle_s: replicas are always loaded; leave it out"),
        ({"models": [CHAT, {**CODE, "device": "cuda"}]}, "models: code: device: cuda needs a GPU, but num_gpus is 0"),
        ({"models": [CHAT, {**CODE, "kv_events": "tcp://*:5557"}]}, "models: code: kv_events: not supported"),
        ({"models": [CHAT, {**CODE, "quantization": "int44"}]}, "models: entry 2 (code): quantization: expected"),
        ({"memory_gib": 8}, "memory_gib: replicas do not share memory between models; set kv_cache_gib of each model"),
        ({"load_timeout_s": 8}, "load_timeout_s: replicas are loaded before they get requests"),
        (
            {"data_dir": "/data"},
            "data_dir: several replicas cannot share stored data; serve one model, or leave it out",
        ),
        ({"model": "org/chat"}, "model: with `models`, set `path` in the model's entry"),
    ],
)
def test_what_several_models_cannot_have_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_arguments({"models": [CHAT, CODE], **given})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_options_by_model_need_models() -> None:
    with pytest.raises(OptionsError, match=r"^replicas: these are options of several models, but `models` is not set"):
        read_arguments({"replicas": {"code": {}}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_replica": 2}, "max_replica: not an option of replicas and not a setting; did you mean max_replicas"),
        ({"zzz": 1}, "zzz: not an option of replicas and not a setting"),
        ({"min_replicas": "two"}, "min_replicas: input should be a valid integer"),
        ({"min_replicas": 0}, "min_replicas: input should be greater than or equal to 1 (got 0)"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: must be at least min_replicas (3), got 2"),
        ({"num_gpus": 2}, "num_gpus: input should be less than or equal to 1 (got 2)"),
        ({"target_load": 0}, "target_load: input should be greater than 0 (got 0)"),
        ({"max_num_seqs": "many"}, "max_num_seqs: expected a whole number"),
        ({"model": "x", "isolate_keys": True}, "isolate_keys needs api_keys_file"),
        ({"port": 8000}, "port: replicas do not listen"),
        ({"host": "::1"}, "host: replicas do not listen"),
        ({"root_path": "/llm"}, "root_path: replicas do not listen"),
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile: replicas do not listen"),
        ({"device": "cuda"}, "device: cuda needs a GPU, but num_gpus is 0"),
        ({"device": "cpu", "num_gpus": 1}, "num_gpus: the device cpu uses no GPU, but num_gpus is 1"),
        ({"kv_events": "tcp://*:5557"}, "kv_events: not supported with replicas"),
        (
            {"data_dir": "/data", "max_replicas": 2},
            "data_dir: several replicas cannot share stored data; max_replicas must be 1, got 2",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_arguments(given)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)


def test_variables_of_a_server_that_listens_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_PORT", "9000")
    with pytest.raises(OptionsError, match="port"):
        read_arguments({})


def test_one_replica_may_keep_things() -> None:
    assert read_arguments({"data_dir": "/data"}).settings.data_dir == Path("/data")


def test_secrets_are_not_said() -> None:
    with pytest.raises(OptionsError) as caught:
        read_arguments({"api_key": ["sk-secret"]})
    assert "sk-secret" not in str(caught.value)


def test_the_host_of_the_image_is_no_question_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_HOST", "0.0.0.0")
    read_arguments({})
    monkeypatch.setenv("SAMEWISE_HOST", "10.0.0.7")
    with pytest.raises(OptionsError, match=r"^host: replicas do not listen"):
        read_arguments({})

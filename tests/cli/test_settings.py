"""Flag, variable and YAML key are one settings model."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.cli import serve
from server.cli.main import app
from server.config import GROUPS, Settings, load_settings, misspelt_variables
from server.setting_errors import SettingsError


class StartedError(Exception):
    """Raised in place of starting a server, with the settings that it would have."""


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(settings: Settings) -> None:
        raise StartedError(settings)

    monkeypatch.setattr(serve, "run", stop)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def settings_of(*arguments: str) -> Settings:
    result = invoke(*arguments)
    assert isinstance(result.exception, StartedError), result.output
    return result.exception.args[0]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "samewise.yaml"


def test_defaults_are_the_models_own() -> None:
    assert settings_of() == Settings()


def test_flag_goes_before_variable_before_file_before_default(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml_file.write_text("port: 1\nmax_num_seqs: 2\nmax_waiting: 3\n")
    monkeypatch.setenv("SAMEWISE_PORT", "10")
    monkeypatch.setenv("SAMEWISE_MAX_NUM_SEQS", "20")
    settings = settings_of("--config", str(yaml_file), "--port", "100")
    assert (settings.port, settings.max_num_seqs, settings.max_waiting, settings.threads) == (100, 20, 3, None)


def test_the_file_can_be_named_by_a_variable(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml_file.write_text("policy: fair\n")
    monkeypatch.setenv("SAMEWISE_CONFIG", str(yaml_file))
    assert settings_of().policy == "fair"


EXAMPLES: dict[str, tuple[str, Any]] = {
    "model": ("some/model", "some/model"),
    "served_model_name": ("x", ("x",)),
    "revision": ("v1.0", "v1.0"),
    "chat_template": ("chat.jinja", Path("chat.jinja")),
    "literal_messages": ("true", True),
    "template_date": ("2026-11-28", "2026-11-28"),
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "root_path": ("/llm/", "/llm"),
    "ssl_certfile": ("cert.pem", Path("cert.pem")),
    "ssl_keyfile": ("key.pem", Path("key.pem")),
    "device": ("cpu", "cpu"),
    "dtype": ("bfloat16", "bfloat16"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("64", 64),
    "block_size": ("16", 16),
    "kv_cache_dtype": ("int8", "int8"),
    "quantization": ("none", "none"),
    "rows": ("int16", "int16"),
    "exact": ("false", False),
    "cuda_graphs": ("false", False),
    "kv_cache_gib": ("0.5", 0.5),
    "prefix_caching": ("false", False),
    "state_snapshot_every": ("512", 512),
    "kv_events": ("tcp://*:5557", "tcp://*:5557"),
    "kv_events_topic": ("kv@10.0.0.7:8000@some/model", "kv@10.0.0.7:8000@some/model"),
    "kv_events_replay": ("ipc:///run/kv", "ipc:///run/kv"),
    "policy": ("priority", "priority"),
    "logprobs": ("processed", "processed"),
    "threads": ("1", 1),
    "speculation": ("suffix", "suffix"),
    "num_draft_tokens": ("4", 4),
    "draft_model": ("some/draft", "some/draft"),
    "heads": ("some/heads", ("some/heads",)),
    "learn": ("true", True),
    "learn_threads": ("2", 2),
    "learn_memory": ("1.5", 1.5),
    "aux_model": ("some/amateur", "some/amateur"),
    "tool_parser": ("hermes", "hermes"),
    "reasoning_parser": ("think", "think"),
    "score_tokens": ("no,yes", ("no", "yes")),
    "data_dir": ("data", Path("data")),
    "max_stored_mib": ("0.5", 0.5),
    "max_batch_lines": ("7", 7),
    "max_file_mib": ("1.5", 1.5),
    "images": ("false", False),
    "image_cache_gib": ("1.5", 1.5),
    "max_images": ("7", 7),
    "max_image_mib": ("1.5", 1.5),
    "max_image_megapixels": ("1.5", 1.5),
    "image_hosts": ("a.example,B.example", ("a.example", "b.example")),
    "max_files_mib": ("2.5", 2.5),
    "strict": ("true", True),
    "lenient": ("true", True),
    "any_model_name": ("true", True),
    "auto_truncate": ("true", True),
    "max_logprobs": ("30", 30),
    "api_keys_file": ("keys.txt", Path("keys.txt")),
    "isolate_keys": ("true", True),
    "cors_origins": ("https://a.example", ("https://a.example",)),
    "allowed_hosts": ("LLM.example.com", ("llm.example.com",)),
    "page": ("false", False),
    "max_body_mib": ("1.5", 1.5),
    "max_waiting": ("0", 0),
    "request_timeout_s": ("1", 1.0),
    "client_timeout_s": ("2", 2.0),
    "drain_grace_s": ("0", 0.0),
    "keepalive_s": ("3", 3.0),
    "engine_timeout_s": ("4", 4.0),
    "metrics_prefix": ("vllm", "vllm"),
    "open_metrics": ("true", True),
    "otlp_traces_endpoint": ("http://localhost:4318", "http://localhost:4318/v1/traces"),
    "log_format": ("json", "json"),
    "log_level": ("debug", "debug"),
    "log_prompts": ("true", True),
}


def test_every_field_has_an_example() -> None:
    secrets = {"api_key", "redis_url", "hub_token", "ssl_keyfile_password"}
    of_several = {"models", "memory_gib", "load_timeout_s"}  # see test_several_models.py
    assert set(EXAMPLES) | secrets | of_several == set(Settings.model_fields)


def test_every_field_is_in_one_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(Settings.model_fields)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_field_is_a_flag_a_variable_and_a_key(
    name: str, yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = EXAMPLES[name]
    dashed = name.replace("_", "-")
    if name.startswith("learn_"):
        monkeypatch.setenv("SAMEWISE_LEARN", "true")
    if name.startswith("kv_events_"):
        monkeypatch.setenv("SAMEWISE_KV_EVENTS", "tcp://*:5557")
    for one, other in (("ssl_certfile", "SSL_KEYFILE"), ("ssl_keyfile", "SSL_CERTFILE")):
        if name == one:
            monkeypatch.setenv(f"SAMEWISE_{other}", "other.pem")
    if name == "isolate_keys":
        monkeypatch.setenv("SAMEWISE_API_KEYS_FILE", "keys.txt")
    flags = {"model": [text], "log_prompts": ["--log-prompts"], "strict": ["--strict"], "learn": ["--learn"]}
    flags |= {
        "lenient": ["--lenient"],
        "any_model_name": ["--any-model-name"],
        "literal_messages": ["--literal-messages"],
        "isolate_keys": ["--isolate-keys"],
        "open_metrics": ["--open-metrics"],
    }
    flags |= {"auto_truncate": ["--auto-truncate"]}
    flags |= {switch: [f"--no-{dashed}"] for switch in ("prefix_caching", "exact", "cuda_graphs", "page", "images")}
    by_flag = settings_of(*flags.get(name, [f"--{dashed}", text]))
    yaml_file.write_text(f"{name}: {text!r}\n" if isinstance(value, str) else f"{name}: {text}\n")
    by_file = settings_of("--config", str(yaml_file))
    monkeypatch.setenv(f"SAMEWISE_{name.upper()}", text)
    by_variable = settings_of()
    assert getattr(by_flag, name) == getattr(by_file, name) == getattr(by_variable, name) == value
    assert by_flag == by_file == by_variable


def test_a_variable_can_be_overruled_either_way_by_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_PREFIX_CACHING", "false")
    assert settings_of().prefix_caching is False
    assert settings_of("--prefix-caching").prefix_caching is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "abc"], "--port: expected a whole number (got 'abc')"),
        (["--port", "70000"], "--port: must be at most 65535 (got '70000')"),
        (["--block-size", "48"], "--block-size: expected 16, 32 or 64 (got 48)"),
        (["--device", "tpu"], "--device: expected 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        (["--speculation", "n-gram"], "--speculation: expected 'auto', 'draft_model', 'eagle', "),
        (
            ["--quantization", "int9"],
            "--quantization: expected 'auto', 'int8', 'fp8', 'int4' or 'none'; did you mean 'int",
        ),
        (["--speculation", "early_exit"], "--speculation: 'early_exit' was removed. Use 'suffix', or 'draft_model'"),
        (
            ["--speculation", "draft_model"],
            "speculation 'draft_model' needs draft_model. Set draft_model too, or leave speculation",
        ),
        (["--learn-threads", "2"], "learn_threads needs learn. Set learn too, or leave learn_threads out\n"),
        (["--strict", "--lenient"], "strict and lenient exclude each other. Set one of them\n"),
        (["--redis-url", "redis://host"], "redis_url needs api_keys_file. Set api_keys_file too"),
        (["--isolate-keys", "--api-key", "x"], "isolate_keys needs api_keys_file. Set api_keys_file too"),
        (["--kv-events-replay", "tcp://*:5558"], "kv_events_replay needs kv_events. Set kv_events too"),
        (["--kv-events-topic", "kv@pod@model"], "kv_events_topic needs kv_events. Set kv_events too"),
        (
            ["--kv-events", "tcp://*:5557", "--no-prefix-caching"],
            "kv_events needs prefix_caching. Set prefix_caching too",
        ),
        (
            ["--kv-events", "tcp://*:5557", "--api-keys-file", "keys.yaml", "--isolate-keys"],
            "kv_events and isolate_keys exclude each other: with isolate_keys no prefix is shared\n",
        ),
        (
            ["--state-snapshot-every", "512", "--no-prefix-caching"],
            "state_snapshot_every needs prefix_caching. Set prefix_caching too",
        ),
        (["--no-learn", "--learn-memory", "2"], "learn_memory needs learn. Set learn too"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens: must be at least 1 (got '0')"),
        (["--num-draft-tokens", "65"], "--num-draft-tokens: must be at most 64 (got '65')"),
        (
            ["--metrics-prefix", "vllm:"],
            "--metrics-prefix: 'vllm:' cannot begin metric names. Use letters",
        ),
        (["--metrics-prefix", "9"], "--metrics-prefix: '9' cannot begin metric names"),
        (["--metrics-prefix", ""], "--metrics-prefix: '' cannot begin metric names"),
        (
            ["--otlp-traces-endpoint", "collector:4317"],
            "--otlp-traces-endpoint: 'collector:4317' is not the URL of an OTLP collector",
        ),
        (
            ["--otlp-traces-endpoint", "http://me:secret@host"],
            "--otlp-traces-endpoint: do not put credentials in the URL; use the variable OTEL_EXPORTER_OTLP_HEADERS\n",
        ),
        (["--keepalive-s", "nan"], "--keepalive-s: "),
        (["--keepalive-s", "inf"], "--keepalive-s: expected a finite number (got 'inf')"),
        (["--keepalive-s", "0"], "--keepalive-s: must be more than 0 (got '0')"),
        (["--keepalive-s", "soon"], "--keepalive-s: expected a number (got 'soon')"),
        (["--root-path", "llm"], "--root-path: 'llm' is not a path such as /llm. It begins with /"),
        (["--root-path", "https://a.example/llm"], "--root-path: 'https://a.example/llm' is not a path"),
        (["--ssl-certfile", "a.pem"], "ssl_certfile needs ssl_keyfile. Set ssl_keyfile too"),
        (["--ssl-keyfile", "a.pem"], "ssl_keyfile needs ssl_certfile. Set ssl_certfile too"),
        (["--ssl-keyfile-password", "x"], "ssl_keyfile_password needs ssl_keyfile. Set ssl_keyfile too"),
        (["--revision", ""], "--revision: is empty. Give a branch, tag or commit"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_several_heads(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("--heads", "a", "--heads", "b:c").heads == ("a", "b:c")
    yaml_file.write_text("heads: [a, /b/c]\n")
    assert settings_of("--config", str(yaml_file)).heads == ("a", "/b/c")
    yaml_file.write_text("heads: [1]\n")
    message = invoke("--config", str(yaml_file)).stderr
    assert message == f"error: {yaml_file}: heads: expected text; in a YAML file put it in quotes (got 1)\n"
    monkeypatch.setenv("SAMEWISE_HEADS", "a:org/name")
    assert settings_of().heads == ("a", "org/name")
    assert settings_of("--heads", "x").heads == ("x",)
    monkeypatch.setenv("SAMEWISE_HEADS", "")
    assert settings_of().heads == ()


def test_several_origins(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("https://a.example", "http://localhost:3000")
    assert settings_of("--cors-origins", both[0], "--cors-origins", both[1]).cors_origins == both
    assert settings_of("--cors-origins", "https://A.example, http://localhost:3000").cors_origins == both
    yaml_file.write_text("cors_origins: [https://a.example, 'http://localhost:3000']\n")
    assert settings_of("--config", str(yaml_file)).cors_origins == both
    monkeypatch.setenv("SAMEWISE_CORS_ORIGINS", ",".join(both))
    assert settings_of().cors_origins == both
    for name in ("*", "localhost", "none"):
        assert settings_of("--cors-origins", name).cors_origins == (name,)
    assert "other origins are given with it" in invoke("--cors-origins", "none,https://a.example").stderr
    monkeypatch.setenv("SAMEWISE_CORS_ORIGINS", "")
    assert settings_of().cors_origins == ()


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "null", "https://*.a.example"])
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    assert invoke("--cors-origins", origin).stderr.startswith(f"error: --cors-origins: '{origin}' is not an origin")


@pytest.mark.parametrize("name", ["kv-events", "kv-events-replay"])
@pytest.mark.parametrize(
    "endpoint", ["5557", "tcp://*", "tcp://:5557", "tcp://*:65536", "http://a:1", "udp://*:1", "ipc://", "inproc://a"]
)
def test_what_zeromq_cannot_listen_on_is_no_endpoint(name: str, endpoint: str) -> None:
    assert invoke(f"--{name}", endpoint).stderr.startswith(f"error: --{name}: '{endpoint}' is not a ZeroMQ endpoint")


@pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://127.0.0.1:*", "tcp://[::]:5557", "tcp://a.b:1", "ipc://a b"])
def test_where_zeromq_can_listen(endpoint: str) -> None:
    assert settings_of("--kv-events", endpoint).kv_events == endpoint


def test_a_draft_model_for_its_method() -> None:
    assert settings_of("--speculation", "draft_model", "--draft-model", "x").speculation == "draft_model"


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_PORT", "tcp://10.0.0.1:80")
    assert invoke().stderr.startswith("error: SAMEWISE_PORT: expected a whole number")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: many\n", "{file}: port: expected a whole number (got 'many')"),
        ("page: maybe\n", "{file}: page: expected true or false (got 'maybe')"),
        ("max_model_length: 5\n", "{file}: unknown setting `max_model_length`; did you mean `max_model_len`"),
        ("max-num-seqs: 5\n", "{file}: unknown setting `max-num-seqs`; did you mean `max_num_seqs`"),
        ("zzz: 5\n", "{file}: unknown setting `zzz`; `samewise serve --help` lists all\n"),
        ("- 5\n", "{file}: expected lines such as `port: 8000`, found a list"),
        ("port: 1\na: [\n", "{file}, line 3: not YAML: "),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key(content: str, message: str, yaml_file: Path) -> None:
    yaml_file.write_text(content)
    result = invoke("--config", str(yaml_file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: " + message.format(file=yaml_file))
    assert result.stderr.count("\n") == 1


def test_a_missing_file_and_an_empty_one(yaml_file: Path) -> None:
    assert "No such file" in invoke("--config", str(yaml_file)).stderr
    yaml_file.write_text("")
    assert settings_of("--config", str(yaml_file)) == Settings()


def test_a_secret_is_in_no_help_and_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_API_KEY", "sk-hush")
    assert settings_of().api_key is not None
    assert "hush" not in invoke("--help").output
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_key": 12345})
    assert "--api-key" in str(caught.value)
    assert "12345" not in str(caught.value)


@pytest.mark.parametrize("name", ["hub_token", "ssl_keyfile_password"])
def test_further_secrets(name: str, monkeypatch: pytest.MonkeyPatch, yaml_file: Path) -> None:
    needed = [] if name == "hub_token" else ["--ssl-certfile", "a", "--ssl-keyfile", "b"]
    monkeypatch.setenv(f"SAMEWISE_{name.upper()}", "hush")
    by_variable = settings_of(*needed)
    monkeypatch.delenv(f"SAMEWISE_{name.upper()}")
    yaml_file.write_text(f"{name}: hush\n")
    assert settings_of("--config", str(yaml_file), *needed) == by_variable
    assert settings_of(f"--{name.replace('_', '-')}", "hush", *needed) == by_variable
    assert getattr(by_variable, name).get_secret_value() == "hush"
    assert "hush" not in repr(by_variable)


def test_help_is_grouped_and_says_no_type_of_python() -> None:
    output = invoke("--help").output
    assert [line for line in output.splitlines() if line in [f"{title}:" for title in GROUPS]] == [
        f"{title}:" for title in GROUPS
    ]
    for words in ("typing.", "Annotated", "<function", "NoneType", "<str>"):
        assert words not in output
    assert "  --kv-events TEXT  " in output
    assert "  --kv-cache-gib GIB  " in output
    assert "it needs --ssl-keyfile." in " ".join(output.split())


@pytest.mark.parametrize("command", ["chat", "bench", "page", "verify", "train-heads"])
def test_no_help_says_a_type_of_python(command: str) -> None:
    output = CliRunner().invoke(app, [command, "--help"]).output
    assert [
        words for words in ("<str", "<int", "<float", "typing.", "None", "range>", "list[") if words in output
    ] == []


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_its_terminal(columns: int) -> None:
    command = [sys.executable, "-m", "server.cli.main", "serve", "--help"]
    environment = {**os.environ, "COLUMNS": str(columns)}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert columns - 10 < max(len(line) for line in output.splitlines()) <= columns


def test_every_description_is_one_to_four_sentences_that_end() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description is not None
        assert field.description.endswith("."), name
        assert len(field.description) < 260, name


def test_help_lists_every_field_with_its_default() -> None:
    output = " ".join(invoke("--help").output.split())
    for name in set(Settings.model_fields) - {"model", "models"}:
        assert f"--{name.replace('_', '-')}" in output
    assert "[default: 8000]" in output
    assert "--prefix-caching / --no-prefix-caching" in output


def test_a_misspelt_flag_is_refused_with_near_ones() -> None:
    result = invoke("--max-model-length", "5")
    assert result.exit_code == 2
    assert "--max-model-len" in result.stderr


def test_a_misspelt_variable_is_told() -> None:
    near = misspelt_variables(["SAMEWISE_MAX_MODEL_LENGTH", "SAMEWISE_PORT", "SAMEWISE_CACHE", "SAMEWISE_PORT_80_TCP"])
    assert near == [
        "the variable SAMEWISE_MAX_MODEL_LENGTH is not a setting and has no effect; "
        "did you mean SAMEWISE_MAX_MODEL_LEN?"
    ]


SERVICE_LINKS = {
    "SAMEWISE_SERVICE_HOST": "10.96.0.7",
    "SAMEWISE_SERVICE_PORT": "8000",
    "SAMEWISE_SERVICE_PORT_HTTP": "8000",
    "SAMEWISE_PORT": "tcp://10.96.0.7:8000",
    "SAMEWISE_PORT_8000_TCP": "tcp://10.96.0.7:8000",
    "SAMEWISE_PORT_8000_TCP_PROTO": "tcp",
    "SAMEWISE_PORT_8000_TCP_PORT": "8000",
    "SAMEWISE_PORT_8000_TCP_ADDR": "10.96.0.7",
}


def test_what_kubernetes_sets_for_a_service_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    result = invoke()
    assert result.exit_code == 2
    assert result.stderr.startswith("error: SAMEWISE_PORT: expected a whole number")
    assert "a Service named samewise: put `enableServiceLinks: false`" in result.stderr
    assert settings_of("--port", "80").port == 80
    assert misspelt_variables(SERVICE_LINKS) == []
    monkeypatch.setenv("SAMEWISE_PORT", "eighty")
    assert "Kubernetes" not in invoke().stderr


def test_version_and_commands() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("samewise ")
    output = CliRunner().invoke(app, ["--help"]).output
    assert all(command in output for command in ("serve", "chat", "bench"))


def test_the_command_alone_says_what_to_do_first() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    for command in ("serve", "chat", "bench", "verify", "page", "train-heads", "--install-completion"):
        assert f"samewise {command}" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 120

"""The settings: the one model, and reading it from flags, variables (SAMEWISE_*) and the YAML file."""

import difflib
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from model_runner.config import (
    METHOD_ALIASES,
    REMOVED_METHODS,
    Device,
    DType,
    KVCacheDType,
    LogprobsMode,
    Quantization,
    Rows,
    SpeculationMethod,
)
from scheduler.interface import Policy


def _parse_integer(value: object) -> object:
    """Flags and environment variables are text; a Literal of integers takes only integers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _split_list(value: object) -> object:
    """One text may hold several entries, written as in $PATH."""
    return [entry for entry in value.split(os.pathsep) if entry] if isinstance(value, str) else value


def _split_names(value: object) -> object:
    """One text may hold several names, with commas between them: folders are no names."""
    return [word for name in value.split(",") if (word := name.strip())] if isinstance(value, str) else value


def _split_words(value: object) -> object:
    """Commas may stand between several, however they were given."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return entries
    return [word for entry in entries for one in entry.split(",") if (word := one.strip())]


def _split_lowered(value: object) -> object:
    """As in other servers; browsers write origins and hosts in lower case."""
    words = _split_words(value)
    return [word.lower() if isinstance(word, str) else word for word in words] if isinstance(words, list) else words


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """What a browser never sends would never match."""
    for origin in origins:
        if origin not in _NAMED_ORIGINS and not _ORIGIN.fullmatch(origin):
            message = (
                "'{origin}' is no origin, such as https://chat.example.com or http://10.0.0.7:3000, and not {named}"
            )
            named = ", ".join(_NAMED_ORIGINS[:-1]) + f" or {_NAMED_ORIGINS[-1]}"
            raise PydanticCustomError("no_origin", message, {"origin": origin, "named": named})
    if "none" in origins and len(origins) > 1:
        raise PydanticCustomError("no_origin", "'none' stands for no origins, and others are given with it")
    return origins


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """A port, a scheme or a path would never match."""
    for host in hosts:
        if host != "*" and not _HOST_NAME.fullmatch(host):
            message = "'{host}' is no name of a host, such as llm.example.com or *.example.com, and not *"
            raise PydanticCustomError("no_host", message, {"host": host})
    return hosts


def _check_metrics_prefix(prefix: str) -> str:
    """Prometheus takes more, but a colon follows, and queries would have to quote anything else."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        message = "'{prefix}' cannot begin the names of metrics: it takes letters, digits and _, with no digit first"
        raise PydanticCustomError("no_metrics_prefix", message, {"prefix": prefix})
    return prefix


def _check_collector(url: str) -> str:
    """The whole URL; the path is the usual one where there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = "'{url}' is no URL of a collector, such as http://localhost:4318, which takes OTLP over HTTP"
        raise PydanticCustomError("no_collector", message, {"url": url})
    if parts.username is not None:
        message = "settings are shown in places where passwords are not to be: OTEL_EXPORTER_OTLP_HEADERS takes them"
        raise PydanticCustomError("secret_in_url", message)
    return url if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()


def _check_endpoint(endpoint: str) -> str:
    """ZeroMQ itself takes a port that is too large modulo 65536."""
    tcp = _TCP.fullmatch(endpoint)
    if not _IPC.fullmatch(endpoint) and (tcp is None or (tcp["port"] != "*" and int(tcp["port"]) > 65535)):
        message = "'{endpoint}' is no endpoint, such as tcp://*:5557, tcp://[::]:5557 or ipc:///run/samewise.kv"
        raise PydanticCustomError("no_endpoint", message, {"endpoint": endpoint})
    return endpoint


_TCP = re.compile(r"tcp://(\*|[\w.-]+|\[[\w:.%]+\]):(?P<port>\d{1,9}|\*)")
_IPC = re.compile(r"ipc://[^*\s].*")
_HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_NAMED_ORIGINS = ("*", "localhost", "none")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


def _known_method(value: object) -> object:
    """A method of speculation under its present name."""
    if isinstance(value, str) and value in REMOVED_METHODS:
        raise PydanticCustomError("removed", "'{value}' was removed. " + REMOVED_METHODS[value], {"value": value})
    return METHOD_ALIASES.get(value, value) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]
"""A flag that may be given several times, a list in the YAML file, or one text for all."""

Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_lowered), AfterValidator(_check_origins)]
"""The same, but in one text there are commas between them."""

Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_lowered), AfterValidator(_check_hosts)]
"""The same, of names of hosts."""

Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""Where ZeroMQ listens."""


class Settings(BaseSettings):
    """Everything that `samewise serve` can be told. Immutable once read."""

    model_config = SettingsConfigDict(env_prefix="SAMEWISE_", extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = Field(None, description="Folder, GGUF file or hub name; the embedded model when left out.")
    served_model_name: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)] = Field(
        (), description="Name in the API; by default the model's own. May be given several times."
    )
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")

    device: Device = Field("auto", description="Where the model runs.")
    dtype: DType = Field(
        "auto", description="Type that the model computes in; auto is float32 on CPU, the model's own on CUDA."
    )
    quantization: Quantization = Field(
        "auto",
        description="Type of the weights in products: int8 (CPU, and there by default), fp8 (CUDA), int4 or none (by "
        "default on CUDA).",
    )
    rows: Rows = Field(
        "auto",
        description="On CPU, type of the inputs of products with int8 weights: int8 (by default with AVX-512 VNNI) or "
        "int16 (by default without); the answers of one are not quite those of the other.",
    )
    exact: bool = Field(
        True, description="The same answer in every batch, bit for bit; --no-exact is faster on CUDA and promises less."
    )
    cuda_graphs: bool = Field(True, description="On CUDA, replay small steps from graphs captured at the start.")
    max_model_len: int | None = Field(None, ge=1, description="Prompt and output together; by default the model's.")
    max_num_seqs: int | None = Field(
        None, ge=1, description="Choices (answers) that run at the same time; by default 64 on CPU, 256 on CUDA."
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Tokens computed in one step; by default 512 on CPU, 8192 on CUDA."
    )
    block_size: Annotated[Literal[16, 32, 64], BeforeValidator(_parse_integer)] = Field(
        32, description="Tokens in a KV block."
    )
    kv_cache_dtype: KVCacheDType = Field(
        "auto", description="Type of the KV cache; auto is bfloat16 on CPU beside int8 or int4 weights, else dtype."
    )
    kv_cache_gib: float | None = Field(None, gt=0, description="Memory for the KV cache; by default from what is free.")
    prefix_caching: bool = Field(True, description="Reuse the KV cache of shared prompt prefixes.")
    kv_events: Endpoint | None = Field(
        None,
        description="ZeroMQ endpoint to publish at which prefixes are cached, for routers, such as tcp://*:5557; it "
        "shows the tokens of prompts to whoever connects.",
    )
    kv_events_topic: str = Field(
        "", description="Topic of what is published there; llm-d wants kv@ADDRESS:PORT@MODEL, of this server."
    )
    kv_events_replay: Endpoint | None = Field(
        None, description="ZeroMQ endpoint that sends the last of it again to routers that missed some."
    )
    policy: Policy = Field(
        "fcfs",
        description="Who waits for how long: first come, first served; lower `priority` of requests first; or fair "
        "shares for API keys, and turns between the requests of each with different `cache_salt`.",
    )
    logprobs: LogprobsMode = Field("raw", description="Logprobs of the raw or of the processed distribution.")
    threads: int | None = Field(None, ge=1, description="Threads of the CPU kernels; by default the cores at hand.")

    speculation: Annotated[SpeculationMethod | Literal["off"], BeforeValidator(_known_method)] = Field(
        "auto", description="How tokens are guessed ahead for requests that do not say; never changes an answer."
    )
    num_draft_tokens: int = Field(16, ge=1, le=64, description="Draft tokens of one choice in a step at most.")
    draft_model: str | None = Field(
        None, description="Smaller model with the same tokenizer, for speculation: folder, GGUF file or hub name."
    )
    heads: Names = Field(
        (),
        description="Medusa, Hydra or EAGLE-3 heads for speculation: folder or hub name; may be given several times; "
        "by default those that come with the embedded model.",
    )
    learn: bool = Field(
        False,
        description="In idle time, train the heads for speculation on what requests bring, and go on with that at the "
        "next start.",
    )
    learn_threads: int | None = Field(None, ge=1, description="Threads of that training; by default 1.")
    learn_memory: float | None = Field(
        None,
        gt=0,
        description="GiB for that training; by default what the heads need, and 0.25 for what they learn from.",
    )

    aux_model: str | None = Field(
        None,
        description="Weaker model with the same tokenizer, for `contrastive`: folder, GGUF file or hub name.",
    )

    tool_parser: str | None = Field(
        None, description="How the model writes calls of tools; by default what its chat template says."
    )
    reasoning_parser: str | None = Field(
        None, description="Tags of the model's reasoning, or none; by default what its chat template says."
    )

    score_tokens: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_words)] = Field(
        (), description="The words for no and yes of a model that scores by them, such as no,yes; by default its own."
    )

    api_key: SecretStr | None = Field(None, description="Key that clients must send; see also api_keys_file.")
    api_keys_file: Path | None = Field(
        None,
        description="File with one accepted key a line, or YAML with names, limits and shares; read again when it "
        "changes.",
    )
    isolate_keys: bool = Field(
        False, description="Let no key find by the speed of an answer what others have asked: no prefix is shared."
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis in which several servers count what keys use; by default each counts by itself."
    )
    data_dir: Path | None = Field(
        None,
        description="Folder for what clients have the server keep; by default it is kept in memory, and there are no "
        "files.",
    )
    max_stored_mib: float = Field(256.0, gt=0, description="So much is kept; beyond that, the oldest is dropped.")
    max_batch_lines: int = Field(50_000, ge=1, description="Requests in a batch.")
    max_file_mib: float = Field(200.0, gt=0, description="Largest file that may be uploaded.")
    max_files_mib: float = Field(4096.0, gt=0, description="All files together; beyond that, none is taken any more.")
    strict: bool = Field(False, description="Refuse what would otherwise be left out of a request and reported.")
    lenient: bool = Field(False, description="Report unknown fields of a request instead of refusing them.")
    cors_origins: Origins = Field(
        (),
        description="Origin of web pages that may use the server from a browser, * for all, localhost for those of "
        "the browser's own machine, none; may be given several times; by default localhost, and with API keys none.",
    )
    allowed_hosts: Hosts = Field(
        (),
        description="Name by which the server may be asked, such as llm.example.com or *.example.com, * for all; may "
        "be given several times; by default all with API keys, and without only those that nobody can register.",
    )
    page: bool = Field(
        True,
        description="Show a page at / to talk to the model and see what the server does, if samewise[page] is there.",
    )
    max_body_mib: float = Field(8.0, gt=0, description="Largest request body.")
    max_waiting: int = Field(1024, ge=0, description="Choices that may wait beyond those that run; more get 429.")
    request_timeout_s: float = Field(600.0, gt=0, description="A request that takes longer is ended with an error.")
    client_timeout_s: float = Field(
        30.0, gt=0, description="A client that keeps the server waiting for this long, sending or reading, is dropped."
    )
    drain_grace_s: float = Field(30.0, ge=0, description="How long running requests may finish after SIGTERM.")
    keepalive_s: float = Field(15.0, gt=0, description="Silence on a stream after which a sign of life is sent.")
    engine_timeout_s: float = Field(300.0, gt=0, description="An engine silent for this long mid-step is restarted.")
    metrics_prefix: Annotated[str, AfterValidator(_check_metrics_prefix)] = Field(
        "samewise",
        description="What the names in /metrics begin with, before a colon; vllm for dashboards and routers of vLLM.",
    )
    open_metrics: bool = Field(
        False,
        description="Answer /metrics and /load without a key where keys are configured, for routers that have none; "
        "what each key has used is left out then.",
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(_check_collector)] | None = Field(
        None, description="OpenTelemetry collector that traces are sent to, such as http://localhost:4318."
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_prompts: bool = Field(False, description="Also log prompts and outputs, which are never logged otherwise.")

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.api_key is not None or self.api_keys_file is not None

    @model_validator(mode="after")
    def _have_draft_model(self) -> "Settings":
        if self.speculation == "draft_model" and self.draft_model is None:
            raise PydanticCustomError("no_draft_model", "speculation by draft_model needs the setting draft_model")
        return self

    @model_validator(mode="after")
    def _have_learn(self) -> "Settings":
        for name in ("learn_threads", "learn_memory"):
            if getattr(self, name) is not None and not self.learn:
                raise PydanticCustomError("no_learn", "{name} needs the setting learn", {"name": name})
        return self

    @model_validator(mode="after")
    def _be_strict_or_lenient(self) -> "Settings":
        if self.strict and self.lenient:
            raise PydanticCustomError("strict_and_lenient", "strict and lenient are contraries: set one of them")
        return self

    @model_validator(mode="after")
    def _have_keys(self) -> "Settings":
        for name in ("isolate_keys", "redis_url"):
            if getattr(self, name) and self.api_keys_file is None:
                raise PydanticCustomError("no_keys", "{name} needs the setting api_keys_file", {"name": name})
        return self

    @model_validator(mode="after")
    def _have_kv_events(self) -> "Settings":
        if self.kv_events is None:
            for name in ("kv_events_topic", "kv_events_replay"):
                if getattr(self, name):
                    raise PydanticCustomError("no_kv_events", "{name} needs the setting kv_events", {"name": name})
        elif not self.prefix_caching:
            raise PydanticCustomError("no_prefixes", "kv_events needs the setting prefix_caching")
        elif self.isolate_keys:
            raise PydanticCustomError(
                "no_prefixes", "with isolate_keys, kv_events has nothing to tell: no prefix is shared"
            )
        return self


PREFIX = "SAMEWISE_"


OTHER_VARIABLES = frozenset({"SAMEWISE_CONFIG", "SAMEWISE_CACHE"})
"""Variables with the prefix that are read elsewhere."""


SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes gives containers SAMEWISE_PORT=tcp://10.0.0.1:8000 where there is a Service named samewise."""


class SettingsError(ValueError):
    """A setting cannot be used; the message is one line that names the field and the source of its value."""


def flag(field: str) -> str:
    """The command line option of a field."""
    return "--" + field.replace("_", "-")


def load_settings(
    flags: Mapping[str, object], config_file: Path | None = None, spelt: Callable[[str], str] | None = None
) -> Settings:
    """Read the settings from flags (None: not given), environment and file, in this order. Raises SettingsError.

    `spelt` returns how errors name a given field; by default, its flag.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    environment: dict[str, Any] = EnvSettingsSource(Settings)()
    from_file = _read_file(config_file) if config_file is not None else {}
    try:
        return Settings(**{**from_file, **environment, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = {name: (spelt or _on_the_command_line)(name) for name in given}
        raise SettingsError(_describe(first, names, environment, config_file)) from None


def misspelt_variables(environment: Iterable[str] = os.environ) -> list[str]:
    """A warning for each variable that looks like a misspelt setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    warnings = []
    for variable in sorted(environment):
        near = difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0.85)
        if variable.startswith(PREFIX) and near and variable.upper() not in known:
            warnings.append(f"{variable} is not a setting and has no effect; did you mean {near[0]}?")
    return warnings


def alternatives(annotation: object) -> tuple[Any, ...]:
    """The types or literal values that a field takes, except None; for a list, those of its entries."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin is tuple:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(one for part in get_args(annotation) for one in alternatives(part) if one is not types.NoneType)
    return (annotation,)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  (slow, and only needed for a file)

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected `key: value` lines, found a {type(content).__name__}")
    for key in content:
        if key not in Settings.model_fields:
            raise SettingsError(f"{path}: {_unknown_key(str(key))}")
    return content


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), Settings.model_fields, n=3, cutoff=0.6)
    return f"unknown key `{key}`" + (f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else "")


def _on_the_command_line(name: str) -> str:
    return "MODEL" if name == "model" else flag(name)


def _describe(
    error: ErrorDetails, given: Mapping[str, str], environment: Mapping[str, object], config_file: Path | None
) -> str:
    if not error["loc"]:
        return error["msg"]
    name = str(error["loc"][0])
    if name in given:
        source = given[name]
    elif name in environment:
        source = PREFIX + name.upper()
    else:
        source = f"{name} in {config_file}"
    secret = error["type"] == "secret_in_url" or SecretStr in alternatives(Settings.model_fields[name].annotation)
    got = "" if secret else f" (got {error['input']!r})"
    return f"{source}: {error['msg'][0].lower()}{error['msg'][1:]}{got}{_advice(source, error['input'])}"


def _advice(source: str, value: object) -> str:
    """Advice if Kubernetes has set the variable, not the user."""
    if source != PREFIX + "PORT" or not SERVICE_LINK.match(str(value)):
        return ""
    return (
        "; Kubernetes sets it for a Service named samewise: put `enableServiceLinks: false` into the pod's "
        "specification, or name the Service otherwise"
    )

"""The settings: one model for flags, variables (SAMEWISE_*) and the YAML file, and the code that reads it."""

import difflib
import os
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from model_runner.config import Device, DType, InputType, KVCacheDType, LogprobsMode, Quantization, SpeculationMethod
from scheduler.interface import Policy
from server.model_settings import OF_SEVERAL, Entries, ModelSettings, check_together, settings_of, with_models
from server.setting_errors import (
    PREFIX,
    SettingsError,
    describe_value_error,
    missing_setting,
    service_link_advice,
    unknown_setting,
)
from server.setting_types import (
    Collector,
    Endpoint,
    File,
    Hosts,
    ImageHosts,
    IsoDate,
    MetricsPrefix,
    Model,
    Names,
    Origins,
    Revision,
    UrlPrefix,
    known_method,
    parse_integer,
    split_names,
    split_words,
)


class Settings(BaseSettings):
    """All settings of `samewise serve`. Immutable."""

    model_config = SettingsConfigDict(env_prefix="SAMEWISE_", extra="forbid", frozen=True, allow_inf_nan=False)

    model: Model = Field(
        None,
        description="Folder, GGUF file or its URL, hub name such as Qwen/Qwen3-0.6B or user/repo:Q4_K_M, "
        "ollama:NAME:TAG or lmstudio:PUBLISHER/REPO. By default the embedded SmolLM2-135M.",
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_names)] = Field(
        (),
        description="Name of the model in the API. By default its hub, folder or file name. Repeat it to serve the "
        "model under several names.",
    )
    revision: Revision | None = Field(
        None, description="Branch, tag or commit of a model from the hub. By default its main branch."
    )
    hub_token: SecretStr | None = Field(
        None,
        description="Hugging Face token for gated and private models. By default the variable HF_TOKEN or the login "
        "of `hf auth login`. A flag is visible in the list of processes.",
    )
    chat_template: File | None = Field(
        None,
        description="Jinja file that replaces the model's chat template, if that is missing or shows no tools.",
    )
    literal_messages: bool = Field(False, description="Read control tokens that clients spell in messages as text.")
    template_date: IsoDate | None = Field(
        None, description="Date that chat templates show as today's. By default today."
    )
    tool_parser: str | None = Field(
        None,
        description="Format of the model's tool calls, such as hermes. By default detected from the chat template; "
        "set it when calls come back as text.",
    )
    reasoning_parser: str | None = Field(
        None,
        description="Tags of the model's reasoning, such as think, or none. By default found in the chat template.",
    )
    score_tokens: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_words)] = Field(
        (),
        description="The words for no and yes of a reranker that scores by them, such as no,yes. By default the "
        "model's own.",
    )
    aux_model: str | None = Field(
        None,
        description="Weaker model with the same tokenizer, which requests with `contrastive` need: folder, GGUF file "
        "or hub name.",
    )

    models: Annotated[Entries, NoDecode] = Field(
        (),
        description="Models of a server that serves several, each with a `name`. They are loaded when a request asks "
        "for them, and unloaded when another one needs the memory.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory in GiB for all models on one device together. By default most of what is free there when "
        "the server starts. It needs several models.",
    )
    load_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a request waits for its model to be loaded. Then it gets 503. It needs several "
        "models.",
    )

    device: Device = Field("auto", description="Device that runs the model. auto takes CUDA if there is a GPU.")
    dtype: DType = Field(
        "auto",
        description="Type that the model computes in. auto is float32 on CPU and the model's own type on CUDA.",
    )
    quantization: Quantization = Field(
        "auto",
        description="Type of the weights: int8 (CPU), fp8 (CUDA), int4, or none (the default on CUDA). On CPU, auto "
        "keeps blocks of GGUF, GPTQ and AWQ as they are, and packs other weights and the embedded model in int8. int4 "
        "changes answers the most.",
    )
    rows: InputType = Field(
        "auto",
        description="Type of the inputs of products with int8 weights on CPU. auto is int8 with AVX-512 VNNI and "
        "int16 without. The two round differently, so their answers may differ. Setting it packs all weights in int8.",
    )
    exact: bool = Field(
        True,
        description="Give the same answer in every batch, bit for bit. --no-exact is faster on CUDA and promises less.",
    )
    cuda_graphs: bool = Field(
        True, description="Replay small steps from CUDA graphs. Turn it off to start sooner or to debug."
    )
    threads: int | None = Field(None, ge=1, description="Threads of the CPU kernels. By default the available cores.")

    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of prompt and answer together. By default the model's own; lower it when the KV "
        "cache does not fit. It also chooses the factors of models with LongRoPE.",
    )
    kv_cache_gib: float | None = Field(
        None, gt=0, description="Memory for the KV cache in GiB. By default a share of what is free after the weights."
    )
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="Type of the KV cache. auto is bfloat16 on CPU with int8 or int4 weights, otherwise `dtype`. int8 "
        "or fp8 hold more tokens in the same memory.",
    )
    block_size: Annotated[Literal[16, 32, 64], BeforeValidator(parse_integer)] = Field(
        32, description="Tokens of a KV cache block, the unit in which prefixes are shared. Rarely worth changing."
    )
    prefix_caching: bool = Field(True, description="Reuse the KV cache of prompts that begin alike.")
    state_snapshot_every: int | None = Field(
        None,
        ge=0,
        description="Tokens of a long prompt between states of recurrent layers (Qwen3.5, Mamba) that are kept for "
        "other prompts that begin alike, in whole blocks. Default 2048; 0 keeps only states at the end of prompts.",
    )

    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="Maximum choices (answers) that run at the same time. By default 64 on CPU and 256 on CUDA, or 128 "
        "on GPUs with less than 40 GiB.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens computed in one step. By default 512 on CPU and 8192 on CUDA, or 2048 on "
        "GPUs with less than 40 GiB. Lower it for steadier streams, raise it for long prompts.",
    )
    policy: Policy = Field(
        "fcfs",
        description="Order of waiting requests: fcfs (first come, first served), priority, or fair. With priority, the "
        "lowest `priority` of a request is first. With fair, API keys get shares by weight, and the `cache_salt` "
        "values of each key equal ones.",
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        description="Maximum choices that wait while `max_num_seqs` choices run. Requests beyond that get 429.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Seconds after which a request fails. Raise it for long answers on slow machines."
    )
    engine_timeout_s: float = Field(
        300.0, gt=0, description="Seconds without a sign of life in a step after which the engine is restarted."
    )

    speculation: Annotated[SpeculationMethod | Literal["off"], BeforeValidator(known_method)] = Field(
        "auto",
        description="Method that drafts tokens ahead for requests that name none, or off. It changes the speed and "
        "never an answer.",
    )
    num_draft_tokens: int = Field(
        16, ge=1, le=64, description="Maximum draft tokens of one choice in a step. Rarely worth changing."
    )
    draft_model: str | None = Field(
        None,
        description="Smaller model with the same tokenizer, for speculation: folder, GGUF file or hub name.",
    )
    heads: Names = Field(
        (),
        description="Folder or hub name of Medusa, Hydra or EAGLE-3 heads for speculation, or of the model itself for "
        "its own module for multi-token prediction. Repeat it for several. By default the heads of the embedded model, "
        "if that is served.",
    )
    learn: bool = Field(
        False,
        description="Train the heads for speculation on requests while the server is idle, and keep them for the next "
        "start.",
    )
    learn_threads: int | None = Field(None, ge=1, description="Threads of the training with `learn`. By default 1.")
    learn_memory: float | None = Field(
        None,
        gt=0,
        description="Memory of the training with `learn`, in GiB. By default what the heads need, and 0.25 for "
        "examples.",
    )

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. The default admits this machine only; 0.0.0.0 admits others too, so set a "
        "key with it.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    root_path: UrlPrefix = Field(
        "",
        description="Path that a proxy strips before it passes requests on, such as /llm. Links of the page and of "
        "the API's documentation then begin with it.",
    )
    ssl_certfile: File | None = Field(
        None,
        description="PEM file of the certificate, and of those that signed it. With it the server speaks HTTPS; it "
        "needs `ssl_keyfile`.",
    )
    ssl_keyfile: File | None = Field(None, description="PEM file of the certificate's private key.")
    ssl_keyfile_password: SecretStr | None = Field(None, description="Password of `ssl_keyfile`, if it is encrypted.")
    page: bool = Field(
        True, description="Show a page at / to chat and to watch the server, if `samewise[page]` is installed."
    )
    max_body_mib: float | None = Field(
        None,
        gt=0,
        description="Largest request body in MiB. Larger ones get 413. By default 8, and 64 if the model takes images.",
    )
    client_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a client may pause while sending or reading before it is disconnected."
    )
    keepalive_s: float = Field(
        15.0,
        gt=0,
        description="Seconds without output after which a stream gets a keep-alive. Stay below the idle timeout of "
        "proxies.",
    )
    drain_grace_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM. Then they fail."
    )

    images: bool = Field(
        True, description="Take images, if the model does. --no-images leaves the weights for them on disk."
    )
    image_cache_gib: float = Field(
        0.5, gt=0, description="Memory for what the model sees in images, in GiB. Evicted images are computed again."
    )
    max_images: int = Field(100, ge=1, description="Maximum images of one request.")
    max_image_mib: float = Field(20.0, gt=0, description="Largest image file in MiB.")
    max_image_megapixels: float = Field(
        50.0, gt=0, description="Largest image in millions of pixels. Decoding takes up to 20 bytes of memory for each."
    )
    image_hosts: ImageHosts = Field(
        (),
        description="Host that images are fetched from, by https, such as images.example.com. It needs a public "
        "address. Repeat it for several. By default none: https URLs are refused.",
    )

    strict: bool = Field(
        False,
        description="Refuse request fields that have no effect here, instead of listing them in `warnings`.",
    )
    lenient: bool = Field(
        False, description="Report unknown request fields instead of refusing them, for clients that send extras."
    )
    auto_truncate: bool = Field(False, description="Cut texts that are too long for vectors or scores, and report it.")
    any_model_name: bool = Field(
        False, description="Answer requests for models of any name with the only model, and report it."
    )
    logprobs: LogprobsMode = Field(
        "raw",
        description="Logprobs of the model's own distribution (raw), or of the one after penalties, temperature and "
        "filters (processed).",
    )
    max_logprobs: int = Field(
        20, ge=0, le=1000,
        description="Most alternatives that a request may ask for with the logprobs of a token. Each takes about "
        "100 bytes of memory for a token until it is sent.",
    )  # fmt: skip

    data_dir: Path | None = Field(
        None,
        description="Folder for stored responses, files, batches and usage. By default responses and usage are in "
        "memory until the server ends, and files and batches are off.",
    )
    max_stored_mib: float = Field(
        256.0, gt=0, description="Maximum size of stored responses in MiB. Beyond it the oldest are dropped."
    )
    max_file_mib: float = Field(200.0, gt=0, description="Largest uploaded file in MiB. Larger ones get 413.")
    max_files_mib: float = Field(
        4096.0, gt=0, description="Maximum size of all files together in MiB. Beyond it uploads are refused."
    )
    max_batch_lines: int = Field(50_000, ge=1, description="Maximum requests of a batch.")

    api_key: SecretStr | None = Field(
        None,
        description="Key that clients must send. Prefer the variable SAMEWISE_API_KEY: a flag is visible in the list "
        "of processes.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="File with one key a line, or YAML with names, limits and shares. It is read again when it "
        "changes.",
    )
    isolate_keys: bool = Field(
        False,
        description="Share no cached prefix between keys, so that the speed of an answer reveals nothing about other "
        "keys' prompts.",
    )
    redis_url: SecretStr | None = Field(
        None,
        description="Redis in which several servers count usage together. By default each server counts alone.",
    )
    cors_origins: Origins = Field(
        (),
        description="Origin of web pages that may call the server from a browser; * for all, localhost for pages of "
        "the browser's own machine, or none. Repeat it for several. By default localhost, and none with API keys.",
    )
    allowed_hosts: Hosts = Field(
        (),
        description="Host name that requests may be sent to, such as llm.example.com or *.example.com; * for all. "
        "Repeat it for several. By default all with API keys, otherwise only names that no one can register.",
    )
    open_metrics: bool = Field(
        False,
        description="Serve /metrics and /load without a key, for routers that have none. Each key's usage is then "
        "hidden.",
    )

    log_format: Literal["text", "json"] = Field("text", description="Format of log lines. Use json for log collectors.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_prompts: bool = Field(False, description="Also log prompts and answers, which are never logged otherwise.")
    metrics_prefix: MetricsPrefix = Field(
        "samewise",
        description="First part of metric names, before a colon. Use vllm for dashboards and routers of vLLM.",
    )
    otlp_traces_endpoint: Collector | None = Field(
        None, description="OpenTelemetry collector to send traces to over HTTP, such as http://localhost:4318."
    )
    kv_events: Endpoint | None = Field(
        None,
        description="ZeroMQ endpoint, such as tcp://*:5557, that tells routers which prefixes are cached. It shows "
        "the tokens of prompts to everyone who connects.",
    )
    kv_events_topic: str = Field(
        "", description="Topic of the messages of `kv_events`. llm-d expects kv@ADDRESS:PORT@MODEL of this server."
    )
    kv_events_replay: Endpoint | None = Field(
        None, description="ZeroMQ endpoint that sends recent messages of `kv_events` again to routers that missed some."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Values come from the caller alone: load_settings reads the variables."""
        return (init_settings,)

    def of_model(self, entry: ModelSettings) -> "Settings":
        """The settings of a server that serves this entry of `models` alone."""
        return settings_of(self, entry)

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.api_key is not None or self.api_keys_file is not None

    def body_mib(self, *, takes_images: bool) -> float:
        """Largest request body in MiB."""
        return self.max_body_mib or (64.0 if takes_images else 8.0)

    @model_validator(mode="after")
    def _check_models(self) -> "Settings":
        if "models" in self.model_fields_set:
            check_together(self)
            return self
        for name in OF_SEVERAL:
            if name in self.model_fields_set:
                raise missing_setting(name, "models")
        return self

    @model_validator(mode="after")
    def _check_draft_model(self) -> "Settings":
        if self.speculation == "draft_model" and self.draft_model is None and not self.models:
            raise missing_setting("speculation 'draft_model'", "draft_model")
        return self

    @model_validator(mode="after")
    def _check_learn(self) -> "Settings":
        for name in ("learn_threads", "learn_memory"):
            if getattr(self, name) is not None and not self.learn:
                raise missing_setting(name, "learn")
        return self

    @model_validator(mode="after")
    def _check_snapshots(self) -> "Settings":
        if self.state_snapshot_every is not None and not self.prefix_caching:
            raise missing_setting("state_snapshot_every", "prefix_caching")
        return self

    @model_validator(mode="after")
    def _check_strictness(self) -> "Settings":
        if self.strict and self.lenient:
            raise PydanticCustomError("strict_and_lenient", "strict and lenient exclude each other. Set one of them")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "Settings":
        for name in ("isolate_keys", "redis_url"):
            if getattr(self, name) and self.api_keys_file is None:
                raise missing_setting(name, "api_keys_file")
        return self

    @model_validator(mode="after")
    def _check_certificate(self) -> "Settings":
        if self.ssl_certfile is not None and self.ssl_keyfile is None:
            raise missing_setting("ssl_certfile", "ssl_keyfile")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise missing_setting("ssl_keyfile", "ssl_certfile")
        if self.ssl_keyfile_password is not None and self.ssl_keyfile is None:
            raise missing_setting("ssl_keyfile_password", "ssl_keyfile")
        return self

    @model_validator(mode="after")
    def _check_kv_events(self) -> "Settings":
        if self.kv_events is None:
            for name in ("kv_events_topic", "kv_events_replay"):
                if getattr(self, name):
                    raise missing_setting(name, "kv_events")
        elif not self.prefix_caching:
            raise missing_setting("kv_events", "prefix_caching")
        elif self.isolate_keys:
            raise PydanticCustomError(
                "no_prefixes", "kv_events and isolate_keys exclude each other: with isolate_keys no prefix is shared"
            )
        return self


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("model", "served_model_name", "revision", "hub_token", "chat_template", "template_date", "literal_messages"),
        *("tool_parser", "reasoning_parser", "score_tokens", "aux_model"),
    ),
    "Several models": ("models", *OF_SEVERAL),
    "Device and precision": ("device", "dtype", "quantization", "rows", "exact", "cuda_graphs", "threads"),
    "Memory": (
        *("max_model_len", "kv_cache_gib", "kv_cache_dtype", "block_size", "prefix_caching", "state_snapshot_every"),
    ),
    "Scheduling": (
        *("max_num_seqs", "max_num_batched_tokens", "policy", "max_waiting", "request_timeout_s", "engine_timeout_s"),
    ),
    "Speculation": (
        *("speculation", "num_draft_tokens", "draft_model", "heads", "learn", "learn_threads", "learn_memory"),
    ),
    "Network": (
        *("host", "port", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "page", "max_body_mib"),
        *("client_timeout_s", "keepalive_s", "drain_grace_s"),
    ),
    "API": ("strict", "lenient", "any_model_name", "auto_truncate", "logprobs", "max_logprobs"),
    "Images": ("images", "image_cache_gib", "max_images", "max_image_mib", "max_image_megapixels", "image_hosts"),
    "Stored data": ("data_dir", "max_stored_mib", "max_file_mib", "max_files_mib", "max_batch_lines"),
    "Security": (
        *("api_key", "api_keys_file", "isolate_keys", "redis_url", "cors_origins", "allowed_hosts", "open_metrics"),
    ),
    "Observability": (
        *("log_format", "log_level", "log_prompts", "metrics_prefix", "otlp_traces_endpoint"),
        *("kv_events", "kv_events_topic", "kv_events_replay"),
    ),
}
"""Names of the settings by the group under which help and documentation list them."""

OTHER_VARIABLES = frozenset({"SAMEWISE_CONFIG", "SAMEWISE_CACHE", "SAMEWISE_KERNELS"})
"""Variables with the prefix that are not settings."""


def flag(field: str) -> str:
    """The command line option of a field."""
    return "--" + field.replace("_", "-")


def load_settings(
    flags: Mapping[str, object], config_file: Path | None = None, spelt: Callable[[str], str] | None = None
) -> Settings:
    """Read the settings. Flags override environment variables, which override the file. Raises SettingsError.

    A flag that is None was not given; `model` may be a list of several. `spelt` returns how errors name a flag's field;
    by default, as its option.
    """
    environment: dict[str, Any] = EnvSettingsSource(Settings)()
    from_file = _read_file(config_file) if config_file is not None else {}
    given = {name: value for name, value in flags.items() if value not in (None, [], ())}
    given = with_models(given, environment, from_file)
    values = {**from_file, **environment, **given}
    if "models" in given:
        values.pop("model", None)
    try:
        return Settings(**values)
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
            warnings.append(f"the variable {variable} is not a setting and has no effect; did you mean {near[0]}?")
    return warnings


def alternatives(annotation: object) -> tuple[Any, ...]:
    """The types or literal values that a field accepts, except None. For a list, the types of its entries."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (tuple, Annotated):
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
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SettingsError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected lines such as `port: 8000`, found a {type(content).__name__}")
    for key in content:
        if key not in Settings.model_fields:
            advice = "; `samewise serve --help` lists all"
            raise SettingsError(f"{path}: {unknown_setting(str(key), Settings.model_fields, advice)}")
    return content


def _on_the_command_line(name: str) -> str:
    return "MODEL" if name in ("model", "models") else flag(name)


def _describe(
    error: ErrorDetails, given: Mapping[str, str], environment: Mapping[str, object], config_file: Path | None
) -> str:
    name = str(error["loc"][0] if error["loc"] else error.get("ctx", {}).get("setting", ""))
    if not name:
        return error["msg"]
    if name in given:
        source = given[name]
    elif name in environment:
        source = PREFIX + name.upper()
    else:
        source = f"{config_file}: {name}"
    if error["type"] == "setting_error":
        return f"{source}: {error['msg']}"
    if name == "models" and len(error["loc"]) > 1:
        source = ": ".join((source, f"entry {int(error['loc'][1]) + 1}", *map(str, error["loc"][2:3])))
    annotation = Settings.model_fields[name].annotation
    secret = error["type"] in ("secret_in_url", "missing") or SecretStr in alternatives(annotation)
    got = "" if secret else f" (got {error['input']!r})"
    return f"{source}: {describe_value_error(error)}{got}{service_link_advice(source, error['input'])}"

"""The models of a server that serves several: the entries of `models` in the settings file."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from model_runner.hub.access import ModelNotFoundError
from server.setting_errors import PREFIX, SettingsError, describe_value_error, setting_error, unknown_setting
from server.setting_types import split_names

if TYPE_CHECKING:
    from server.config import Settings

NOT_SHARED = frozenset(
    {
        *("revision", "chat_template", "tool_parser", "reasoning_parser", "score_tokens", "aux_model", "draft_model"),
        *("heads", "kv_events", "kv_events_topic", "kv_events_replay"),
    }
)
"""Settings of one model, which cannot be a default for all."""
OF_A_MODEL = NOT_SHARED | {
    *("device", "dtype", "quantization", "rows", "exact", "cuda_graphs", "threads"),
    *("max_model_len", "kv_cache_gib", "kv_cache_dtype", "block_size", "prefix_caching", "state_snapshot_every"),
    *("max_num_seqs", "max_num_batched_tokens", "policy", "max_waiting", "request_timeout_s", "engine_timeout_s"),
    *("speculation", "num_draft_tokens", "learn", "learn_threads", "learn_memory"),
    *("images", "image_cache_gib", "logprobs", "template_date", "literal_messages"),
}
"""Settings that an entry may have. Outside of `models` they are defaults for all entries, unless in NOT_SHARED."""
NOT_OF_ENCODERS = ("kv_cache_gib", "kv_cache_dtype", "max_model_len", "learn", "learn_threads", "learn_memory")
"""Settings for models that generate. As defaults for all models, they do not count for encoders."""
IN_FILE_ONLY = frozenset({"models"})
"""Settings that are no flag and no variable."""
OF_SEVERAL = ("memory_gib", "load_timeout_s")
"""Settings of a server with several models."""
_NAMED = {"model": "`path`", "served_model_name": "`name` and `aliases`"}
"""Keys of an entry in place of the settings of a server with one model."""


def _check_name(name: str) -> str:
    if not name.strip() or name != name.strip() or not name.isprintable():
        raise PydanticCustomError("no_name", "is not a name; give letters or digits, without a space at an end")
    return name


_Name = Annotated[str, AfterValidator(_check_name)]


class ModelSettings(BaseModel):
    """An entry of `models`: a model of a server with several. Immutable."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: _Name = Field(description="Name of the model in the API.")
    path: str | None = Field(
        None,
        description="Folder, GGUF file or its URL, hub name such as Qwen/Qwen3-0.6B or user/repo:Q4_K_M, "
        "ollama:NAME:TAG, lmstudio:PUBLISHER/REPO, or SmolLM2-135M-Instruct for the embedded model. By default `name`.",
    )
    aliases: Annotated[tuple[_Name, ...], BeforeValidator(split_names)] = Field(
        (), description="Other names of the model in the API."
    )
    load: Literal["start", "demand"] = Field(
        "demand",
        description="When the model is loaded: at the start, or when a request asks for it. The default of the first "
        "entry is start.",
    )
    pinned: bool = Field(False, description="Never unload the model once it is loaded, unless an operator asks for it.")
    idle_s: float | None = Field(
        None,
        gt=0,
        description="Seconds without a request after which the model is unloaded. By default it is only unloaded when "
        "another model needs its memory.",
    )

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The entry's own values of settings in OF_A_MODEL, as they were given."""
        return self.model_extra or {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in the API, its own first."""
        return (self.name, *self.aliases)


def check_entries(entries: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    """The entries, the first of which is loaded at the start unless it says otherwise."""
    if not entries:  # the default
        return entries
    counts = Counter(name for entry in entries for name in entry.names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise setting_error("models", f"the name '{twice[0]}' is given twice. Names and aliases must differ")
    for number, entry in enumerate(entries, 1):
        if entry.pinned and entry.idle_s is not None:
            message = f"{_place(number, entry)}: pinned and idle_s exclude each other. Leave one out"
            raise setting_error("models", message)
    first = entries[0] if "load" in entries[0].model_fields_set else entries[0].model_copy(update={"load": "start"})
    return (first, *entries[1:])


def with_models(
    flags: Mapping[str, Any], environment: Mapping[str, Any], from_file: Mapping[str, Any]
) -> dict[str, Any]:
    """The flags, with an entry of `models` for each name if `model` is a list of several. Raises SettingsError."""
    if "models" in environment:
        raise SettingsError(f"{PREFIX}MODELS: several models are set in the YAML file, or named after `samewise serve`")
    if "models" in from_file and not flags.keys().isdisjoint(("model", "models")):
        raise SettingsError("MODEL: the settings file has `models`. Name the models in one of the two places")
    named = flags.get("model")
    if not isinstance(named, list | tuple):
        return dict(flags)
    rest = {flag: value for flag, value in flags.items() if flag != "model"}
    if len(named) == 1:
        return rest | {"model": named[0]}
    from model_runner.hub.repository import default_name  # noqa: PLC0415  (only needed for several)

    try:
        return rest | {"models": [{"name": default_name(path), "path": path} for path in named]}
    except ModelNotFoundError as error:
        raise SettingsError(f"MODEL: {error}") from None


def settings_of(settings: "Settings", entry: ModelSettings) -> "Settings":
    """The settings of a server that serves this entry alone. Raises ValidationError if its values cannot be used."""
    shared = settings.model_fields_set - {"models", *OF_SEVERAL}
    own = {"model": entry.path or entry.name, "served_model_name": entry.names}
    return type(settings)(**{name: getattr(settings, name) for name in shared} | {**entry.overrides} | own)


def check_together(settings: "Settings") -> None:
    """Refuse settings that do not go with `models`, and entries that cannot be used. Raises PydanticCustomError."""
    if not settings.models:
        raise setting_error("models", "has no entry. Give each model one, or leave `models` out")
    fields = type(settings).model_fields
    for name in sorted(settings.model_fields_set & (NOT_SHARED | _NAMED.keys())):
        if getattr(settings, name) not in (None, (), "", fields[name].default):
            key = _NAMED.get(name, f"`{name}`")
            raise setting_error(name, f"is a setting of one model. With `models`, set {key} in the model's entry")
    for number, entry in enumerate(settings.models, 1):
        for problem in _problems(settings, entry):
            message = f"{_place(number, entry)}: {problem}"
            raise setting_error("models", message)
    if settings.any_model_name and len(settings.models) > 1:
        raise setting_error("any_model_name", "is for a server of one model: with several, names choose the model")
    for name in sorted(settings.model_fields_set & OF_A_MODEL):
        if all(name in entry.overrides for entry in settings.models):
            raise setting_error(name, "has no effect, because every entry of `models` sets it. Leave it out")


def _problems(settings: "Settings", entry: ModelSettings) -> Iterator[str]:
    """Problems of an entry's settings, in words."""
    fields = type(settings).model_fields
    for key in entry.overrides:
        if key in _NAMED:
            yield f"`{key}` is a setting of a server with one model. Set {_NAMED[key]} instead"
        elif key in fields and key not in OF_A_MODEL:
            yield f"`{key}` is a setting of the server, not of a model. Set it outside of `models`"
        elif key not in fields:
            yield unknown_setting(str(key), (*ModelSettings.model_fields, *OF_A_MODEL))
    try:
        settings_of(settings, entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        value = f"{describe_value_error(first)} (got {first['input']!r})"
        yield f"{first['loc'][0]}: {value}" if first["loc"] else first["msg"]


def _place(number: int, entry: ModelSettings) -> str:
    return f"entry {number} ({entry.name})"


Entries = Annotated[tuple[ModelSettings, ...], AfterValidator(check_entries)]
"""The entries of `models`."""

"""Arguments of the Serve application: number of replicas, resources of each, and the server's settings."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.config import Settings, load_settings
from server.model_settings import ModelSettings
from server.setting_errors import SettingsError

_RAY_SETTINGS = frozenset(
    {
        *("host", "port", "client_timeout_s"),
        *("root_path", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    }
)
"""Settings that do not apply, because Ray listens instead of the server."""
_OF_ONE_MACHINE = {
    "memory_gib": "replicas do not share memory between models; set kv_cache_gib of each model",
    "load_timeout_s": "replicas are loaded before they get requests; leave it out",
}
"""Settings of a server that loads several models by itself, and why replicas do not have them."""
_HOST_OF_IMAGE = "0.0.0.0"
"""The container image's SAMEWISE_HOST, which replicas ignore."""


class ReplicaOptions(BaseModel):
    """Number, resources and scaling of a model's replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min_replicas: int = Field(1, ge=1, description="Minimum number of replicas.")
    max_replicas: int | None = Field(None, ge=1, description="Maximum number of replicas; min_replicas by default.")
    target_load: float = Field(
        0.8,
        gt=0,
        description="Target load: running and waiting choices of a replica, divided by max_num_seqs. Replicas are "
        "added above it and removed below it.",
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="Seconds of higher load before a replica is added.")
    downscale_delay_s: float = Field(600.0, ge=0, description="Seconds of lower load before a replica is removed.")
    num_cpus: float = Field(1.0, gt=0, description="Cores of a replica, and its threads for CPU kernels.")
    num_gpus: float = Field(0.0, ge=0, le=1, description="GPUs of a replica: 1, a fraction, or 0.")

    @property
    def most(self) -> int:
        """Maximum number of replicas."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas


class Options(ReplicaOptions):
    """All options of the application. Of several models, each has these options of replicas, or its own."""

    ingress_replicas: int = Field(1, ge=1, description="Number of processes that forward requests to the replicas.")
    replicas: Mapping[str, dict[str, Any]] = Field(
        {}, description="Options of replicas of one of several models, by its name, in place of the general ones."
    )


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """A model and its replicas."""

    names: tuple[str, ...]
    """All names of one of several models, its own first; empty for the only model."""
    options: ReplicaOptions
    settings: Settings
    """The settings of a replica."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The validated arguments."""

    options: Options
    settings: Settings
    """The settings of the server; with one model, the settings of a replica."""
    models: tuple[ModelDeployment, ...]

    @property
    def has_many(self) -> bool:
        """Whether there may be several replicas, of one model or of several, so that they cannot store anything."""
        return len(self.models) > 1 or any(model.options.most > 1 for model in self.models)


class OptionsError(ValueError):
    """An argument is invalid; the message is one line that names it."""


def read_arguments(arguments: Mapping[str, Any]) -> Deployment:
    """Read options and settings from the arguments; missing settings come from the environment. Raises OptionsError."""
    known = Options.model_fields.keys() | Settings.model_fields.keys()
    for name in arguments:
        if name not in known:
            raise OptionsError(_unknown(str(name), known, "not an option of replicas and not a setting"))
    if {"model", "models"} <= arguments.keys():
        raise OptionsError("model: with `models`, set `path` in the model's entry")
    options = _options(Options, {name: value for name, value in arguments.items() if name in Options.model_fields})
    try:
        settings = load_settings(
            {name: value for name, value in arguments.items() if name in Settings.model_fields}, spelt=str
        )
    except SettingsError as error:
        raise OptionsError(str(error)) from None
    deployment = _deployment(options, settings)
    _check_server(deployment)
    return deployment


_AnyOptions = TypeVar("_AnyOptions", bound=ReplicaOptions)


def _options(kind: type[_AnyOptions], given: Mapping[str, Any]) -> _AnyOptions:
    try:
        options = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ": ".join(map(str, first["loc"]))
        raise OptionsError(f"{name}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})") from None
    if options.most < options.min_replicas:
        raise OptionsError(f"max_replicas: must be at least min_replicas ({options.min_replicas}), got {options.most}")
    return options


def _deployment(options: Options, settings: Settings) -> Deployment:
    """The deployment of each model. Raises OptionsError."""
    if not settings.models:
        if options.replicas:
            raise OptionsError("replicas: these are options of several models, but `models` is not set")
        adapted = _adapted(settings, options)
        return Deployment(options, adapted, (ModelDeployment((), options, adapted),))
    names = [entry.name for entry in settings.models]
    for name in options.replicas:
        if name not in names:
            raise OptionsError(f"replicas: {_unknown(name, names, 'not the name of an entry of `models`')}")
    return Deployment(options, settings, tuple(_model(options, settings, entry) for entry in settings.models))


def _model(options: Options, settings: Settings, entry: ModelSettings) -> ModelDeployment:
    """The deployment of one of several models. Raises OptionsError, which names it."""
    own = options.replicas.get(entry.name, {})
    shared = options.model_dump(exclude_unset=True, include=set(ReplicaOptions.model_fields))
    try:
        for name in own:
            if name not in ReplicaOptions.model_fields:
                raise OptionsError(_unknown(name, ReplicaOptions.model_fields, "not an option of replicas"))
        of_model = _options(ReplicaOptions, {**shared, **own})
    except OptionsError as error:
        raise OptionsError(f"replicas: {entry.name}: {error}") from None
    try:
        for problem in _problems(entry):
            raise OptionsError(problem)
        adapted = _adapted(settings.of_model(entry), of_model)
    except OptionsError as error:
        raise OptionsError(f"models: {entry.name}: {error}") from None
    return ModelDeployment(entry.names, of_model, adapted)


def _problems(entry: ModelSettings) -> Iterator[str]:
    """Settings of an entry that say when its model is unloaded, which replicas never do."""
    if "load" in entry.model_fields_set and entry.load == "demand":
        yield "load: replicas are always loaded; set it to start, or leave it out (got 'demand')"
    if entry.idle_s is not None:
        yield f"idle_s: replicas are always loaded; leave it out (got {entry.idle_s:g})"


def _check_server(deployment: Deployment) -> None:
    """Raise OptionsError for a setting of the server that replicas do not have."""
    settings = deployment.settings
    of_image = {"host"} if settings.host == _HOST_OF_IMAGE else set()
    if of_ray := sorted((_RAY_SETTINGS & settings.model_fields_set) - of_image):
        raise OptionsError(f"{of_ray[0]}: replicas do not listen themselves; set this in Ray's http_options")
    for name, why in _OF_ONE_MACHINE.items():
        if name in settings.model_fields_set:
            raise OptionsError(f"{name}: {why}")
    if settings.data_dir is not None and deployment.has_many:
        most = max(model.options.most for model in deployment.models)
        why = f"max_replicas must be 1, got {most}" if most > 1 else "serve one model, or leave it out"
        raise OptionsError(f"data_dir: several replicas cannot share stored data; {why}")


def _adapted(settings: Settings, options: ReplicaOptions) -> Settings:
    """Adapt a model's settings to a replica's resources. Raises OptionsError if options and settings conflict."""
    if settings.kv_events is not None:
        raise OptionsError(
            "kv_events: not supported with replicas; requests with the same prefix go to the same replica anyway"
        )
    if settings.device == "cuda" and not options.num_gpus:
        raise OptionsError("device: cuda needs a GPU, but num_gpus is 0")
    if settings.device == "cpu" and options.num_gpus:
        raise OptionsError(f"num_gpus: the device cpu uses no GPU, but num_gpus is {options.num_gpus:g}")
    return settings.model_copy(
        update={
            "device": "cuda" if options.num_gpus else "cpu",  # not auto: visible GPUs may belong to other replicas
            "threads": settings.threads or max(1, int(options.num_cpus)),
        }
    )


def _unknown(name: str, known: Collection[str], problem: str) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), sorted(known), n=3, cutoff=0.6)
    return f"{name}: {problem}" + (f"; did you mean {' or '.join(near)}?" if near else "")

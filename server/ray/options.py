"""Arguments of the Serve application: number of replicas, resources of each, and the server's settings."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.config import Settings, load_settings
from server.setting_errors import SettingsError

_RAY_SETTINGS = frozenset(
    {
        *("host", "port", "client_timeout_s"),
        *("root_path", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    }
)
"""Settings that do not apply, because Ray listens instead of the server."""
_HOST_OF_IMAGE = "0.0.0.0"
"""The container image's SAMEWISE_HOST, which replicas ignore."""


class Options(BaseModel):
    """Number, resources and scaling of replicas."""

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
    ingress_replicas: int = Field(1, ge=1, description="Number of processes that forward requests to the replicas.")

    @property
    def most(self) -> int:
        """Maximum number of replicas."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Deployment:
    """The validated arguments."""

    options: Options
    settings: Settings


class OptionsError(ValueError):
    """An argument is invalid; the message is one line that names it."""


def read_arguments(arguments: Mapping[str, Any]) -> Deployment:
    """Read options and settings from the arguments; missing settings come from the environment. Raises OptionsError."""
    known = Options.model_fields.keys() | Settings.model_fields.keys()
    for name in arguments:
        if name not in known:
            raise OptionsError(_unknown(str(name), sorted(known)))
    options = _options({name: value for name, value in arguments.items() if name in Options.model_fields})
    try:
        settings = load_settings(
            {name: value for name, value in arguments.items() if name in Settings.model_fields}, spelt=str
        )
    except SettingsError as error:
        raise OptionsError(str(error)) from None
    return Deployment(options, _adapted(settings, options))


def _options(given: Mapping[str, Any]) -> Options:
    try:
        options = Options.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = f"{first['loc'][0]}: {first['msg'][0].lower()}{first['msg'][1:]} (got {first['input']!r})"
        raise OptionsError(message) from None
    if options.most < options.min_replicas:
        raise OptionsError(f"max_replicas: must be at least min_replicas ({options.min_replicas}), got {options.most}")
    return options


def _adapted(settings: Settings, options: Options) -> Settings:
    """Adapt the settings to a replica's resources. Raises OptionsError if options and settings conflict."""
    of_image = {"host"} if settings.host == _HOST_OF_IMAGE else set()
    if of_ray := sorted((_RAY_SETTINGS & settings.model_fields_set) - of_image):
        raise OptionsError(f"{of_ray[0]}: replicas do not listen themselves; set this in Ray's http_options")
    if settings.models:
        raise OptionsError("models: a deployment serves one model; deploy one application for each")
    if settings.kv_events is not None:
        raise OptionsError(
            "kv_events: not supported with replicas; requests with the same prefix go to the same replica anyway"
        )
    if settings.data_dir is not None and options.most > 1:
        raise OptionsError(
            f"data_dir: several replicas cannot share stored data; max_replicas must be 1, got {options.most}"
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


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.6)
    return f"{name}: not an option of replicas and not a setting" + (
        f"; did you mean {' or '.join(near)}?" if near else ""
    )

"""Arguments of the Serve application: how many replicas, what each gets, and the settings of all of them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.config import Settings, SettingsError, load_settings

_OF_RAY = frozenset({"host", "port", "client_timeout_s"})
"""Settings of a server that listens, which is Ray here."""


class Options(BaseModel):
    """How replicas are run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min_replicas: int = Field(1, ge=1, description="Replicas that there are always.")
    max_replicas: int | None = Field(None, ge=1, description="Replicas at most; by default as many as at least.")
    target_load: float = Field(
        0.8,
        gt=0,
        description="Choices that run and wait, as a share of max_num_seqs, that a replica is to have: another one is "
        "started when there are more.",
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="How long there has to be more load before that.")
    downscale_delay_s: float = Field(600.0, ge=0, description="How long there has to be less, before one is ended.")
    num_cpus: float = Field(1.0, gt=0, description="Cores of a replica; of the CPU kernels' threads, too.")
    num_gpus: float = Field(0.0, ge=0, le=1, description="GPUs of a replica: one, a share of one, or none.")
    ingress_replicas: int = Field(1, ge=1, description="Processes that pass requests on to the replicas.")

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Deployment:
    """The checked arguments."""

    options: Options
    settings: Settings


class OptionsError(ValueError):
    """An argument cannot be used; the message is one line that names it."""


def read_arguments(arguments: Mapping[str, Any]) -> Deployment:
    """Options and settings from the application's arguments, otherwise from the environment. Raises OptionsError."""
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
        raise OptionsError(f"max_replicas: less than min_replicas, {options.most} < {options.min_replicas}")
    return options


def _adapted(settings: Settings, options: Options) -> Settings:
    """The settings of a replica with these resources. Raises OptionsError if they exclude each other."""
    if of_ray := sorted(_OF_RAY & settings.model_fields_set):
        raise OptionsError(f"{of_ray[0]}: replicas do not listen; that is said to Ray, in its http_options")
    if settings.kv_events is not None:
        raise OptionsError("kv_events: replicas publish none; requests that begin alike go to the same one anyway")
    if settings.data_dir is not None and options.most > 1:
        raise OptionsError(
            "data_dir: what clients have a server keep is kept by one replica, and the others do not know it; "
            "max_replicas must be 1"
        )
    if settings.device == "cuda" and not options.num_gpus:
        raise OptionsError("device: cuda needs num_gpus, of which the replicas have 0")
    if settings.device == "cpu" and options.num_gpus:
        raise OptionsError(f"num_gpus: {options.num_gpus:g} that the device cpu does not use")
    return settings.model_copy(
        update={
            "device": "cuda" if options.num_gpus else "cpu",  # what is there, but belongs to others, is not looked for
            "threads": settings.threads or max(1, int(options.num_cpus)),
        }
    )


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.6)
    return f"{name}: no option of replicas and no setting" + (f"; did you mean {' or '.join(near)}?" if near else "")

"""Ollama's `options` of a request, with its names and defaults, and their conversion to decoding settings."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from server.api.fields.decoding import StopString
from server.api.fields.foreign import ForeignSettings, NPredict, WholeNumber, as_whole
from server.api.fields.rules import SUPPORTED_ONLY, SUPPORTED_VALUES_ONLY, refused, related, same_as
from server.api.fields.samplers import (
    LAST_N_DESCRIPTION,
    SAMPLERS_DESCRIPTION,
    SamplerNames,
    counted_notices,
)
from server.generation.notices import Notice
from server.generation.settings import MAX_STOPS, DecodingSettings, facts_of

DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "num_predict": -1,
    "seed": -1,
}
"""Ollama's defaults. At its paths they apply where neither the request nor the model's files set a value."""
NATIVE: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "mirostat")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta")},
    "repeat_penalty": "repetition_penalty",
}
"""The field of DecodingSettings for each option."""
_TRUNCATIONS = ("top_k", "top_p", "min_p", "typical_p")
"""Options that Mirostat replaces."""


def _option(description: str, name: str, *, off: tuple[object, ...] = (), **limits: Any) -> Any:
    """A field with Ollama's default."""
    return Field(
        None, description=description, json_schema_extra={**related(off=off), "x-default": DEFAULTS[name]}, **limits
    )


def _as_native(name: str, description: str = "") -> Any:
    """An option with the meaning and limits of a native field, and Ollama's default."""
    native = NATIVE[name]
    facts = facts_of(DecodingSettings)[native]
    off: tuple[object, ...] = tuple(facts.off)
    return _option(description or f"As `{native}` of /v1/completions.", name, off=off, **dict(facts.limits))


class OllamaOptions(ForeignSettings):
    """Ollama's options. Options without a value have the model's default, otherwise Ollama's."""

    num_ctx: WholeNumber | None = Field(
        None, ge=1,
        description="Caps the context of this request: prompt and output together. The model stays loaded with its own "
        "context, so a number that differs from it is reported.",
    )  # fmt: skip
    num_predict: WholeNumber | None = _option(
        "The most tokens to generate; 0 or less: up to the model's default or the end of the context.", "num_predict",
        ge=-2, le=2**31 - 1,
    )  # fmt: skip
    n_predict: NPredict = same_as("num_predict", "llama.cpp's name.")
    max_tokens: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] | None = same_as("num_predict", "OpenAI's name.")
    seed: WholeNumber | None = _option(
        "Seed of the sampling; -1 draws one, which the answer returns.", "seed", ge=-1, le=2**63 - 1
    )
    stop: list[StopString] | None = Field(
        None, max_length=MAX_STOPS, fail_fast=True, description="Strings that end the output and are not part of it."
    )
    temperature: float | None = _as_native("temperature")
    top_k: WholeNumber | None = _as_native("top_k")
    top_p: float | None = _as_native("top_p")
    min_p: float | None = _as_native("min_p")
    typical_p: float | None = _as_native("typical_p")
    repeat_penalty: float | None = _as_native("repeat_penalty")
    samplers: SamplerNames | None = Field(None, description=SAMPLERS_DESCRIPTION)
    repetition_penalty: float | None = same_as(
        "repeat_penalty", "vLLM's name.", **dict(facts_of(DecodingSettings)["repetition_penalty"].limits)
    )
    repeat_last_n: WholeNumber | None = _option(LAST_N_DESCRIPTION, "repeat_last_n", ge=-1, le=2**31 - 1)
    presence_penalty: float | None = _as_native("presence_penalty")
    frequency_penalty: float | None = _as_native("frequency_penalty")
    mirostat: Annotated[Annotated[Literal[0, 2], BeforeValidator(as_whole)] | None, SUPPORTED_VALUES_ONLY] = _as_native(
        "mirostat", "2 is Mirostat 2.0, which replaces `top_k`, `top_p`, `min_p` and `typical_p`; 0 turns it off."
    )
    mirostat_tau: float | None = _as_native("mirostat_tau")
    mirostat_eta: float | None = _as_native("mirostat_eta")

    logits_all: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Compute logits of the whole prompt.")
    vocab_only: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Load the vocabulary only.")
    embedding_only: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Load the model for embeddings only.")

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        for name in (*_TRUNCATIONS, "samplers") if self.mirostat else ():
            if name in self.model_fields_set and self.asks(name):
                yield Notice(f"{path}.{name}", "Mirostat replaces it.")
        yield from counted_notices(self.decoding, self.repeat_last_n, f"{path}.repeat_last_n")

    @property
    def num_tokens(self) -> int | None:
        """The most tokens to generate; None: not limited by the request."""
        asked: int | None = self.named_value("num_predict")[1]
        return asked if asked is not None and asked > 0 else None

    @property
    def decoding(self) -> DecodingSettings:
        """The decoding settings that the options set."""
        values = {native: self.named_value(name)[1] for name, native in NATIVE.items()}
        if self.mirostat:
            values |= dict.fromkeys(_TRUNCATIONS)
        decoding = DecodingSettings(**values, stop=None if self.stop is None else tuple(self.stop))
        return self.with_samplers(decoding, None if self.mirostat else self.samplers)


def with_ollama_defaults(decoding: DecodingSettings, of_model: Container[str]) -> DecodingSettings:
    """The settings with Ollama's defaults, except where the model has its own; `of_model` names the model's."""
    wanted = {
        native: DEFAULTS[name]
        for name, native in NATIVE.items()
        if getattr(decoding, native) is None
        and native not in of_model
        and not (decoding.mirostat and name in _TRUNCATIONS)
    }
    return replace(decoding, **wanted)

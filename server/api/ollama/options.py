"""Ollama's `options` of a request, with its names and defaults, and their conversion to decoding settings."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from server.api.fields.decoding import StopString
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    SUPPORTED_VALUES_ONLY,
    RequestModel,
    hint,
    refused,
    related,
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
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LOADED = "The server's settings decide how the model is loaded."


def _whole(value: object) -> object:
    """A number such as 8192.0 as an integer: clients with number fields in their settings send it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]


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


class OllamaOptions(RequestModel):
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
    repeat_last_n: WholeNumber | None = _option(
        "0 turns the three penalties off. Otherwise `repeat_penalty` counts the whole prompt and output, as with -1, "
        "and the other two count the output; other values are reported.",
        "repeat_last_n", ge=-1, le=2**31 - 1,
    )  # fmt: skip
    presence_penalty: float | None = _as_native("presence_penalty")
    frequency_penalty: float | None = _as_native("frequency_penalty")
    mirostat: Annotated[Annotated[Literal[0, 2], BeforeValidator(_whole)] | None, SUPPORTED_VALUES_ONLY] = _as_native(
        "mirostat", "2 is Mirostat 2.0, which replaces `top_k`, `top_p`, `min_p` and `typical_p`; 0 turns it off."
    )
    mirostat_tau: float | None = _as_native("mirostat_tau")
    mirostat_eta: float | None = _as_native("mirostat_eta")

    num_keep: WholeNumber | None = hint(
        "Tokens to keep when the context shifts.", "The context does not shift.", off=[0, -1]
    )
    num_batch: WholeNumber | None = hint("Tokens to compute in a step.", _LOADED)
    num_gpu: WholeNumber | None = hint("Layers to compute on a GPU.", _LOADED, off=[-1])
    main_gpu: WholeNumber | None = hint("The GPU to use.", _LOADED, off=[0])
    num_thread: WholeNumber | None = hint("Threads to compute with.", _LOADED, off=[0])
    draft_num_predict: WholeNumber | None = hint("Tokens that a draft model drafts.", _LOADED)
    use_mmap: bool | None = hint("Whether to map the model's file.", _LOADED, on=True)
    use_mlock: bool | None = hint("Whether to keep the model from being swapped out.", _LOADED)
    numa: bool | None = hint("Whether to optimise for several memory nodes.", _LOADED)
    low_vram: bool | None = hint("Whether to save memory of the GPU.", _LOADED)
    f16_kv: bool | None = hint("Whether keys and values have 16 bits.", _LOADED, on=True)

    tfs_z: Annotated[Literal[1] | None, BeforeValidator(_whole), SUPPORTED_ONLY] = refused("Tail free sampling.")
    penalize_newline: Annotated[Literal[True] | None, SUPPORTED_ONLY] = refused("Whether penalties count line breaks.")
    logits_all: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Compute logits of the whole prompt.")
    vocab_only: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Load the vocabulary only.")
    embedding_only: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("Load the model for embeddings only.")

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        for name in _TRUNCATIONS if self.mirostat else ():
            if name in self.model_fields_set and self.asks(name):
                yield Notice(f"{path}.{name}", "Mirostat replaces it.")
        counts_output = bool(self.presence_penalty or self.frequency_penalty)
        counts_all = self.repeat_penalty not in (None, 1) and self.repeat_last_n != -1
        if self.repeat_last_n != 0 and (counts_output or counts_all):
            reason = "`repeat_penalty` counts the whole prompt and output, the other two penalties the output."
            yield Notice(f"{path}.repeat_last_n", reason)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens to generate; None: not limited by the request."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def decoding(self) -> DecodingSettings:
        """The decoding settings that the options set."""
        values = {native: getattr(self, name) for name, native in NATIVE.items()}
        if self.mirostat:
            values |= dict.fromkeys(_TRUNCATIONS)
        if self.repeat_last_n == 0:
            values |= {name: facts_of(DecodingSettings)[name].default for name in _PENALTIES}
        return DecodingSettings(**values, stop=None if self.stop is None else tuple(self.stop))


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

"""The samplers of llama.cpp as request fields: which of them act, and in which order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from server.api.fields.rules import RequestModel, problem, related
from server.errors import shorten
from server.generation.notices import Notice
from server.generation.settings import DecodingSettings

_FIRST = ("penalties", "dry")
"""Samplers that come first, in this order."""
STEPS: Mapping[str, tuple[str, object]] = {
    "top_n_sigma": ("top_n_sigma", 0.0),
    "top_k": ("top_k", 0),
    "typ_p": ("typical_p", 1.0),
    "typical_p": ("typical_p", 1.0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "xtc": ("xtc_probability", 0.0),
    "temperature": ("temperature", 1.0),
}
"""The native field of each sampler after the penalties, and the value that turns it off, by llama.cpp's name."""
SAMPLERS = (*_FIRST, *(name for name in STEPS if name != "typical_p"))
"""The samplers of llama.cpp that this server has, in llama.cpp's order."""
SamplerNames = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16, fail_fast=True)]
SAMPLERS_DESCRIPTION = (
    "llama.cpp's samplers to use, in this order; samplers that are not named are off. `penalties` and `dry` come "
    "first. Samplers that this server does not have, such as `infill`, are ignored and reported."
)
LAST_N_DESCRIPTION = (
    "0 turns the three penalties off. Otherwise the repetition penalty counts the whole prompt and output, as with -1, "
    "and the other two count the output; other values are reported."
)
_COUNTED = "The repetition penalty counts the whole prompt and output, the other two penalties the output."
_NO_PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def is_present(sampler: str) -> bool:
    """Whether this server has a sampler of this name."""
    return sampler in _FIRST or sampler in STEPS


class SamplerFields(RequestModel):
    """The samplers of llama.cpp, and the tokens that penalties count."""

    samplers: SamplerNames | None = Field(
        None, description=SAMPLERS_DESCRIPTION, json_schema_extra=related(excludes=["sampler_order", "mirostat"])
    )
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1, description=LAST_N_DESCRIPTION)

    @model_validator(mode="after")
    def _check_samplers(self) -> Self:
        names = ["typ_p" if name == "typical_p" else name for name in self.samplers or ()]
        twice = next((index for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            message = f"Invalid '{{path}}': '{shorten(names[twice])}' is named twice."
            raise problem("invalid_value", message, f"samplers[{twice}]")
        present = [name for name in names if is_present(name)]
        first = [name for name in _FIRST if name in present]
        if present[: len(first)] != first:
            message = "Unsupported value: '{path}' needs 'penalties' and 'dry', in this order, before other samplers."
            raise problem("unsupported_value", message, "samplers")
        return self

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        within = f"{path}." if path else ""
        for index, name in enumerate(self.samplers or ()):
            if not is_present(name):
                yield Notice(f"{within}samplers[{index}]", f"This server has no sampler '{shorten(name)}'.")

    def with_samplers(self, decoding: DecodingSettings, samplers: Sequence[str] | None) -> DecodingSettings:
        """The settings with only these samplers, in their order; None: as they are. Penalties of no tokens are off."""
        changes: dict[str, Any] = {}
        if samplers is not None:
            steps = [STEPS[name] for name in samplers if name in STEPS]
            named = [name for name, _ in steps]
            changes |= {name: off for name, off in STEPS.values() if name not in named}
            changes["sampler_order"] = tuple("xtc" if name == "xtc_probability" else name for name in named) or None
            if "dry" not in samplers:
                changes["dry_multiplier"] = 0.0
        if self.repeat_last_n == 0 or (samplers is not None and "penalties" not in samplers):
            changes |= _NO_PENALTIES
        return replace(decoding, **changes) if changes else decoding


def counted_notices(decoding: DecodingSettings, last_n: int | None, path: str) -> Iterator[Notice]:
    """A notice if penalties of these settings count other tokens than the last `last_n`; None: llama.cpp's default."""
    counts_output = bool(decoding.presence_penalty or decoding.frequency_penalty)
    if last_n != 0 and (counts_output or (decoding.repetition_penalty not in (None, 1) and last_n != -1)):
        yield Notice(path, _COUNTED)

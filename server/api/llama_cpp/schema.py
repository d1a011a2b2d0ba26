"""Request schemas for POST /completion and POST /infill, with llama.cpp's names and defaults."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from model_runner.read_numbers import whole_number
from server.api.fields.decoding import MAX_BREAKERS, Breaker, NumAlternatives, StopString, TokenId
from server.api.fields.foreign import ForeignSettings, NumPredict
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    SUPPORTED_VALUES_ONLY,
    RequestModel,
    at_most,
    hint,
    no_effect,
    problem,
    refused,
    related,
    same_as,
)
from server.api.fields.samplers import LAST_N_DESCRIPTION, SAMPLERS, SAMPLERS_DESCRIPTION, SamplerNames
from server.api.fields.structured import MAX_TEXT, GuidedFields
from server.generation.request import ContextFile, MixedPrompt, TextPrompt, TokenPrompt
from server.generation.settings import DRY_BREAKERS, MAX_LOGIT_BIAS, MAX_STOPS, DecodingSettings, facts_of

MAX_BIASED_TEXT = 256
DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": list(DRY_BREAKERS),
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "n_predict": -1,
    "n_probs": 0,
    "samplers": list(SAMPLERS),
}
"""llama.cpp's defaults. On its routes they replace the model's own defaults."""
_NO_SHIFT = "The context does not shift: an answer ends when the context is full."
_NO_TIME = "Answers do not depend on time; use `n_predict` to limit them."


def _check_pair(pair: list[Any]) -> list[Any]:
    """Check that this is a token and its bias."""
    if len(pair) == 2:
        token, bias = pair
        is_text = isinstance(token, str) and 0 < len(token) <= MAX_BIASED_TEXT
        is_token = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if (is_text or is_token) and (is_number or bias is False):
            return pair
    expected = f"[token id or text of at most {MAX_BIASED_TEXT} characters, number from -100 to 100 or false]"
    raise problem("invalid_value", f"Invalid '{{path}}': Expected {expected}.")


Bias = Annotated[
    Annotated[float, Field(ge=-100, le=100), Tag("<number>")] | Annotated[Literal[False], Tag("<boolean>")],
    Discriminator(lambda value: "<boolean>" if isinstance(value, bool) else "<number>"),
]
LogitBias = Annotated[
    Annotated[list[Annotated[list[Any], AfterValidator(_check_pair)]], Field(max_length=MAX_LOGIT_BIAS), Tag("<array>")]
    | Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=MAX_BIASED_TEXT)], Bias],
        at_most(MAX_LOGIT_BIAS),
        Tag("<object>"),
    ],
    Discriminator(lambda value: "<object>" if isinstance(value, dict) else "<array>"),
]


def _as_native(name: str, description: str = "", **limits: float) -> Any:
    """A field with the meaning of the native field `name`, and llama.cpp's default."""
    facts = facts_of(DecodingSettings)[name]
    all_limits: dict[str, Any] = {**facts.limits, **limits}
    return _field(description or f"As `{name}` of /v1/completions.", name, off=[*facts.off], **all_limits)


def _field(description: str, name: str, off: Sequence[object] = (), **limits: Any) -> Any:
    """A field with llama.cpp's default."""
    extra = {**related(off=off), "x-default": DEFAULTS[name]}
    return Field(None, description=description, json_schema_extra=extra, **limits)


class LlamaFields(ForeignSettings, GuidedFields):
    """The fields that POST /completion and POST /infill share."""

    model: str | None = Field(None, description="Name of the served model; optional.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    n_predict: int | None = _field(
        "The most tokens to generate; -1: up to the model's default or the end of the context.",
        "n_predict",
        ge=-1,
        le=2**31 - 1,
    )
    max_tokens: int | None = same_as("n_predict", ge=-1, le=2**31 - 1)
    num_predict: NumPredict = same_as("n_predict", "Ollama's name.")
    n_cmpl: int | None = Field(
        None, ge=1, le=128, description="Completions for each prompt; 1 by default.", json_schema_extra=related(off=[1])
    )
    stop: list[StopString] | None = Field(
        None, max_length=MAX_STOPS, fail_fast=True, description="Strings that end the output and are not part of it."
    )
    seed: int | None = Field(
        None, ge=-1, le=2**63 - 1, description="Seed of the sampling. -1, the default, and 4294967295 draw one, "
        "which `generation_settings` reports.", json_schema_extra={"x-default": -1},
    )  # fmt: skip
    ignore_eos: bool | None = Field(None, description="Continue after the end-of-sequence token.")

    temperature: float | None = _field("Sampling temperature; 0 or less is greedy.", "temperature", off=[0], le=2)
    top_k: int | None = _as_native("top_k")
    top_p: float | None = _as_native("top_p")
    min_p: float | None = _as_native("min_p")
    typical_p: float | None = _as_native("typical_p")
    top_n_sigma: float | None = _as_native("top_n_sigma")
    xtc_probability: float | None = _as_native("xtc_probability")
    xtc_threshold: float | None = _as_native("xtc_threshold")
    repeat_penalty: float | None = _field(
        "As `repetition_penalty` of /v1/completions.", "repeat_penalty", off=[1], ge=0.01, le=100
    )
    repetition_penalty: float | None = same_as("repeat_penalty", "vLLM's name.", ge=0.01, le=100)
    repeat_last_n: int | None = _field(LAST_N_DESCRIPTION, "repeat_last_n", ge=-1, le=2**31 - 1)
    presence_penalty: float | None = _as_native("presence_penalty")
    frequency_penalty: float | None = _as_native("frequency_penalty")
    dry_multiplier: float | None = _as_native("dry_multiplier")
    dry_base: float | None = _as_native("dry_base")
    dry_allowed_length: int | None = _as_native("dry_allowed_length")
    dry_penalty_last_n: int | None = _as_native("dry_penalty_last_n")
    dry_sequence_breakers: list[Breaker] | None = Field(
        None, min_length=1, max_length=MAX_BREAKERS, fail_fast=True,
        description="As `dry_sequence_breakers` of /v1/completions.",
        json_schema_extra={"x-default": DEFAULTS["dry_sequence_breakers"]},
    )  # fmt: skip
    mirostat: Annotated[Literal[0, 2] | None, SUPPORTED_VALUES_ONLY] = _as_native(
        "mirostat", "2 is Mirostat 2.0, which replaces all samplers except temperature; 0 turns it off."
    )
    mirostat_tau: float | None = _as_native("mirostat_tau")
    mirostat_eta: float | None = _as_native("mirostat_eta")
    samplers: SamplerNames | None = _field(SAMPLERS_DESCRIPTION, "samplers")
    logit_bias: LogitBias | None = Field(
        None,
        description="Pairs `[token, bias]`, or an object. A token is an id, or a text each of whose tokens gets the "
        "bias; the bias `false` bans a token.",
        examples=[[[15043, 1.0], ["Hello", -0.5], [13, False]], {"15043": 1.0}],
    )
    grammar: str | None = Field(
        None, max_length=MAX_TEXT, description="A GBNF grammar for the output.",
        json_schema_extra=related(excludes=["json_schema", "ignore_eos"]),
    )  # fmt: skip
    json_schema: dict[str, Any] | None = Field(
        None, description="A JSON schema for the output; `{}`: any JSON.",
        json_schema_extra=related(excludes=["ignore_eos"]),
    )  # fmt: skip

    n_probs: NumAlternatives | None = _field(
        "Report the log-probabilities of each token and of this many alternatives, at most the setting `max_logprobs`.",
        "n_probs",
    )
    return_tokens: bool | None = Field(None, description="Report the ids of the output; a stream always does.")
    timings_per_token: bool | None = Field(None, description="Send the timings so far with every chunk of a stream.")
    response_fields: list[Annotated[str, Field(max_length=256)]] | None = Field(
        None, max_length=64, fail_fast=True,
        description="The properties of the answer to return; `/` separates levels of nested ones.",
        examples=[["content", "generation_settings/seed"]],
    )  # fmt: skip

    cache_prompt: bool | None = no_effect("Prefixes are cached, and never change an answer.")
    n_cache_reuse: int | None = no_effect("Prefixes are cached, and never change an answer.")
    backend_sampling: bool | None = no_effect("Where tokens are drawn never changes them.")
    id_slot: int | None = hint("Which slot to use.", "There are no fixed slots.", off=[-1])
    sse_ping_interval: int | None = hint("Seconds between pings.", "The server's keepalive_s decides.", off=[-1])
    return_progress: bool | None = hint("Report progress on the prompt.", "Progress is not reported.")

    lora: Annotated[list[Any] | None, Field(max_length=0), SUPPORTED_ONLY] = refused("LoRA adapters.")

    @property
    def writes_json(self) -> bool:
        return self.json_schema is not None and not self.grammar

    def value_of(self, name: str) -> Any:
        """The value of a field, or llama.cpp's default."""
        value = self.named_value(name)[1]
        return DEFAULTS[name] if value is None else value

    @property
    def biases(self) -> Iterator[tuple[int | str, float]]:
        """Tokens and texts with their biases; in an object, a key that is a number is a token."""
        by_key = isinstance(self.logit_bias, dict)
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias or ()
        for token, bias in pairs:
            number = whole_number(token) if by_key and isinstance(token, str) else None
            yield token if number is None else number, float("-inf") if bias is False else float(bias)


MAX_PROMPTS = 1024
MAX_FILES = 256

Piece = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TokenId, Tag("<token>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<token>"),
]
Pieces = Annotated[list[Piece], Field(min_length=1, fail_fast=True)]


class PromptObject(RequestModel):
    """A prompt with a name."""

    prompt_string: str
    multimodal_data: Annotated[list[Any] | None, Field(max_length=0), SUPPORTED_ONLY] = refused("Images and audio.")


def _shape(value: object) -> str | None:
    """The tag of one prompt's shape."""
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else "<pieces>" if isinstance(value, list) else None


def _shape_of_all(value: object) -> str | None:
    """The tag of the prompt's shape: an array with a number is one prompt, any other array has several."""
    if isinstance(value, list) and value and not any(isinstance(item, int | float) for item in value):
        return "<batch>"
    return _shape(value)


Prompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Pieces, Tag("<pieces>")] | Annotated[PromptObject, Tag("<object>")],
    Discriminator(_shape),
]
Prompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Pieces, Tag("<pieces>")]
    | Annotated[PromptObject, Tag("<object>")]
    | Annotated[list[Prompt], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<batch>")],
    Discriminator(_shape_of_all),
]


class LlamaCompletionRequest(LlamaFields):
    """Request schema for POST /completion."""

    prompt: Prompts = Field(
        description="A text, or token ids and texts that are joined, or an array of such prompts. The answer to an "
        "array is an array."
    )

    @property
    def prompts(self) -> Sequence[TextPrompt | TokenPrompt | MixedPrompt]:
        """All prompts, in any of the accepted shapes."""
        if isinstance(self.prompt, list) and _shape_of_all(self.prompt) == "<batch>":
            return [_prompt(prompt, f"prompt[{index}]") for index, prompt in enumerate(self.prompt)]
        return [_prompt(self.prompt, "prompt")]


def _prompt(prompt: Any, path: str) -> TextPrompt | TokenPrompt | MixedPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt, path)
    if isinstance(prompt, PromptObject):
        return TextPrompt(prompt.prompt_string, f"{path}.prompt_string")
    if all(isinstance(piece, int) for piece in prompt):
        return TokenPrompt(tuple(prompt), path)
    return MixedPrompt(tuple(prompt), path)


class ExtraFile(RequestModel):
    """A file to show before the file with the gap."""

    text: str = Field(description="The file's content.")
    filename: str | None = Field(None, description="The file's name, for models that were trained with names.")


class InfillRequest(LlamaFields):
    """Request schema for POST /infill."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: list[ExtraFile] | None = Field(
        None, max_length=MAX_FILES, fail_fast=True, description="Other files, shown before the file with the gap."
    )
    prompt: str | None = Field(None, description="More text before the gap, after `input_prefix`.")

    @property
    def files(self) -> Sequence[ContextFile]:
        """The other files."""
        return [ContextFile(file.filename, file.text) for file in self.input_extra or ()]

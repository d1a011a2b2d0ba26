"""The fields that completions and chat completions share."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.beam_search import MAX_WIDTH, BeamSearchFields, BeamSearchOptions
from server.api.fields.rules import (
    SUPPORTED_VALUES_ONLY,
    Refused,
    RequestModel,
    at_most,
    no_effect,
    problem,
    refused,
    related,
    shape,
)
from server.api.fields.samplers import DRAWING, SamplerFields
from server.api.fields.scoring import ContrastiveOptions, DoLaOptions, GuidanceOptions
from server.api.fields.speculation import SpeculationChoice

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_PROMPT_LOGPROBS = 20

MAX_CANDIDATES = 64
"""Tokens that contrastive search compares at one place."""
_NOT_WITH_CONTRASTIVE_SEARCH = (
    *DRAWING,
    *("speculation", "prediction", "use_beam_search", "beam_search"),
)
_OTHER_DECODING = ("use_beam_search", "beam_search", "penalty_alpha", "guidance")
"""Fields that have their own idea of the scores, or of what to do with them."""

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(max_length=20)], Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_LOGIT_BIAS)
]


class StreamOptions(RequestModel):
    """How a stream is written."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")
    include_obfuscation: Annotated[Literal[False] | None, SUPPORTED_VALUES_ONLY] = refused(
        "Padding of the chunks against traffic analysis."
    )


class OpenAIFields(RequestModel):
    """OpenAI's own that completions and chat completions share."""

    model: str = Field(description="Name of the served model.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. By default the model's own, or 1.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    top_p: float | None = Field(
        None, ge=0, le=1, description="Mass of the nucleus. By default the model's own, or 1.",
        json_schema_extra=related(off=[1]),
    )  # fmt: skip
    n: int | None = Field(
        None, ge=1, le=128, description="Choices for each prompt; 1 by default.", json_schema_extra=related(off=[1])
    )
    stop: Stop | None = Field(None, description=f"Up to {MAX_STOPS} strings that end the output.")
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from the logit of each token that is in the output.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once for each time that the token is in the output.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    logit_bias: LogitBias | None = Field(
        None, description=f"Token id, as a string, to a value added to its logit; at most {MAX_LOGIT_BIAS} tokens."
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Drawn if not given, and returned either way as `seed`."
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="What the stream tells beside the answer.", json_schema_extra=related(requires=["stream"])
    )
    user: str | None = no_effect("Your own id of the end user.")


class SamplingFields(BeamSearchFields, SamplerFields, OpenAIFields):
    """How tokens are chosen, when to stop, and what to report: OpenAI's fields, then the extensions."""

    top_k: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep the k best tokens; 0 or -1 turns it off.",
        json_schema_extra=related(off=[0, -1]),
    )  # fmt: skip
    min_p: float | None = Field(
        None, ge=0, le=1, description="Least share of the highest probability.", json_schema_extra=related(off=[0])
    )
    typical_p: float | None = Field(
        None, gt=0, le=1, description="Mass of locally typical sampling; 1 turns it off.",
        json_schema_extra=related(off=[1]),
    )  # fmt: skip
    penalty_alpha: float | None = Field(
        None, ge=0, le=1,
        description="Above 0: contrastive search, which draws nothing: of the `top_k` most probable tokens (4 by "
        f"default, {MAX_CANDIDATES} at most) the one with the highest (1 - penalty_alpha) * probability - "
        "penalty_alpha * likeness to a token before it. Never the model's default.",
        json_schema_extra=related(excludes=_NOT_WITH_CONTRASTIVE_SEARCH, off=[0]),
    )  # fmt: skip
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=100,
        description="Divides logits of tokens in prompt or output, or multiplies negative ones; 1 turns it off.",
        json_schema_extra=related(off=[1]),
    )
    no_repeat_ngram_size: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="No n-gram of this length occurs twice; 0 turns it off.",
        json_schema_extra=related(off=[0]),
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=128, fail_fast=True, description="Words that must not appear in the output."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, fail_fast=True, description="Only these tokens may be chosen."
    )
    min_tokens: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Until so many tokens were generated, nothing but max_tokens ends them."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=128, fail_fast=True, description="Tokens that end the output."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Show what ended the output as well.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; on by default.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_PROMPT_LOGPROBS, description="Report so many alternatives for each token of the prompt.",
        json_schema_extra=related(excludes=["stream"]),
    )  # fmt: skip
    return_token_ids: bool | None = Field(None, description="Report the token ids of prompt and output.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only so many tokens at the end of the prompt; -1: what fits."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Lower runs first. Needs the server's policy to be `priority`."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=128, description="Share cached prefixes only with requests of the same salt."
    )

    contrastive: ContrastiveOptions | None = Field(
        None,
        description="Contrastive decoding: what the model says, less what the server's auxiliary model says as well.",
        json_schema_extra=related(excludes=["dola", *_OTHER_DECODING]),
        examples=[{}, {"beta": 1, "expert_weight": 1, "temperature": 0.5}],
    )
    guidance: GuidanceOptions | None = Field(
        None,
        description="Classifier-free guidance: go further in the direction in which the prompt changes the answer.",
        examples=[{"scale": 1.5, "negative_prompt": "You are a rude assistant."}],
        json_schema_extra=related(excludes=["use_beam_search", "beam_search", "penalty_alpha"]),
    )
    dola: DoLaOptions | None = Field(
        None,
        description="Decoding by contrasting layers: what the model says, less what it would say before its last "
        "layers. A repetition_penalty of 1.2 is advised.",
        json_schema_extra=related(excludes=_OTHER_DECODING),
        examples=[{"layers": "low"}, {"layers": [8, 10, 12], "alpha": 0.2}],
    )
    speculation: SpeculationChoice | None = Field(
        None,
        description="Guess tokens ahead and verify several at a time, for speed: `off`, or how. By default as the "
        "server was started.",
        json_schema_extra=related(off=["off"]),
        examples=["off", {"method": "ngram", "num_tokens": 8}, {"verify": "rejection"}],
    )

    structured_outputs: Refused = refused("Output by a grammar.")
    logits_processors: Refused = refused("Code that changes logits.")

    @model_validator(mode="after")
    def _check_combinations(self) -> "SamplingFields":
        if self.truncate_prompt_tokens == 0:
            message = "Invalid '{path}': Expected -1 or a value >= 1, but got 0 instead."
            raise problem("integer_below_min_value", message, "truncate_prompt_tokens")
        if self.use_beam_search and (self.n or 1) > MAX_WIDTH:
            expected = f"Expected a value <= {MAX_WIDTH} beside 'use_beam_search', but got {self.n} instead."
            raise problem(
                "integer_above_max_value", f"Invalid '{{path}}': integer above maximum value. {expected}", "n"
            )
        if self.asks("penalty_alpha") and self.top_k is not None:
            self._check_candidates(self.top_k)
        return self

    def _check_candidates(self, top_k: int) -> None:
        if not 1 <= top_k <= MAX_CANDIDATES:
            side, sign, limit = ("below", ">=", 1) if top_k < 1 else ("above", "<=", MAX_CANDIDATES)
            bound = "minimum" if top_k < 1 else "maximum"
            message = (
                f"Invalid '{{path}}': integer {side} {bound} value. "
                f"Expected a value {sign} {limit} beside 'penalty_alpha', but got {top_k} instead."
            )
            raise problem(f"integer_{side}_{bound[:3]}_value", message, "top_k")

    @property
    def beams(self) -> BeamSearchOptions | None:
        """The beam search that is asked for, in whichever way."""
        if not self.use_beam_search:
            return self.beam_search
        width = self.n or 1
        return BeamSearchOptions.model_construct(
            width=width,
            num_return=width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            groups=None,
            diversity_penalty=None,
        )

    @property
    def width_field(self) -> str:
        """Path of the field that says how many beams there are."""
        return "n" if self.use_beam_search else "beam_search.width"

    @property
    def num_answers(self) -> int:
        """Choices that each prompt is answered with."""
        return (self.n if self.beams is None else self.beams.num_return) or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

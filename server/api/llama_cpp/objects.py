"""What llama.cpp's routes answer with."""

from typing import Any, Literal

from pydantic import Field

from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel


class LlamaTopToken(ResponseModel):
    """A token that could stand at a place."""

    id: int = Field(description="Its id.")
    token: str = Field(description="Its text, as far as it is whole characters.")
    bytes: list[int] = Field(description="The text as bytes, which need not be whole characters.")
    logprob: float = Field(description="Its log-probability; -9999 stands for minus infinity.")


class LlamaTokenProbs(LlamaTopToken):
    """A token of the output."""

    top_logprobs: list[LlamaTopToken] = Field(description="The most probable tokens at its place.")


class LlamaTimings(ResponseModel):
    """How long a completion took."""

    cache_n: int = Field(description="Tokens of the prompt that were found in the prefix cache.")
    prompt_n: int = Field(description="Tokens of the prompt that were computed.")
    prompt_ms: float = Field(description="From the request's arrival to the first token.")
    prompt_per_token_ms: float = Field(description="`prompt_ms` for each of them.")
    prompt_per_second: float = Field(description="Tokens of the prompt in a second.")
    predicted_n: int = Field(description="Tokens of the output.")
    predicted_ms: float = Field(description="From the first token to the last.")
    predicted_per_token_ms: float = Field(description="`predicted_ms` for each of them.")
    predicted_per_second: float = Field(description="Tokens of the output in a second; 0 where there is one alone.")


class LlamaChunk(ResponseModel):
    """What came since the last event. The last event of a completion is a LlamaCompletion, with an empty `content`."""

    index: int = Field(description="Which completion it belongs to, over all prompts.")
    content: str = Field(description="Text.")
    tokens: list[int] = Field(description="Ids of the tokens that are complete with it.")
    stop: Literal[False] = Field(description="Whether the completion has ended.")
    id_slot: Literal[-1] = Field(description="There are no fixed slots.")
    tokens_predicted: int = Field(description="Tokens of the output so far.")
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    timings: LlamaTimings | None = Field(None, description="With `timings_per_token`.")
    completion_probabilities: list[LlamaTokenProbs] | None = Field(None, description="With `n_probs`.")
    warnings: list[ReportedNotice] | None = Field(None, description=f"{WARNINGS} In the first event.")


class LlamaCompletion(ResponseModel):
    """A completion; of several prompts, or with `n_cmpl`, an array has all of them."""

    index: int = Field(description="Its number, over all prompts.")
    content: str = Field(description="The text; empty at the end of a stream.")
    tokens: list[int] = Field(description="Its token ids, with `return_tokens`.")
    id_slot: Literal[-1] = Field(description="There are no fixed slots.")
    stop: Literal[True] = Field(description="Whether the completion has ended.")
    model: str = Field(description="The model's name.")
    tokens_predicted: int = Field(description="Tokens of the output.")
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    generation_settings: dict[str, Any] = Field(description="The settings that counted, by llama.cpp's names.")
    prompt: str = Field(description="The prompt, special tokens included.")
    has_new_line: bool = Field(description="Whether the output has a line break.")
    truncated: bool = Field(description="Whether the context was full before the output ended.")
    stop_type: Literal["eos", "limit", "word"] = Field(description="What ended the output.")
    stopping_word: str = Field(description="The string of `stop` that ended it; else empty.")
    tokens_cached: int = Field(description="Tokens of the prompt that were found in the prefix cache.")
    timings: LlamaTimings
    completion_probabilities: list[LlamaTokenProbs] | None = Field(
        None, description="With `n_probs`; not at the end of a stream."
    )
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class AppliedTemplate(ResponseModel):
    """Messages as the text of a prompt."""

    prompt: str = Field(description="The text, special tokens included.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class LlamaModalities(ResponseModel):
    """What a prompt may have besides text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class DefaultSettings(ResponseModel):
    """What counts where a request says nothing."""

    params: dict[str, Any] = Field(description="As `generation_settings` of a completion.")
    n_ctx: int = Field(description="Prompt and output together, in tokens.")


class LlamaProps(ResponseModel):
    """What the server tells of itself."""

    default_generation_settings: DefaultSettings
    total_slots: int = Field(description="Completions that are computed at a time.")
    model_alias: str = Field(description="The model's name.")
    model_path: str = Field(description="The model's name as well: paths of this machine are not told.")
    modalities: LlamaModalities
    endpoint_slots: Literal[True] = Field(description="Whether there is GET /slots.")
    endpoint_props: Literal[False] = Field(description="Whether properties can be changed.")
    endpoint_metrics: Literal[True] = Field(description="Whether there is GET /metrics.")
    chat_template: str = Field(description="The Jinja source; empty if the model has none.")
    bos_token: str = Field(description="Begins a text; empty if there is none.")
    eos_token: str = Field(description="Ends it; empty if there is none.")
    build_info: str = Field(description="This server's name and version.")
    is_sleeping: Literal[False] = Field(description="The model stays loaded.")


class NextToken(ResponseModel):
    """How far a completion's request is, with all of its completions."""

    has_next_token: bool = Field(description="Whether more may come.")
    n_remain: int = Field(description="Tokens that may still come; -1 where nothing runs.")
    n_decoded: int = Field(description="Tokens that have come.")


class LlamaSlot(ResponseModel):
    """A place for a completion that is computed."""

    id: int = Field(description="Its number; a completion has no number of its own, and may change it.")
    id_task: int = Field(description="-1: see `request_id`.")
    request_id: str | None = Field(description="Extension: that of the header `x-request-id`, for GET /v1/requests.")
    n_ctx: int = Field(description="Prompt and output together, in tokens.")
    speculative: bool = Field(description="Whether the server guesses tokens ahead by default.")
    is_processing: bool = Field(description="Whether a completion of this key runs in it.")
    next_token: NextToken

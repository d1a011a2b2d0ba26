"""Fields of other servers (vLLM, SGLang, llama.cpp, Ollama, OpenRouter) that this one does not support.

Samplers and settings that other servers' clients send with every request, and fields that cannot change the answer, are
hints: ignored and reported. Other fields are refused, unless their value asks for nothing. A field with an equivalent
on this server is declared next to that one.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from server.api.fields.decoding import NUM_ALTERNATIVES
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    Anything,
    Opaque,
    Refused,
    RequestModel,
    hint,
    no_effect,
    refused,
    same_as,
)
from server.api.fields.samplers import SamplerFields
from server.generation.settings import DecodingSettings, facts_of

_PLACED = "The server decides where a request runs."
_ONE_MODEL = "The request runs on the model that `model` names; there are no other providers."
_NO_MEDIA = "The model's own files say how images are processed."
_STAYS = "The server's settings decide; only Ollama's routes support it."
_NO_TRANSFER = "Keys and values are not moved between servers."
_TIMES = "`GET /v1/requests/{request_id}` has the times of a request."
_LOADED = "The server's settings decide how the model is loaded."
_NO_SAMPLER = "This server has no such sampler."
_NO_SHIFT = "The context does not shift: an answer ends when the context is full."
_NO_TIME = "Answers do not depend on time; limit their tokens instead."
Nothing = Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY]
"""A list that must be empty, because its items are not supported."""


def own_id() -> Any:
    """The default of the field `request_id` of an API whose answers have ids that the server makes."""
    return hint("vLLM: your own id for the request.", "Send it as the header `x-request-id`, which answers repeat.")


def _same_setting(name: str, description: str) -> Any:
    """The default of a field that is another server's name for a decoding setting."""
    limits: dict[str, Any] = {**facts_of(DecodingSettings)[name].limits}
    return same_as(name, description, **limits)


def as_whole(value: object) -> object:
    """A number such as 8192.0 as an integer: clients with number fields in their settings send it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(as_whole)]
NPredict = Annotated[
    Annotated[WholeNumber, Field(ge=-1, le=2**31 - 1)] | None,
    AfterValidator(lambda value: None if value == -1 else value),
]
"""A number of tokens in llama.cpp; -1 is no limit."""
NumPredict = Annotated[
    Annotated[WholeNumber, Field(ge=-2, le=2**31 - 1)] | None,
    AfterValidator(lambda value: value if value is not None and value > 0 else None),
]
"""A number of tokens in Ollama; 0 or less is no limit."""

NProbs = Annotated[Annotated[WholeNumber, NUM_ALTERNATIVES] | None, AfterValidator(lambda value: value or None)]
"""A number of alternatives in llama.cpp; 0 reports nothing."""


class ForeignSettings(SamplerFields):
    """Samplers and settings of llama.cpp, Ollama and vLLM, accepted with any request that generates.

    Those without an equal are reported. An API with a field of its own that has one of these names declares it again.
    """

    num_ctx: WholeNumber | None = hint("Ollama: size of the context.", _LOADED)
    num_keep: WholeNumber | None = hint("Ollama: tokens to keep when the context shifts.", _NO_SHIFT, off=[0, -1])
    num_batch: WholeNumber | None = hint("Ollama: tokens to compute in a step.", _LOADED)
    num_gpu: WholeNumber | None = hint("Ollama: layers to compute on a GPU.", _LOADED, off=[-1])
    main_gpu: WholeNumber | None = hint("Ollama: the GPU to use.", _LOADED, off=[0])
    num_thread: WholeNumber | None = hint("Ollama: threads to compute with.", _LOADED, off=[0])
    draft_num_predict: WholeNumber | None = hint("Ollama: tokens that a draft model drafts.", _LOADED)
    use_mmap: bool | None = hint("Ollama: whether to map the model's file.", _LOADED, on=True)
    use_mlock: bool | None = hint("Ollama: whether to keep the model from being swapped out.", _LOADED)
    numa: bool | None = hint("Ollama: whether to optimise for several memory nodes.", _LOADED)
    low_vram: bool | None = hint("Ollama: whether to save memory of the GPU.", _LOADED)
    f16_kv: bool | None = hint("Ollama: whether keys and values have 16 bits.", _LOADED, on=True)
    tfs_z: float | None = hint("Ollama: tail free sampling.", _NO_SAMPLER, off=[1])
    penalize_newline: bool | None = hint(
        "Ollama: whether penalties count line breaks.", "Penalties count line breaks.", on=True
    )

    n_keep: WholeNumber | None = hint("llama.cpp: tokens to keep when the context shifts.", _NO_SHIFT, off=[0, -1])
    n_discard: WholeNumber | None = hint("llama.cpp: tokens to drop when the context shifts.", _NO_SHIFT, off=[0])
    n_indent: WholeNumber | None = hint("llama.cpp: the least indentation of a line.", "It is not enforced.", off=[0])
    min_keep: WholeNumber | None = hint(
        "llama.cpp: the fewest tokens that samplers keep.", "Samplers keep at least one token.", off=[0, 1]
    )
    dynatemp_range: float | None = hint("llama.cpp: dynamic temperature.", _NO_SAMPLER, off=[0])
    dynatemp_exponent: float | None = no_effect("llama.cpp: only with a `dynatemp_range`, which is not supported.")
    adaptive_target: float | None = hint("llama.cpp: target of the adaptive-p sampler.", _NO_SAMPLER, off=[-1])
    adaptive_decay: float | None = no_effect("llama.cpp: only with an `adaptive_target`, which is not supported.")
    t_max_prompt_ms: float | None = hint("llama.cpp: the longest time for the prompt.", _NO_TIME, off=[0, -1])
    t_max_predict_ms: float | None = hint("llama.cpp: the longest time for the output.", _NO_TIME, off=[0, -1])
    post_sampling_probs: bool | None = hint(
        "llama.cpp: report probabilities after sampling.", "Reported are log-probabilities as `logprobs` defines them."
    )
    n_probs: WholeNumber | None = hint(
        "llama.cpp: report log-probabilities.", "Here the API's own fields ask for log-probabilities.", off=[0]
    )
    parse_tool_calls: bool | None = hint(
        "llama.cpp: whether calls are returned apart from the text.", "Calls are always returned as calls.", on=True
    )
    reasoning_budget: WholeNumber | None = hint(
        "llama.cpp: the most reasoning tokens.", "Reasoning is not limited here.", off=[-1]
    )
    guided_decoding_backend: str | None = hint(
        "vLLM: the library that constrains the output.", "The backend is always llguidance.", off=["auto", "guidance"]
    )


class ForeignHints(RequestModel):
    """Hints of other servers, accepted with any request. None of them changes an answer."""

    keep_alive: Anything | None = hint(
        "Ollama: how long the model stays in memory.", "Here the server's settings decide; Ollama's routes honour it."
    )
    provider: Opaque | None = hint("OpenRouter: providers that may answer.", _ONE_MODEL)
    models: list[str] | None = hint("OpenRouter: fallback models.", _ONE_MODEL)
    route: str | None = hint("OpenRouter: how to choose among models.", _ONE_MODEL)
    session_id: str | None = hint("vLLM and OpenRouter: requests that belong together.", _PLACED)
    data_parallel_rank: int | None = hint("vLLM and SGLang: the replica to run on.", _PLACED)
    id_slot: int | None = hint("llama.cpp: the slot to run in; -1: any.", _PLACED, off=[-1])
    kv_transfer_params: Opaque | None = hint("vLLM: moves keys and values between servers.", _NO_TRANSFER)
    ec_transfer_params: Opaque | None = hint("vLLM: moves encoded images between servers.", _NO_TRANSFER)
    bootstrap_host: Anything | None = hint("SGLang: the server that computes the prompt.", _NO_TRANSFER)
    bootstrap_port: Anything | None = hint("SGLang: the server that computes the prompt.", _NO_TRANSFER)
    bootstrap_room: Anything | None = hint("SGLang: the server that computes the prompt.", _NO_TRANSFER)
    mm_processor_kwargs: Opaque | None = hint("vLLM: options for processing images.", _NO_MEDIA)
    media_io_kwargs: Opaque | None = hint("vLLM: options for loading media.", _NO_MEDIA)


class ForeignFields(ForeignSettings, ForeignHints):
    """Fields of other servers' generation APIs."""

    usage: Opaque | None = hint("OpenRouter: whether to report usage.", "For streams, `stream_options` decides.")
    transforms: list[str] | None = hint("OpenRouter: how to shorten a long prompt.", "Prompts are not shortened.")
    stream_interval: int | None = hint(
        "vLLM and SGLang: tokens in a chunk.", "Tokens are sent as they are generated.", off=[1]
    )  # fmt: skip
    timings_per_token: bool | None = hint("llama.cpp: report times.", _TIMES)
    return_progress: bool | None = hint("llama.cpp: report progress on the prompt.", _TIMES)
    repeat_penalty: float | None = _same_setting("repetition_penalty", "llama.cpp's and Ollama's name.")
    typ_p: float | None = _same_setting("typical_p", "llama.cpp's name.")

    options: Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused(
        "Ollama: settings, which are fields of the request here."
    )
    plugins: Nothing = refused("OpenRouter: tools that the server runs.")
    lora: Nothing = refused("llama.cpp: LoRA adapters.")
    lora_path: Refused = refused("SGLang: a LoRA adapter.")
    custom_logit_processor: Refused = refused("SGLang: code that changes logits.")
    vllm_xargs: Refused = refused("vLLM: arguments of its extensions.")
    repetition_detection: Refused = refused("vLLM: end output that repeats itself.")
    stop_regex: Refused = refused("SGLang: a regular expression that ends the output.")
    return_hidden_states: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused(
        "SGLang: return hidden states of the model."
    )

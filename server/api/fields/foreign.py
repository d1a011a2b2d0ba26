"""Fields of other servers (vLLM, SGLang, llama.cpp, Ollama, OpenRouter) that this one does not support.

Fields that cannot change the answer are hints: ignored and reported. Fields that would change it are refused, unless
their value asks for nothing. A field with an equivalent on this server is declared next to that one.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.api.fields.rules import SUPPORTED_ONLY, Anything, Opaque, Refused, RequestModel, hint, refused

_PLACED = "The server decides where a request runs."
_ONE_MODEL = "This server has one model and no other providers."
_NO_MEDIA = "The model reads text only."
_NO_TRANSFER = "Keys and values are not moved between servers."
_TIMES = "`GET /v1/requests/{request_id}` has the times of a request."
Nothing = Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY]
"""A list that must be empty, because its items are not supported."""


def own_id() -> Any:
    """The default of the field `request_id` of an API whose answers have ids that the server makes."""
    return hint("vLLM: your own id for the request.", "Send it as the header `x-request-id`, which answers repeat.")


class ForeignHints(RequestModel):
    """Hints of other servers, accepted with any request. None of them changes an answer."""

    keep_alive: Anything | None = hint("Ollama: how long the model stays in memory.", "The model is always in memory.")
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


class ForeignFields(ForeignHints):
    """Fields of other servers' generation APIs."""

    usage: Opaque | None = hint("OpenRouter: whether to report usage.", "For streams, `stream_options` decides.")
    transforms: list[str] | None = hint("OpenRouter: how to shorten a long prompt.", "Prompts are not shortened.")
    stream_interval: int | None = hint(
        "vLLM and SGLang: tokens in a chunk.", "Tokens are sent as they are generated.", off=[1]
    )  # fmt: skip
    timings_per_token: bool | None = hint("llama.cpp: report times.", _TIMES)
    return_progress: bool | None = hint("llama.cpp: report progress on the prompt.", _TIMES)
    n_keep: int | None = hint(
        "llama.cpp: tokens to keep when the context is full.", "The output ends when the context is full.", off=[0]
    )
    n_discard: int | None = hint(
        "llama.cpp: tokens to drop when the context is full.", "The output ends when the context is full.", off=[0]
    )

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

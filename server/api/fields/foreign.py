"""Fields that other servers take (vLLM, SGLang, llama.cpp, Ollama, OpenRouter) and that this one does not honour.

They are hints, which are reported, or ask for another answer, and are refused; values that ask for nothing are taken.
Fields that mean the same as one of this server are declared next to that one.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from server.api.fields.rules import SUPPORTED_ONLY, Anything, Opaque, Refused, RequestModel, hint, refused

_PLACED = "The server decides where a request runs."
_ONE_MODEL = "There is one model, and nothing behind it to choose from."
_NO_MEDIA = "The model reads text only."
_NO_TRANSFER = "Keys and values are not moved between servers."
_TIMES = "`GET /v1/requests/{request_id}` has the times of a request."
Nothing = Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY]
"""A list of what is not supported, which may be empty."""


def own_id() -> Any:
    """The default of the field `request_id` of an API whose answers have ids of the server's."""
    return hint("vLLM: your own id of the request.", "Send it as the header `x-request-id`, which answers repeat.")


class ForeignHints(RequestModel):
    """Hints of other servers that go with any request. None of them changes an answer."""

    keep_alive: Anything | None = hint("Ollama: how long the model stays in memory.", "The model is always in memory.")
    provider: Opaque | None = hint("OpenRouter: who may answer.", _ONE_MODEL)
    models: list[str] | None = hint("OpenRouter: models to fall back on.", _ONE_MODEL)
    route: str | None = hint("OpenRouter: how to choose among models.", _ONE_MODEL)
    session_id: str | None = hint("vLLM and OpenRouter: requests that belong together.", _PLACED)
    data_parallel_rank: int | None = hint("vLLM and SGLang: where to run.", _PLACED)
    id_slot: int | None = hint("llama.cpp: where to run; -1 for anywhere.", _PLACED, off=[-1])
    kv_transfer_params: Opaque | None = hint("vLLM: moves keys and values between servers.", _NO_TRANSFER)
    ec_transfer_params: Opaque | None = hint("vLLM: moves encoded images between servers.", _NO_TRANSFER)
    bootstrap_host: Anything | None = hint("SGLang: where the prompt is computed.", _NO_TRANSFER)
    bootstrap_port: Anything | None = hint("SGLang: where the prompt is computed.", _NO_TRANSFER)
    bootstrap_room: Anything | None = hint("SGLang: where the prompt is computed.", _NO_TRANSFER)
    mm_processor_kwargs: Opaque | None = hint("vLLM: how images are read.", _NO_MEDIA)
    media_io_kwargs: Opaque | None = hint("vLLM: how media are read.", _NO_MEDIA)


class ForeignFields(ForeignHints):
    """Fields of other servers that generate."""

    usage: Opaque | None = hint("OpenRouter: whether usage is reported.", "It is, in a stream by `stream_options`.")
    transforms: list[str] | None = hint("OpenRouter: how a long prompt is shortened.", "It is not shortened.")
    stream_interval: int | None = hint(
        "vLLM and SGLang: tokens in a chunk.", "Tokens are sent as they come.", off=[1]
    )  # fmt: skip
    timings_per_token: bool | None = hint("llama.cpp: report times.", _TIMES)
    return_progress: bool | None = hint("llama.cpp: report how much of the prompt was computed.", _TIMES)
    n_keep: int | None = hint(
        "llama.cpp: tokens to keep when the context is full.", "An output ends with the context.", off=[0]
    )
    n_discard: int | None = hint(
        "llama.cpp: tokens to drop when the context is full.", "An output ends with the context.", off=[0]
    )

    options: Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused(
        "Ollama: what the fields of this request say."
    )
    plugins: Nothing = refused("OpenRouter: tools that a server runs.")
    lora: Nothing = refused("llama.cpp: adapters of the model.")
    lora_path: Refused = refused("SGLang: an adapter of the model.")
    custom_logit_processor: Refused = refused("SGLang: code that changes logits.")
    vllm_xargs: Refused = refused("vLLM: what its extensions take.")
    repetition_detection: Refused = refused("vLLM: end an output that repeats itself.")
    stop_regex: Refused = refused("SGLang: an expression that ends the output.")
    return_hidden_states: Annotated[Literal[False] | None, SUPPORTED_ONLY] = refused("SGLang: states of the model.")

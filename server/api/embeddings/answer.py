"""The vectors of a request."""

import base64

import msgspec

from server.api.embeddings.schema import EmbeddingRequest
from server.api.openai.numbers import floats_of, prompt_usage
from server.generation.notices import as_warnings
from server.generation.run import Run
from server.generation.served_model import ServedModel


def is_base64(body: EmbeddingRequest) -> bool:
    """What the answer has to know of the body."""
    return body.encoding_format == "base64"


def embedding_answer(run: Run, model: ServedModel, in_base64: bool) -> bytes:
    """An EmbeddingList."""
    data = [
        {
            "object": "embedding",
            "index": prompt.index,
            "embedding": base64.b64encode(prompt.pooled).decode() if in_base64 else floats_of(prompt),
        }
        for prompt in run.prompts
    ]
    usage = prompt_usage(run.usage.prompt_tokens)
    return msgspec.json.encode(
        {"object": "list", "model": run.plan.model, "data": data, "usage": usage, **as_warnings(run.plan.notices)}
    )

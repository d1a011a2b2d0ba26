"""What the body of a request for embeddings asks for."""

from server.api.embeddings.schema import EmbeddingRequest
from server.api.fields.pooling import pooling_fields
from server.generation.pooling import Embed, PoolingRequest
from server.generation.request import TextPrompt, TokenPrompt


def embedding_intent(body: EmbeddingRequest) -> PoolingRequest:
    """The body's fields as a request."""
    conversation = body.conversation(opens_turn=False)
    texts = tuple(_input(body, index, one) for index, one in enumerate(body.inputs))
    inputs = texts if conversation is None else (conversation,)
    return PoolingRequest(
        **pooling_fields(body),
        asks=Embed(inputs, body.dimensions, body.prompt_name, body.truncate_prompt_tokens, body.use_activation),
        id_prefix="embd-",
        paths={"prompt": "input" if conversation is None else "messages"},
    )


def _input(body: EmbeddingRequest, index: int, one: str | list[int]) -> TextPrompt | TokenPrompt:
    path = "input" if body.input is one else f"input[{index}]"
    return TextPrompt(one, path) if isinstance(one, str) else TokenPrompt(tuple(one), path)

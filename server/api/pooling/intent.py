"""Converts the bodies of embedding, score, rerank and classify requests to pooling requests."""

from typing import Any

from server.api.pooling.schema import ClassifyRequest, EmbeddingRequest, PoolingFields, RerankRequest, ScoreRequest
from server.generation.pooling import Classify, Embed, Pair, PoolingRequest, Score
from server.generation.request import TextPrompt, TokenPrompt


def embedding_intent(body: EmbeddingRequest) -> PoolingRequest:
    """A request for a vector of each input, or of the conversation."""
    conversation = body.conversation(opens_turn=False)
    texts = tuple(_input(body, index, one) for index, one in enumerate(body.inputs))
    inputs = texts if conversation is None else (conversation,)
    asks = Embed(inputs, body.dimensions, body.prompt_name, body.truncate_prompt_tokens, body.use_activation)
    return _request(body, asks, "embd-", "input" if conversation is None else "messages")


def classify_intent(body: ClassifyRequest) -> PoolingRequest:
    """A request for the classes of each input."""
    inputs = tuple(_input(body, index, one) for index, one in enumerate(body.inputs))
    return _request(body, Classify(inputs, body.truncate_prompt_tokens), "classify-", "input")


def score_intent(body: ScoreRequest) -> PoolingRequest:
    """A request for the score of each document for its query."""
    (query_field, document_field), (queries, documents) = body.names, body.texts
    pairs = []
    for index, document in enumerate(documents):
        query = index % len(queries)
        paths = _path(body, query_field, query), _path(body, document_field, index)
        pairs.append(Pair(queries[query], document, *paths))
    return _request(
        body, Score(pairs, body.instruction, truncate=body.truncate_prompt_tokens), "score-", document_field
    )


def rerank_intent(body: RerankRequest) -> PoolingRequest:
    """A request for the score of each document for the one query."""
    documents = enumerate(body.written)
    pairs = tuple(Pair(body.query, text, "query", f"{body.named}[{index}]") for index, text in documents)
    asks = Score(pairs, body.instruction, body.max_tokens_per_doc, body.num_kept)
    return _request(body, asks, "rerank-", body.named, may_omit_model=body.is_tei)


def _request(
    body: PoolingFields, asks: Embed | Score | Classify, id_prefix: str, prompt: str, **more: Any
) -> PoolingRequest:
    """The request of a body whose prompts are in the field `prompt`."""
    return PoolingRequest(
        model=body.model,
        asks=asks,
        id_prefix=id_prefix,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        paths={"prompt": prompt},
        notices=tuple(body.ignored()),
        **more,
    )


def _input(body: EmbeddingRequest | ClassifyRequest, index: int, one: str | list[int]) -> TextPrompt | TokenPrompt:
    path = "input" if body.input is one else f"input[{index}]"
    return TextPrompt(one, path) if isinstance(one, str) else TokenPrompt(tuple(one), path)


def _path(body: ScoreRequest, name: str, index: int) -> str:
    return name if isinstance(getattr(body, name), str) else f"{name}[{index}]"

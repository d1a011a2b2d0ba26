"""Converts the bodies of embedding, score, rerank and classify requests to pooling requests."""

from typing import Any

from server.api.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
)
from server.generation.pooling import Classify, Embed, Pair, PoolingRequest, Score
from server.generation.request import TextPrompt, TokenPrompt


def embedding_intent(body: EmbeddingRequest) -> PoolingRequest:
    """A request for a vector of each input, or of the conversation."""
    conversation = body.conversation(opens_turn=False)
    inputs = _inputs(body.input, "input") if conversation is None else (conversation,)
    asks = Embed(inputs, body.dimensions, body.prompt_name, body.truncate_prompt_tokens, body.use_activation)
    return _request(body, asks, "embd-", "input" if conversation is None else "messages")


def tei_embed_intent(body: TeiEmbedRequest) -> PoolingRequest:
    """A request for a vector of each input."""
    inputs = _inputs(body.inputs, "inputs")
    asks = Embed(inputs, body.dimensions, body.prompt_name, body.num_kept, body.normalize is not False)
    return _request(body, asks, "embd-", "inputs", may_omit_model=True)


def classify_intent(body: ClassifyRequest) -> PoolingRequest:
    """A request for the classes of each input."""
    asks = Classify(_inputs(body.input, "input"), body.truncate_prompt_tokens)
    return _request(body, asks, "classify-", "input")


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


def _inputs(given: Any, name: str) -> tuple[TextPrompt | TokenPrompt, ...]:
    """The prompts of an `Input` in the field `name`."""
    if isinstance(given, str) or isinstance(given[0], int):
        return (_input(given, name),)
    return tuple(_input(one, f"{name}[{index}]") for index, one in enumerate(given))


def _input(one: str | list[int], path: str) -> TextPrompt | TokenPrompt:
    return TextPrompt(one, path) if isinstance(one, str) else TokenPrompt(tuple(one), path)


def _path(body: ScoreRequest, name: str, index: int) -> str:
    return name if isinstance(getattr(body, name), str) else f"{name}[{index}]"

"""What the body of a request to rank documents asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.fields.pooling import pooling_fields
from server.api.rerank.schema import RerankRequest
from server.generation.pooling.request import Pair, PoolingRequest, Score


@dataclass(frozen=True, slots=True)
class RerankOptions:
    """What the answer has to know of the body."""

    top_n: int | None
    documents: Sequence[str] | None
    """If they are to be returned."""


def rerank_intent(body: RerankRequest) -> PoolingRequest:
    """The body's fields as a request."""
    pairs = tuple(Pair(body.query, text, "query", f"documents[{index}]") for index, text in enumerate(body.texts))
    return PoolingRequest(
        **pooling_fields(body),
        model=body.model,
        asks=Score(pairs, body.instruction, body.max_tokens_per_doc),
        id_prefix="rerank-",
        paths={"prompt": "documents"},
    )


def rerank_options(body: RerankRequest) -> RerankOptions:
    """What the answer has to know of the body."""
    return RerankOptions(body.top_n, None if body.return_documents is False else body.texts)

"""What the body of a request to rank documents asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.api.fields.pooling import pooling_fields
from server.api.rerank.schema import RerankRequest
from server.generation.pooling import Pair, PoolingRequest, Score


@dataclass(frozen=True, slots=True)
class RerankOptions:
    """What the answer has to know of the body."""

    top_n: int | None
    documents: Sequence[str] | None
    """If they are to be returned."""
    is_raw: bool
    """Whether scores are the model's own numbers."""
    is_array: bool
    """Whether the answer has TEI's form."""


def rerank_intent(body: RerankRequest) -> PoolingRequest:
    """The body's fields as a request."""
    documents = enumerate(body.written)
    pairs = tuple(Pair(body.query, text, "query", f"{body.named}[{index}]") for index, text in documents)
    return PoolingRequest(
        **pooling_fields(body),
        may_omit_model=body.texts is not None,
        asks=Score(pairs, body.instruction, body.max_tokens_per_doc),
        id_prefix="rerank-",
        paths={"prompt": body.named},
    )


def rerank_options(body: RerankRequest) -> RerankOptions:
    """What the answer has to know of the body."""
    is_array = body.texts is not None
    shows = bool(body.return_text) if is_array else body.return_documents is not False
    is_raw = bool(body.raw_scores) or body.use_activation is False
    return RerankOptions(body.top_n, body.written if shows else None, is_raw, is_array)

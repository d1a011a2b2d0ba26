"""What the body of a request for scores asks for."""

from server.api.fields.pooling import pooling_fields
from server.api.scores.schema import ScoreRequest
from server.generation.pooling import Pair, PoolingRequest, Score


def score_intent(body: ScoreRequest) -> PoolingRequest:
    """The body's fields as a request."""
    queries, documents = body.texts
    of_queries, of_documents = body.names
    pairs = tuple(
        Pair(
            queries[index % len(queries)],
            document,
            _path(body, of_queries, index % len(queries)),
            _path(body, of_documents, index),
        )
        for index, document in enumerate(documents)
    )
    return PoolingRequest(
        **pooling_fields(body),
        asks=Score(pairs, body.instruction),
        id_prefix="score-",
        paths={"prompt": of_documents},
    )


def _path(body: ScoreRequest, name: str, index: int) -> str:
    """Of one of the texts."""
    return name if isinstance(getattr(body, name), str) else f"{name}[{index}]"

"""What the body of a request for scores asks for."""

from server.api.fields.pooling import pooling_fields
from server.api.scores.schema import ScoreRequest
from server.generation.pooling.request import Pair, PoolingRequest, Score


def score_intent(body: ScoreRequest) -> PoolingRequest:
    """The body's fields as a request."""
    queries, documents = body.texts
    name = body.names[1]
    is_one = isinstance(getattr(body, name), str)
    pairs = tuple(
        Pair(queries[index % len(queries)], document, name if is_one else f"{name}[{index}]")
        for index, document in enumerate(documents)
    )
    return PoolingRequest(
        **pooling_fields(body),
        model=body.model,
        asks=Score(pairs, body.instruction),
        id_prefix="score-",
        paths={"prompt": name},
    )

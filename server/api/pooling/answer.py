"""The answers of POST /v1/embeddings, /v1/score and /v1/rerank."""

import base64
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import Field

from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel
from server.api.pooling.schema import EmbeddingRequest, RerankRequest, ScoreRequest
from server.generation.notices import as_warnings
from server.generation.run import PromptRun, Run
from server.generation.served_model import ServedModel


class PromptUsage(ResponseModel):
    """Tokens that a request took."""

    prompt_tokens: int = Field(description="Of all texts, with what the model puts around them.")
    total_tokens: int = Field(description="The same.")


class Embedding(ResponseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Which of the inputs.")
    embedding: list[float] | str = Field(description="The vector; base64 of it, if asked for.")


class EmbeddingList(ResponseModel):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: str = Field(description="As the request named it.")
    data: list[Embedding] = Field(description="In the order of the inputs.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class Score(ResponseModel):
    """Of one pair."""

    object: Literal["score"] = "score"
    index: int = Field(description="Which of the documents.")
    score: float = Field(description="The higher, the better; from 0 to 1 unless the model's configuration says else.")


class ScoreList(ResponseModel):
    """Answer of POST /v1/score."""

    id: str = Field(description="Of the answer.")
    object: Literal["list"] = "list"
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As the request named it.")
    data: list[Score] = Field(description="In the order of the documents.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class RankedDocument(ResponseModel):
    """A document as it was given."""

    text: str = Field(description="Its text.")


class RerankResult(ResponseModel):
    """Where a document stands."""

    index: int = Field(description="Which of the request's documents.")
    relevance_score: float = Field(
        description="The higher, the better; from 0 to 1 unless the model's configuration says else."
    )
    document: RankedDocument | None = Field(None, description="Unless `return_documents` is off.")


class Reranked(ResponseModel):
    """Answer of POST /v1/rerank."""

    id: str = Field(description="Of the answer.")
    model: str = Field(description="As the request named it.")
    results: list[RerankResult] = Field(description="The best first; of equally good ones, that with the lower index.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class RankedText(ResponseModel):
    """Where a text stands, in TEI's form."""

    index: int = Field(description="Which of the request's texts.")
    score: float = Field(description="The same as `relevance_score`.")
    text: str | None = Field(None, description="The text, with `return_text`.")


Finished = Callable[[Run, ServedModel], bytes]
"""From a finished run to the body of its answer."""


def embedding_answer(body: EmbeddingRequest) -> Finished:
    """Writes an EmbeddingList."""
    return partial(_embeddings, in_base64=body.encoding_format == "base64")


def _embeddings(run: Run, model: ServedModel, *, in_base64: bool) -> bytes:
    data = [
        {
            "object": "embedding",
            "index": prompt.index,
            "embedding": base64.b64encode(prompt.pooled).decode() if in_base64 else _floats(prompt),
        }
        for prompt in run.prompts
    ]
    return _encoded(run, object="list", model=run.plan.model, data=data)


def score_answer(body: ScoreRequest) -> Finished:
    """Writes a ScoreList."""
    return partial(_score_list, is_raw=body.use_activation is False)


def _score_list(run: Run, model: ServedModel, *, is_raw: bool) -> bytes:
    scores = enumerate(_scores(run, model, is_raw=is_raw))
    data = [{"object": "score", "index": index, "score": score} for index, score in scores]
    return _encoded(run, id=run.plan.id, object="list", created=int(time.time()), model=run.plan.model, data=data)


def rerank_answer(body: RerankRequest) -> Finished:
    """Writes a Reranked, or an array of RankedText in TEI's form."""
    shows = bool(body.return_text) if body.is_tei else body.return_documents is not False
    return partial(
        _ranking,
        top_n=body.top_n,
        documents=body.written if shows else None,
        is_raw=bool(body.raw_scores) or body.use_activation is False,
        is_tei=body.is_tei,
    )


def _ranking(
    run: Run, model: ServedModel, *, top_n: int | None, documents: Sequence[str] | None, is_raw: bool, is_tei: bool
) -> bytes:
    scores = _scores(run, model, is_raw=is_raw)
    results = []
    for index in sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]:
        text: Mapping[str, Any] = {} if documents is None else {"text": documents[index]}
        if is_tei:
            results.append({"index": index, "score": scores[index], **text})
        else:
            document = {"document": text} if text else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
    if is_tei:
        return msgspec.json.encode(results)
    return _encoded(run, id=run.plan.id, model=run.plan.model, results=results)


def _scores(run: Run, model: ServedModel, *, is_raw: bool) -> Sequence[float]:
    """The score of each prompt; raw scores are the model's own numbers."""
    scoring = model.abilities.scoring
    assert scoring is not None, "the plan was made with it"
    return [scoring.value(_floats(prompt), is_raw=is_raw) for prompt in run.prompts]


def _floats(prompt: PromptRun) -> Sequence[float]:
    return struct.unpack(f"<{len(prompt.pooled) // 4}f", prompt.pooled)


def _encoded(run: Run, **answer: Any) -> bytes:
    """The answer with its usage and its warnings."""
    num_tokens = run.usage.prompt_tokens
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({**answer, "usage": usage, **as_warnings(run.plan.notices)})

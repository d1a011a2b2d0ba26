"""Answers of POST /v1/embeddings, /embed, /v1/score, /v1/rerank and /v1/classify."""

import base64
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
)
from server.generation.run import PromptRun, Run
from server.generation.served_model import ServedModel

_SCORE = "Higher is better; from 0 to 1 unless the model's configuration turns the sigmoid off."


class PromptUsage(AnswerObject):
    """Tokens of a request's prompts."""

    prompt_tokens: Annotated[int, doc("Tokens of all texts and of the template around them.")]
    total_tokens: Annotated[int, doc("Same as `prompt_tokens`.")]


class Embedding(AnswerObject):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: Annotated[int, doc("Index of the input.")]
    embedding: Annotated[Sequence[float] | str, doc("The vector, in base64 if the request asked for that.")]


class EmbeddingList(AnswerObject):
    """Response schema for POST /v1/embeddings."""

    object: Literal["list"] = "list"
    model: Annotated[str, doc("The model's name, as in the request.")]
    data: Annotated[Sequence[Embedding], doc("In the order of the inputs.")]
    usage: PromptUsage
    warnings: Warnings = UNSET


class Score(AnswerObject):
    """The score of one pair."""

    object: Literal["score"] = "score"
    index: Annotated[int, doc("Index of the document.")]
    score: Annotated[float, doc(_SCORE)]


class ScoreList(AnswerObject):
    """Response schema for POST /v1/score."""

    id: Annotated[str, doc("The answer's id.")]
    object: Literal["list"] = "list"
    created: Annotated[int, doc("Unix time in seconds.")]
    model: Annotated[str, doc("The model's name, as in the request.")]
    data: Annotated[Sequence[Score], doc("In the order of the documents.")]
    usage: PromptUsage
    warnings: Warnings = UNSET


class RankedDocument(AnswerObject):
    """A document of the request."""

    text: Annotated[str, doc("The document's text.")]


class RerankResult(AnswerObject):
    """A document and its score."""

    index: Annotated[int, doc("Index of the document in the request.")]
    relevance_score: Annotated[float, doc(_SCORE)]
    document: Annotated[RankedDocument | UnsetType, doc("Unless `return_documents` is off.")] = UNSET


class Reranked(AnswerObject):
    """Response schema for POST /v1/rerank."""

    id: Annotated[str, doc("The answer's id.")]
    model: Annotated[str, doc("The model's name, as in the request.")]
    results: Annotated[Sequence[RerankResult], doc("The best first; among equals, the lower index first.")]
    usage: PromptUsage
    warnings: Warnings = UNSET


class RankedText(AnswerObject):
    """A document and its score, in TEI's format."""

    index: Annotated[int, doc("Index of the text in the request.")]
    score: Annotated[float, doc("Same as `relevance_score` in the other format.")]
    text: Annotated[str | UnsetType, doc("The text, with `return_text`.")] = UNSET


class TextClasses(AnswerObject):
    """The classes of one input."""

    index: Annotated[int, doc("Index of the input.")]
    label: Annotated[str, doc("Name of the most probable class.")]
    probs: Annotated[Sequence[float], doc("Probabilities of all classes; with `use_activation` off, raw numbers.")]
    num_classes: Annotated[int, doc("How many classes the model has.")]


class Classified(AnswerObject):
    """Response schema for POST /v1/classify."""

    id: Annotated[str, doc("The answer's id.")]
    object: Literal["list"] = "list"
    created: Annotated[int, doc("Unix time in seconds.")]
    model: Annotated[str, doc("The model's name, as in the request.")]
    data: Annotated[Sequence[TextClasses], doc("In the order of the inputs.")]
    usage: PromptUsage
    warnings: Warnings = UNSET


Finished = Callable[[Run, ServedModel], bytes]
"""A function from a finished run to the body of its answer."""


def embedding_answer(body: EmbeddingRequest) -> Finished:
    """The writer of an EmbeddingList."""
    return partial(_embeddings, in_base64=body.encoding_format == "base64")


def _embeddings(run: Run, model: ServedModel, *, in_base64: bool) -> bytes:
    vectors = (base64.b64encode(one.pooled).decode() if in_base64 else floats_of(one) for one in run.prompts)
    data = [Embedding(index=one.index, embedding=vector) for one, vector in zip(run.prompts, vectors, strict=True)]
    return msgspec.json.encode(EmbeddingList(data=data, **_shared(run)))


def tei_embed_answer(body: TeiEmbedRequest) -> Finished:
    """The writer of an array of vectors."""
    return _vectors


def _vectors(run: Run, model: ServedModel) -> bytes:
    return msgspec.json.encode([floats_of(one) for one in run.prompts])


def classify_answer(body: ClassifyRequest) -> Finished:
    """The writer of a Classified."""
    return partial(_classes, is_raw=body.use_activation is False)


def _classes(run: Run, model: ServedModel, *, is_raw: bool) -> bytes:
    form = model.abilities.classification
    assert form is not None, "the plan was made with it"
    data = []
    for prompt in run.prompts:
        numbers = floats_of(prompt)
        best = max(range(len(numbers)), key=numbers.__getitem__)  # the first among equals
        probs = numbers if is_raw else form.probabilities(numbers)
        data.append(TextClasses(index=prompt.index, label=form.labels[best], probs=probs, num_classes=len(numbers)))
    return msgspec.json.encode(Classified(id=run.plan.id, created=int(time.time()), data=data, **_shared(run)))


def score_answer(body: ScoreRequest) -> Finished:
    """The writer of a ScoreList."""
    return partial(_score_list, is_raw=body.use_activation is False)


def _score_list(run: Run, model: ServedModel, *, is_raw: bool) -> bytes:
    scores = _scores(run, model, is_raw=is_raw)
    data = [Score(index=index, score=score) for index, score in enumerate(scores)]
    return msgspec.json.encode(ScoreList(id=run.plan.id, created=int(time.time()), data=data, **_shared(run)))


def rerank_answer(body: RerankRequest) -> Finished:
    """The writer of a Reranked, or of an array of RankedText in TEI's format."""
    shows = bool(body.return_text) if body.is_tei else body.return_documents is not False
    return partial(
        _texts_in_tei_form if body.is_tei else _reranked,
        top_n=body.top_n,
        documents=body.written if shows else None,
        is_raw=bool(body.raw_scores) or body.use_activation is False,
    )


def _reranked(
    run: Run, model: ServedModel, *, top_n: int | None, documents: Sequence[str] | None, is_raw: bool
) -> bytes:
    results = [
        RerankResult(
            index=index,
            relevance_score=score,
            document=UNSET if documents is None else RankedDocument(text=documents[index]),
        )
        for index, score in _best(_scores(run, model, is_raw=is_raw), top_n)
    ]
    return msgspec.json.encode(Reranked(id=run.plan.id, results=results, **_shared(run)))


def _texts_in_tei_form(
    run: Run, model: ServedModel, *, top_n: int | None, documents: Sequence[str] | None, is_raw: bool
) -> bytes:
    best = _best(_scores(run, model, is_raw=is_raw), top_n)
    texts = [
        RankedText(index=index, score=score, text=UNSET if documents is None else documents[index])
        for index, score in best
    ]
    return msgspec.json.encode(texts)


def _best(scores: Sequence[float], top_n: int | None) -> Sequence[tuple[int, float]]:
    """The highest scores with their indices."""
    return sorted(enumerate(scores), key=lambda one: -one[1])[:top_n]


def _scores(run: Run, model: ServedModel, *, is_raw: bool) -> Sequence[float]:
    """The score of each prompt; raw scores are the model's own numbers."""
    scoring = model.abilities.scoring
    assert scoring is not None, "the plan was made with it"
    return [scoring.value(floats_of(prompt), is_raw=is_raw) for prompt in run.prompts]


def floats_of(prompt: PromptRun) -> Sequence[float]:
    """The numbers of one prompt."""
    return struct.unpack(f"<{len(prompt.pooled) // 4}f", prompt.pooled)


def _shared(run: Run) -> dict[str, Any]:
    """The properties that all of these answers end with."""
    num_tokens = run.usage.prompt_tokens
    usage = PromptUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return {"model": run.plan.model, "usage": usage, "warnings": run.plan.notices or UNSET}

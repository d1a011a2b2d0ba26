"""Documents in the order of their scores."""

from typing import Any

import msgspec

from server.api.openai.numbers import prompt_usage
from server.api.rerank.intent import RerankOptions
from server.api.scores.answer import scores_of
from server.generation.notices import as_warnings
from server.generation.run import Run
from server.generation.served_model import ServedModel


def rerank_answer(run: Run, model: ServedModel, options: RerankOptions) -> bytes:
    """A Reranked, or an array of RankedText."""
    scores = scores_of(run, model, is_raw=options.is_raw)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: options.top_n]
    results = [_result(index, scores[index], options) for index in ranked]
    if options.is_array:
        return msgspec.json.encode(results)
    usage = prompt_usage(run.usage.prompt_tokens)
    answer = {"id": run.plan.id, "model": run.plan.model, "results": results, "usage": usage}
    return msgspec.json.encode({**answer, **as_warnings(run.plan.notices)})


def _result(index: int, score: float, options: RerankOptions) -> dict[str, Any]:
    text = None if options.documents is None else options.documents[index]
    if options.is_array:
        return {"index": index, "score": score, **({} if text is None else {"text": text})}
    return {"index": index, "relevance_score": score, **({} if text is None else {"document": {"text": text}})}

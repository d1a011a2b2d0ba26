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
    """A Reranked."""
    scores = scores_of(run, model)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: options.top_n]
    results = []
    for index in ranked:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if options.documents is not None:
            result["document"] = {"text": options.documents[index]}
        results.append(result)
    usage = prompt_usage(run.usage.prompt_tokens)
    answer = {"id": run.plan.id, "model": run.plan.model, "results": results, "usage": usage}
    return msgspec.json.encode({**answer, **as_warnings(run.plan.notices)})

"""The scores of a request."""

import time
from collections.abc import Sequence

import msgspec

from server.api.openai.numbers import floats_of, prompt_usage
from server.api.scores.schema import ScoreRequest
from server.generation.notices import as_warnings
from server.generation.run import Run
from server.generation.served_model import ServedModel


def created(body: ScoreRequest) -> int:
    """What the answer has to know beside its scores."""
    return int(time.time())


def scores_of(run: Run, model: ServedModel) -> Sequence[float]:
    """The score of each prompt."""
    scoring = model.abilities.scoring
    assert scoring is not None, "the plan was made with it"
    return [scoring.value(floats_of(prompt)) for prompt in run.prompts]


def score_answer(run: Run, model: ServedModel, time_created: int) -> bytes:
    """A ScoreList."""
    scores = enumerate(scores_of(run, model))
    answer = {
        "id": run.plan.id,
        "object": "list",
        "created": time_created,
        "model": run.plan.model,
        "data": [{"object": "score", "index": index, "score": score} for index, score in scores],
        "usage": prompt_usage(run.usage.prompt_tokens),
    }
    return msgspec.json.encode({**answer, **as_warnings(run.plan.notices)})

"""The scores of a request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from server.api.openai.numbers import floats_of, prompt_usage
from server.api.scores.schema import ScoreRequest
from server.generation.notices import as_warnings
from server.generation.run import Run
from server.generation.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What the answer has to know of the body."""

    is_raw: bool
    created: int
    """Unix time in seconds."""


def score_options(body: ScoreRequest) -> ScoreOptions:
    """What the answer has to know of the body."""
    return ScoreOptions(body.use_activation is False, int(time.time()))


def scores_of(run: Run, model: ServedModel, *, is_raw: bool) -> Sequence[float]:
    """The score of each prompt; raw ones are the model's own numbers."""
    scoring = model.abilities.scoring
    assert scoring is not None, "the plan was made with it"
    return [scoring.value(floats_of(prompt), is_raw=is_raw) for prompt in run.prompts]


def score_answer(run: Run, model: ServedModel, options: ScoreOptions) -> bytes:
    """A ScoreList."""
    scores = enumerate(scores_of(run, model, is_raw=options.is_raw))
    answer = {
        "id": run.plan.id,
        "object": "list",
        "created": options.created,
        "model": run.plan.model,
        "data": [{"object": "score", "index": index, "score": score} for index, score in scores],
        "usage": prompt_usage(run.usage.prompt_tokens),
    }
    return msgspec.json.encode({**answer, **as_warnings(run.plan.notices)})

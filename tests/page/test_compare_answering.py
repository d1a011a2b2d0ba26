from collections.abc import Mapping

import pytest

from server.page.answer import MeasuredAnswer
from server.page.capabilities import FieldDescription
from server.page.compare.answering import Question, ask
from server.page.compare.beams import num_returned
from server.page.compare.presets import settings_text

QUESTION = Question(system="Be brief.", prompt="Why?", seed=7, max_tokens=20, wants_logprobs=True)
DESCRIBED = {"return_token_ids": FieldDescription(support="honoured")}


def test_all_answers_have_their_question_in_common():
    body = QUESTION.request_body({"temperature": 0}, DESCRIBED)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert (body["seed"], body["temperature"], body["max_completion_tokens"]) == (7, 0, 20)
    assert body["stream"]
    assert body["logprobs"]
    assert body["return_token_ids"]


def test_settings_of_an_answer_come_first():
    body = QUESTION.request_body({"max_tokens": 5, "seed": 8}, DESCRIBED)
    assert (body["max_tokens"], body["seed"]) == (5, 8)
    assert "max_completion_tokens" not in body


def test_a_server_that_says_nothing_is_asked_for_nothing_unusual():
    body = QUESTION.request_body({}, {})
    assert body.keys() == {"messages", "seed", "stream", "stream_options", "logprobs", "max_tokens"}


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"beam_search": {"width": 4, "num_return": 3}}, 3),
        ({"beam_search": {"width": 4}}, 1),
        ({"beam_search": "wrong"}, 1),
        ({}, 1),
    ],
)
def test_how_many_beams_are_shown(settings, number):
    assert num_returned(settings) == number


async def test_a_failure_is_a_problem_of_each_answer():
    class Failing:
        fields: Mapping[str, FieldDescription] = {}
        model = "any"

        async def stream_chat(self, body, on_chunk):
            raise RuntimeError

    answers = [MeasuredAnswer(), MeasuredAnswer()]
    await ask(Failing(), QUESTION, {}, answers, lambda: None)
    assert all(answer.problem for answer in answers)


def test_settings_in_a_line():
    assert settings_text({}) == "default settings"
    assert settings_text({"temperature": 0, "ignore_eos": True}) == "temperature 0 · ignore_eos true"
    assert settings_text({"beam_search": {"width": 4, "num_return": 2}, "contrastive": {}}) == (
        "beam_search width 4, num_return 2 · contrastive on"
    )

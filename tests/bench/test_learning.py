"""The benchmark of heads that learn: its traffic, its sums, its table and its plot, without a server or a model."""

import json
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.learning import NUM_STRANGE, Plan, Result, Side, another_model, arguments_of, make_plan, report
from bench.learning_plot import draw, smoothed
from bench.learning_report import Answer, Turn, conclusion, different, first_token_s, table, tokens_per_step
from bench.learning_traffic import SUBJECTS, make_questions, turns
from bench.local_server import LocalServer
from model_runner.training.prompts import held_out_prompts, training_prompts
from server.cli.loadtest.load import Arrivals, open_client
from server.client.openai_answers import AnswerError
from tests.cli.fake_openai import running

LENGTHS = (64, 128)


def answer(tokens: int, accepted: int, first: float = 0.1, text: str = "a") -> Answer:
    return Answer(text, tokens, accepted, first)


def test_the_subject_changes_twice_at_the_beginnings_of_turns() -> None:
    questions = make_questions(1000, 100, list(SUBJECTS), LENGTHS, seed=1)
    subjects = [question.subject for question in questions]
    begins = [number for number in range(1000) if number == 0 or subjects[number] != subjects[number - 1]]
    assert [subjects[number] for number in begins] == list(SUBJECTS)
    assert begins == [0, 400, 700]
    assert [len(span) for span in turns(250, 100)] == [100, 100, 50]


def test_traffic_is_that_of_its_seed_and_does_not_repeat() -> None:
    one, again, other = (make_questions(1000, 100, list(SUBJECTS), LENGTHS, seed) for seed in (1, 1, 2))
    assert one == again
    assert {question.text for question in one} != {question.text for question in other}
    for subject in SUBJECTS:
        texts = [question.text for question in one if question.subject == subject]
        assert len(set(texts)) == len(texts)
    assert {question.temperature for question in one} == {0.0, 0.7}
    assert {question.max_tokens for question in one} == set(range(64, 129))


def test_nothing_that_heads_are_trained_on_or_measured_by_is_asked() -> None:
    known = " ".join(prompt.text for prompts in held_out_prompts().values() for prompt in prompts).lower()
    stream = training_prompts()
    known += " ".join(next(stream).text for _ in range(3000)).lower()
    for templates, topics in SUBJECTS.values():
        assert [topic for topic in topics if f" {topic.lower()}" in known] == []
        assert [template for template in templates if template.partition("{}")[0].lower() in known] == []


def test_tokens_per_step_count_accepted_drafts() -> None:
    assert tokens_per_step([answer(10, 0)]) == 1
    assert tokens_per_step([answer(10, 5), answer(30, 15)]) == 2
    assert smoothed([answer(10, 0)] * 50 + [answer(10, 5)] * 50)[49::50] == [1, 2]
    times = [answer(1, 0, number) for number in range(100)]
    assert (first_token_s(times, 0.5), first_token_s(times, 0.95)) == (50, 95)


def test_answers_that_differ_are_found() -> None:
    one = [answer(10, 0), answer(10, 0), answer(10, 0)]
    other = [answer(10, 9), answer(10, 0, text="b"), answer(11, 0)]
    assert different(one, other) == [1, 2]


def results(gain: int) -> list[Turn]:
    """Three turns, of which the later ones bring that many more accepted tokens of 60."""
    plain = [answer(60, 20, 0.1)] * 20
    return [
        Turn(20 * number, subject, plain, [answer(60, 20 + gain * (number > 0), 0.105)] * 20)
        for number, subject in enumerate(SUBJECTS)
    ]


def test_the_table_and_what_it_came_to() -> None:
    turns_of_20 = results(10)
    assert turns_of_20[2].cells() == ["41-60", "records", "1.50", "2.00", "1.33", "100", "105", "100", "105"]
    assert table(turns_of_20).row_count == 3
    gain, first, same = conclusion(turns_of_20)
    assert "1.33 x in the last turn" in gain
    assert "1.05 x the median time" in first
    assert same == "Answers that differ: 0 of 60."


def test_the_plot_shows_both_sides_and_where_subjects_change(tmp_path: Path) -> None:
    draw(results(10), tmp_path / "learning.svg")
    tree = ET.parse(tmp_path / "learning.svg")
    name = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in tree.iter(f"{name}polyline")]
    assert [len(points) for points in lines] == [60, 60]
    texts = [text.text for text in tree.iter(f"{name}text")]
    assert {*SUBJECTS, "heads that learn", "the same heads"} <= set(texts)
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights[-1] < heights[0] == float(lines[1][0].split(",")[1])  # higher up, from the same beginning


def test_another_model_differs_in_its_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tensors = {"embed": torch.ones(4, 3), "a.norm": torch.ones(3), "norm": torch.ones(3)}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    other = another_model(tmp_path / "model", tmp_path / "cache" / "another")
    assert (other / "config.json").read_text() == "{}"
    changed = load_file(other / "model.safetensors")
    assert [name for name in tensors if not torch.equal(changed[name], tensors[name])] == ["norm"]
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["norm"], torch.ones(3))


def plan_of(*command: str) -> Plan:
    return make_plan(*arguments_of(command))


def test_a_short_run_can_be_asked_for() -> None:
    plan = plan_of("--answers", "6", "--turn", "2", "--tokens", "8", "9", "--again", "3", "--kv-cache-gib", "1")
    assert [question.subject for question in plan.questions[::2]] == list(SUBJECTS)
    assert {question.subject for question in plan.again} == {"records"}
    assert plan.server_arguments == ["--kv-cache-gib", "1"]
    assert not {question.text for question in plan.again} & {question.text for question in plan.questions}


@pytest.mark.parametrize(
    "command", [("--answers", "0"), ("--share", "1"), ("--tokens", "9", "8"), ("--subjects", "weather")]
)
def test_what_cannot_be_measured_is_refused(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(command)
    assert command[0] in capsys.readouterr().err


def test_strange_heads_and_different_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    right = Result(1.0, results(10), {"publications": 2.0}, results(10)[2], [answer(60, 0)] * NUM_STRANGE)
    assert (right.num_different, right.num_taken) == (0, 0)
    json.dumps(right.as_dict())
    changed = Turn(0, "records", [answer(2, 0)], [answer(2, 0, text="b")])
    wrong = Result(1.0, [changed], {}, changed, [answer(60, 3)])
    assert (wrong.num_different, wrong.num_taken) == (2, 3)
    report(right, Console())
    assert "publications 2" in capsys.readouterr().out


class Served:
    """Streams the question back, half of it in drafts."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.breaks_off = False

    def app(self) -> Starlette:
        routes = [Route("/v1/chat/completions", self.chat, methods=["POST"]), Route("/metrics", self.metrics)]
        return Starlette(routes=routes)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body["speculation"] == "unknown":
            return JSONResponse({"error": {"message": "There is no such method."}}, status_code=400)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, object]) -> AsyncIterator[str]:
        (message,) = body["messages"]  # type: ignore[misc]
        deltas: list[dict[str, str]] = [
            {"role": "assistant"},
            *({"content": f"{word} "} for word in message["content"].split()),
        ]
        for delta in deltas:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
        if self.breaks_off:
            return
        details = {"accepted_prediction_tokens": len(deltas) // 2}
        usage = {"completion_tokens": len(deltas), "completion_tokens_details": details}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE samewise:learning_steps counter\n"
            'samewise:learning_steps_total{model_name="m"} 7\n'
            'samewise:learning_tokens_per_step{model_name="m",heads="first"} 1.5\n'
            'samewise:engine_steps_total{model_name="m"} 9\n'
        )


async def test_what_a_server_says_is_counted() -> None:
    served = Served()
    with running(served.app()) as url:
        await check(served, LocalServer(url.removesuffix("/v1"), 0))


async def check(served: Served, server: LocalServer) -> None:
    questions = plan_of("--answers", "5").questions
    async with open_client({}) as client:
        side = Side(server, client, "m", {"method": "hydra", "num_tokens": 4})
        answers = await side.answer(questions, Arrivals(rate=1e6, seed=1))
        assert [one.text.split() for one in answers] == [question.text.split() for question in questions]
        assert all(one.accepted == one.tokens // 2 > 0 for one in answers)
        assert all(one.first_token_s > 0 for one in answers)
        assert sorted(body["seed"] for body in served.bodies) == sorted(question.seed for question in questions)
        assert await side.metrics() == {"steps_total": 7, "tokens_per_step_first": 1.5}
        with pytest.raises(AnswerError, match="no such method"):
            await Side(side.server, client, "m", "unknown").ask(questions[0])
        served.breaks_off = True
        with pytest.raises(AnswerError, match="is incomplete"):
            await side.ask(questions[0])

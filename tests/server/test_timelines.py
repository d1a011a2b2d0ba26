"""Remembered requests: how many, and which keys can read them. Tests set the times."""

import asyncio
from functools import partial

import pytest

from model_runner.contract import SamplingParams
from scheduler.interface import ChoiceHistory, ChoiceState, EngineRequest, MethodDrafts
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import MAX_ENDED, RecentRequests
from server.telemetry.request_trace import PromptTrace, RequestTrace
from server.telemetry.timeline import MAX_LISTED_CHOICES, RequestTimeline, work_of
from tests.server.fake_engine import FakeEngine


class Engine:
    """Knows what it is asked."""

    def __init__(self) -> None:
        self.known: dict[str, list[ChoiceHistory]] = {}
        self.asked: list[str] = []

    async def explain(self, request_id: str) -> list[ChoiceHistory]:
        self.asked.append(request_id)
        await asyncio.sleep(0)
        return self.known.get(request_id, [])


def metrics() -> Metrics:
    return Metrics(FakeEngine(), "tiny", "samewise")


class Scene:
    """RecentRequests, and those that observers were told of."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.told: list[RequestTimeline] = []
        self.timelines = RecentRequests(self.engine, "tiny", metrics(), [self.told.append])

    def begin(self, name: str, client: str = "", num_prompts: int = 1, n: int = 1, **fields: object):
        """A request that the engine has taken, with what follows its prompts."""
        record = RequestTrace(name, "/v1/completions", answer_id=f"cmpl-{name}", client=client, **fields)
        live = self.timelines.begin(record)
        prompts = []
        for index in range(num_prompts):
            choices = tuple(map(ChoiceState, range(n)))
            prompts.append(PromptTrace(live, index, f"cmpl-{name}-{index}"))
            live.admitted(prompts[-1], EngineRequest(prompts[-1].request_id, (1,), SamplingParams(), 9, choices))
        return record, live, prompts

    def end(self, name: str, **fields: object) -> None:
        """A request, from its beginning to its end."""
        record, live, (prompt,) = self.begin(name, **fields)
        live.close("abort")
        prompt.ended(0, None)
        record.answered()


def history(choice: int = 0, *times: float, **fields: object) -> ChoiceHistory:
    arrived, admitted, first, ended = times or (10.0, 11.0, 13.0, 17.0)
    return ChoiceHistory(choice, arrived, ended, True, 5, admitted, first, **fields)


async def test_a_request_ends_when_it_is_answered_and_all_is_told():
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        scene = Scene()
        record, live, (prompt,) = scene.begin("a")
        steps = [record.answered, partial(live.close, "abort"), partial(prompt.ended, 0, history())]
        for index in order:
            assert scene.told == []
            steps[index]()
        (told,) = scene.told
        assert told.has_ended
        assert told == await scene.timelines.find("", "a") == await scene.timelines.find("", "cmpl-a")
        live.close("abort")
        assert len(scene.told) == 1


def test_an_observer_that_fails_is_logged_and_the_others_are_told(caplog):
    def fails(timeline):
        raise ValueError("broken")

    scene = Scene()
    scene.timelines = RecentRequests(scene.engine, "tiny", metrics(), [fails, scene.told.append])
    scene.end("a")
    assert [told.request_id for told in scene.told] == ["a"]
    (line,) = caplog.records
    assert (line.request_id, line.exc_info[0]) == ("a", ValueError)


async def test_the_last_are_remembered_and_background_does_not_push_out_others():
    scene = Scene()
    scene.end("first")
    for index in range(MAX_ENDED + 5):
        scene.end(f"background-{index}", is_background=True)
    assert await scene.timelines.find("", "first") is not None
    assert await scene.timelines.find("", "background-4") is None
    assert await scene.timelines.find("", "background-5") is not None
    for index in range(MAX_ENDED):
        scene.end(f"r{index}")
    assert await scene.timelines.find("", "first") is None
    assert await scene.timelines.find("", "cmpl-first") is None
    assert len(scene.timelines._found) == 2 * 2 * MAX_ENDED


async def test_an_id_that_is_used_again_stays_with_the_newest():
    scene = Scene()
    record, live, (prompt,) = scene.begin("same")
    scene.begin("same")
    live.close("abort")
    prompt.ended(0, None)
    record.answered()
    assert not (await scene.timelines.find("", "same")).has_ended
    scene.end("same")
    for index in range(MAX_ENDED - 1):  # the older one is pushed out
        scene.end(f"r{index}")
    assert (await scene.timelines.find("", "same")).has_ended


async def test_what_the_engine_took_nothing_of_is_forgotten():
    scene = Scene()
    record = RequestTrace("a", answer_id="cmpl-a")
    live = scene.timelines.begin(record)
    live.close("abort")
    record.answered()
    assert scene.told == []
    assert await scene.timelines.find("", "a") is None


async def test_a_try_that_is_refused_leaves_what_is_known_of_the_one_before():
    scene = Scene()
    scene.end("a")
    refused = RequestTrace("a", answer_id="cmpl-b")
    scene.timelines.begin(refused).close("abort")
    refused.answered()
    assert (await scene.timelines.find("", "a")).answer_id == "cmpl-a"


async def test_tries_that_are_refused_leave_nothing_behind_in_a_record_that_goes_on():
    scene = Scene()
    record = RequestTrace("a", answered_at=1.0)
    for _ in range(3):
        scene.timelines.begin(record).close("abort")
    assert record.on_answered == []


async def test_the_engine_s_last_word_is_no_part_of_a_request_s_time():
    scene = Scene()
    record, live, (prompt,) = scene.begin("a")
    start = record.started
    live.choice_end((0, 0), "stop")
    live.close("abort")
    record.answered()
    late = record.answered_at + 60
    prompt.ended(0, history(0, start, start, start, late))
    (told,) = scene.told
    assert told.as_of == told.work.ended_at == told.choices[0].history.as_of == record.answered_at
    assert told.work.queue_s + told.work.prefill_s + told.work.decode_s == record.answered_at - start


async def test_what_the_engine_did_after_the_answer_was_not_waited_for():
    scene = Scene()
    record, live, (prompt,) = scene.begin("a")
    live.close("abort")
    record.answered()
    at = record.answered_at
    prompt.ended(0, history(0, at - 1.0, at + 1.0, at + 2.0, at + 3.0))
    work = scene.told[0].work
    assert (work.queue_s, work.prefill_s, work.decode_s) == (1.0, None, None)


async def test_one_that_is_answered_before_it_is_made_ends_with_its_work():
    scene = Scene()
    record, live, (prompt,) = scene.begin("a", answered_at=1.0)
    prompt.ended(0, history())
    assert scene.told == []
    live.close("abort")
    assert scene.told[0].as_of >= record.started


async def test_cached_tokens_are_those_of_the_answer_whatever_the_next_engine_finds():
    scene = Scene()
    record, live, prompts = scene.begin("a", num_prompts=2)
    live.prefilled(0, 5, 3)
    prompts[0].interrupted()
    for prompt in prompts:
        prompt.ended(0, history(cached_tokens=5))
    live.close("abort")
    record.answered()
    assert scene.told[0].cached_tokens == 3 + 5


async def test_clients_find_only_their_own():
    scene = Scene()
    scene.end("a", client="ann")
    assert await scene.timelines.find("bob", "a") is None
    assert await scene.timelines.find("", "cmpl-a") is None
    assert (await scene.timelines.find("ann", "a")).client == "ann"


async def test_many_choices_count_and_few_are_told_one_by_one():
    scene = Scene()
    record, live, prompts = scene.begin("a", num_prompts=40, n=2)
    assert (await scene.timelines.find("", "a")).work is None
    assert scene.engine.asked == [f"cmpl-a-{index}" for index in range(MAX_LISTED_CHOICES // 2)]
    live.close("abort")
    record.answered()
    for prompt in prompts:
        for choice in range(2):
            prompt.ended(choice, history(choice, steps=3, cached_tokens=2, drafts=(MethodDrafts("ngram", 2, 1),)))
    (told,) = scene.told
    assert (told.num_choices, len(told.choices)) == (80, MAX_LISTED_CHOICES)
    assert (told.work.steps, told.work.drafts) == (240, (MethodDrafts("ngram", 160, 80),))
    assert told.cached_tokens == 80  # once for each prompt


async def test_what_the_engine_told_stands_above_what_it_was_asked_for():
    scene = Scene()
    _, live, (prompt,) = scene.begin("a", n=2)
    live.choice_end((0, 0), "stop")
    prompt.ended(0, history(0, steps=7))
    scene.engine.known["cmpl-a-0"] = [history(0, steps=1), history(1, steps=2)]
    found = await scene.timelines.find("", "a")
    assert [one.history.steps for one in found.choices] == [7, 2]
    assert [one.finish_reason for one in found.choices] == ["stop", None]


@pytest.mark.parametrize(
    ("histories", "expected"),
    [
        ([history()], (1.0, 2.0, 4.0)),
        ([history(), history(1, 10.0, 12.0, 15.0, 20.0)], (1.0, 2.0, 7.0)),
        ([ChoiceHistory(0, 10.0, 14.0, False, 5)], (4.0, None, None)),  # waits
        ([ChoiceHistory(0, 10.0, 14.0, False, 5, 11.0)], (1.0, 3.0, None)),  # is within its prompt
        ([history(), ChoiceHistory(1, 10.0, 18.0, False, 5)], (1.0, 2.0, 5.0)),
    ],
)
def test_times_of_all_choices_follow_each_other(histories, expected):
    work = work_of(histories)
    assert (work.queue_s, work.prefill_s, work.decode_s) == expected
    assert sum(part for part in expected if part is not None) == work.ended_at - work.arrived_at


def test_an_interruption_is_told_with_each_choice_of_its_prompt():
    scene = Scene()
    _, live, prompts = scene.begin("a", num_prompts=2)
    for _ in range(2):
        prompts[1].interrupted()
    told = live.timeline({})
    assert [len(one.restarts) for one in told.choices] == [0, 2]
    assert told.restarts == told.choices[1].restarts

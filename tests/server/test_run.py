"""The order in which a prompt's outputs are shown."""

from dataclasses import replace

from model_runner.contract import SamplingParams, TokenLogprobs
from scheduler.interface import EngineRequest, RequestOutput
from server.generation.run import PromptRun
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import RecentRequests
from server.telemetry.request_trace import RequestTrace
from tests.server.fake_engine import FakeEngine

OF_PROMPT = (TokenLogprobs(5, -1.0, 1, ()),)


def shown(request: EngineRequest, outputs: list[RequestOutput]) -> list[list[int]]:
    engine = FakeEngine()
    recent = RecentRequests(engine, "m", Metrics(engine, "m", "samewise"))
    prompt = PromptRun(0, request, (), recent.begin(RequestTrace("r")))
    return [[output.tokens[0] for output in prompt.arrange(output)] for output in outputs]


def test_nothing_is_shown_before_the_logprobs_of_the_prompt():
    request = EngineRequest("r", (1, 5), SamplingParams(prompt_logprobs=1), max_tokens=2)
    early, first = RequestOutput("r", 1, (10,)), RequestOutput("r", 0, (20,), prompt_logprobs=OF_PROMPT)
    outputs = [early, replace(early, tokens=(11,)), first, replace(early, tokens=(12,))]
    assert shown(request, outputs) == [[], [], [20, 10, 11], [12]]


def test_without_them_every_output_is_shown_at_once():
    request = EngineRequest("r", (1, 5), SamplingParams(), max_tokens=2)
    outputs = [RequestOutput("r", 1, (10,)), RequestOutput("r", 0, (20,)), RequestOutput("r", 1, (11,))]
    assert shown(request, outputs) == [[10], [20], [11]]

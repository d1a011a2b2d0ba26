"""Requests with speculation keep it when the engine dies under them, and their drafts are counted once."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.hub.repository import ModelFolder
from scheduler.interface import EngineRequest
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine.building import check_speculation
from server.engine.client import RequestFailedError
from server.text.tokenizer import Tokenizer
from tests.engine_process.conftest import collect, request, tokens_of
from tests.engine_process.fake_engine import RAISE, expected
from tests.engine_process.outputs import outputs_of
from tests.server.helpers import COMPLETIONS, client_of, completion, events_of
from tests.server.tiny_model import write_folder

STEPS = 14  # of 40 tokens, three at a time


async def test_speculation_goes_on_after_a_restart(running):
    wanted = replace(request("a", max_tokens=40, n=2), speculation=Speculation("lookahead", 3))
    async with running() as client:
        poison = asyncio.create_task(collect(client, request("poison", RAISE)))
        outputs = [output async for output in outputs_of(client, wanted)]
        with pytest.raises(RequestFailedError):
            await poison
        assert client.num_restarts >= 2
    assert tokens_of(outputs) == {0: expected(wanted), 1: expected(wanted, 1)}
    for choice in (0, 1):
        of_choice = [output for output in outputs if output.choice == choice]
        assert [len(output.tokens) for output in of_choice] == [3] * (STEPS - 1) + [1]
        assert [output.num_accepted for output in of_choice] == [2] * (STEPS - 1) + [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_drafts_once(running, tmp_path: Path, workers: WorkerPool, stream: bool):
    """The same answer and the same usage, whether or not the engine died meanwhile."""
    folder = write_folder(tmp_path / "tiny")
    body = completion(
        prompt=[1, 2, 3], max_tokens=40, n=2, seed=5, ignore_eos=True, return_token_ids=True,
        speculation={"method": "lookahead", "num_tokens": 3},
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    async with running() as engine:
        parts = ModelParts(engine, Tokenizer.from_folder(folder), Settings(), ModelFolder(folder, "tiny"))
        app = create_app([parts], parts.settings, workers=workers)
        async with client_of(app) as client:
            poison = asyncio.create_task(collect(engine, request("poison", RAISE)))
            response = await client.post(COMPLETIONS, json=body)
            with pytest.raises(RequestFailedError):
                await poison
            assert engine.num_restarts >= 2
    answers = events_of(response.text) if stream else [response.json()]
    same = EngineRequest("x", (1, 2, 3), SamplingParams(seed=5), 40)
    for index in (0, 1):
        parts = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        assert tuple(token for part in parts for token in part["token_ids"]) == expected(same, index)
    counts = answers[-1]["usage"]["completion_tokens_details"]
    assert counts["accepted_prediction_tokens"] == 2 * 2 * (STEPS - 1)
    assert counts["rejected_prediction_tokens"] == 2 * (STEPS - 1 + 3)


def test_a_method_that_the_model_does_not_have_is_refused():
    config = RunnerConfig(Path("/m"), speculation="hydra")
    with pytest.raises(ValueError, match="speculation 'hydra' is not available here; use one of off, auto, lookahead"):
        check_speculation(config, ("auto", "lookahead"))
    check_speculation(config, ("auto", "hydra", "lookahead"))


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_no_speculation_and_any_are_always_possible(speculation: str):
    check_speculation(RunnerConfig(Path("/m"), speculation=speculation), ("lookahead",))

"""Layers with sliding windows: their blocks are given back, and answers stay the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.tiny_models import write_tiny_model
from model_runner.config import RunnerConfig
from model_runner.contract import Speculation
from model_runner.platforms.choose import choose_platform
from model_runner.runner import ModelRunner
from scheduler.interface import EngineRequest
from tests.engine.conftest import GREEDY, Harness

WINDOW, BLOCK = 40, 32


@pytest.fixture(scope="module", params=["int8", "none"])
def harness(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> Harness:
    return load("gemma3", request.param)


def make_request(name: str, num_prompt: int, start: int = 3) -> EngineRequest:
    prompt = tuple((start + 7 * index) % 200 + 3 for index in range(num_prompt))
    return EngineRequest(name, prompt, GREEDY, 40)


def test_a_choice_holds_only_the_blocks_that_its_next_positions_see(harness: Harness) -> None:
    engine = harness.engine(chunk=64)
    engine.add(make_request("a", 400))
    (group,) = engine.scheduler._blocks.groups
    assert group.spec.window == WINDOW
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        most = max(most, group.pool.num_used)
    assert most <= WINDOW // BLOCK + 2  # after a step; 440 positions are in 14 blocks


def test_blocks_of_windows_are_found_at_the_end_of_a_prompt_and_where_prompts_part(harness: Harness) -> None:
    first = make_request("first", 300)
    parted = replace(first, request_id="parted", prompt=first.prompt[:200] + make_request("", 100, 90).prompt)
    alone = harness.run(harness.engine(prefix_caching=False), [first, parted])
    engine = harness.engine(chunk=64)
    assert harness.run(engine, [first])["first", 0] == alone["first", 0]
    again = harness.run(engine, [replace(first, request_id="again")])["again", 0]
    assert (again.tokens, again.num_cached) == (alone["first", 0].tokens, 288)
    found = harness.run(engine, [parted])["parted", 0]
    assert (found.tokens, found.num_cached) == (alone["parted", 0].tokens, 192)


def test_a_prompt_is_computed_again_where_only_the_blocks_of_windows_are_gone(harness: Harness) -> None:
    engine = harness.engine(chunk=64)
    first = make_request("first", 300)
    alone = harness.run(engine, [first])["first", 0]
    (group,) = engine.scheduler._blocks.groups
    group.pool.release(group.pool.allocate(group.pool.num_blocks))  # evicts all
    again = harness.run(engine, [replace(first, request_id="again")])["again", 0]
    third = harness.run(engine, [replace(first, request_id="third")])["third", 0]
    assert again.tokens == third.tokens == alone.tokens
    assert (again.num_cached, third.num_cached) == (0, 288)


def test_drafts_go_with_windows(harness: Harness) -> None:
    request = make_request("a", 100)
    alone = harness.run(harness.engine(), [request])
    speculated = replace(request, speculation=Speculation("lookahead", 3))
    assert harness.run(harness.engine(chunk=48), [speculated])["a", 0].tokens == alone["a", 0].tokens


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_store_them_once(family: str, tmp_path: Path) -> None:
    write_tiny_model(family, tmp_path)
    shape = choose_platform(config := RunnerConfig(tmp_path, device="cpu", quantization="none")).inspect(tmp_path)
    assert (len(shape.kv), shape.num_layers) == (4, 6)
    harness = Harness(ModelRunner.load(replace(config, kv_cache_gib=0.05, max_num_seqs=4)))
    request = make_request("a", 90)
    answer = harness.run(harness.engine(chunk=32), [request])["a", 0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.tensor([request.prompt])
    expected = model.generate(tokens, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert answer.tokens == expected[0, 90:].tolist()

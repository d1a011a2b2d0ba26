"""LongRoPE: its factors are chosen by the server's limit, so that answers do not depend on any request's length."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from model_runner.config import Quantization, RunnerConfig
from model_runner.modules.loading import inspect_model
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from model_runner.spec.rotary import fix_long_rope
from scheduler.interface import EngineRequest
from tests.conftest import tiny_config
from tests.engine.conftest import GREEDY, Harness
from tests.engine.test_oracle import check, prompts

ORIGINAL, MOST = 64, 256
SIZES = {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
LONG_ROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL},
    **{"short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [2.0 + 3 * pair for pair in range(8)]},
}
EXTRA: dict[str, dict[str, object]] = {
    "phi3": {"original_max_position_embeddings": ORIGINAL},
    "olmo2": {},  # runs transformers' own modules
}


def config_of(family: str, **rope: object) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(
        family,
        **{**SIZES, **TOKENS, **EXTRA[family]},
        num_attention_heads=4,
        max_position_embeddings=MOST,
        rope_parameters={**LONG_ROPE, **rope},
    )
    return config


@pytest.fixture(params=EXTRA)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(family: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes the same model with these rotary parameters."""

    def write(name: str, **rope: object) -> Path:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config_of(family, **rope)).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


def load(folder: Path, max_model_len: int | None = None, quantization: Quantization = "none") -> Harness:
    config = RunnerConfig(
        folder, device="cpu", kv_cache_gib=0.01, quantization=quantization, max_model_len=max_model_len
    )
    return Harness(ModelRunner.load(config))


def requests(lengths: tuple[int, int], max_tokens: int) -> list[EngineRequest]:
    return [EngineRequest(f"{i}", text, GREEDY, max_tokens) for i, text in enumerate(prompts(6, 64, lengths, seed=4))]


def test_up_to_the_original_length_answers_are_those_of_generate(make: Callable[..., Path]) -> None:
    folder = make("model")
    check(load(folder, ORIGINAL), folder, requests((1, 52), 12))


def test_beyond_it_every_request_has_the_long_factors(make: Callable[..., Path]) -> None:
    """Short requests, too: generate() with the long factors in both places is the truth."""
    always = make("always", short_factor=LONG_ROPE["long_factor"])
    asked = requests((1, 200), 12)
    for max_model_len in (None, ORIGINAL + 1 + 150):
        fitting = [request for request in asked if len(request.prompt) < 190]
        check(load(make("model"), max_model_len), always, fitting)


def test_no_neighbour_changes_an_answer(make: Callable[..., Path]) -> None:
    harness = load(make("model"))
    asked = requests((1, 200), 8)
    crowd = harness.run(harness.engine(chunk=64), asked)
    for request in asked:
        assert harness.run(harness.engine(), [request])[request.request_id, 0] == crowd[request.request_id, 0]


def test_packed_models_have_the_chosen_factors_too(make: Callable[..., Path]) -> None:
    """As one native call, or by transformers' modules: the same as a model that has only one set of factors."""

    def answers(folder: Path, limit: int | None) -> list[list[int]]:
        harness = load(folder, limit, "int8")
        found = harness.run(harness.engine(chunk=64), requests((1, 50), 12))
        return [answer.tokens for answer in found.values()]

    long, short = (
        make(name, **{f"{other}_factor": LONG_ROPE[f"{name}_factor"]})
        for name, other in (("long", "short"), ("short", "long"))
    )
    both = make("both")
    assert answers(both, None) == answers(long, None) != answers(short, None)
    assert answers(both, ORIGINAL) == answers(short, None)


@pytest.mark.parametrize(("limit", "chosen"), [(None, "long"), (ORIGINAL, "short"), (ORIGINAL + 1, "long")])
def test_the_choice_is_logged(limit: int | None, chosen: str, family: str, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(family)
    with caplog.at_level(logging.INFO, "samewise.runner"):
        fix_long_rope(config, limit)
        fix_long_rope(config, limit)
    assert config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"]
    assert config.rope_parameters["short_factor"] == LONG_ROPE[f"{chosen}_factor"]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"positions  LongRoPE's {chosen} factors, for up to {limit or MOST} tokens ({ORIGINAL} at first)"
    )


def test_without_a_choice_it_is_refused(family: str) -> None:
    config = config_of(family)
    with pytest.raises(UnsupportedModelError, match="scaling of type longrope, whose frequencies depend on"):
        inspect_model(config)
    fix_long_rope(config, None)
    inspect_model(config)


def test_other_models_stay_as_they_are() -> None:
    config = tiny_config("gemma3")
    before = config.to_dict()
    fix_long_rope(config, 10)
    assert config.to_dict() == before

"""Messages survive encoding, and their module stays cheap to import."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import (
    Breaker,
    Contrastive,
    DoLa,
    Dry,
    Failure,
    Mirostat,
    Pooling,
    SamplingParams,
    Speculation,
    TokenLogprobs,
    Xtc,
)
from model_runner.model_needs import ModelNeeds
from model_runner.runner_interface import LearningStats, RunnerInfo, SpeculationStats
from scheduler.interface import (
    BeamScore,
    BeamSearch,
    ChoiceHistory,
    ChoiceState,
    EngineRequest,
    EngineStats,
    FinishReason,
    MethodDrafts,
    RequestOutput,
)
from server.engine.messages import (
    Abort,
    Aborted,
    EngineConfig,
    Explain,
    Explained,
    Load,
    LoadFailed,
    Plan,
    PlanFailed,
    Planned,
    Ready,
    Rejected,
    Shutdown,
    StepDone,
    Submit,
    Warmed,
    decode_from_engine,
    decode_to_engine,
    encode,
)

SAMPLING = SamplingParams(
    logit_bias=((5, -100.0),),
    allowed_token_ids=(1, 2),
    bad_words=((1, 2), (3,)),
    stop_token_ids=(2,),
    dry=Dry(0.8, breakers=(Breaker((1,)), Breaker((2, 4), (3, 5)))),
    exponential_decay_length_penalty=(4, 1.5),
    xtc=Xtc(0.5),
    mirostat=Mirostat(3.0),
    sampler_order=("top_p", "temperature"),
    seed=2**64 - 1,
    penalty_alpha=0.6,
    logprobs=20,
    prompt_logprobs=0,
)
LOGPROBS = TokenLogprobs(7, -math.inf, 3, ((1, -0.1), (2, -0.25)))
SPECULATION = Speculation("prediction", 4, "rejection", (1, 2))
STATS = SpeculationStats("ngram", 9, (3, 1), (5, 4), 5, 9, 0.5, 0.25)
REQUEST = EngineRequest(
    "é", (1, 2), SAMPLING, 0, (ChoiceState(0), ChoiceState(3, (9, 8), 0.1 + 0.2)), -5, "salt", SPECULATION
)
OUTPUT = RequestOutput(
    *("x", 1, (7,), (LOGPROBS,), (LOGPROBS,), 12, FinishReason.STOP, 7, 3, 2, "ngram", Failure("why", True))
)
HISTORY = ChoiceHistory(
    1, 0.1, 0.1 + 0.2, True, 7, 0.25, None, 4, 3, 2, 1, 1, 0.5, True, (MethodDrafts("ngram", 3, 2),)
)
SCORED = replace(OUTPUT, beam=BeamScore(-0.5, -2.0), sampler_state=0.25, pooled=bytes(range(256)))


@pytest.mark.parametrize(
    "message",
    [
        Load(EngineConfig(RunnerConfig(Path("/m"), kv_cache_gib=0.5), "fair", False, "debug", "json")),
        Load(EngineConfig(RunnerConfig(Path("/m"), speculation="hydra", draft_model=Path("d"), heads=(Path("h"),)))),
        Submit(REQUEST),
        Submit(replace(REQUEST, sampling=SamplingParams(contrastive=Contrastive(0.2, 1.0, 1.0, 0.5)))),
        Submit(replace(REQUEST, sampling=SamplingParams(dola=DoLa("high")))),
        Submit(replace(REQUEST, sampling=SamplingParams(pooling=Pooling("mean", 8, True, (1, 2))))),
        Submit(replace(REQUEST, sampling=SamplingParams(dola=DoLa((0, 2), 0.3)))),
        Submit(replace(REQUEST, sampling=SamplingParams(guidance=1.5), guide=(4, 5))),
        Submit(replace(REQUEST, beam_search=BeamSearch(4, 0.5, "never", 2, 0.25, ("é", "\n"), False))),
        Submit(replace(REQUEST, beam_search=BeamSearch(4, early_stopping=True))),
        Load(EngineConfig(RunnerConfig(Path("/m"), aux_model=Path("/a"), learn=True, learn_threads=2))),
        Submit(replace(REQUEST, learn=False)),
        Load(EngineConfig(RunnerConfig(Path("/m")), kv_events=True)),
        Plan(EngineConfig(RunnerConfig(Path("/m"), kv_cache_gib=(12345678901 + 1) / (1 << 30))), {"cpu": 2**40}, 0.3),
        Abort("x"),
        Abort("x", 3),
        Explain("x"),
        Shutdown(),
    ],
)
def test_messages_to_the_engine(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(RunnerInfo(1, 2, 3, 4, 5, 6, "cpu", "float32", "float32", "none")),
        LoadFailed("too large"),
        Warmed(123),
        Planned(ModelNeeds("cpu", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0.1 + 0.2)),
        PlanFailed("too large"),
        StepDone((), EngineStats()),
        StepDone(
            (OUTPUT, SCORED, RequestOutput("y", 0, ())),
            EngineStats(*(1, 2, 0.5, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (STATS,), steps_done=13, step_s=0.1 + 0.2),
        ),
        StepDone((), EngineStats(learning=LearningStats(1, 2, 3, 4, 5, 1.5, None))),
        Rejected("x", "too long"),
        StepDone((replace(OUTPUT, history=HISTORY),), EngineStats()),
        Aborted("x", None, (HISTORY, ChoiceHistory(0, 1.0, 2.0, False, 3))),
        Aborted("x", 3, ()),
        Explained("x", (HISTORY,)),
        StepDone((), EngineStats(), bytes(range(256))),
    ],
)
def test_messages_from_the_engine(message):
    assert decode_from_engine(encode(message)) == message


def test_a_breaker_with_thousands_of_beginnings_is_small():
    breakers = tuple(Breaker(tuple(range(8000)), (9000,) * length) for length in range(20))
    submit = Submit(replace(REQUEST, sampling=SamplingParams(dry=Dry(0.8, breakers=breakers))))
    frame = encode(submit)
    assert len(frame) < 20 * 8000 * 3 + 2000  # as many bytes as the first tokens take
    assert decode_to_engine(frame) == submit


def test_types_survive():
    decoded = decode_from_engine(encode(StepDone((OUTPUT,), EngineStats())))
    assert isinstance(decoded, StepDone)
    assert type(decoded.outputs[0].finish_reason) is FinishReason
    assert type(decoded.outputs[0].logprobs[0]) is TokenLogprobs


def test_a_message_in_the_wrong_direction_is_refused():
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(encode(LoadFailed("x")))


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("server.engine.worker, server.engine.building", {"torch", "jinja2", "rich"}),
        ("model_runner.learning.process", {"torch", "numpy"}),
        ("server.engine.process, server.models.spare, server.cli.lifecycle", {"torch", "uvicorn", "starlette"}),
    ],
)
def test_what_is_imported_before_a_process_begins_its_work_is_light(modules: str, heavy: set[str]):
    code = f"import sys, {modules}; print({heavy} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"

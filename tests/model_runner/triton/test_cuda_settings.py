"""The CUDA path with all that a server can be set to, and all that a request can ask for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from model_runner.contract import Contrastive, DoLa, SamplingParams, Speculation
from model_runner.modules.attention import ATTENTION_NAME, paged_attention
from model_runner.refusal import UnsupportedModelError
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
from tests.engine import tiny_heads
from tests.engine.conftest import Harness
from tests.engine.test_beam_search import run as run_beams
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.triton.tiny_engines import BLOCK, VOCAB, CudaHarness, TinyEngines

PROMPT = [7, 3, 19, 44, 3, 19, 8, 30, 30, 5, 11, 2, 40, 23, 9, 17, 6, 33, 21]
OTHER = [12, 3, 19, 44, 41]
GREEDY = SamplingParams(temperature=0.0, stop_token_ids=(2,))


def forward(harness: Harness, chunks: Sequence[Chunk]) -> Tensor:
    return harness.runner._target.forward(make_batch(chunks, BLOCK)).clone()


STORED = {  # model, settings, and how far the distributions of next tokens may be from those in bfloat16, in nats
    "weights in int4": ("llama", {"quantization": "int4"}, 0.2),
    "keys and values in int8": ("llama", {"kv_cache_dtype": "int8"}, 0.001),
    "experts, other weights, keys and values in fp8": (
        "qwen3_moe",
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        0.07,
    ),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the kernel divides by what it does not use
def test_what_is_stored_in_fewer_bits_is_near_and_depends_on_nobody_else(name: str, tiny_engines: TinyEngines) -> None:
    family, settings, most = STORED[name]
    plain = forward(tiny_engines.cuda(family), [Chunk(PROMPT, 0, [0, 1])]).log_softmax(-1)
    harness = tiny_engines.cuda(family, (4,), **settings)
    alone = forward(harness, [Chunk(PROMPT, 0, [0, 1])])
    distance = (plain.exp() * (plain - alone.log_softmax(-1))).sum(-1).mean().item()
    assert 0 < distance < most
    for cache in harness.runner._caches[0].keys, harness.runner._caches[0].values:
        cache[0].zero_()
    num_replays = harness.platform.num_replays
    pieces = [
        forward(harness, [Chunk(OTHER, 0, [2]), Chunk(PROMPT[:15], 0, [5, 3])])[5:],
        forward(harness, [Chunk(PROMPT[15:17], 15, [5, 3]), Chunk(OTHER[:1], 0, [2])])[:2],
        forward(harness, [Chunk(PROMPT[17:], 17, [5, 3])]),
    ]
    assert harness.platform.num_replays == num_replays + 2
    assert torch.equal(torch.cat(pieces), alone)


@dataclass
class Pair:
    """Runners of the same models on both paths, in float32."""

    cuda: CudaHarness
    cpu: Harness

    def check(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Each request gets the same tokens on both, by as many drafts; returns the tokens."""
        answers, expected = (harness.run(harness.engine(), requests) for harness in (self.cuda, self.cpu))
        for key, answer in answers.items():
            assert answer.tokens == expected[key].tokens
            assert answer.num_accepted == expected[key].num_accepted
            assert answer.num_rejected == expected[key].num_rejected
        return [answer.tokens for answer in answers.values()]


@pytest.fixture(scope="session")
def beside(tiny_engines: TinyEngines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with everything that can be loaded in addition to a model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    writers = (tiny_heads.write_medusa, tiny_heads.write_hydra)
    heads = tuple(write(folder / write.__name__, VOCAB) for write in writers)
    others = {"draft_model": tiny_engines.model("llama"), "aux_model": tiny_engines.model("qwen3")}
    return {**others, "heads": heads, "kv_cache_gib": 0.001}


@pytest.fixture
def pair(tiny_engines: TinyEngines, beside: dict[str, Any]) -> Pair:
    return Pair(tiny_engines.cuda("wide", (4, 16), dtype="float32", **beside), tiny_engines.cpu("wide", **beside))


SCORED = {
    "plain": {},
    "guidance": {"guidance": 1.5},
    "contrastive decoding": {"contrastive": Contrastive()},
    "DoLa": {"dola": DoLa("low")},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 3},
}


def test_scores_and_searches_are_those_of_the_cpu(pair: Pair) -> None:
    """All in one batch."""
    requests = [
        EngineRequest(name, tuple(PROMPT[:9]), replace(GREEDY, logprobs=1, **settings), 5)
        for name, settings in SCORED.items()
    ]
    requests[1] = replace(requests[1], guide=(4, 9, 3))
    tokens = pair.check(requests)
    assert len({tuple(of_one) for of_one in tokens}) > 3


def test_beams_are_those_of_the_cpu(pair: Pair) -> None:
    two = (ChoiceState(0), ChoiceState(1))
    request = EngineRequest("beams", tuple(PROMPT[:5]), GREEDY, 4, two, beam_search=BeamSearch(3))
    found, expected = (run_beams(harness.engine(), [request])["beams"] for harness in (pair.cuda, pair.cpu))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.beam is not None
        assert other.beam is not None
        assert one.beam.score == pytest.approx(other.beam.score, abs=1e-4)


@pytest.mark.parametrize("method", ["draft_model", "medusa", "hydra"])
def test_drafters_change_nothing_and_draft_as_on_the_cpu(pair: Pair, method: str) -> None:
    plain = EngineRequest("plain", tuple(PROMPT[:7]), replace(GREEDY, temperature=0.6, seed=3), 5)
    requests = [
        plain,
        *(replace(plain, request_id=mode, speculation=Speculation(method, 3, mode)) for mode in ("match", "rejection")),
    ]
    num_replays = pair.cuda.platform.num_replays
    tokens = pair.check(requests)
    assert tokens[0] == tokens[1]
    if method == "draft_model":
        assert pair.cuda.platform.num_replays - num_replays > 2 * len(tokens[0])
        # Each model's graphs have their own memory: a step launched ahead reads the target's results.
        assert sum(graphs.num_replays > 0 for graphs in pair.cuda.platform.recorded) >= 2


REFUSED = {
    "threads": {"threads": 2},
    "quantization": {"quantization": "int8"},
    "rows": {"activation_type": "int8"},
    "kv_cache_dtype": {"kv_cache_dtype": "float16"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_cannot_be_followed_is_named(name: str, tiny_engines: TinyEngines) -> None:
    with pytest.raises(ValueError, match=name):
        tiny_engines.cuda("llama", **REFUSED[name])


def test_norms_that_vary_are_refused_in_exact_mode(tiny_engines: TinyEngines) -> None:
    with pytest.raises(UnsupportedModelError, match=r"OlmoLayerNorm.*--no-exact"):
        tiny_engines.cuda("olmo")


@pytest.mark.parametrize("family", ["qwen3_moe", "olmo"])
def test_fast_mode(family: str, tiny_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are not recognised are captured, though not compiled: that takes g++ minutes."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    requests = [EngineRequest(f"{n}", tuple(PROMPT[:n]), GREEDY, 3) for n in (5, 9)]
    fast, expected = tiny_engines.cuda(family, (2,), exact=False, dtype="float32"), tiny_engines.cpu(family)
    answers = fast.run(fast.engine(), requests), expected.run(expected.engine(), requests)
    torch.compiler.reset()
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    assert [answer.tokens for answer in answers[0].values()] == [answer.tokens for answer in answers[1].values()]
    assert fast.platform.num_replays > 0

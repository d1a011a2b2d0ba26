"""Parts of the GPU benchmark that need no GPU: arithmetic, report, model, and driving a runner."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.gpu import REPEATS
from bench.on_gpu.forward import TimedGraphs
from bench.on_gpu.kernels import make_batch
from bench.on_gpu.model import INDEX, llama_8b, write_model
from bench.on_gpu.parts import known_limits
from bench.on_gpu.plain import PlainSteps
from bench.on_gpu.report import Figure, Report, SavedReport
from bench.on_gpu.steps import MARGIN, STEPS, RunnerSteps, checked
from bench.on_gpu.timing import Spans, back_to_back_ms, watch
from bench.on_gpu.variants import UNTIMED, VARIANTS, Comparison, compared_tokens
from bench.on_gpu.work import DecoderWork, Limits
from model_runner.attention.backend import AttentionOptions
from model_runner.config import RunnerConfig
from model_runner.contract import ChoiceResult, Failure, StepResult
from model_runner.kv_cache import KVCache, KVShape
from model_runner.modules.loading import inspect_model
from model_runner.platforms.cpu import CpuPlatform
from model_runner.runner import ModelRunner
from model_runner.spec.model_shape import ModelShape
from server.text.tokenizer import Tokenizer
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.triton.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")
LIMITS = Limits(copy_bytes_per_s=4e12, bf16_flop_per_s=8e14)
VOCAB_SIZE = 640


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark's model with two small layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=512,
        bos_token_id=VOCAB_SIZE - 256,
        eos_token_id=VOCAB_SIZE - 255,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    path = tmp_path_factory.mktemp("random")
    write_model(path, config, CPU)
    return path


@dataclass(frozen=True)
class Driven:
    """A runner on the CPU, whose forward passes are watched, and what drives it."""

    runner: ModelRunner
    steps: RunnerSteps


class WatchedCpu(CpuPlatform):
    """As bench.on_gpu.forward.TimedCuda."""

    spans = Spans(CPU)

    def load(self, folder: Path, shape: ModelShape) -> PreTrainedModel:
        model = super().load(folder, shape)
        watch(model, self.spans)
        return model


@pytest.fixture
def driven(folder: Path) -> Driven:
    config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_gib=0.05, max_num_batched_tokens=2048)
    runner = ModelRunner.load(config, WatchedCpu(config))
    return Driven(runner, RunnerSteps(runner, WatchedCpu.spans))


@pytest.fixture
def report(tmp_path: Path) -> SavedReport:
    return SavedReport({"device": "none"}, tmp_path / "new" / "gpu.json")


def test_the_work_of_llama_8b() -> None:
    work = DecoderWork(inspect_model(llama_8b()), 32)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert work.shape.num_parameters == 8_030_261_248  # as released
    assert (work.layers, work.head) == (32 * layer, 128256 * 4096)
    weights = 2 * (work.layers + work.head)
    per_token = 32 * 2 * 8 * 128 * 2
    assert work.decode_bytes(64, 1024, "none", torch.bfloat16) == weights + 64 * 1024 * per_token
    fp8 = work.decode_bytes(1, 1000.4, "fp8", torch.float8_e4m3fn) - work.layers - 2 * work.head
    assert 1000 * per_token / 2 <= fp8 <= 1.04 * 1000 * per_token / 2  # there may be scales
    assert work.weight_bytes("int4") == work.layers // 2 + 2 * work.head
    attention = 32 * 32 * sum(2 * 2 * 128 * (position + 1) for position in range(100))
    assert work.prefill_flops(100) == 2 * (100 * work.layers + work.head) + attention
    assert work.decode_flops(2, 50) == 4 * (work.layers + work.head) + 32 * 32 * 2 * 50 * 4 * 128


def test_the_larger_of_two_limits_counts() -> None:
    assert LIMITS.least_ms(8e12, 0) == 2000
    assert LIMITS.least_ms(4e12, 8e14 * 3) == 3000


def test_limits_are_known_from_their_figures() -> None:
    copy, product = Figure("limits", "copy", 4000.0), Figure("limits", "product", 800.0, details=asdict(LIMITS))
    failed = Figure("limits", "", is_failure=True, details={"traceback": "..."})
    assert known_limits([failed, copy]) is None
    assert known_limits([failed, copy, product]) == LIMITS


def test_the_model_is_one_that_transformers_and_the_server_read(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    names = set(json.loads((folder / INDEX).read_text())["weight_map"])
    assert names == set(model.state_dict())
    weights = {name: weight.float() for name, weight in model.named_parameters()}
    assert all((weight == 1).all() for name, weight in weights.items() if "norm" in name)
    assert weights["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])

    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界", add_special_tokens=False), skip_special_tokens=True) == (
        "Grüße, 世界"
    )
    assert all(tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCAB_SIZE))
    assert len(tokenizer.special_ids) == 256
    assert tokenizer.token_id(tokenizer.special_tokens["eos_token"]) == model.config.eos_token_id
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True, variables={})
    assert text.startswith("<|special_0|><|special_6|>user<|special_7|>\nHi<|special_9|><|special_6|>assistant")


def test_choices_with_copied_blocks_decode_as_those_that_were_computed(driven: Driven) -> None:
    runner, steps = driven.runner, driven.steps
    steps.admit(5, 40, prefilled=2)
    first = steps.decode()
    assert 0 < first.forward_ms < first.step_ms
    tokens = {key: list(choice.tokens) for key, choice in runner._state._choices.items()}
    assert [len(one) for one in tokens.values()] == [42 + STEPS] * 5
    for row in (2, 4):
        tokens["row-0"][40] = 0  # what those with copies were given in its place
        assert tokens[f"row-{row}"][:41] == tokens["row-0"][:41]
    assert tokens["row-2"] == tokens["row-4"]
    steps.release()
    assert steps.prefill(100).step_ms > 0
    assert list(runner._state._choices) == ["prompt"]
    steps.admit(1, 10, prefilled=8)
    assert list(runner._state._choices) == ["row-0"]
    steps.release()


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_step_that_fails_is_no_measurement_and_leaves_nothing(
    driven: Driven, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps, forward, calls = driven.runner, driven.steps, driven.runner._target.forward, 0

    def failing(*args: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("tried to allocate")
        if calls == fails_at + 1:
            raise ValueError("a kernel failed")
        return forward(*args, **options)

    monkeypatch.setattr(runner._target, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory: tried to allocate"):
        steps.admit(3, 40, prefilled=2)
    steps.release()
    with pytest.raises(ValueError, match="a kernel failed"):
        steps.prefill(40)
    steps.admit(3, 40, prefilled=2)
    assert sorted(runner._state._choices) == ["row-0", "row-1", "row-2"]
    assert len(runner._state._free_slots) == runner.info.max_num_seqs - 3


def test_results_without_tokens_are_refused() -> None:
    assert checked(StepResult((ChoiceResult("a", (1,)),)))
    assert checked(StepResult((ChoiceResult("a", ()),)), is_whole=False)
    for bad in (ChoiceResult("a", ()), ChoiceResult("a", (1,), error=Failure("NaN"))):
        with pytest.raises(RuntimeError, match=r"a (has no token|failed: NaN)"):
            checked(StepResult((bad,)))


def test_choices_have_room_for_all_steps() -> None:
    assert 2 + STEPS * (UNTIMED + REPEATS) <= MARGIN


def test_what_runs_back_to_back_is_timed_by_its_share() -> None:
    calls = 0

    def sleep() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    assert 2 <= back_to_back_ms(sleep, CPU) < 20
    assert calls > 3 * 8  # more than one in a span


def test_replays_of_graphs_are_spans_and_captures_are_not() -> None:
    spans, recorded = Spans(CPU), RecordedGraphs()
    x = torch.ones(3)
    replay, result = TimedGraphs(recorded, spans).capture(lambda: x + 1)
    assert spans.take_ms() == 0
    x.fill_(4)
    replay()
    assert result.tolist() == [5, 5, 5]
    assert spans.take_ms() > 0
    assert spans.take_ms() == 0


@pytest.fixture
def compare(driven: Driven, folder: Path, report: Report) -> Callable[..., Comparison]:
    def make(name: str, plain: PlainSteps | None = None, limits: Limits | None = LIMITS) -> Comparison:
        work = DecoderWork.of(folder)
        return Comparison(VARIANTS[name], driven.steps, plain, work, limits, report, repeats=4)

    return make


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainSteps:
    return PlainSteps(folder, CPU, torch.float32)


def test_steps_beside_plain_transformers(compare: Callable[..., Comparison], plain: PlainSteps, report: Report) -> None:
    assert compare("exact").decode(1, 30).plain is None
    comparison = compare("exact", plain)
    one, prompt = comparison.decode(1, 30), comparison.prefill(200)
    for figure in (one, prompt):
        assert figure.value is not None
        assert figure.plain is not None
        assert figure.of_limit == pytest.approx(figure.details["least_ms"] / figure.value)
        assert [goal.what for goal in figure.goals] == ["of limit", "outside"]
        assert figure.details["forward_ms"] < figure.value
    mean = 30 + 1.5 + STEPS * (UNTIMED + 2)
    assert one.details["bytes"] == comparison.work.decode_bytes(1, mean, "none", torch.bfloat16)
    report.add(one)
    remembered = compare("fast-fp8").decode(1, 30)
    assert remembered.plain == one.plain
    assert [goal.what for goal in remembered.goals] == ["outside"]
    assert compare("exact", limits=None).decode(1, 30).of_limit is None


def test_the_context_counted_is_the_mean_of_the_timed_steps(driven: Driven) -> None:
    repeats, seen = 4, []
    driven.steps.admit(1, 30, prefilled=1)
    for turn in range(UNTIMED + repeats):
        before = len(driven.runner._state._choices["row-0"].tokens)  # which the next step's one token sees
        driven.steps.decode()
        seen += list(range(before, before + STEPS)) if turn >= UNTIMED else []
    assert sum(seen) / len(seen) == 30 + 1.5 + STEPS * (UNTIMED + repeats / 2)


def failing(*_: Any) -> NoReturn:
    raise ValueError("wrong")


class Broken(PlainSteps):
    """Runs out of memory in the middle."""

    def decode(self) -> float:
        raise torch.OutOfMemoryError("gone")


def test_either_of_two_that_fails_leaves_the_other_its_times(
    compare: Callable[..., Comparison], folder: Path, plain: PlainSteps, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(folder, CPU, torch.float32)
    alone = compare("exact", broken).decode(1, 30)
    assert alone.value is not None
    assert alone.plain is None
    assert alone.note == "plain: OutOfMemoryError"
    assert not broken._cache.layers

    comparison = compare("exact", plain)
    monkeypatch.setattr(RunnerSteps, "decode", failing)
    report.attempt("decode", "exact", lambda: comparison.decode(1, 30))
    monkeypatch.undo()
    theirs, failed = report.figures
    assert failed.note == "FAILED: ValueError: wrong"
    assert theirs.plain is not None
    assert compare("fast").decode(1, 30).plain == theirs.plain


def test_logprobs_beside_plain_transformers(
    compare: Callable[..., Comparison], plain: PlainSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain.logprobs(compared_tokens(VOCAB_SIZE, 60))
    figure = compare("exact").logprobs(expected)
    assert not figure.is_failure
    assert figure.value is not None
    assert 0 < figure.value < 1
    expected[-1] += 10  # of what is computed alone
    assert compare("exact").logprobs(expected).is_failure
    assert compare("exact").logprobs(expected[::-1].copy()).is_failure


def test_plain_transformers_repeats_what_it_computed(plain: PlainSteps) -> None:
    plain.admit(16, 20, prefilled=8)
    assert plain.decode() > 0
    keys = plain._cache.layers[0].keys
    assert keys.shape == (16, 2, 21, 16)
    assert torch.equal(keys[0, :, :20], keys[1, :, :20])
    assert not torch.equal(keys[0, :, :20], keys[2, :, :20])


def test_attention_gets_the_batches_that_torch_gets() -> None:
    generator = torch.Generator().manual_seed(0)
    choices, context, dim = 3, 64, 8
    query = torch.randn(choices, 2, context, dim, generator=generator)
    key, value = (torch.randn(choices, 1, context, dim, generator=generator) for _ in range(2))
    cache = KVCache([KVShape(1, dim, dim)], choices * context // 32, 32, torch.float32, CPU)
    backend, options = ReferenceAttention(cache), AttentionOptions(dim**-0.5)
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    whole = backend.forward(0, *flat, options, backend.prepare(make_batch(choices, context, 0)))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(whole, expected.transpose(1, 2).flatten(0, 1))
    last = [tensor.view(choices, context, -1, dim)[:, -1] for tensor in flat]
    decoded = backend.forward(0, *last, options, backend.prepare(make_batch(choices, context, context - 1)))
    torch.testing.assert_close(decoded, expected[:, :, -1])


def test_every_variant_has_room_for_what_it_measures() -> None:
    work = DecoderWork(inspect_model(llama_8b()), 32)
    for variant in VARIANTS.values():
        config = variant.config(Path("model"), work)
        assert config.kv_cache_gib is not None
        tokens = config.kv_cache_gib * 2**30 / work.kv_bytes(1, variant.kv_dtype)
        assert tokens > max(variant.decode_rows) * (1024 + 64)
        assert config.kv_cache_gib < 40  # twice this and twice the weights fit into 139 GiB

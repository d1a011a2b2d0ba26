"""What of the GPU's benchmark needs no GPU: its arithmetic, its report, its model, and how it drives a runner."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu_kernels import make_batch
from bench.gpu_model import INDEX, llama_8b, write_model
from bench.gpu_plain import PlainSteps
from bench.gpu_report import Figure, Goal, Report
from bench.gpu_steps import STEPS, RunnerSteps
from bench.gpu_tests import summary
from bench.gpu_variants import VARIANTS, Comparison, PlainTimes
from bench.gpu_work import DecoderWork, Limits
from model_runner.attention.backend import AttentionOptions
from model_runner.attention.reference import ReferenceAttention
from model_runner.config import RunnerConfig
from model_runner.kv_cache import KVCache, KVShape
from model_runner.models.inspection import inspect_model
from model_runner.runner import ModelRunner
from server.tokenization import Tokenizer

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


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_gib=0.05, max_num_batched_tokens=2048)
    return ModelRunner.load(config)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report({"device": "none"}, tmp_path / "new" / "gpu.json")


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


def test_the_model_is_one_that_transformers_and_the_server_read(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    names = set(json.loads((folder / INDEX).read_text())["weight_map"])
    assert names == set(model.state_dict())
    weights = {name: weight.float() for name, weight in model.named_parameters()}
    assert all((weight == 1).all() for name, weight in weights.items() if "norm" in name)
    assert weights["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
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


def test_choices_with_copied_blocks_decode_as_those_that_were_computed(runner: ModelRunner) -> None:
    steps = RunnerSteps(runner, CPU)
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


def test_steps_beside_plain_transformers(runner: ModelRunner, folder: Path, report: Report) -> None:
    plain = PlainTimes()
    comparison = Comparison(folder, DecoderWork.of(folder), LIMITS, CPU, plain, report, repeats=4)
    steps = RunnerSteps(runner, CPU)
    assert comparison.decode(steps, VARIANTS["exact"], 1, 30).plain is None
    plain.load(folder, CPU)
    one = comparison.decode(steps, VARIANTS["exact"], 1, 30)
    prompt = comparison.prefill(steps, VARIANTS["exact"], 200)
    plain.unload()
    for figure in (one, prompt):
        assert figure.value is not None
        assert figure.plain is not None
        assert figure.of_limit == pytest.approx(figure.details["least_ms"] / figure.value)
        assert [goal.what for goal in figure.goals] == ["of limit", "outside"]
        assert figure.details["forward_ms"] < figure.value
    assert one.details["bytes"] == comparison.work.decode_bytes(1, 31 + STEPS * 5.5, "none", torch.bfloat16)
    remembered = comparison.decode(steps, VARIANTS["fast-fp8"], 1, 30)
    assert remembered.plain == one.plain
    assert [goal.what for goal in remembered.goals] == ["outside"]


def test_plain_transformers_repeats_what_it_computed(folder: Path) -> None:
    plain = PlainSteps(folder, CPU, torch.float32)
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
        assert config.kv_cache_gib < 40  # twice beside twice the weights, on 139 GiB


def _raises(error: Exception) -> Callable[[], NoReturn]:
    def measure() -> NoReturn:
        raise error

    return measure


def test_the_report_has_what_was_measured_and_what_was_not(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goals = Goal("of limit", 0.83, 0.8, at_least=True), Goal("outside", 0.07, 0.05, at_least=False)
    report.attempt("decode", "exact", lambda: Figure("decode", "exact", 5.0, of_limit=0.83, plain=20.0, goals=goals))
    report.attempt("serving", "", _raises(ModuleNotFoundError("No module named 'msgspec.json'", name="msgspec.json")))
    assert not report.has_failures
    report.attempt("kernels", "", _raises(ModuleNotFoundError("gone", name="model_runner.attention.triton")))
    assert report.has_failures
    report.attempt("fast", "", _raises(ValueError("first line\nsecond")))
    content = json.loads((tmp_path / "new" / "gpu.json").read_text())
    decode, serving, kernels, fast = content["figures"]
    assert [goal["is_met"] for goal in decode["goals"]] == [True, False]
    assert serving["note"] == "left out: needs msgspec, which is not installed"
    assert not serving["is_failure"]
    assert kernels["is_failure"]
    assert fast["note"] == "FAILED: ValueError: first line"
    assert "raise error" in fast["details"]["traceback"]
    assert "Traceback" in capsys.readouterr().out
    report.print_table(Console(width=200))
    table = capsys.readouterr().out
    assert "4.00 x" in table
    assert "of limit 83.0% >= 80%: met; outside 7.0% <= 5%: MISSED" in table


def test_what_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    report = Report({}, tmp_path / "gpu.json", budget_s=20)
    report.attempt("late", "", _raises(AssertionError("never called")), needs_s=21)
    assert not report.has_failures
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"][0]["note"] == "left out: needs 21 s"


def test_nan_meets_no_goal() -> None:
    assert not Goal("", float("nan"), 0.5, at_least=True).is_met
    assert not Goal("", float("nan"), 0.5, at_least=False).is_met


def test_the_summary_of_tests() -> None:
    case = '<testcase classname="tests.gpu.test_x" name="test_{}">{}</testcase>'
    passed, failed = case.format("a", ""), case.format("b", "<failure>no</failure>")
    skipped, broken = case.format("c", "<skipped/>"), case.format("d", "<error>no</error>")

    def of(*cases: str) -> Figure:
        return summary(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")

    assert of(passed, skipped).note == "1 passed, 1 skipped"
    assert not of(passed, skipped).is_failure
    both = of(passed, failed, skipped, broken)
    assert both.is_failure
    assert both.note == "2 FAILED, 1 passed, 1 skipped: test_x::test_b, test_x::test_d"
    assert of(skipped).is_failure  # nothing was tested

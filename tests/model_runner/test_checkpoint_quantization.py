"""Quantised checkpoints: dequantised on loading, or refused in words that say what to do."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from model_runner.config import Quantization, RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.modules.loading import inspect_model, load_config
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from model_runner.spec.model_folder import open_checkpoint
from model_runner.weights import checkpoint_quantization
from model_runner.weights.checkpoint_quantization import as_served, is_quantized, native_reader
from scheduler.engine import Engine
from scheduler.interface import EngineRequest, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.model_runner.quantized_checkpoints import rewrite, write_pair, write_plain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS = [
    "fp8",
    "fp8 per tensor",
    pytest.param(
        "compressed-tensors",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
        ),
    ),
]
Pair = tuple[Path, Path]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A quantised checkpoint and the plain one that it stands for."""
    return write_pair(tmp_path_factory.mktemp("quantized"), request.param)


def generate(folder: Path, quantization: Quantization) -> list[int]:
    """Greedy tokens of a server with this model on the CPU."""
    runner = ModelRunner.load(
        RunnerConfig(folder, device="cpu", quantization=quantization, kv_cache_gib=0.01, speculation="off")
    )
    info = runner.info
    engine = Engine(Scheduler(SchedulerConfig(info.block_size, 4, 64, info.max_model_len), info.num_blocks), runner)
    engine.add(EngineRequest("a", tuple(range(5, 40)), SamplingParams(temperature=0.0), max_tokens=20))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
    return tokens


def test_weights_are_those_that_the_checkpoint_stands_for(pair: Pair) -> None:
    quantized, plain = pair
    config = as_served(quantized, load_config(quantized), CPU, exact=True)
    assert not is_quantized(config)
    model: Any = AutoModelForCausalLM.from_pretrained(quantized, config=config, dtype=torch.float32)
    expected: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for (name, weight), (other, meant) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, meant), name


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_server_answers_as_with_the_plain_weights(pair: Pair, quantization: Quantization) -> None:
    quantized, plain = pair
    assert generate(quantized, quantization) == generate(plain, quantization)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors", "compressed-tensors int4"])
def test_a_server_reads_these_without_their_packages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = write_pair(tmp_path, kind)
    expected = generate(plain, "int8")
    monkeypatch.setattr(checkpoint_quantization.importlib.util, "find_spec", lambda name: None)
    assert generate(quantized, "int8") == expected


def test_linears_are_read_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    for kind in ("gptq", "awq", "compressed-tensors", "compressed-tensors int4"):
        quantized, plain = write_pair(tmp_path, kind)
        opened = open_checkpoint(quantized, native_reader(quantized, load_config(quantized)))
        expected = open_checkpoint(plain)
        assert opened is not None
        assert expected is not None
        assert opened.shapes == expected.shapes
        for name in expected.shapes:
            assert torch.equal(opened.tensor(name), expected.tensor(name)), name


def test_weights_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, "gptq")
    with pytest.raises(UnsupportedModelError, match=r"by GPTQ, which the CPU serves only with --quantization int8"):
        generate(quantized, "none")
    stored = load_file(quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    rewrite(quantized, stored, config | {"bits": 3})
    with pytest.raises(UnsupportedModelError, match=r"cannot be read: GPTQ weights with 3 bits .*; name another"):
        generate(quantized, "int8")
    del stored["model.layers.1.mlp.up_proj.scales"]
    rewrite(quantized, stored, config)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj has no tensor scales"):
        generate(quantized, "int8")


def test_the_memory_plan_sees_the_plain_weights(pair: Pair) -> None:
    quantized, plain = pair
    config = as_served(quantized, load_config(quantized), CPU, exact=True)
    assert inspect_model(config) == inspect_model(load_config(quantized)) == inspect_model(load_config(plain))


def test_a_checkpoint_that_is_not_quantised_is_left_alone(tmp_path: Path) -> None:
    write_plain(tmp_path)
    config = load_config(tmp_path)
    assert as_served(tmp_path, config, CPU, exact=True) is config
    assert not is_quantized(config)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored_as(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder whose configuration says so of its weights."""

    def make(method: str, **more: Any) -> Path:
        rewrite(tmp_path, write_plain(tmp_path), {"quant_method": method, **more})
        return tmp_path

    return make


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has just these packages be installed."""

    def make(*packages: str) -> None:
        def find(name: str) -> object | None:
            return name if name in packages else None

        monkeypatch.setattr(checkpoint_quantization.importlib.util, "find_spec", find)

    return make


@pytest.mark.parametrize(("method", "name"), [("gptq", "GPTQ"), ("awq", "AWQ")])
def test_what_cannot_be_dequantised_is_refused(
    method: str, name: str, stored_as: Callable[..., Path], installed: Callable[..., None]
) -> None:
    folder = stored_as(method, bits=4, group_size=128)
    config = load_config(folder)
    with pytest.raises(UnsupportedModelError, match=rf"by {name}, which the CPU serves only .*int8 .*; .* unquantised"):
        as_served(folder, config, CPU, exact=True)
    with pytest.raises(UnsupportedModelError, match=rf"by {name}, .* depend on the batch; .*--no-exact"):
        as_served(folder, config, CUDA, exact=True)
    installed()
    with pytest.raises(UnsupportedModelError, match=r"which needs .*; run `pip install .*gptqmodel"):
        as_served(folder, config, CUDA, exact=False)
    installed("optimum", "gptqmodel")
    served = as_served(folder, config, CUDA, exact=False)
    assert served is config
    assert is_quantized(served)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_can_be_dequantised_stays_only_where_it_may_and_can_be_multiplied(
    method: str, stored_as: Callable[..., Path], installed: Callable[..., None]
) -> None:
    folder = stored_as(method)
    config = load_config(folder)
    installed()
    assert not is_quantized(as_served(folder, config, CUDA, exact=False))
    installed("kernels")
    assert is_quantized(as_served(folder, config, CUDA, exact=False))
    assert not is_quantized(as_served(folder, config, CUDA, exact=True))
    assert is_quantized(config)  # which was not changed


def test_a_package_that_is_missing_is_named(stored_as: Callable[..., Path], installed: Callable[..., None]) -> None:
    folder = stored_as("compressed-tensors")
    installed()
    with pytest.raises(UnsupportedModelError, match="needs compressed-tensors; run `pip install compressed-tensors`"):
        as_served(folder, load_config(folder), CPU, exact=True)


def test_other_methods_are_refused_by_the_runner(stored_as: Callable[..., Path]) -> None:
    folder = stored_as("bitnet")
    with pytest.raises(UnsupportedModelError, match=r"bitnet, .* \(supported here: AWQ, FP8, GPTQ, MXFP4, "):
        ModelRunner.load(RunnerConfig(folder, device="cpu"))


def test_a_refusal_names_only_methods_that_are_served_there(stored_as: Callable[..., Path]) -> None:
    folder = stored_as("bitnet")
    with pytest.raises(UnsupportedModelError, match=r"\(supported here: FP8, MXFP4, compressed-tensors\)"):
        as_served(folder, load_config(folder), CUDA, exact=True)
    with pytest.raises(UnsupportedModelError, match=r"\(supported here: AWQ, FP8, GPTQ, MXFP4, compressed-tensors\)"):
        as_served(folder, load_config(folder), CUDA, exact=False)


def test_blocks_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    """transformers would take blocks of 96."""
    quantized, _ = write_pair(tmp_path, "fp8", hidden=192)
    with pytest.raises(UnsupportedModelError, match=r"not a multiple of their blocks of 128 x 128: model.*, 192 x 384"):
        as_served(quantized, load_config(quantized), CPU, exact=True)


def test_weights_smaller_than_a_block_are_one(tmp_path: Path) -> None:
    quantized, plain = write_pair(tmp_path, "fp8", hidden=64)
    assert generate(quantized, "none") == generate(plain, "none")


def test_scales_of_another_name_are_refused(tmp_path: Path) -> None:
    """transformers would take the weights without them."""
    quantized, _ = write_pair(tmp_path, "fp8 per tensor")
    stored = load_file(quantized / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): weight for name, weight in stored.items()}
    rewrite(quantized, renamed, json.loads((quantized / "config.json").read_text())["quantization_config"])
    with pytest.raises(UnsupportedModelError, match="whose scales were not found: model"):
        as_served(quantized, load_config(quantized), CPU, exact=True)


@pytest.mark.parametrize(
    ("said", "algorithm"),
    [
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, r"\(FP8"),
        ({"producer": {"name": "modelopt"}}, "does not name"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
    ],
)
def test_what_only_modelopts_own_file_says_is_refused(said: Any, algorithm: str | None, tmp_path: Path) -> None:
    write_plain(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    config = load_config(tmp_path)
    if algorithm is None:
        assert as_served(tmp_path, config, CPU, exact=True) is config
        return
    with pytest.raises(UnsupportedModelError, match=rf"by ModelOpt .*{algorithm}.*hf_quant_config.*; name another"):
        as_served(tmp_path, config, CPU, exact=True)

"""The decoder layer for CUDA: what transformers' layer computes, and independent rows."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_runner.cuda.layer import CudaDecoderLayer, replace_layers
from model_runner.modules.attention import ATTENTION_NAME, register_attention
from model_runner.modules.target import HFTargetModel
from model_runner.spec.layer_spec import LayerSpec
from model_runner.spec.model_spec import read_model_spec
from model_runner.weights.checkpoint import TensorCheckpoint
from tests.model_runner.decoder_models import LayerRun, layer_runs, tiny_model
from tests.model_runner.decoder_oracle import run_form
from tests.model_runner.triton.layers import OneLayer, Step, TorchProduct, WrittenAttention, make_cache, step_batch

TOKENS = 18  # beyond the windows
CASES = [
    ("llama", 0),
    ("llama with biases", 1),
    ("qwen2", 3),  # biases, a window
    ("qwen3", 0),  # norms of the heads
    ("gemma2", 0),  # norms of what is added
    ("gemma3_text", 1),
    ("granite", 0),  # scaled residuals
    ("hyperclovax", 0),  # both
    ("exaone4", 1),  # no norms of what enters; no positions
    ("phi3", 0),  # some dimensions are not rotated
    ("smollm3", 2),  # no positions
]


def forms_of(model: PreTrainedModel) -> Sequence[LayerSpec]:
    spec = read_model_spec(model.config, TensorCheckpoint(model.state_dict()))
    assert spec is not None
    return spec.layers


def run_of(case: str, layer: int, dtype: torch.dtype, device: torch.device) -> tuple[LayerSpec, LayerRun]:
    model = tiny_model(case).to(device, dtype)
    spec = forms_of(model)[layer]
    embedding = model.get_input_embeddings()
    embedding.weight.data.mul_(2)
    return spec, layer_runs(model, TOKENS)[layer]


def error_of(spec: LayerSpec, run: LayerRun, answer: Tensor) -> Tensor:
    """[tokens] the size of the error as a share of what the layer adds to its input."""
    truth = run_form(spec, run.hidden, run.cos_sin)
    return (answer.double() - truth).norm(dim=-1) / (truth - run.hidden.double()).norm(dim=-1)


@pytest.mark.parametrize(("case", "layer"), CASES)
def test_the_layer_computes_what_transformers_does(case: str, layer: int, device: torch.device) -> None:
    spec, run = run_of(case, layer, torch.float32, device)
    answer = OneLayer(spec, torch.float32, device)(run.hidden, run.cos_sin, [(0, 0, TOKENS)])
    torch.testing.assert_close(answer, run.answer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("case", "layer"), [("llama", 0), ("gemma3_text", 1), ("granite", 0)])
def test_in_half_precision_it_is_as_near_to_the_truth(
    case: str, layer: int, dtype: torch.dtype, device: torch.device
) -> None:
    spec, run = run_of(case, layer, dtype, device)
    answer = OneLayer(spec, dtype, device)(run.hidden, run.cos_sin, [(0, 0, TOKENS)])
    assert answer.dtype == dtype
    assert error_of(spec, run, answer).mean() < 1.1 * error_of(spec, run, run.answer).mean()


def without(name: str) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(spec, norms=replace(spec.norms, **{name: None}))


def with_window(size: int) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: replace(
        spec,
        mixer=replace(spec.mixer, options=replace(spec.mixer.options, window=size)),  # type: ignore[type-var]
    )


@pytest.mark.parametrize(
    ("case", "layer", "spoil"),
    [
        ("qwen3", 0, without("query")),
        ("gemma2", 0, without("mlp_post")),
        ("gemma2", 0, with_window(17)),
        ("granite", 0, lambda spec: replace(spec, residual_scale=0.4)),
        ("llama with biases", 1, lambda spec: replace(spec, down=replace(spec.down, bias=None))),
    ],
)
def test_what_is_different_shows(
    case: str, layer: int, spoil: Callable[[LayerSpec], LayerSpec], device: torch.device
) -> None:
    spec, run = run_of(case, layer, torch.float32, device)
    answer = OneLayer(spoil(spec), torch.float32, device)(run.hidden, run.cos_sin, [(0, 0, TOKENS)])
    assert (answer - run.answer).abs().max() > 1e-3


@pytest.mark.parametrize(("case", "layer", "dtype"), [("qwen3", 0, torch.bfloat16), ("gemma3_text", 1, torch.float32)])
def test_rows_alone_and_in_a_crowd(case: str, layer: int, dtype: torch.dtype, device: torch.device) -> None:
    spec, run = run_of(case, layer, dtype, device)

    def rows(steps: list[Step]) -> dict[tuple[int, int], Tensor]:
        """By sequence and position; all sequences are the same."""
        one, result = OneLayer(spec, dtype, device), {}
        for step in steps:
            places = [(s, position) for s, start, end in step for position in range(start, end)]
            index = torch.tensor([position for _, position in places], device=device)
            assert run.cos_sin is not None
            cos_sin = run.cos_sin[0][index], run.cos_sin[1][index]
            result.update(zip(places, one(run.hidden[index], cos_sin, step), strict=True))
        return result

    crowd = rows([[(0, 0, TOKENS), (1, 0, 7), (2, 0, 3)]])
    pieces = rows([[(1, 0, 1)], [(0, 0, 15), (1, 1, 5)], [(2, 0, 3), (0, 15, 17)], [(0, 17, 18)], [(1, 5, 7)]])
    assert crowd.keys() == pieces.keys()
    assert all(torch.equal(pieces[place], row) for place, row in crowd.items())


def test_no_tokens(device: torch.device) -> None:
    spec, run = run_of("llama", 0, torch.float32, device)
    assert run.cos_sin is not None
    cos, sin = run.cos_sin
    assert OneLayer(spec, torch.float32, device)(run.hidden[:0], (cos[:0], sin[:0]), []).shape == (0, 48)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_not_finite_stays_in_its_sequence(broken: float, device: torch.device) -> None:
    spec, run = run_of("gemma3_text", 1, torch.float32, device)
    assert run.cos_sin is not None
    cos, sin = (torch.cat([t[:6], t[:6]]) for t in run.cos_sin)
    layer, step = OneLayer(spec, torch.float32, device), [(0, 0, 6), (1, 0, 6)]
    hidden = run.hidden[:12].clone()
    whole = layer(hidden, (cos, sin), step)
    hidden[3, 5] = broken
    result = layer(hidden, (cos, sin), step)
    assert result[3].isnan().all()
    assert torch.equal(result[6:], whole[6:])


def test_a_whole_model(device: torch.device) -> None:
    model = tiny_model("gemma2", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]).to(device)
    register_attention()
    tokens = torch.arange(TOKENS, device=device)[None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION_NAME)
    specs = forms_of(model)
    assert replace_layers(model, TorchProduct) == 2
    assert all(isinstance(layer, CudaDecoderLayer) for layer in model.model.layers)
    attention = WrittenAttention(make_cache(specs, torch.float32, device))
    target = HFTargetModel(model, attention)  # type: ignore[arg-type]
    torch.testing.assert_close(target.forward(step_batch([(0, 0, TOKENS)])), expected, rtol=1e-4, atol=1e-4)


def test_other_layers_stay() -> None:
    assert replace_layers(tiny_model("qwen3_moe"), TorchProduct) == 1  # its layer without experts
    assert replace_layers(tiny_model("olmoe", num_experts=4), TorchProduct) == 0
    assert replace_layers(tiny_model("qwen3_5_text"), TorchProduct) == 0  # recurrent, or gated


def test_layers_are_gone_when_they_are_replaced() -> None:
    model = tiny_model("llama")
    layers = [weakref.ref(layer) for layer in model.model.layers]
    num_alive = []

    def make(weight: Tensor) -> TorchProduct:
        num_alive.append(sum(layer() is not None for layer in layers))
        return TorchProduct(weight)

    assert replace_layers(model, make) == 4
    assert num_alive[::4] == [4, 3, 2, 1]

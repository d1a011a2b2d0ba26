"""Which norms of transformers' models are replaced, and that the model's answers stay."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from model_runner.cuda.layer import CudaNorm, ReplacedNorms, replace_norms
from tests.conftest import tiny_config
from tests.model_runner.decoder_models import tiny_model


def logits(model: nn.Module, device: torch.device) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.arange(5, 14, device=device)[None], use_cache=False).logits
    return result


@pytest.mark.parametrize(
    ("case", "per_layer"),
    [("llama", 2), ("qwen3", 4), ("gemma3_text", 6), ("olmo2", 4), ("cohere", 1), ("vaultgemma", 2)],
)
def test_a_model_with_other_norms_answers_the_same(case: str, per_layer: int, device: torch.device) -> None:
    model = tiny_model(case, num_hidden_layers=2, layer_types=None).to(device)
    expected = logits(model, device)
    assert replace_norms(model) == ReplacedNorms(2 * per_layer + 1, frozenset())
    torch.testing.assert_close(logits(model, device), expected, rtol=1e-4, atol=1e-4)
    assert replace_norms(model) == ReplacedNorms(0, frozenset())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("gemma2"), dtype=dtype).to(device).eval()
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected = norm(rows)
    assert replace_norms(model).replaced == 13
    assert isinstance(model.model.norm, CudaNorm)
    assert model.model.norm.weight is norm.weight  # Mamba's blocks ask for its type
    torch.testing.assert_close(model.model.norm(rows), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


class PlainRMSNorm(nn.Module):
    """In the form that most families have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, generator=torch.Generator().manual_seed(0)))
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class WeightlessRMSNorm(nn.Module):
    """Takes rows of any width."""

    eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class LargestNorm(PlainRMSNorm):
    """Another norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + self.eps)


class OtherEpsRMSNorm(PlainRMSNorm):
    """Does not use the eps that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class GatedRMSNorm(PlainRMSNorm):
    """A norm that takes another input in addition."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


def test_what_is_not_recognised_is_named() -> None:
    own = [PlainRMSNorm(), LargestNorm(), OtherEpsRMSNorm(), GatedRMSNorm(), nn.LayerNorm(24), nn.RMSNorm(24)]
    modules = nn.ModuleList(own)
    assert replace_norms(modules) == ReplacedNorms(1, frozenset({"LargestNorm", "OtherEpsRMSNorm", "GatedRMSNorm"}))
    assert isinstance(modules[0], CudaNorm)
    assert list(modules[1:]) == own[1:]


@pytest.mark.parametrize("norm", [PlainRMSNorm, WeightlessRMSNorm])
def test_any_leading_dimensions(norm: type[nn.Module], device: torch.device) -> None:
    module = nn.ModuleList([norm().to(device)])
    rows = torch.randn(2, 3, 5, 24, device=device)
    expected = module[0](rows)
    assert replace_norms(module).replaced == 1
    torch.testing.assert_close(module[0](rows), expected)
    torch.testing.assert_close(module[0](rows.transpose(1, 2)), expected.transpose(1, 2))

"""The gate of an MLP against float64, and independent rows."""

import pytest
import torch

from model_runner.kernels.triton.linear import activate_and_multiply

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def truth(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.double().cpu().chunk(2, dim=1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [84, 1024, 1500])
def test_gate(width: int, activation: str, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (4 * torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(0))).to(device, dtype)
    result = activate_and_multiply(gate_up, activation)
    assert result.dtype == dtype
    expected = truth(gate_up, activation)
    # Where gelu_tanh nearly vanishes, what is left of 1 + tanh has few digits.
    torch.testing.assert_close(result.double().cpu(), expected, rtol=1.02 * TOLERANCE[dtype], atol=2e-6)
    alone = torch.cat([activate_and_multiply(row[None], activation) for row in gate_up])
    assert torch.equal(alone, result)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_far_from_zero(activation: str, device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert activate_and_multiply(gate_up, activation).tolist() == [[0.0, 1e4, pytest.approx(0, abs=1e-30), 0.0]]


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = torch.randn(3, 50, device=device)
    out = torch.empty(3, 20, device=device)
    assert activate_and_multiply(wide[:, 5:45], "silu", out) is out
    assert torch.equal(out, activate_and_multiply(wide[:, 5:45].contiguous(), "silu"))


def test_no_rows(device: torch.device) -> None:
    assert activate_and_multiply(torch.empty(0, 40, device=device), "silu").shape == (0, 20)

"""A gated delta net as one native call, against transformers' modules, and its exactness."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from model_runner.batch import Batch, StateTables
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels
from model_runner.recurrence.backend import BLOCK, ConvShape, GatedDeltaNetParameters, RecurrentShape, StateCache
from model_runner.recurrence.cpu import NativeRecurrence
from tests.model_runner.kernels.conftest import ISAS

SHAPE = RecurrentShape(4, 2, 16, 32, delta=True, per_channel=False)
CONV = ConvShape(2 * 32 + 128, 4)
LENGTH = 75


@pytest.fixture(scope="module")
def module() -> Any:
    """With random weights, some of whose heads forget fast."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    module = Qwen3_5GatedDeltaNet(config, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


class Runner:
    """Runs the native layer on the chunks of one choice."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self.backend = NativeRecurrence(kernels, StateCache([SHAPE], [CONV], 3, 4, torch.device("cpu")))
        parameters = GatedDeltaNetParameters(
            module.conv1d.weight.squeeze(1), None, module.A_log, module.dt_bias, module.norm.weight, 1e-6
        )
        layer = self.backend.gated_delta_net((0, 0), lambda: parameters)
        assert layer is not None
        self.layer = layer

    def run(self, projected: list[Tensor], cuts: list[int]) -> Tensor:
        """Returns the input of the last projection."""
        outputs, start, anchor = [], 0, (0, -1)
        for count in cuts:
            end = start + count
            pages = [(end // BLOCK - 1, end // BLOCK)] if end // BLOCK > anchor[0] else []
            states = StateTables([[0, 1, 2]], [anchor], [pages])
            nothing, positions = np.zeros(count, dtype=np.int64), np.arange(start, end)
            batch = Batch(nothing, positions, nothing, [[]], nothing, nothing, nothing[:0], [], [], states=states)
            outputs.append(self.layer(*(rows[start:end] for rows in projected), self.backend.prepare(batch)))
            start, anchor = end, (pages[0][0] + 1, pages[0][1]) if pages else anchor
        return torch.cat(outputs)


@torch.inference_mode()
def test_is_transformers_layer_in_any_chunks_on_every_instruction_set(module: Any, kernels_library: Path) -> None:
    hidden = torch.randn(LENGTH, 64)
    hidden[3] *= 30  # gates that are shut, or wide open
    [expected] = module(hidden[None])
    projections = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
    projected = [projection(hidden) for projection in projections]
    results = []
    for isa in ISAS:
        try:
            kernels = Kernels(kernels_library, 2, isa)
        except NoKernelsError:
            continue
        all_cuts = [LENGTH], [1] * LENGTH, [33, 31, 1, 10]
        results += [Runner(module, kernels).run(projected, cuts) for cuts in all_cuts]
    torch.testing.assert_close(module.out_proj(results[0]), expected, atol=2e-4, rtol=2e-5)
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_leaves_heads_that_vectors_do_not_fill_to_their_parts(kernels_library: Path) -> None:
    shape = RecurrentShape(1, 1, 20, 16, delta=True, per_channel=False)
    cache = StateCache([shape], [ConvShape(56, 4)], 1, 1, torch.device("cpu"))
    backend = NativeRecurrence(Kernels(kernels_library, 1), cache)
    assert backend.gated_delta_net((0, 0), lambda: pytest.fail("it reads parameters")) is None

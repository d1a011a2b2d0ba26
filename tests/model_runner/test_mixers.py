"""Recurrent mixers and indexers of transformers on the server's caches, against transformers' pass over the text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from bench.tiny_models import VOCAB_SIZE, auto_class, tiny_config, write_tiny_model
from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, StateTables
from model_runner.kv_cache import KVCache
from model_runner.modules.call import ModelCall
from model_runner.modules.classes import HOOKS, MIXERS
from model_runner.modules.experts import EXPERTS_NAME, register_experts
from model_runner.modules.loading import inspect_model, load_config, load_model
from model_runner.modules.packing import prepare
from model_runner.modules.target import HFTargetModel
from model_runner.recurrence.states import ConvShape, RecurrentShape, ScanShape, StateCache
from model_runner.spec.model_shape import ModelShape
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.oracles.attention import ReferenceAttention
from tests.model_runner.oracles.recurrence import ReferenceRecurrence

CPU = torch.device("cpu")
BLOCK = 32
FAMILIES = [
    "bailing_hybrid",
    "bamba",
    "falcon_mamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
]
WITH_INDEXERS = [
    "deepseek_v32",
    "deepseek_v4",
    "glm5_next",
    "hy_v4",
    "minimax_m3_vl_text",
    "mistral_large4",
    "qwen4_exp_text",
]


class NoAttention(AttentionBackend[None]):
    """For a model without attention."""

    def prepare(self, batch: Batch) -> None:
        """Nothing."""

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: None
    ) -> Tensor:
        raise AssertionError("the model attends")

    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: None) -> Tensor:
        raise AssertionError("the model attends")


class Driver:
    """Runs prompts in chunks through a model, with rows and pages of its own for each of their blocks."""

    def __init__(self, folder: Path, num_blocks: int = 12) -> None:
        register_experts()
        config = load_config(folder)
        self.shape: ModelShape = inspect_model(load_config(folder), keeps_latents=True)
        model = load_model(folder, config, torch.float32, EXPERTS_NAME)
        prepare(model, None)
        cache = KVCache(self.shape.kv, num_blocks, BLOCK, torch.float32, CPU) if self.shape.kv else None
        attention: AttentionBackend[Any] = NoAttention() if cache is None else ReferenceAttention(cache)
        of_model = self.shape.recurrences, self.shape.convolutions
        states = StateCache(*of_model, num_blocks, num_blocks, CPU, scans=self.shape.scans)
        self.target = HFTargetModel(model, attention, recurrence=ReferenceRecurrence(states))

    def run(self, prompts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [T, vocab] of each prompt, which is computed in chunks of the sizes in `cuts`, all next to another."""
        tables, first = [], 0
        for prompt in prompts:
            count = -(-len(prompt) // BLOCK)
            tables.append(list(range(first, first + count)))
            first += count
        done, found = [0] * len(prompts), [[] for _ in prompts]
        for sizes in zip(*cuts, strict=True):
            parts = [(index, done[index], done[index] + size) for index, size in enumerate(sizes) if size]
            chunks = [Chunk(prompts[index][start:end], start, tables[index]) for index, start, end in parts]
            states = StateTables(
                rows=[tables[index] for index, _, _ in parts],
                anchors=[(n, tables[index][n - 1] if n else -1) for index, n in ((i, s // BLOCK) for i, s, _ in parts)],
                pages=[
                    [(block, tables[index][block]) for block in range(start // BLOCK, end // BLOCK)]
                    for index, start, end in parts
                ],
            )
            logits = self.target.forward(replace(make_batch(chunks, BLOCK), states=states))
            for (index, _, end), rows in zip(
                parts, logits.split([end - start for _, start, end in parts]), strict=True
            ):
                found[index].append(rows.clone())
                done[index] = end
        return [torch.cat(rows) for rows in found]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (75, 40)]


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_INDEXERS])
def test_flat_batches_give_the_logits_of_the_whole_text(family: str, tmp_path: Path) -> None:
    write_tiny_model(family, tmp_path)
    reference: Any = auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path, dtype=torch.float32)
    driver, (long, short) = Driver(tmp_path), prompts()
    whole = driver.run([long], [[75]])[0]
    with torch.no_grad():
        expected = reference.eval()(torch.tensor([long]), use_cache=False).logits[0]
    assert (whole - expected).abs().max() <= 2e-5 * expected.abs().max()
    parts = driver.run([short, long], [[40, 0, 0, 0, 0, 0], [13, 20, 1, 1, 29, 11]])
    assert torch.equal(parts[1], whole)
    mixed = driver.run([long, short], [[1, 30, 2, 42], [7, 1, 24, 8]])
    assert torch.equal(mixed[0], whole)
    assert torch.equal(mixed[1], parts[0])


def test_inspection_finds_the_shapes_of_all_states() -> None:
    shape = inspect_model(tiny_config("qwen3_next"))
    assert shape.recurrences == (RecurrentShape(4, 2, 16, 16, delta=True, per_channel=False),) * 3
    assert shape.convolutions == (ConvShape(128, 4),) * 3
    assert len(shape.kv) == 1
    assert shape.num_layers == 4
    shape = inspect_model(tiny_config("kimi_linear"))
    assert shape.recurrences == (RecurrentShape(4, 4, 16, 16, delta=True, per_channel=True),) * 3
    shape = inspect_model(tiny_config("mamba2"))
    assert shape.recurrences == (RecurrentShape(8, 2, 16, 16, delta=False, per_channel=False),) * 4
    assert shape.kv == ()
    shape = inspect_model(tiny_config("zamba"))  # a scan for each of two heads
    assert shape.scans == (ScanShape(64, 16),) * 10
    assert shape.convolutions == (ConvShape(128, 4),) * 5
    assert len(shape.kv) == 2


def test_a_hooked_mixer_computes_as_before_outside_of_the_engine() -> None:
    torch.manual_seed(0)
    model = auto_class(config := tiny_config("qwen3_next")).from_config(config).eval()
    tokens = torch.tensor([prompts()[0]])
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        ModelCall(model)
        assert torch.equal(model(tokens, use_cache=False).logits, before)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen4_exp_text"])
def test_hooked_indexers_compute_as_before_outside_of_the_engine(family: str) -> None:
    torch.manual_seed(0)
    model = auto_class(config := tiny_config(family)).from_config(config).eval()
    tokens = torch.tensor([prompts()[0]])
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        ModelCall(model)
        assert torch.equal(model(tokens, use_cache=False).logits, before)


def test_a_mixer_that_calls_other_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    monkeypatch.setitem(HOOKS, "Changed", MIXERS["Lfm2ShortConv"])
    with pytest.raises(ValueError, match="Changed does not call causal_conv1d_fn; this version of transformers"):
        ModelCall(nn.ModuleList([Changed()]))

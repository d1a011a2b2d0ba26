"""Weights from block formats keep their values, and so do their products."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.block_formats import BLOCK_FORMATS, Q4_ZERO, find_block_format
from model_runner.kernels.library import Kernels, NativeWeight, WeightKind
from model_runner.native.packer import NativePacker
from model_runner.weights.matrix import Blocks, DenseMatrix, Linear
from tests.model_runner.kernels.decoder_runs import LENGTHS, FusedModel
from tests.model_runner.kernels.int8_oracle import Floats, quantise
from tests.model_runner.kernels.test_block_formats import HALVES, QUANTISED, TWO, random_blocks, reference

LEVELS = 2047
COUNTS = (1, 2, 3, 7, 8, 9, 33, 121)
EACH = [*QUANTISED, Q4_ZERO]
SEVERAL = (2, 3, 12, 14, 23, 39, Q4_ZERO)
"""One format for each way in which levels and scales are packed, but bytes."""


def name(number: int) -> str:
    stored = find_block_format(number)
    assert stored is not None
    return stored.name


def inputs_of(number: int) -> int:
    """More than are unpacked at once, and no multiple of it where the format allows."""
    stored = find_block_format(number)
    assert stored is not None
    return 768 if stored.weights == 256 else 320


def random_weight(number: int, rows: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of random bytes with finite scales; weights are finite, too."""
    if number == Q4_ZERO:
        blocks = np.random.default_rng(seed).integers(0, 256, (rows * inputs // 32, 19), dtype=np.uint8)
        blocks[:, 2] &= 15
        blocks[:, :2] = (
            np.random.default_rng(seed).standard_normal(len(blocks)).astype(np.float16)[:, None].view(np.uint8)
        )
        return blocks.reshape(rows, -1)
    blocks = random_blocks(number, rows, inputs, seed)
    if number == 39:  # the largest scales make infinite weights or sums
        blocks.reshape(-1, 17)[:, 0] = np.random.default_rng(seed).integers(0, 200, blocks.size // 17)
    return blocks


def values(number: int, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights as other software reads them."""
    if number != Q4_ZERO:
        return reference(number, blocks)
    stored = blocks.reshape(-1, 19)
    nibbles = np.concatenate([stored[:, 3:] & 15, stored[:, 3:] >> 4], axis=1)
    scales = np.ascontiguousarray(stored[:, :2]).view(np.float16).astype(np.float32)
    weights: NDArray[np.float32] = scales * (nibbles.astype(np.float32) - stored[:, 2:3])
    return weights.reshape(len(blocks), -1)


def without_minimums(number: int, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same blocks with minimums of 0."""
    stored = BLOCK_FORMATS.get(number)
    place = None if stored is None else 82 if stored.name == "Q2_K" else 2 if stored.name in TWO else None
    if stored is None or place is None:
        return blocks
    changed = blocks.reshape(-1, stored.num_bytes).copy()
    changed[:, place : place + 2] = 0
    return changed.reshape(blocks.shape)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(number: int, blocks: NDArray[np.uint8], rows: Tensor) -> tuple[Floats, Floats]:
    """The product [n, outputs] of rounded rows [n, inputs] and the weights, and how far off float32 may be."""
    x = quantise(rows, LEVELS)
    numbers = x.integers * x.scales[:, None].astype(np.float64)
    weights = values(number, blocks).astype(np.float64)
    levels = values(number, without_minimums(number, blocks)).astype(np.float64)
    stored = find_block_format(number)
    assert stored is not None
    steps = rows.shape[1] / min(stored.weights, 256 if name(number) != "NVFP4" else 16)
    magnitude = np.abs(numbers) @ (np.abs(levels) + np.abs(weights - levels)).T
    return numbers @ weights.T, (4 * steps + 4) * 2.0**-24 * magnitude + 1e-44


@pytest.mark.parametrize("number", EACH, ids=name)
@pytest.mark.parametrize("outputs", [1, 37])
def test_products(kernels: Kernels, kernels_library: Path, number: int, outputs: int) -> None:
    """They are near the products of the file's weights, and the same bits in any company on every instruction set."""
    inputs = inputs_of(number)
    blocks, bias = random_weight(number, outputs, inputs), random(outputs, seed=1)
    weight = kernels.repack(number, blocks, inputs)
    rows = random(max(COUNTS), inputs, seed=2)
    assert len(weight.packed) == kernels.repacked_bytes(number, outputs, inputs)
    result = kernels.linear(weight, rows)
    expected, error = product(number, blocks, rows)
    assert (np.abs(result.double().numpy() - expected) <= error).all()
    for count in COUNTS:
        assert torch.equal(kernels.linear(weight, rows[:count]), result[:count])
        assert torch.equal(kernels.linear(weight, rows[-count:]), result[-count:])
    portable = Kernels(kernels_library, threads=3, isa="portable")
    assert torch.equal(portable.linear(portable.repack(number, blocks, inputs), rows), result)
    assert torch.equal(kernels.linear(kernels.repack(number, blocks, inputs, bias=bias), rows), result + bias)


@pytest.mark.parametrize("number", EACH, ids=name)
def test_packed_weights_are_the_files(kernels: Kernels, number: int) -> None:
    """A row that is 1 at one input and 2,047 where the weights are 0 reads one weight of each output."""
    stored = find_block_format(number)
    assert stored is not None
    inputs = 2 * stored.weights
    blocks = random_weight(number, 48, inputs)
    zeros = np.zeros((48, stored.num_bytes), np.uint8)
    weight = kernels.repack(number, np.concatenate([blocks, zeros], axis=1), inputs + stored.weights)
    rows = torch.nn.functional.pad(torch.eye(inputs), (0, stored.weights))
    rows[:, -1] = LEVELS
    read = kernels.linear(weight, rows).T.numpy()
    np.testing.assert_array_equal(read, values(number, blocks))
    other = blocks.copy()
    other.reshape(-1, stored.num_bytes)[:, -1] ^= 0x11
    assert (values(number, other) != read).any()


@pytest.mark.parametrize("number", SEVERAL, ids=name)
def test_rows_in_another_order(kernels: Kernels, number: int) -> None:
    inputs = inputs_of(number)
    blocks, rows = random_weight(number, 40, inputs), random(5, inputs)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:33].int()
    result = kernels.linear(kernels.repack(number, blocks, inputs, order), rows)
    assert torch.equal(result, kernels.linear(kernels.repack(number, blocks, inputs), rows)[:, order])


def test_inputs_in_another_order_and_factors_of_outputs(kernels: Kernels) -> None:
    blocks, rows = random_weight(Q4_ZERO, 20, 320), random(130, 320)
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0)).int()
    factors = 2.0 ** torch.arange(-10, 10)
    weight = kernels.repack(Q4_ZERO, blocks, 320, output_scales=factors, input_order=order)
    plain = kernels.repack(Q4_ZERO, blocks, 320)
    assert torch.equal(kernels.linear(weight, rows), kernels.linear(plain, rows[:, order].contiguous()) * factors)
    same = kernels.repack(8, random_weight(8, 16, 320), 320, input_order=order.clone())
    joined = kernels.join([weight, same])
    assert torch.equal(kernels.linear(joined, rows)[:, :20], kernels.linear(weight, rows))
    with pytest.raises(ValueError, match="cannot be joined"):
        kernels.join([weight, plain])
    for wrong in (order[:-1], torch.zeros_like(order), order + 1):
        with pytest.raises(ValueError, match="does not name each of 320 inputs"):
            kernels.repack(Q4_ZERO, blocks, 320, input_order=wrong)


def test_the_largest_sums_of_levels_and_scales(kernels: Kernels) -> None:
    """They have room in 32 bits: with all levels, scales and rows at their limits, whatever the signs."""
    inputs = 512
    signs = np.sign(np.random.default_rng(0).standard_normal((9, inputs)))
    signs[0], signs[1] = 1, -1
    for number, scales, levels in ((14, {192: 0x80}, 0x00), (23, {2: 0x00, 4: 0x00}, 0x00), (13, {4: 0xFF}, 0xFF)):
        stored = BLOCK_FORMATS[number]
        blocks = np.full((17, inputs // 256, stored.num_bytes), levels, np.uint8)
        for place, byte in scales.items():
            blocks[:, :, place : place + (16 if place == 192 else 12 if number == 13 else 4)] = byte
        for place in HALVES.get(stored.name, [0, 2] if stored.name in TWO else [0]):
            blocks[:, :, place : place + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
        flat = blocks.reshape(17, -1)
        rows = torch.from_numpy(LEVELS * signs).float()
        result = kernels.linear(kernels.repack(number, flat, inputs), rows)
        expected = (LEVELS * signs) @ gguf.dequantize(flat, gguf.GGMLQuantizationType(number)).astype(np.float64).T
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def parts_of(kernels: Kernels, inputs: int) -> list[NativeWeight]:
    """One of each way of packing, with outputs that are no whole panels."""
    numbers = (12, 14, 8, 7, 3, 2, 13, 23, 40, Q4_ZERO)
    blocks = [kernels.repack(number, random_weight(number, 21, inputs), inputs, bias=random(21)) for number in numbers]
    dense: Sequence[WeightKind] = ("int8", "int4")
    return [*blocks, *(kernels.pack(kind, random(16, inputs)) for kind in dense)]


def test_joined_weights_are_one_linear(kernels: Kernels, kernels_library: Path) -> None:
    rows = random(130, 512)
    parts = parts_of(kernels, 512)
    expected = torch.cat([kernels.linear(part, rows) for part in parts], dim=1)
    joined = kernels.join([kernels.join(parts[:3]), *parts[3:]])
    assert joined.outputs == expected.shape[1]
    for count in (1, 3, 21, 130):
        assert torch.equal(kernels.linear(joined, rows[:count]), expected[:count])
    alone = Kernels(kernels_library, threads=1, isa=kernels.isa)
    assert torch.equal(alone.linear(joined, rows), expected)
    bias = random(joined.outputs, seed=1)
    free = kernels.join(parts, bias=torch.zeros(joined.outputs))
    assert torch.equal(kernels.linear(kernels.join(parts, bias=bias), rows), kernels.linear(free, rows) + bias)


def test_rows_of_joined_weights_suit_all_parts(kernels: Kernels) -> None:
    """A wide int8 weight takes rows of fewer bits, and then all parts do."""
    inputs = 20_224
    parts = [kernels.pack("int8", torch.ones(16, inputs)), kernels.repack(8, random_weight(8, 16, inputs), inputs)]
    joined = kernels.join(parts[::-1])
    rows = torch.ones(1, inputs)
    assert torch.equal(kernels.linear(joined, rows)[:, 16:], kernels.linear(parts[0], rows))
    assert kernels.linear(joined, rows)[0, 16] == pytest.approx(inputs, rel=1e-5)


@dataclass(frozen=True)
class StoredMatrix:
    """Implements Matrix for blocks in Q8_0."""

    stored: Blocks
    block_format = 8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.stored.rows), self.stored.rows.shape[1] // 34 * 32

    def blocks(self) -> Blocks:
        return self.stored

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        numbers = torch.from_numpy(reference(8, self.stored.rows[start:stop].numpy()))
        order = self.stored.input_order
        return numbers if order is None else numbers[:, order.argsort()]

    def drop(self, start: int, stop: int) -> None:
        """The tensor stays."""


def test_linears_that_share_rows(kernels: Kernels) -> None:
    """A dense MLP of a layer follows its experts in blocks, unless the blocks take different rows."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).int()
    plain, ordered = (
        Linear([StoredMatrix(Blocks(8, torch.from_numpy(random_weight(8, 16, 64)), input_order=one))])
        for one in (None, order)
    )
    dense = Linear([DenseMatrix(random(16, 64))])
    packer = NativePacker(kernels, "int8_rotated", multiplies_stored_blocks=True)
    rows = random(3, 64, seed=1)

    def products(linears: list[Linear]) -> list[Tensor]:
        weights = packer.pack_alike(linears)
        assert len({weight.rows for weight in weights}) == 1
        return [kernels.linear(weight, rows) for weight in weights]

    exact = kernels.linear(packer.pack(plain), rows)
    in_12_bits = kernels.linear(kernels.pack("int8", dense.weight), rows)
    for result, expected in zip(products([plain, dense]), (exact, in_12_bits), strict=True):
        assert torch.equal(result, expected)
    requantised = [kernels.linear(kernels.pack("int8", linear.weight), rows) for linear in (plain, ordered)]
    for result, expected in zip(products([plain, ordered]), requantised, strict=True):
        assert torch.equal(result, expected)
    assert packer.pack_alike([dense])[0].rows[1]


@pytest.mark.parametrize("case", ["llama with biases", "gemma2", "mixtral"])
def test_models_of_joined_weights(kernels: Kernels, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, experts and heads give the same bits, however their linears are divided into parts."""
    step = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]
    whole = torch.cat(FusedModel(case, kernels).logits([step]))
    pack = NativePacker.pack
    divided: list[Linear] = []

    def pack_parts(packer: NativePacker, linear: Linear) -> NativeWeight:
        parts = torch.tensor_split(linear.weight, [5, 37])
        divided.append(linear)
        return kernels.join([pack(packer, Linear([DenseMatrix(part)])) for part in parts if len(part)], linear.bias)

    monkeypatch.setattr(NativePacker, "pack", pack_parts)
    assert torch.equal(torch.cat(FusedModel(case, kernels).logits([step])), whole)
    assert len(divided) > 4


@pytest.mark.parametrize(("kind", "inputs"), [("int8", 65), ("int8_rotated", 65), ("int4", 64)])
def test_weights_packed_in_ranges(kernels: Kernels, kind: WeightKind, inputs: int) -> None:
    weight, rows = random(53, inputs), random(3, inputs, seed=1)
    whole, started = kernels.pack(kind, weight), kernels.start(kind, 53, inputs)
    for first, end in ((32, 53), (0, 16), (16, 32)):
        kernels.pack_rows(started, first, weight[first:end])
    assert torch.equal(started.packed, whole.packed)
    assert torch.equal(kernels.linear(started, rows), kernels.linear(whole, rows))
    for first, end in ((8, 24), (16, 24), (48, 64)):
        with pytest.raises(ValueError, match="begin and end at multiples of 16"):
            kernels.pack_rows(started, first, random(end - first, inputs))


def test_what_cannot_be_packed_is_an_error(kernels: Kernels) -> None:
    blocks = random_weight(12, 20, 512)
    with pytest.raises(ValueError, match="block format F16 cannot be packed as they are"):
        kernels.repack(1, blocks, 512)
    with pytest.raises(ValueError, match="block format 4 cannot be packed as they are"):
        kernels.repack(4, blocks, 512)
    for refused in (lambda: kernels.repack(12, blocks, 500), lambda: kernels.repacked_bytes(12, 20, 500)):
        with pytest.raises(ValueError, match="500 inputs are no whole blocks of Q4_K"):
            refused()
    with pytest.raises(ValueError, match="take contiguous numbers"):
        kernels.repack(12, blocks[:, 1:].copy(), 512)
    with pytest.raises(IndexError, match="not among the 20"):
        kernels.repack(12, blocks, 512, torch.tensor([3, 20], dtype=torch.int32))
    for place in (0, 2):
        broken = blocks.copy()
        broken[19, place : place + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        with pytest.raises(ValueError, match="weights in Q4_K has a scale or minimum that is not a finite number"):
            kernels.repack(12, broken, 512)
    plain, rotated = kernels.pack("int8", random(16, 512)), kernels.pack("int8_rotated", random(16, 512))
    for parts in ([plain, rotated], [plain, kernels.pack("int8", random(16, 256))], []):
        with pytest.raises(ValueError, match="cannot be joined"):
            kernels.join(parts)

"""Unpacked blocks of every format are the same as with the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.block_formats import BLOCK_FORMATS, Q4_ZERO
from model_runner.kernels.interface import CPU
from model_runner.kernels.library import Kernels

QUANTISED = [number for number, stored in BLOCK_FORMATS.items() if stored.weights > 1]
HALVES = {
    "IQ1_M": [],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
    "NVFP4": [],
}
"""Where a block has its numbers in half precision, unless it begins with one."""
TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
"""Blocks that begin with two."""


def name(number: int) -> str:
    return BLOCK_FORMATS[number].name


def random_blocks(number: int, rows: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of random bytes, but finite scales: among them zeros of both signs and subnormal numbers."""
    stored = BLOCK_FORMATS[number]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * inputs // stored.weights, stored.num_bytes), dtype=np.uint8)
    scales = rng.standard_normal((len(blocks), 2)).astype(np.float16)
    special = [(0, 0), (-0.0, 0), (0, -0.0), (-0.0, -0.0), (6e-8, 6e-8), (65504, -65504)]
    scales[: len(special)] = special[: len(scales)]
    for index, place in enumerate(HALVES.get(stored.name, [0, 2] if stored.name in TWO else [0])):
        blocks[:, place : place + 2] = scales[:, index : index + 1].view(np.uint8)
    if stored.name == "IQ1_M":  # spread over the upper nibbles of four words
        for part in range(4):
            at = 49 + part * 2
            blocks[:, at] = (blocks[:, at] & 15) | (scales[:, 0].view(np.uint16) >> part * 4 & 15) << 4
    return blocks.reshape(rows, -1)


def reference(number: int, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # the largest scales of MXFP4 are infinite times some levels
        unpacked: NDArray[np.float32] = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number))
    return unpacked


def assert_same(unpacked: Tensor, expected: NDArray[np.float32]) -> None:
    """The same bits, so that zeros have the same sign."""
    assert expected.dtype == np.float32
    assert np.array_equal(unpacked.numpy().view(np.int32), expected.view(np.int32))


def test_sizes_are_those_of_the_gguf_package() -> None:
    for number, stored in BLOCK_FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (stored.name, (stored.weights, stored.num_bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_all_formats_that_the_gguf_package_unpacks_are_there() -> None:
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
    assert {int(kind) for kind in plain | set(quants._type_traits)} == set(BLOCK_FORMATS)


def test_the_header_has_the_same_numbers() -> None:
    numbers = CPU.constants("SwBlockFormat")
    assert numbers == {f"SW_{stored.name}": number for number, stored in BLOCK_FORMATS.items()} | {
        "SW_Q4_ZERO": Q4_ZERO
    }


@pytest.mark.parametrize("number", QUANTISED, ids=name)
def test_blocks(kernels: Kernels, number: int) -> None:
    """So many that every entry of a codebook occurs."""
    blocks = random_blocks(number, 16, 8192)
    expected = reference(number, blocks)
    assert not np.isnan(expected).any()
    assert_same(kernels.unpack(number, torch.from_numpy(blocks), 8192), expected)


@pytest.mark.parametrize("number", QUANTISED, ids=name)
def test_a_change_of_any_byte_changes_a_weight(kernels: Kernels, number: int) -> None:
    """Otherwise equality would not show that the byte is read."""
    stored = BLOCK_FORMATS[number]
    block = random_blocks(number, 1, stored.weights * 8)[:, -stored.num_bytes :].copy()
    changed = np.repeat(block, stored.num_bytes + 1, axis=0)
    changed[np.arange(stored.num_bytes), np.arange(stored.num_bytes)] ^= 0x15
    unpacked = kernels.unpack(number, torch.from_numpy(changed), stored.weights)
    assert not (unpacked[:-1] == unpacked[-1]).all(1).any()


def test_all_scales_of_fp4(kernels: Kernels) -> None:
    for number, places in ((39, 1), (40, 4)):
        stored = BLOCK_FORMATS[number]
        blocks = random_blocks(number, 256, stored.weights)
        blocks[:, :places] = np.arange(256)[:, None]
        expected = reference(number, blocks)
        assert_same(kernels.unpack(number, torch.from_numpy(blocks), stored.weights), expected)


def test_plain_numbers(kernels: Kernels) -> None:
    """All numbers of 16 bits but NaN."""
    numbers = np.arange(1 << 16, dtype=np.uint16)
    for number, infinity in ((1, 0x7C00), (30, 0x7F80)):
        rows = numbers[(numbers & 0x7FFF) <= infinity].reshape(2, -1).view(np.uint8)
        expected = reference(number, rows)
        assert_same(kernels.unpack(number, torch.from_numpy(rows), expected.shape[1]), expected)
    floats = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    assert_same(kernels.unpack(0, torch.from_numpy(floats).view(torch.uint8), 5), floats)


def test_single_rows_of_a_mapping(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> None:
    """At an odd address, as an embedding looks them up."""
    blocks = random_blocks(12, 7, 512)
    path = tmp_path_factory.mktemp("mapped") / "blocks"
    path.write_bytes(b"x" + blocks.tobytes())
    mapped = np.memmap(path, np.uint8, "r", offset=1, shape=blocks.shape)
    chosen = [5, 0, 5, 6]
    unpacked = kernels.unpack(12, mapped, 512, torch.tensor(chosen, dtype=torch.int32))
    assert_same(unpacked, reference(12, blocks)[chosen])
    assert kernels.unpack(12, mapped, 512, torch.empty(0, dtype=torch.int32)).shape == (0, 512)


def test_what_does_not_fit_is_an_error(kernels: Kernels) -> None:
    blocks = torch.from_numpy(random_blocks(12, 2, 512))
    with pytest.raises(ValueError, match="block format 4 cannot be unpacked: it is unknown"):
        kernels.unpack(4, blocks, 512)
    with pytest.raises(ValueError, match="500 inputs are no whole blocks of Q4_K, which have 256 weights"):
        kernels.unpack(12, blocks, 500)
    for wrong in (blocks[:, :-1].contiguous(), blocks[:, ::2], blocks.float(), blocks.flatten()):
        with pytest.raises((ValueError, TypeError), match=r"take contiguous numbers|uint8_t"):
            kernels.unpack(12, wrong, 512)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="not among the 2"):
            kernels.unpack(12, blocks, 512, torch.tensor([index], dtype=torch.int32))
    with pytest.raises(TypeError, match="int32_t"):
        kernels.unpack(12, blocks, 512, torch.tensor([0]))

"""Formats of stored weights, by GGUF's type numbers: their names, the sizes of their blocks, and their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format whose rows are sequences of blocks. Plain numbers count as blocks of one weight."""

    name: str
    weights: int
    """Weights in a block."""
    num_bytes: int
    """Bytes of a block."""

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row. Raises ValueError if the row does not consist of whole blocks."""
        if inputs % self.weights:
            raise ValueError(f"{inputs} inputs are no whole blocks of {self.name}, which have {self.weights} weights")
        return inputs // self.weights * self.num_bytes


F32, F16, BF16 = 0, 1, 30
"""Formats of plain numbers."""

BLOCK_FORMATS: Mapping[int, BlockFormat] = MappingProxyType(
    {
        F32: BlockFormat("F32", 1, 4),
        F16: BlockFormat("F16", 1, 2),
        2: BlockFormat("Q4_0", 32, 18),
        3: BlockFormat("Q4_1", 32, 20),
        6: BlockFormat("Q5_0", 32, 22),
        7: BlockFormat("Q5_1", 32, 24),
        8: BlockFormat("Q8_0", 32, 34),
        10: BlockFormat("Q2_K", 256, 84),
        11: BlockFormat("Q3_K", 256, 110),
        12: BlockFormat("Q4_K", 256, 144),
        13: BlockFormat("Q5_K", 256, 176),
        14: BlockFormat("Q6_K", 256, 210),
        16: BlockFormat("IQ2_XXS", 256, 66),
        17: BlockFormat("IQ2_XS", 256, 74),
        18: BlockFormat("IQ3_XXS", 256, 98),
        19: BlockFormat("IQ1_S", 256, 50),
        20: BlockFormat("IQ4_NL", 32, 18),
        21: BlockFormat("IQ3_S", 256, 110),
        22: BlockFormat("IQ2_S", 256, 82),
        23: BlockFormat("IQ4_XS", 256, 136),
        29: BlockFormat("IQ1_M", 256, 56),
        BF16: BlockFormat("BF16", 1, 2),
        34: BlockFormat("TQ1_0", 256, 54),
        35: BlockFormat("TQ2_0", 256, 66),
        39: BlockFormat("MXFP4", 32, 17),
        40: BlockFormat("NVFP4", 64, 36),
    }
)
"""All formats that the kernels can unpack, with the numbers of SwBlockFormat in cpu/samewise.h."""

Q4_ZERO = 1000
"""Block format of 4-bit weights in other files than GGUF's: scale * (nibble - zero) in groups of 32.

A block has the scale in half precision, the zero in one byte, and 16 bytes of nibbles: byte j has weight j in its lower
half and weight j + 16 in its upper half."""
_OTHERS = {Q4_ZERO: BlockFormat("W4A16", 32, 19)}


def find_block_format(number: int) -> BlockFormat | None:
    """The format with this number, GGUF's or another; None if it is unknown."""
    return BLOCK_FORMATS.get(number) or _OTHERS.get(number)


def unpack(rows: NDArray[np.uint8], block_format: int) -> NDArray[np.float32]:
    """uint8 [n, bytes of a row] -> float32 [n, width], where the kernels cannot do it."""
    if block_format == F32:
        return rows.view(np.float32)
    if block_format == Q4_ZERO:
        blocks = rows.reshape(len(rows), -1, _OTHERS[Q4_ZERO].num_bytes)
        scales, zeros, pairs = blocks[..., :2].copy().view(np.float16), blocks[..., 2:3], blocks[..., 3:]
        levels = np.concatenate((pairs & 15, pairs >> 4), -1).astype(np.float32) - zeros
        values: NDArray[np.float32] = (levels * scales.astype(np.float32)).reshape(len(rows), -1)
        return values
    from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - takes 0.1 s, and is hardly ever needed

    return dequantize(rows, GGMLQuantizationType(block_format)).astype(np.float32, copy=False)

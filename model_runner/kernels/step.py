"""A step's tokens as the CPU kernels take them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model_runner.batch import Batch, Int32Array
from model_runner.kernels.structs import StepStruct


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step, and the arrays that its struct points into."""

    struct: StepStruct
    arrays: tuple[Int32Array, ...]


def make_step(batch: Batch) -> NativeStep:
    """The step of a batch on the CPU."""
    table = batch.block_table()
    num_choices, width = table.shape
    arrays: list[npt.NDArray[Any]] = [
        np.searchsorted(batch.choice_of, np.arange(num_choices + 1)),  # first_token
        batch.positions,
        batch.block_of,
        batch.offset_of,
        table,
    ]
    if batch.paths is not None:
        arrays += [batch.paths.start, batch.paths.first, batch.paths.places]
    numbers = tuple(np.ascontiguousarray(array, dtype=np.int32) for array in arrays)
    struct = StepStruct(len(batch.positions), num_choices, width, *map(_address, numbers))
    return NativeStep(struct, numbers)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

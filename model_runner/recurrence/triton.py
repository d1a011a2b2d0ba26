"""Recurrences and convolutions on CUDA with Triton kernels."""

from dataclasses import astuple, dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.kernels.triton import recurrence as kernels
from model_runner.recurrence.backend import RecurrenceBackend, has_silu
from model_runner.recurrence.plan import Plan, make_plan
from model_runner.recurrence.states import BLOCK, StateCache


@dataclass(slots=True)
class DevicePlan:
    """A plan in device memory."""

    plan: Plan
    numbers: Tensor
    """The plan's int32 numbers, as the kernel takes them."""
    starts: tuple[int, ...]
    """Where each part of them begins, then the number of choices."""
    block_of: Tensor  # [T] rows block of each token's row
    offset_of: Tensor  # [T]
    pages: Tensor  # [written] pages to write
    page_blocks: Tensor  # [written] the rows block that each one follows
    conv_inputs: dict[int, Tensor] = field(default_factory=dict)
    """By kernel size, `Plan.inputs_of`."""


class TritonRecurrence(RecurrenceBackend[DevicePlan]):
    """A program does one head of one choice, for some channels of its values."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def prepare(self, batch: Batch) -> DevicePlan:
        plan = make_plan(batch)
        lists = (plan.segments, plan.first_segment, plan.anchors)
        parts = [*(np.array(part, dtype=np.int32).ravel() for part in lists), plan.order, plan.num_rows]
        parts.append(plan.paths.ravel())
        whole_parts = [np.pad(part, (0, -len(part) % 4)) for part in parts]  # every part has the same alignment
        numbers = torch.from_numpy(np.concatenate(whole_parts)).to(self.cache.device)
        starts = (*accumulate(map(len, whole_parts[:-1]), initial=0), len(plan.anchors))
        written = np.array(plan.written, dtype=np.int64).reshape(-1, 2)
        slots = plan.slots.astype(np.int64)
        indices = (slots // BLOCK, slots % BLOCK, written[:, 0], written[:, 1])
        blocks, offsets, pages, page_blocks = (torch.from_numpy(i.copy()).to(self.cache.device) for i in indices)
        return DevicePlan(plan, numbers, starts, blocks, offsets, pages, page_blocks)

    def recur(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        metadata: DevicePlan,
    ) -> Tensor:
        shape, memory = self.cache.recurrences[index], self.cache.recurrent[index]
        memory.put(metadata.block_of, metadata.offset_of, key, log_decay)
        output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        rows = _regular(query), _regular(value), None if beta is None else _regular(beta)
        sizes = kernels.RecurrenceSizes(*astuple(shape))
        kernels.recur(sizes, memory.parts, metadata.numbers, metadata.starts, rows, output)
        return output.to(value.dtype)

    def scan(
        self,
        index: int,
        step: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        metadata: DevicePlan,
    ) -> Tensor:
        memory = self.cache.scan[index]
        memory.put(metadata.block_of, metadata.offset_of, step, value, b)
        output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        kernels.scan(memory.parts, metadata.numbers, metadata.starts, (_regular(a), _regular(c)), output)
        return output.to(value.dtype)

    def convolve(
        self,
        index: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        metadata: DevicePlan,
    ) -> Tensor:
        memory, kernel = self.cache.conv[index], self.cache.convolutions[index].kernel
        rows, output = _regular(x), torch.empty(x.shape, dtype=torch.float32, device=x.device)
        memory.inputs[metadata.block_of, metadata.offset_of] = rows
        sources = metadata.conv_inputs.get(kernel)
        if sources is None:
            sources = torch.from_numpy(metadata.plan.inputs_of(kernel)).to(self.cache.device)
            metadata.conv_inputs[kernel] = sources
        parameters = _regular(weight), None if bias is None else _regular(bias)
        kernels.convolve(memory.parts, sources, rows, *parameters, output, silu=has_silu(activation))
        memory.last[metadata.pages] = memory.inputs[metadata.page_blocks, BLOCK + 1 - kernel :]
        return output.to(x.dtype)


def _regular(numbers: Tensor) -> Tensor:
    """Contiguous in float32, and aligned: Triton compiles kernels for arguments with another alignment anew."""
    numbers = numbers.float().contiguous()
    return numbers.clone() if numbers.data_ptr() % 16 else numbers

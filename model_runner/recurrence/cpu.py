"""Recurrences and convolutions with the C++ kernels."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from model_runner.batch import Batch
from model_runner.kernels import recurrence as native
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels
from model_runner.recurrence.backend import RecurrenceBackend, StateCache, has_silu, padded
from model_runner.recurrence.plan import Plan, make_plan


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """A plan, and the same for the kernels."""

    plan: Plan
    native: native.NativePlan


class NativeRecurrence(RecurrenceBackend[NativeMetadata]):
    """A unit of work is one head of one choice."""

    def __init__(self, kernels: Kernels, cache: StateCache) -> None:
        self._kernels = kernels
        self.cache = cache
        self._recurrences = [self._recurrence(index) for index in range(len(cache.recurrences))]

    def prepare(self, batch: Batch) -> NativeMetadata:
        plan = make_plan(batch)
        per_token = (plan.slots, plan.num_rows, plan.order)
        return NativeMetadata(
            plan,
            native.NativePlan(per_token, plan.segments, plan.first_segment, plan.anchors, plan.paths, plan.written),
        )

    def recur(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        metadata: NativeMetadata,
    ) -> Tensor:
        shape = self.cache.recurrences[index]
        decays = _padded(log_decay) if shape.per_channel else log_decay.float().contiguous()
        gains = None if beta is None else beta.float().contiguous()
        rows = (_padded(query), _padded(key), _padded(value), decays, gains)
        output = native.recur(self._kernels, self._recurrences[index], metadata.native, rows)
        return output[..., : shape.value_dim].to(value.dtype)

    def convolve(
        self,
        index: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        metadata: NativeMetadata,
    ) -> Tensor:
        shape, memory = self.cache.convolutions[index], self.cache.conv[index]
        sources = metadata.plan.inputs_of(shape.kernel)
        weights = weight.float().contiguous()
        biases = None if bias is None else bias.float().contiguous()
        struct = CPU.new(
            "SwConvolution",
            channels=shape.channels,
            kernel=shape.kernel,
            silu=has_silu(activation),
            rows_stride=memory.inputs.stride(0),
            page_stride=memory.last.stride(0),
            inputs=_address(memory.inputs),
            last=_address(memory.last),
            weight=pointer(weights, shape.channels, shape.kernel),
            bias=CPU.ffi.NULL if biases is None else pointer(biases, shape.channels),
            sources=pointer(sources, len(x), shape.kernel - 1),
        )
        return native.convolve(self._kernels, struct, metadata.native, x.float().contiguous()).to(x.dtype)

    def _recurrence(self, index: int) -> CData:
        shape, memory = self.cache.recurrences[index], self.cache.recurrent[index]
        return CPU.new(
            "SwRecurrence",
            heads=shape.heads,
            key_heads=shape.key_heads,
            key_dim=padded(shape.key_dim),
            value_dim=padded(shape.value_dim),
            per_channel=shape.per_channel,
            rows_stride=memory.keys.stride(0),
            page_stride=memory.states.stride(0),
            keys=_address(memory.keys),
            decays=_address(memory.decays),
            updates=_address(memory.updates),
            states=_address(memory.states),
        )


def _address(memory: Tensor) -> CData:
    """The address of the first block or page of a layer."""
    return CPU.ffi.cast("float *", memory.data_ptr())


def _padded(vectors: Tensor) -> Tensor:
    """Contiguous float32 vectors with zeros up to the stored size."""
    dim = vectors.shape[-1]
    return F.pad(vectors.float(), (0, padded(dim) - dim)).contiguous() if dim % 16 else vectors.float().contiguous()

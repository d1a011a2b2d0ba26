"""Recurrences and convolutions with the C++ kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from model_runner.batch import Batch
from model_runner.kernels import recurrence as native
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.library import Kernels
from model_runner.recurrence.backend import (
    GatedDeltaNet,
    GatedDeltaNetParameters,
    RecurrenceBackend,
    StateCache,
    has_silu,
    padded,
)
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
        self._convolutions: dict[int, tuple[Tensor, CData, object]] = {}
        """For each convolution that was computed: its weight, SwConvolution, and the memory of that. Weights do not
        change."""
        self._scans: dict[int, tuple[CData, object]] = {}
        """For each selective scan that was computed: SwScan, and the memory of its A, which does not change."""
        self._nets: dict[int, GatedDeltaNet[NativeMetadata]] = {}
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
        decays = _padded(log_decay) if shape.per_channel else _floats(log_decay)
        gains = None if beta is None else _floats(beta)
        rows = (_padded(query), _padded(key), _padded(value), decays, gains)
        output = native.recur(self._kernels, self._recurrences[index], metadata.native, rows)
        return output[..., : shape.value_dim].to(value.dtype)

    def scan(
        self,
        index: int,
        step: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        metadata: NativeMetadata,
    ) -> Tensor:
        shape = self.cache.scans[index]
        if index not in self._scans:
            self._scans[index] = self._scan(index, a)
        rows = _padded(step), _padded(value), _floats(b), _floats(c)
        output = native.scan(self._kernels, self._scans[index][0], metadata.native, rows)
        return output[:, : shape.channels].to(value.dtype)

    def convolve(
        self,
        index: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        metadata: NativeMetadata,
    ) -> Tensor:
        known = self._convolutions.get(index)
        if known is None or known[0].data_ptr() != weight.data_ptr():
            known = self._convolutions[index] = weight, *self._convolution(index, weight, bias, activation)
        struct = known[1]
        struct.sources = self._sources(index, metadata)
        return native.convolve(self._kernels, struct, metadata.native, _floats(x)).to(x.dtype)

    def gated_delta_net(
        self, indices: tuple[int, int], read: Callable[[], GatedDeltaNetParameters]
    ) -> GatedDeltaNet[NativeMetadata] | None:
        shape = self.cache.recurrences[indices[0]]
        if (padded(shape.key_dim), padded(shape.value_dim)) != (shape.key_dim, shape.value_dim):
            return None
        if indices[0] not in self._nets:
            self._nets[indices[0]] = self._make_net(indices, read())
        return self._nets[indices[0]]

    def _make_net(self, indices: tuple[int, int], parameters: GatedDeltaNetParameters) -> GatedDeltaNet[NativeMetadata]:
        shape = self.cache.recurrences[indices[0]]
        p = parameters
        convolution, of_convolution = self._convolution(indices[1], p.conv_weight, p.conv_bias, "silu")
        numbers = [_floats(part) for part in (-p.a_log.float().exp(), p.dt_bias, p.norm)]
        struct = CPU.new(
            "SwGatedDeltaNet",
            recurrence=self._recurrences[indices[0]][0],
            convolution=convolution[0],
            gain=p.gain,
            norm_eps=p.norm_eps,
            decay_factor=pointer(numbers[0], shape.heads),
            decay_bias=pointer(numbers[1], shape.heads),
            norm=pointer(numbers[2], shape.value_dim),
        )
        memory = (*numbers, of_convolution)

        def run(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, metadata: NativeMetadata) -> Tensor:
            assert memory
            struct.convolution.sources = self._sources(indices[1], metadata)
            rows = _floats(qkv), _floats(z), _floats(b), _floats(a)
            return native.gated_delta_net(self._kernels, struct, metadata.native, rows).to(qkv.dtype)

        return run

    def _sources(self, index: int, metadata: NativeMetadata) -> CData:
        kernel = self.cache.convolutions[index].kernel
        sources = metadata.plan.inputs_of(kernel)
        return pointer(sources, len(sources), kernel - 1)

    def _convolution(
        self, index: int, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> tuple[CData, object]:
        """An SwConvolution without sources, and the memory that it needs."""
        shape, memory = self.cache.convolutions[index], self.cache.conv[index]
        weights, biases = _floats(weight.T), None if bias is None else _floats(bias)
        struct = CPU.new(
            "SwConvolution",
            channels=shape.channels,
            kernel=shape.kernel,
            silu=has_silu(activation),
            rows_stride=memory.inputs.stride(0),
            page_stride=memory.last.stride(0),
            inputs=_address(memory.inputs),
            last=_address(memory.last),
            weight=pointer(weights, shape.kernel, shape.channels),
            bias=CPU.ffi.NULL if biases is None else pointer(biases, shape.channels),
        )
        return struct, (weights, biases)

    def _scan(self, index: int, a: Tensor) -> tuple[CData, object]:
        """An SwScan, and the memory that it needs."""
        shape, memory = self.cache.scans[index], self.cache.scan[index]
        decays = _padded(a.T)
        struct = CPU.new(
            "SwScan",
            channels=padded(shape.channels),
            num_states=shape.states,
            rows_stride=memory.steps.stride(0),
            page_stride=memory.states.stride(0),
            steps=_address(memory.steps),
            values=_address(memory.values),
            inputs=_address(memory.inputs),
            states=_address(memory.states),
            decays=pointer(decays, *shape.state),
        )
        return struct, decays

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


def _floats(numbers: Tensor) -> Tensor:
    """Contiguous float32."""
    return numbers.detach().float().contiguous()


def _padded(vectors: Tensor) -> Tensor:
    """Contiguous float32 vectors with zeros up to the stored size."""
    dim = vectors.shape[-1]
    return F.pad(_floats(vectors), (0, padded(dim) - dim)) if padded(dim) > dim else _floats(vectors)

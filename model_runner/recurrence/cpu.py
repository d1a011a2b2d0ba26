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
    GatedDeltaNetParameters,
    MixerParameters,
    RecurrenceBackend,
    ShortConvolutionParameters,
    has_silu,
)
from model_runner.recurrence.plan import Plan, make_plan
from model_runner.recurrence.states import StateCache, padded


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """A plan, and the same for the kernels."""

    plan: Plan
    native: native.NativePlan


@dataclass(frozen=True, slots=True)
class BoundMixer:
    """A recurrent mixer on the rows and pages of a cache."""

    field: str
    """Its field of an SwDecoderLayer."""
    struct: CData
    memory: object
    """The numbers that the struct points into."""


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
        self._bound: dict[tuple[int, int], BoundMixer] = {}
        self._kernel_sizes = sorted({shape.kernel for shape in cache.convolutions})
        self._recurrences = [self._recurrence(index) for index in range(len(cache.recurrences))]

    def prepare(self, batch: Batch) -> NativeMetadata:
        plan = make_plan(batch)
        per_token = (plan.slots, plan.num_rows, plan.order)
        sources = {kernel: plan.inputs_of(kernel) for kernel in self._kernel_sizes}
        lists = plan.segments, plan.first_segment, plan.anchors, plan.paths, plan.written
        return NativeMetadata(plan, native.NativePlan(per_token, *lists, sources))

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
        return native.convolve(self._kernels, known[1], metadata.native, _floats(x)).to(x.dtype)

    def bind(self, indices: tuple[int, int], read: Callable[[], MixerParameters]) -> "BoundMixer":
        """The recurrent mixer on the recurrence and the convolution of these indices, whose dimensions are whole.

        A short convolution has no recurrence; its first index is the next recurrence's.

        Args:
            indices: of the recurrence and of the convolution in the cache.
            read: reads the mixer's parameters, when it is first needed.
        """
        if indices not in self._bound:
            self._bound[indices] = self._bind(indices, read())
        return self._bound[indices]

    def _bind(self, indices: tuple[int, int], parameters: MixerParameters) -> "BoundMixer":
        weight, bias = parameters.conv_weight, parameters.conv_bias
        is_short = isinstance(parameters, ShortConvolutionParameters)
        convolution, memory = self._convolution(indices[1], weight, bias, None if is_short else "silu")
        if isinstance(parameters, ShortConvolutionParameters):
            return BoundMixer("short_convolution", convolution, (memory, self.cache))
        shape, p = self.cache.recurrences[indices[0]], parameters
        recurrence = self._recurrences[indices[0]][0]
        numbers = [_floats(part) for part in (-p.a_log.float().exp(), p.dt_bias, p.norm) if part is not None]
        factor, step_bias, *norm = (pointer(part, len(part)) for part in numbers)
        common = {"recurrence": recurrence, "convolution": convolution[0], "decay_factor": factor}
        common |= {"norm": norm[0] if norm else CPU.ffi.NULL, "norm_eps": p.norm_eps}
        if isinstance(p, GatedDeltaNetParameters):
            net = CPU.new("SwGatedDeltaNet", gain=p.gain, decay_bias=step_bias, **common)
            return BoundMixer("delta_net", net, (*numbers, memory, self.cache))
        least, most = p.step_limits
        skip = _floats(p.d)
        layer = CPU.new(
            "SwMamba2",
            least_step=least,
            most_step=most,
            norm_groups=p.norm_groups,
            step_bias=step_bias,
            skip=pointer(skip, shape.heads),
            **common,
        )
        return BoundMixer("mamba2", layer, (*numbers, skip, memory, self.cache))

    def _convolution(
        self, index: int, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> tuple[CData, object]:
        """An SwConvolution, and the memory that it needs."""
        shape, memory = self.cache.convolutions[index], self.cache.conv[index]
        weights, biases = _floats(weight.T), None if bias is None else _floats(bias)
        struct = CPU.new(
            "SwConvolution",
            channels=shape.channels,
            kernel=shape.kernel,
            silu=has_silu(activation),
            page_stride=memory.last.stride(0),
            inputs=self._rows(memory.inputs)[0],
            last=_address(memory.last),
            weight=pointer(weights, shape.kernel, shape.channels),
            bias=CPU.ffi.NULL if biases is None else pointer(biases, shape.channels),
        )
        return struct, (weights, biases)

    def _scan(self, index: int, a: Tensor) -> tuple[CData, object]:
        """An SwScan, and the memory that it needs."""
        shape, memory = self.cache.scans[index], self.cache.scan[index]
        decays, rows = _padded(a.T), self._rows(memory.steps, memory.values, memory.inputs)
        struct = CPU.new(
            "SwScan",
            channels=padded(shape.channels),
            num_states=shape.states,
            page_stride=memory.states.stride(0),
            **dict(zip(("steps", "values", "inputs"), rows, strict=True)),
            states=_address(memory.states),
            decays=pointer(decays, *shape.page),
        )
        return struct, decays

    def _recurrence(self, index: int) -> CData:
        shape, memory = self.cache.recurrences[index], self.cache.recurrent[index]
        rows = self._rows(memory.keys, memory.decays, memory.updates)
        return CPU.new(
            "SwRecurrence",
            heads=shape.heads,
            key_heads=shape.key_heads,
            key_dim=padded(shape.key_dim),
            value_dim=padded(shape.value_dim),
            per_channel=shape.per_channel,
            page_stride=memory.states.stride(0),
            states=_address(memory.states),
            **dict(zip(("keys", "decays", "updates"), rows, strict=True)),
        )

    def _rows(self, *parts: Tensor) -> list[CData]:
        """An SwRows of each part [blocks, ...] of a layer's rows."""
        scratch = self.cache.scratch([part.shape[1:] for part in parts])
        return [
            CPU.new(
                "SwRows",
                blocks=_address(part),
                scratch=_address(piece),
                stride=part.stride(0),
                scratch_stride=piece.stride(0),
                num_blocks=len(part),
            )[0]
            for part, piece in zip(parts, scratch, strict=True)
        ]


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

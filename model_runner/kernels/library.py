"""Calls into the library of CPU kernels."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from model_runner.kernels.arena import Arena
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.structs import (
    AttentionStruct,
    DecoderLayerStruct,
    DrawStruct,
    Int8WeightStruct,
    KVCacheStruct,
    StepStruct,
)

_PANEL = 16

_SIGNATURES = {
    "sw_create": (c_void_p, [c_int32, c_char_p]),
    "sw_destroy": (None, [c_void_p]),
    "sw_isa": (c_char_p, [c_void_p]),
    "sw_packed_size": (c_int64, [c_int32, c_int32]),
    "sw_pack_int8": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "sw_linear_int8": (c_int32, [c_void_p, POINTER(Int8WeightStruct), c_void_p, c_int32, c_void_p]),
    "sw_attention": (
        c_int32,
        [c_void_p, POINTER(KVCacheStruct), POINTER(StepStruct), POINTER(AttentionStruct), *[c_void_p] * 4],
    ),
    "sw_decoder_layer": (
        c_int32,
        [c_void_p, POINTER(DecoderLayerStruct), POINTER(StepStruct), *[c_void_p] * 4],
    ),
    "sw_gumbel_max": (c_int32, [c_void_p, c_void_p, c_int64, POINTER(DrawStruct), c_int32, POINTER(c_int64)]),
}


class Int8Weight:
    """A weight [outputs, inputs] as int8 with one scale for each output, packed for the kernels."""

    def __init__(self, struct: Int8WeightStruct, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.struct = struct
        self.outputs: int = struct.outputs
        self.inputs: int = struct.inputs
        self._memory = (packed, scales, bias)  # the struct points into these

    @property
    def scales(self) -> Tensor:
        """[outputs] float32."""
        return self._memory[1][: self.outputs]


class Kernels:
    """The loaded library with its own threads. One call at a time.

    All tensors are contiguous and on the CPU; floats are float32.
    """

    def __init__(self, library: Path, threads: int, isa: str = "auto") -> None:
        """Raises NoKernelsError if the library cannot be loaded or this machine lacks the instruction set."""
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise NoKernelsError(f"the CPU kernels cannot be loaded: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._context = self._library.sw_create(threads, isa.encode())
        if not self._context:
            raise NoKernelsError(f"the CPU kernels cannot run with {threads} threads and instruction set {isa}")
        weakref.finalize(self, self._library.sw_destroy, self._context)
        self.isa: str = self._library.sw_isa(self._context).decode()
        self.threads = threads
        self._arena = Arena()

    def pack_int8(self, weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
        """Quantise a float32 weight [outputs, inputs]: each output's largest magnitude becomes 127."""
        outputs, inputs = weight.shape
        packed = self._arena.take(self._library.sw_packed_size(outputs, inputs))
        padded = -(-outputs // _PANEL) * _PANEL
        scales = torch.empty(padded, dtype=torch.float32)
        self._call("sw_pack_int8", weight.data_ptr(), outputs, inputs, packed.data_ptr(), scales.data_ptr())
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, padded - outputs))
        struct = Int8WeightStruct(
            outputs, inputs, packed.data_ptr(), scales.data_ptr(), None if bias is None else bias.data_ptr()
        )
        return Int8Weight(struct, packed, scales, bias)

    def linear(self, weight: Int8Weight, rows: Tensor) -> Tensor:
        """Rows [n, inputs] -> [n, outputs]. A row's result does not depend on the other rows."""
        output = torch.empty(rows.shape[0], weight.outputs, dtype=torch.float32)
        self._call("sw_linear_int8", weight.struct, rows.data_ptr(), rows.shape[0], output.data_ptr())
        return output

    def attention(
        self,
        cache: KVCacheStruct,
        step: StepStruct,
        options: AttentionStruct,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Write key and value [T, kv_heads, dim] to the cache, then attend with query [T, heads, key_dim].

        Returns:
            [T, heads, value_dim].
        """
        output = torch.empty(*query.shape[:2], value.shape[2], dtype=torch.float32)
        pointers = (tensor.data_ptr() for tensor in (query, key, value, output))
        self._call("sw_attention", cache, step, options, *pointers)
        return output

    def decoder_layer(
        self, layer: DecoderLayerStruct, step: StepStruct, cos: Tensor, sin: Tensor, hidden: Tensor
    ) -> Tensor:
        """Run a layer on hidden [T, hidden] with cos and sin [T, rotary_dim]; returns [T, hidden]."""
        output = torch.empty_like(hidden)
        pointers = (tensor.data_ptr() for tensor in (cos, sin, hidden, output))
        self._call("sw_decoder_layer", layer, step, *pointers)
        return output

    def gumbel_max(self, logits: Tensor, draws: Sequence[tuple[int, int, float]]) -> list[int]:
        """The token that each draw picks from logits [n, vocab]; the lowest among equals.

        A draw names a row, the key of its noise and the temperature that the row is still to be divided by. Each row
        that is named has at least one finite entry and none above. What is drawn is what sampling.noise.GumbelMax
        draws from the divided row, bit for bit.
        """
        tokens = (c_int64 * len(draws))()
        structs = (DrawStruct * len(draws))(*(DrawStruct(*draw) for draw in draws))
        self._call("sw_gumbel_max", logits.data_ptr(), logits.shape[1], structs, len(draws), tokens)
        return list(tokens)

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(self._context, *arguments):
            raise MemoryError(f"out of memory in {name}")

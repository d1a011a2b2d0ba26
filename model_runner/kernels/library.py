"""Calls into the library of CPU kernels."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model_runner.kernels.arena import Arena
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.structs import (
    AttentionStruct,
    DecoderLayerStruct,
    DrawStruct,
    KVCacheStruct,
    ModelStruct,
    MoveStruct,
    PassStruct,
    StepStruct,
    WeightStruct,
)

WeightKind = Literal["int8", "int4"]
"""int8 has one scale for each output; int4 a scale and a minimum for each output and group of INT4_GROUP inputs."""
INT4_GROUP = 32
INT4_BITS = 5
"""Of a weight, with its share of the group's scale and minimum."""
_KINDS: dict[WeightKind, int] = {"int8": 0, "int4": 1}
_PANEL = 16

_SIGNATURES = {
    "sw_create": (c_void_p, [c_int32, c_char_p]),
    "sw_destroy": (None, [c_void_p]),
    "sw_isa": (c_char_p, [c_void_p]),
    "sw_packed_size": (c_int64, [c_int32, c_int32, c_int32]),
    "sw_pack": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "sw_linear": (c_int32, [c_void_p, POINTER(WeightStruct), c_void_p, c_int32, c_void_p]),
    "sw_attention": (
        c_int32,
        [c_void_p, POINTER(KVCacheStruct), POINTER(StepStruct), POINTER(AttentionStruct), *[c_void_p] * 4],
    ),
    "sw_decoder_layer": (
        c_int32,
        [c_void_p, POINTER(DecoderLayerStruct), POINTER(StepStruct), *[c_void_p] * 4],
    ),
    "sw_forward": (c_int32, [c_void_p, POINTER(ModelStruct), POINTER(StepStruct), POINTER(PassStruct)]),
    "sw_gumbel_max": (c_int32, [c_void_p, c_void_p, c_int64, POINTER(DrawStruct), c_int32, POINTER(c_int64)]),
    "sw_move_kv": (c_int32, [c_void_p, POINTER(KVCacheStruct), c_int32, POINTER(MoveStruct), c_int32]),
}


class NativeWeight:
    """A weight [outputs, inputs], packed for the kernels."""

    def __init__(self, struct: WeightStruct, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.struct = struct
        self.outputs: int = struct.outputs
        self.inputs: int = struct.inputs
        self.packed = packed
        """int8 [bytes]: see cpu/int8_panels.h and cpu/int4_group.h."""
        self.scales = scales[: self.outputs]
        """[outputs] float32: what 1 stands for; a power of two in int4."""
        self._memory = (packed, scales, bias)  # the struct points into these


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

    def pack(self, kind: WeightKind, weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
        """Quantise a float32 weight [outputs, inputs].

        In int8 each output's largest magnitude becomes 127. In int4 the weights of a group become 0 to 15 times a scale
        plus a minimum that are chosen for a small squared error; weights that came from such groups stay as they are.

        Raises:
            ValueError: if the inputs are no multiple of INT4_GROUP in int4.
        """
        outputs, inputs = weight.shape
        if kind == "int4" and inputs % INT4_GROUP:
            raise ValueError(f"{inputs} inputs cannot be packed in int4: they are no multiple of {INT4_GROUP}")
        code = _KINDS[kind]
        packed = self._arena.take(self._library.sw_packed_size(code, outputs, inputs))
        padded = -(-outputs // _PANEL) * _PANEL
        scales = torch.empty(padded, dtype=torch.float32)
        self._call("sw_pack", code, weight.data_ptr(), outputs, inputs, packed.data_ptr(), scales.data_ptr())
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, padded - outputs))
        pointers = packed.data_ptr(), scales.data_ptr(), None if bias is None else bias.data_ptr()
        return NativeWeight(WeightStruct(code, outputs, inputs, *pointers), packed, scales, bias)

    def linear(self, weight: NativeWeight, rows: Tensor) -> Tensor:
        """Rows [n, inputs] -> [n, outputs]. A row's result does not depend on the other rows."""
        output = torch.empty(rows.shape[0], weight.outputs, dtype=torch.float32)
        self._call("sw_linear", weight.struct, rows.data_ptr(), rows.shape[0], output.data_ptr())
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

    def forward(self, model: ModelStruct, step: StepStruct, what: PassStruct) -> None:
        """Run a model on a step's tokens; see SwPass for what is wanted of it."""
        self._call("sw_forward", model, step, what)

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

    def move_kv(self, layers: "ctypes.Array[KVCacheStruct]", moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of tokens in all layers, one move (from block, offset; to block, offset) after another.

        No move reads a place that one before it has written.
        """
        structs = (MoveStruct * len(moves))(*(MoveStruct(*move) for move in moves))
        self._call("sw_move_kv", layers, len(layers), structs, len(moves))

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(self._context, *arguments):
            raise MemoryError(f"out of memory in {name}")

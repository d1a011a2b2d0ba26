"""Calls into the library of CPU kernels."""

import ctypes
import logging
import mmap
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.structs import (
    PICK,
    AttentionStruct,
    DecoderLayerStruct,
    DraftStruct,
    ExpertsStruct,
    HydraStruct,
    KVCacheStruct,
    ModelStruct,
    MoveStruct,
    PassStruct,
    StepStruct,
    TruncationStruct,
    WeightStruct,
)

logger = logging.getLogger("samewise.runner")

WeightKind = Literal["int8", "int8_rotated", "int4"]
"""int8 has one scale for each output, rotated or not; int4 a scale and a minimum for each output and group of
INT4_GROUP inputs. Rotated weights are multiplied with rows of 8 bits, the others with rows of 12."""
INT4_GROUP = 32
INT4_BITS = 5
"""Of a weight, with its share of the group's scale and minimum."""
ROTATED_BLOCK = 64
"""What inputs that are rotated are padded to a multiple of."""
WIDEST_ROTATED = 32_768
"""Inputs."""
_KINDS: dict[WeightKind, int] = {"int8": 0, "int4": 1, "int8_rotated": 2}
PANEL = 16
"""Outputs that are packed together; scales and biases are padded to a multiple of it."""

_SIGNATURES = {
    "sw_create": (c_void_p, [c_int32, c_char_p]),
    "sw_destroy": (None, [c_void_p]),
    "sw_isa": (c_char_p, [c_void_p]),
    "sw_threads": (c_int32, [c_void_p]),
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
    "sw_experts": (c_int32, [c_void_p, POINTER(ExpertsStruct), *[c_void_p] * 3, c_int32, c_void_p]),
    "sw_pick": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_void_p]),
    "sw_draft": (c_int32, [c_void_p, POINTER(HydraStruct), POINTER(DraftStruct)]),
    "sw_truncate": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_int64, POINTER(TruncationStruct), POINTER(c_int32), c_void_p],
    ),
    "sw_move_kv": (c_int32, [c_void_p, POINTER(KVCacheStruct), c_int32, POINTER(MoveStruct), c_int32]),
}


class NativeWeight:
    """A weight [outputs, inputs], packed for the kernels."""

    def __init__(self, struct: WeightStruct, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.struct = struct
        self.outputs: int = struct.outputs
        self.inputs: int = struct.inputs
        self.packed = packed
        """int8 [bytes]: see cpu/int8_panels.h, cpu/rotated_panels.h and cpu/int4_group.h."""
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
        self.int8_kind: WeightKind = "int8_rotated" if self.isa.startswith("avx512") else "int8"
        """The faster form of int8: elsewhere integers are widened to 16 bits to be multiplied, whatever they are."""
        self.threads: int = self._library.sw_threads(self._context)
        """As many as were asked for, or as the system would make; results do not depend on it."""
        if self.threads < threads:
            logger.warning(
                "The system refuses to make %d threads for the CPU kernels, so they run in %d and take longer; raise "
                "its limits on processes and memory, or lower --threads.",
                threads,
                self.threads,
            )
        self._path = library
        self._arena = Arena()

    def beside(self) -> "Kernels":
        """The same kernels with one thread and memory of their own, for calls beside those of these."""
        return Kernels(self._path, 1, self.isa)

    def pack(self, kind: WeightKind, weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
        """Quantise a float32 weight [outputs, inputs].

        In int8 each output's largest magnitude becomes 127, after the rotation if there is one. In int4 the weights of
        a group become 0 to 15 times a scale plus a minimum that are chosen for a small squared error; weights that came
        from such groups stay as they are.

        Raises:
            ValueError: if the inputs are no multiple of INT4_GROUP in int4, or too many to be rotated.
        """
        outputs, inputs = weight.shape
        if kind == "int4" and inputs % INT4_GROUP:
            raise ValueError(f"{inputs} inputs cannot be packed in int4: they are no multiple of {INT4_GROUP}")
        if kind == "int8_rotated" and inputs > WIDEST_ROTATED:
            raise ValueError(f"{inputs:,} inputs cannot be rotated: they are more than {WIDEST_ROTATED:,}")
        code = _KINDS[kind]
        packed = self._arena.take(self._library.sw_packed_size(code, outputs, inputs))
        padded = -(-outputs // PANEL) * PANEL
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

    def experts(self, experts: ExpertsStruct, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sums of what the chosen experts make of rows [n, hidden], added up in the order of the ranks.

        Args:
            experts: without a router.
            rows: [n, hidden].
            chosen: [n, top_k] int32, experts of each row.
            weights: [n, top_k] of what they make of it.

        Returns:
            [n, hidden]. A row's sum does not depend on the other rows.
        """
        output = torch.empty_like(rows)
        pointers = (tensor.data_ptr() for tensor in (rows, chosen, weights))
        self._call("sw_experts", experts, *pointers, len(rows), output.data_ptr())
        return output

    def pick(
        self,
        logits: Tensor,
        keys: NDArray[np.uint64],
        temperatures: NDArray[np.float64],
        rows: Sequence[int] | None = None,
        masks: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """A token of each row of logits [n, vocab] that is named: the highest, or a draw; the lowest among equals.

        What is drawn is what sampling.noise.GumbelMax draws from the row divided by its temperature, bit for bit.

        Args:
            logits: of which these are rows.
            keys: [count] of the noise; of no matter where nothing is drawn.
            temperatures: [count] what the rows are still to be divided by; 0 takes the highest logit.
            rows: [count] of the logits; all of them in order when left out.
            masks: [count, words] the tokens that may be taken: bit t % 32 of word t // 32; any when left out.

        Returns:
            [count] int64; -1 where a logit that may be taken is NaN or +inf, or none of them is finite.
        """
        picks = np.zeros(len(keys), dtype=PICK)
        picks["row"] = range(len(logits)) if rows is None else rows
        picks["key"] = keys
        picks["temperature"] = temperatures
        if masks is not None:
            picks["mask"] = masks.ctypes.data + masks.strides[0] * np.arange(len(masks))
        tokens = torch.empty(len(picks), dtype=torch.int64)
        self._call("sw_pick", logits.data_ptr(), logits.shape[1], picks.ctypes.data, len(picks), tokens.data_ptr())
        return tokens

    def draft(self, hydra: HydraStruct, draft: DraftStruct) -> None:
        """Draft trees by Hydra heads; see SwDraft for what is wanted and where it goes."""
        self._call("sw_draft", hydra, draft)

    def truncate(self, logits: Tensor, steps: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
        """Logits [n, vocab] after the steps of each row, -inf where a token was taken out.

        A step is a number of SwTruncationKind and its setting; sampling.truncations says what it does. Rows that have
        steps have at least one finite entry and none above.
        """
        output = torch.empty_like(logits)
        ends = list(accumulate(map(len, steps), initial=0))
        first = (c_int32 * len(ends))(*ends)
        structs = (TruncationStruct * ends[-1])(*(TruncationStruct(*step) for of_row in steps for step in of_row))
        self._call("sw_truncate", logits.data_ptr(), *logits.shape, structs, first, output.data_ptr())
        return output

    def move_kv(self, layers: "ctypes.Array[KVCacheStruct]", moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of tokens in all layers, one move (from block, offset; to block, offset) after another.

        No move reads a place that one before it has written.
        """
        structs = (MoveStruct * len(moves))(*(MoveStruct(*move) for move in moves))
        self._call("sw_move_kv", layers, len(layers), structs, len(moves))

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(self._context, *arguments):
            raise MemoryError(f"out of memory in {name}")


_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 64


def huge_pages(num_bytes: int) -> Tensor:
    """Zeroed int8 memory [num_bytes], in huge pages where the system has them; taken from it as it is written."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


class Arena:
    """Hands out pieces of large chunks of memory, for as long as the pieces live."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.int8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed int8 memory [num_bytes], aligned to 64 bytes."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._free):
            self._free = huge_pages(max(rounded, _CHUNK))
        piece, self._free = self._free[:num_bytes], self._free[rounded:]
        return piece

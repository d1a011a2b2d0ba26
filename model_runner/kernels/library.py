"""Calls into the library of CPU kernels."""

import logging
import mmap
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.interface import CPU, CData, pointer

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
_KINDS: dict[WeightKind, str] = {"int8": "SW_INT8", "int4": "SW_INT4", "int8_rotated": "SW_INT8_ROTATED"}
PANEL = 16
"""Outputs that are packed together; scales and biases are padded to a multiple of it."""


class NativeWeight:
    """A weight [outputs, inputs], packed for the kernels."""

    def __init__(self, struct: CData, packed: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`struct` is an SwWeight that points into the tensors."""
        self.struct = struct
        self.outputs: int = struct.outputs
        self.inputs: int = struct.inputs
        self.packed = packed
        """int8 [bytes]: see cpu/int8_panels.h and cpu/int4_panels.h."""
        self.scales = scales[: self.outputs]
        """[outputs] float32: what 1 stands for; a power of two in int4."""
        self._memory = (packed, scales, bias)


@dataclass(frozen=True, slots=True)
class ModelPass:
    """The tokens of a step of T, and float32 memory for what is wanted of them."""

    tokens: NDArray[np.int32]
    """[T]."""
    logits_index: NDArray[np.int32]
    """[R] tokens whose logits are wanted."""
    logits: Tensor
    """[R, outputs of the head] takes the logits."""
    layer_inputs: Mapping[int, Tensor] = field(default_factory=dict)
    """By the index of a layer, [T, hidden] that takes the layer's input."""
    last: Tensor | None = None
    """[T, hidden] takes the output of the last norm."""


class Kernels:
    """The loaded library with its own threads. One call at a time.

    All tensors are contiguous and on the CPU; floats are float32. Calls with other tensors, or with shapes that do not
    fit the structs, raise ValueError or TypeError before the library sees them.
    """

    def __init__(self, library: Path, threads: int, isa: str = "auto") -> None:
        """Raises NoKernelsError if the library cannot be loaded or this machine lacks the instruction set."""
        self._library = CPU.load(library)
        self._context: CData = self._library.sw_create(threads, isa.encode())
        if not self._context:
            raise NoKernelsError(f"the CPU kernels cannot run with {threads} threads and instruction set {isa}")
        weakref.finalize(self, self._library.sw_destroy, self._context)
        self.isa: str = CPU.ffi.string(self._library.sw_isa(self._context)).decode()
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

    def single_thread_clone(self) -> "Kernels":
        """The same kernels with one thread and memory of their own, for calls while these are busy."""
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
        code = CPU.constants("SwWeightKind")[_KINDS[kind]]
        packed = self._arena.take(self._library.sw_packed_size(code, outputs, inputs))
        scales = torch.empty(-(-outputs // PANEL) * PANEL, dtype=torch.float32)
        target = pointer(packed, len(packed)), pointer(scales, len(scales))
        self._call("sw_pack", code, pointer(weight, outputs, inputs), outputs, inputs, *target)
        struct = CPU.new("SwWeight", kind=code, outputs=outputs, inputs=inputs, packed=target[0], scales=target[1])
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, len(scales) - outputs))
            struct.bias = pointer(bias, len(scales))
        return NativeWeight(struct, packed, scales, bias)

    def linear(self, weight: NativeWeight, rows: Tensor) -> Tensor:
        """Rows [n, inputs] -> [n, outputs]. A row's result does not depend on the other rows."""
        count = rows.shape[0]
        output = torch.empty(count, weight.outputs, dtype=torch.float32)
        source = pointer(rows, count, weight.inputs)
        self._call("sw_linear", weight.struct, source, count, pointer(output, count, weight.outputs))
        return output

    def attention(self, cache: CData, step: CData, options: CData, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value [T, kv_heads, dim] to the cache, then attend with query [T, heads, key_dim].

        Args:
            cache: SwKvCache.
            step: SwStep.
            options: SwAttention.
            query: see above, as are key and value.
            key: likewise.
            value: likewise.

        Returns:
            [T, heads, value_dim].
        """
        count, heads, kv_heads = step.num_tokens, options.heads, cache.kv_heads
        key_dim, value_dim = cache.key_dim, cache.value_dim
        output = torch.empty(count, heads, value_dim, dtype=torch.float32)
        self._call(
            "sw_attention",
            cache,
            step,
            options,
            pointer(query, count, heads, key_dim),
            pointer(key, count, kv_heads, key_dim),
            pointer(value, count, kv_heads, value_dim),
            pointer(output, count, heads, value_dim),
        )
        return output

    def decoder_layer(self, layer: CData, step: CData, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        """Run an SwDecoderLayer on hidden [T, hidden] with cos and sin [T, rotary_dim]; returns [T, hidden]."""
        if not layer.cache.keys:
            raise ValueError("a decoder layer needs a cache before its first step")
        count, rotary_dim = step.num_tokens, layer.rotary_dim
        output = torch.empty_like(hidden)
        rotation = pointer(cos, count, rotary_dim), pointer(sin, count, rotary_dim)
        rows = pointer(hidden, count, layer.hidden), pointer(output, count, layer.hidden)
        self._call("sw_decoder_layer", layer, step, *rotation, *rows)
        return output

    def forward(self, model: CData, step: CData, wanted: ModelPass) -> None:
        """Run an SwModel on the tokens of an SwStep.

        Raises:
            IndexError: if logits are wanted of a token that the step does not have.
        """
        count, num_logits, hidden = step.num_tokens, len(wanted.logits_index), model.hidden
        if num_logits and wanted.logits_index.view(np.uint32).max() >= count:
            raise IndexError(f"logits are wanted of a token that is not in the step of {count}")
        layer_inputs = CPU.array("float *", model.num_layers)
        for layer, memory in wanted.layer_inputs.items():
            layer_inputs[layer] = pointer(memory, count, hidden)
        outputs = CPU.new(
            "SwPass",
            num_logits=num_logits,
            tokens=pointer(wanted.tokens, count),
            logits_index=pointer(wanted.logits_index, num_logits),
            logits=pointer(wanted.logits, num_logits, model.head.outputs),
            entering=layer_inputs,
            last=CPU.ffi.NULL if wanted.last is None else pointer(wanted.last, count, hidden),
        )
        self._call("sw_forward", model, step, outputs)

    def experts(self, experts: CData, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sums of what the chosen experts make of rows [n, hidden], added up in the order of the ranks.

        Args:
            experts: SwExperts without a router.
            rows: [n, hidden].
            chosen: [n, top_k] int32, experts of each row.
            weights: [n, top_k] of what they make of it.

        Returns:
            [n, hidden]. A row's sum does not depend on the other rows.
        """
        count, top_k, hidden = rows.shape[0], experts.top_k, experts.gate_up[0].inputs
        output = torch.empty_like(rows)
        choices = pointer(chosen, count, top_k), pointer(weights, count, top_k)
        self._call("sw_experts", experts, pointer(rows, count, hidden), *choices, count, pointer(output, count, hidden))
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

        Raises:
            IndexError: if a row is not in the logits.
        """
        (num_rows, width), count = logits.shape, len(keys)
        picks = np.zeros(count, dtype=CPU.array_type("SwPick"))
        picks["row"] = np.arange(num_rows) if rows is None else rows
        if rows and not 0 <= min(rows) <= max(rows) < num_rows:
            raise IndexError(f"there is a row that is not among the {num_rows} of the logits")
        picks["key"] = keys
        picks["temperature"] = temperatures
        if masks is not None:
            picks["mask"] = _mask_addresses(masks, count, width)
        tokens = torch.empty(count, dtype=torch.int64)
        self._call(
            "sw_pick",
            pointer(logits, num_rows, width),
            width,
            CPU.structs_of("SwPick", picks),
            count,
            pointer(tokens, count),
        )
        return tokens

    def draft(self, hydra: CData, draft: CData) -> None:
        """Draft trees by an SwHydra; see SwDraft for what is wanted and where it goes."""
        self._call("sw_draft", hydra, draft)

    def truncate(self, logits: Tensor, steps: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
        """Logits [n, vocab] after the steps of each row, -inf where a token was taken out.

        A step is a number of SwTruncationKind and its setting; sampling.truncations says what it does. Rows that have
        steps have at least one finite entry and none above.
        """
        count, width = len(steps), logits.shape[1]
        output = torch.empty_like(logits)
        first = CPU.array("int32_t", list(accumulate(map(len, steps), initial=0)))
        structs = CPU.array("SwTruncation", [step for of_row in steps for step in of_row])
        source, target = pointer(logits, count, width), pointer(output, count, width)
        self._call("sw_truncate", source, count, width, structs, first, target)
        return output

    def move_kv(self, layers: CData, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of tokens in all layers, one move (from block, offset; to block, offset) after another.

        No move reads a place that one before it has written. `layers` is an array of SwKvCache.
        """
        self._call("sw_move_kv", layers, len(layers), CPU.array("SwMove", moves), len(moves))

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(self._context, *arguments):
            raise MemoryError(f"out of memory in {name}")


def _mask_addresses(masks: NDArray[np.int32], count: int, width: int) -> NDArray[np.int64]:
    """Where the mask of each row begins."""
    words = masks.shape[1]
    if words * 32 < width:
        raise ValueError(f"masks of {words} words are too short for {width} logits")
    address = int(CPU.ffi.cast("intptr_t", pointer(masks, count, words)))
    return address + masks.strides[0] * np.arange(count)


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

"""Python calls into the library of CPU kernels."""

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.block_formats import BlockFormat, find_block_format
from model_runner.kernels.compiler import NoKernelsError
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kernels.memory import Arena

logger = logging.getLogger("samewise.runner")

WeightKind = Literal["int8", "int8_rotated", "int4"]
"""Storage format of a weight.

int8 has one scale per output, optionally with rotated inputs. int4 has a scale and a minimum per output and group of
INT4_GROUP inputs. Rotated weights are multiplied with rows quantised to 8 bits, the others with 12 bits."""
INT4_GROUP = 32
INT4_BITS = 5
"""Bits per weight, including its share of the group's scale and minimum."""
ROTATED_BLOCK = 64
"""Rotated inputs are padded to a multiple of this."""
WIDEST_ROTATED = 32_768
"""Maximum number of inputs of a rotated weight."""
_WIDEST_IN_12_BITS = 8259
"""Inputs of an int8 weight whose rows have all 12 bits."""
PANEL = 16
"""Outputs that are packed together. Scales and biases are padded to a multiple of it."""


class NativeWeight:
    """A weight [outputs, inputs], packed for the kernels."""

    def __init__(self, struct: CData, packed: Tensor, scales: Tensor, memory: object) -> None:
        """`struct` is an SwWeight that points into the tensors and `memory`, perhaps the first of a chain."""
        self.struct = struct
        self.outputs = _outputs(struct)
        self.inputs: int = struct.inputs
        self.packed = packed
        """int8 [bytes], laid out as cpu/int8_panels.h and cpu/block_panels.h describe. Of the first part, if there are
        several."""
        self.scales = scales[: struct.outputs]
        """[outputs] float32: the value of one unit; a power of two in int4. Of the first part."""
        self._memory = (packed, scales, memory)

    @property
    def rows(self) -> tuple[int, bool, bool, bytes]:
        """How rows are rounded for this weight; equal for weights that can be multiplied with the same rounded rows."""
        kinds, names = {part.kind for part in _chain(self.struct)}, CPU.constants("SwWeightKind")
        order = self.struct.input_order
        return (
            self.inputs,
            names["SW_INT8_ROTATED"] in kinds,
            names["SW_INT8"] in kinds and self.inputs > _WIDEST_IN_12_BITS,
            bytes(CPU.ffi.buffer(order, self.inputs * 4)) if order else b"",
        )


@dataclass(frozen=True, slots=True)
class ModelPass:
    """Inputs of a model pass over T tokens, and float32 buffers for its outputs."""

    tokens: NDArray[np.int32]
    """[T] token ids."""
    logits_index: NDArray[np.int32]
    """[R] tokens whose logits are wanted."""
    logits: Tensor
    """[R, outputs of the head] receives the logits."""
    layer_inputs: Mapping[int, Tensor] = field(default_factory=dict)
    """By layer index, [T, hidden] that receives the layer's input."""
    last: Tensor | None = None
    """[T, hidden] that receives the output of the last norm."""
    angles: NDArray[np.int32] | None = None
    """[T] each token's row of the rotary tables; None: its position."""


class Kernels:
    """The loaded library with its own threads. Only one call at a time.

    All tensors are contiguous and on the CPU; floats are float32. Wrong types, or shapes that do not fit the structs,
    raise ValueError or TypeError before the library is called.
    """

    def __init__(self, library: Path, threads: int, isa: str = "auto") -> None:
        """Raises NoKernelsError if the library cannot be loaded or the CPU lacks the instruction set."""
        loaded = CPU.load(library)
        self._context: CData = loaded.sw_create(threads, isa.encode())
        if not self._context:
            raise NoKernelsError(f"the CPU kernels cannot run with {threads} threads and instruction set {isa}")
        weakref.finalize(self, loaded.sw_destroy, self._context)
        table, fields = loaded.sw_kernels(self._context), CPU.ffi.typeof("SwKernels").fields
        self._functions = SimpleNamespace(**{name: getattr(table, name) for name, _ in fields})
        """Read once, since a field of a struct takes cffi longer than an attribute."""
        self.isa: str = CPU.ffi.string(self._functions.isa).decode()
        self.int8_kind: WeightKind = "int8_rotated" if self.isa.startswith("avx512") else "int8"
        """The faster int8 format. Without AVX-512, integers are widened to 16 bits anyway, so rotation does not
        help."""
        self.threads: int = loaded.sw_threads(self._context)
        """Number of threads: as requested, or fewer if the system refuses. Results do not depend on it."""
        if self.threads < threads:
            logger.warning(
                "The system refuses to make %d threads for the CPU kernels, so they run in %d and take longer; raise "
                "its limits on processes and memory, or lower --threads.",
                threads,
                self.threads,
            )
        self._path = library
        self._arena = Arena()

    def copy(self, threads: int = 1) -> "Kernels":
        """The same kernels with threads and memory of their own, for calls while these are busy."""
        return Kernels(self._path, threads, self.isa)

    def pack(self, kind: WeightKind, weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
        """Quantise a float32 weight [outputs, inputs].

        In int8 each output's largest magnitude becomes 127, after the rotation if there is one. In int4 the weights of
        a group become 0 to 15 times a scale plus a minimum, chosen for a small squared error. Weights that already have
        this form are unchanged.

        Raises:
            ValueError: if int4 inputs are not a multiple of INT4_GROUP, or there are too many inputs to rotate.
        """
        outputs, inputs = weight.shape
        packed = self.start(kind, outputs, inputs, bias)
        self.pack_rows(packed, 0, weight)
        return packed

    def start(self, kind: WeightKind, outputs: int, inputs: int, bias: Tensor | None = None) -> NativeWeight:
        """A weight whose rows pack_rows sets, so that they need not be in memory together. Raises as `pack` does."""
        if kind == "int4" and inputs % INT4_GROUP:
            raise ValueError(f"{inputs} inputs cannot be packed in int4: they are no multiple of {INT4_GROUP}")
        if kind == "int8_rotated" and inputs > WIDEST_ROTATED:
            raise ValueError(f"{inputs:,} inputs cannot be rotated: they are more than {WIDEST_ROTATED:,}")
        return self._new_weight(_code(kind), outputs, inputs, bias)

    def pack_rows(self, weight: NativeWeight, first: int, rows: Tensor) -> None:
        """Quantise float32 rows [n, inputs] as outputs `first` and following of a started weight.

        Raises:
            ValueError: if `first` is no multiple of PANEL, or n is none and the rows are not the last.
        """
        count, inputs, struct = len(rows), weight.inputs, weight.struct
        end = first + count
        if first % PANEL or end > weight.outputs or (count % PANEL and end != weight.outputs):
            raise ValueError(
                f"outputs {first} to {end} of {weight.outputs} cannot be packed at once: ranges of outputs begin and "
                f"end at multiples of {PANEL}"
            )
        packed = struct.packed + self._functions.sw_packed_size(struct.kind, first, inputs)
        source = pointer(rows, count, inputs)
        self.call("sw_pack", struct.kind, source, count, inputs, packed, struct.scales + first)

    def repack(
        self,
        block_format: int,
        blocks: Tensor | NDArray[np.uint8],
        inputs: int,
        order: Tensor | None = None,
        bias: Tensor | None = None,
        output_scales: Tensor | None = None,
        input_order: Tensor | None = None,
    ) -> NativeWeight:
        """Pack rows of a stored matrix whose blocks the kernels can multiply with; every weight keeps its value.

        Args:
            block_format: a type number of GGUF, or Q4_ZERO.
            blocks: [n, bytes of a row] uint8, of any alignment; may be a mapping of a file.
            inputs: weights in a row.
            order: [outputs] int32 indices of the rows to pack, in this order; by default all.
            bias: [outputs], or None.
            output_scales: [outputs] float32 factors of the weights; 1 by default.
            input_order: [inputs] int32, which input each column of `blocks` belongs to; by default they are in order.

        Raises:
            ValueError: if the format has no packed form or is unknown, rows are no whole blocks, `blocks` has rows of
                another size, a block has a scale that is not finite, or `input_order` is no order of the inputs.
            IndexError: if a row index is out of range.
        """
        stored, kind = self._repacked_kind(block_format)
        row_bytes = stored.row_bytes(inputs)
        source = pointer(blocks, len(blocks), row_bytes)
        outputs, indices = _indices(order, len(blocks))
        weight = self._new_weight(kind, outputs, inputs, bias, input_order)
        if output_scales is not None:
            weight.scales.copy_(output_scales)
        packed = weight.struct.packed
        if self.call("sw_repack", block_format, source, row_bytes, indices, outputs, inputs, packed):
            raise ValueError(f"a block of weights in {stored.name} has a scale or minimum that is not a finite number")
        return weight

    @property
    def layout(self) -> str:
        """A name of all that the bytes of packed weights depend on, apart from what is packed."""
        return f"{self._path.stem} {self.isa}"

    def can_repack(self, block_format: int) -> bool:
        """Whether `repack` supports a block format."""
        return find_block_format(block_format) is not None and self._functions.sw_repacked_kind(block_format) >= 0

    def packed_bytes(self, kind: WeightKind, outputs: int, inputs: int) -> int:
        """Memory of a weight that `pack` makes."""
        return int(self._functions.sw_packed_size(_code(kind), outputs, inputs))

    def repacked_bytes(self, block_format: int, outputs: int, inputs: int) -> int:
        """Memory of a weight that `repack` packs. Raises ValueError as `repack` does."""
        stored, kind = self._repacked_kind(block_format)
        stored.row_bytes(inputs)
        size: int = self._functions.sw_packed_size(kind, outputs, inputs)
        return size

    def _repacked_kind(self, block_format: int) -> tuple[BlockFormat, int]:
        """The format, and the SwWeightKind that it is packed as."""
        stored, kind = find_block_format(block_format), self._functions.sw_repacked_kind(block_format)
        if stored is None or kind < 0:
            name = block_format if stored is None else stored.name
            raise ValueError(f"weights in block format {name} cannot be packed as they are: they are not in blocks")
        return stored, kind

    def join(self, parts: Sequence[NativeWeight], bias: Tensor | None = None) -> NativeWeight:
        """One linear of the outputs of several, one after another, each packed in its own way.

        Args:
            parts: with the same inputs. Their rows are rounded once, so either all or none are int8_rotated. If one is
                int8 and has more than 8,259 inputs, rows have fewer than 12 bits for all.
            bias: [sum of outputs] instead of the parts' own; by default these.

        Raises:
            ValueError: if the parts do not fit together.
        """
        if len({(inputs, rotated, order) for inputs, rotated, _, order in (part.rows for part in parts)}) != 1:
            kinds = ", ".join(f"{part.inputs} inputs of kind {part.struct.kind}" for part in parts)
            raise ValueError(f"weights cannot be joined that take different rows: {kinds}")
        structs = [CPU.new("SwWeight", struct[0]) for part in parts for struct in _chain(part.struct)]
        memory: list[object] = [*structs, *parts]
        if bias is not None:
            for struct, of_part in zip(structs, torch.split(bias, [struct.outputs for struct in structs]), strict=True):
                memory.append(padded := _padded(of_part))
                struct.bias = pointer(padded, len(padded))
        for struct, following in pairwise(structs):
            struct.next = following
        return NativeWeight(structs[0], parts[0].packed, parts[0].scales, memory)

    def _new_weight(
        self, kind: int, outputs: int, inputs: int, bias: Tensor | None, input_order: Tensor | None = None
    ) -> NativeWeight:
        """A weight with scales of 1, a copy of the bias [outputs], and all else zero."""
        size = self._functions.sw_packed_size(kind, outputs, inputs)
        packed, scales = self._arena.take(size), _padded(torch.ones(outputs))
        target = {"packed": pointer(packed, size), "scales": pointer(scales, len(scales))}
        struct = CPU.new("SwWeight", kind=kind, outputs=outputs, inputs=inputs, **target)
        if bias is not None:
            bias = _padded(bias)
            struct.bias = pointer(bias, len(scales))
        if input_order is not None:
            if inputs > WIDEST_ROTATED or not torch.equal(input_order.sort().values, torch.arange(inputs)):
                raise ValueError(
                    f"the order of inputs does not name each of {inputs:,} inputs, at most {WIDEST_ROTATED:,}"
                )
            struct.input_order = pointer(input_order, inputs)
        return NativeWeight(struct, packed, scales, (bias, input_order))

    def unpack(
        self,
        block_format: int,
        blocks: Tensor | NDArray[np.uint8],
        inputs: int,
        rows: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Convert rows of a stored matrix to float32, with exactly the values that the format defines.

        Args:
            block_format: a type number of GGUF, one of BLOCK_FORMATS, or Q4_ZERO.
            blocks: [n, bytes of a row] uint8, of any alignment; may be a mapping of a file.
            inputs: weights in a row.
            rows: [count] int32 indices of the rows to convert; by default all.
            output: [count, inputs] receives the weights; by default a new tensor.

        Returns:
            [count, inputs].

        Raises:
            ValueError: if the format is unknown, rows are no whole blocks, or `blocks` has rows of another size.
            IndexError: if a row index is out of range.
        """
        if (stored := find_block_format(block_format)) is None:
            raise ValueError(f"weights in block format {block_format} cannot be unpacked: it is unknown")
        num_rows, row_bytes = len(blocks), stored.row_bytes(inputs)
        source = pointer(blocks, num_rows, row_bytes)
        count, indices = _indices(rows, num_rows)
        output = torch.empty(count, inputs, dtype=torch.float32) if output is None else output
        target = pointer(output, count, inputs)
        self.call("sw_unpack", block_format, source, row_bytes, indices, count, inputs, target)
        return output

    def linear(self, weight: NativeWeight, rows: Tensor) -> Tensor:
        """Multiply rows [n, inputs] -> [n, outputs]. A row's result does not depend on the other rows."""
        count = rows.shape[0]
        output = torch.empty(count, weight.outputs, dtype=torch.float32)
        source = pointer(rows, count, weight.inputs)
        self.call("sw_linear", weight.struct, source, count, pointer(output, count, weight.outputs))
        return output

    def linears(self, weights: CData, rows: Tensor, outputs: int) -> Tensor:
        """Multiply rows [n, count, inputs] with an SwWeight each of `count`, all alike -> [n, count, outputs]."""
        count, output = rows.shape[1], torch.empty(*rows.shape[:2], outputs, dtype=torch.float32)
        source = pointer(rows, len(rows), count, weights[0].inputs)
        self.call("sw_linears", weights, count, source, len(rows), pointer(output, len(rows), count, outputs))
        return output

    def attention(
        self,
        cache: CData,
        step: CData,
        options: CData,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Tensor:
        """Write key and value [T, kv_heads, dim] to the cache, if given, then attend with query [T, heads, key_dim].

        Args:
            cache: SwKvCache.
            step: SwStep.
            options: SwAttention.
            query: [T, heads, key_dim].
            key: [T, kv_heads, key_dim].
            value: [T, kv_heads, value_dim].

        Returns:
            [T, heads, value_dim].
        """
        count, heads, kv_heads = step.num_tokens, options.heads, cache.kv_heads
        key_dim, value_dim = cache.key_dim, cache.value_dim
        output = torch.empty(count, heads, value_dim, dtype=torch.float32)
        self.call(
            "sw_attention",
            cache,
            step,
            options,
            pointer(query, count, heads, key_dim),
            CPU.ffi.NULL if key is None else pointer(key, count, kv_heads, key_dim),
            CPU.ffi.NULL if value is None else pointer(value, count, kv_heads, value_dim),
            pointer(output, count, heads, value_dim),
        )
        return output

    def forward(self, model: CData, step: CData, wanted: ModelPass) -> None:
        """Run an SwModel on the tokens of an SwStep.

        Raises:
            IndexError: if logits are wanted for a token that is not in the step.
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
            angles=CPU.ffi.NULL if wanted.angles is None else pointer(wanted.angles, count),
            logits_index=pointer(wanted.logits_index, num_logits),
            logits=pointer(wanted.logits, num_logits, _outputs(CPU.ffi.addressof(model, "head"))),
            layer_inputs=layer_inputs,
            last=CPU.ffi.NULL if wanted.last is None else pointer(wanted.last, count, hidden),
        )
        self.call("sw_forward", model, step, outputs)

    def experts(self, experts: CData, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Apply the chosen experts to rows [n, hidden] and sum their weighted outputs, in the order of ranks.

        Args:
            experts: SwExperts without a router.
            rows: [n, hidden].
            chosen: [n, top_k] int32, expert ids of each row.
            weights: [n, top_k] weights of their outputs.

        Returns:
            [n, hidden]. A row's sum does not depend on the other rows.
        """
        count, top_k, hidden = rows.shape[0], experts.top_k, experts.gate_up[0].inputs
        output = torch.empty_like(rows)
        choices = pointer(chosen, count, top_k), pointer(weights, count, top_k)
        self.call("sw_experts", experts, pointer(rows, count, hidden), *choices, count, pointer(output, count, hidden))
        return output

    def pick(
        self,
        logits: Tensor,
        keys: NDArray[np.uint64],
        temperatures: NDArray[np.float64],
        rows: Sequence[int] | None = None,
        masks: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Choose one token for each named row of logits [n, vocab]: the highest, or a draw. Ties go to the lowest id.

        A draw is the argmax of sampling.noise's scores for the row divided by its temperature, bit for bit.

        Args:
            logits: the rows to choose from.
            keys: [count] noise keys; ignored at temperature 0.
            temperatures: [count] divisors of the rows; 0 takes the highest logit.
            rows: [count] row indices; by default all rows in order.
            masks: [count, words] the allowed tokens, bit t % 32 of word t // 32; by default all tokens.

        Returns:
            [count] int64; -1 if an allowed logit is NaN or +inf, or no allowed logit is finite.

        Raises:
            IndexError: if a row index is out of range.
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
        self.call(
            "sw_pick",
            pointer(logits, num_rows, width),
            width,
            CPU.structs_of("SwPick", picks),
            count,
            pointer(tokens, count),
        )
        return tokens

    def draft(self, hydra: CData, draft: CData) -> None:
        """Draft trees with an SwHydra. SwDraft describes inputs and outputs."""
        self.call("sw_draft", hydra, draft)

    def truncate(self, logits: Tensor, steps: Sequence[Sequence[tuple[int, float]]]) -> Tensor:
        """Apply the truncation steps of each row to logits [n, vocab]; removed tokens become -inf.

        A step is a (SwTruncationKind, setting) pair, with the meaning given in sampling.truncations. Rows with steps
        must have at least one finite entry and no NaN or +inf.
        """
        count, width = len(steps), logits.shape[1]
        output = torch.empty_like(logits)
        first = CPU.array("int32_t", list(accumulate(map(len, steps), initial=0)))
        structs = CPU.array("SwTruncation", [step for of_row in steps for step in of_row])
        source, target = pointer(logits, count, width), pointer(output, count, width)
        self.call("sw_truncate", source, count, width, structs, first, target)
        return output

    def move_kv(self, layers: CData, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy keys and values of tokens in all of some layers. A move is (from block, offset, to block, offset).

        Moves are made in order, and none reads a place that an earlier one has written. `layers` is an array of
        SwKvCache.
        """
        self.call("sw_move_kv", layers, len(layers), CPU.array("SwMove", moves), len(moves))

    def call(self, name: str, *arguments: object) -> int:
        """Call a function of the kernels and return its code. Raises MemoryError if memory ran out."""
        code: int = getattr(self._functions, name)(self._context, *arguments)
        if code == 1:
            raise MemoryError(f"out of memory in {name}")
        return code


_PLAIN_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


def embedding_struct(table: Tensor, block_format: int | None = None) -> CData:
    """An SwEmbedding, whose rows are looked up as they are stored.

    Args:
        table: [vocabulary, hidden] in float32, float16 or bfloat16; or blocks [vocabulary, bytes of a row] uint8, of
            any alignment. It must outlive the struct.
        block_format: a type number of GGUF, for blocks.

    Raises:
        ValueError: if the table has another type or is not contiguous.
    """
    if block_format is None:
        block_format = _PLAIN_FORMATS.get(table.dtype)
        if block_format is None:
            raise ValueError(f"an embedding in {table.dtype} cannot be looked up; use float32, float16 or bfloat16")
        table = table.detach().view(torch.uint8)
    rows = pointer(table, *table.shape)
    return CPU.new("SwEmbedding", format=block_format, row_bytes=table.shape[1], rows=rows)


def _code(kind: WeightKind) -> int:
    """The kind's SwWeightKind."""
    return CPU.constants("SwWeightKind")[f"SW_{kind.upper()}"]


def _chain(weight: CData) -> Iterator[CData]:
    """The SwWeights of a linear."""
    while weight:
        yield weight
        weight = weight.next


def _outputs(weight: CData) -> int:
    """Outputs of all parts of a linear."""
    return sum(part.outputs for part in _chain(weight))


def _indices(rows: Tensor | None, num_rows: int) -> tuple[int, CData]:
    """Number and address of the rows to read, null for all. Raises IndexError if one is not below num_rows."""
    if rows is None:
        return num_rows, CPU.ffi.NULL
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise IndexError(f"there is a row that is not among the {num_rows} of the matrix")
    return len(rows), pointer(rows, len(rows))


def _padded(numbers: Tensor) -> Tensor:
    """Float32 numbers with zeros up to a multiple of PANEL."""
    return torch.nn.functional.pad(numbers.float(), (0, -len(numbers) % PANEL))


def _mask_addresses(masks: NDArray[np.int32], count: int, width: int) -> NDArray[np.int64]:
    """Address of each row's mask."""
    words = masks.shape[1]
    if words * 32 < width:
        raise ValueError(f"masks of {words} words are too short for {width} logits")
    address = int(CPU.ffi.cast("intptr_t", pointer(masks, count, words)))
    return address + masks.strides[0] * np.arange(count)

"""Linear weights of quantised safetensors, as blocks that the CPU kernels multiply with.

Reads GPTQ, AWQ and compressed-tensors without their packages. Every weight keeps the value that its checkpoint
defines: scale * (integer - zero) with 4 bits, scale * integer with 8 bits. Other checkpoints are refused.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from model_runner.kernels.block_formats import Q4_ZERO
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.checkpoint import Checkpoint, DerivedCheckpoint, MadeTensor
from model_runner.weights.matrix import BlockMatrix, Blocks, Matrix

logger = logging.getLogger("samewise.runner")

Shape = tuple[int, ...]

Q8_0 = 8
"""Block format: 32 integers of 8 bits, after a scale in half precision."""
_BLOCK = 32
_HALF_BLOCK = _BLOCK // 2
_IN_WORD = 8
"""4-bit numbers in a word of 32 bits."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word in AWQ, from low to high."""
_OUTPUTS_AT_ONCE = 256
"""Outputs whose weights are in memory as single numbers at once."""
_ZERO = 8
"""The zero of symmetric weights of 4 bits."""


class LinearReader(Protocol):
    """Reads the linears of a checkpoint. Tensors are named by what follows the linear's own name: qweight, scales."""

    parts: ClassVar[frozenset[str]]
    """Names of the tensors that a quantised linear may have, except its bias."""

    def shape(self, name: str, shapes: Mapping[str, Shape]) -> tuple[int, int] | None:
        """Outputs and inputs of a linear whose tensors have these shapes; None if it is not stored quantised."""
        ...

    def block_format(self, name: str) -> int:
        """The format of a linear's blocks."""
        ...

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """Read one linear: Q4_ZERO, with powers of two as scales of outputs, or Q8_0.

        Args:
            name: the linear's name in the checkpoint, for errors and to find its scheme.
            tensors: its tensors, on the CPU. A bias is ignored.

        Raises:
            UnsupportedModelError: if a tensor is missing or has another shape, or the weights are not exact in blocks.
        """
        ...


def linear_reader(quantization: Mapping[str, Any]) -> LinearReader:
    """The reader for a checkpoint with this `quantization_config`.

    Raises:
        UnsupportedModelError: if its weights cannot be read exactly; the message continues a sentence that names the
            checkpoint, as in "{folder} has weights that cannot be read: {message}".
    """
    method = str(quantization.get("quant_method"))
    if (reader := _READERS.get(method)) is None:
        raise UnsupportedModelError(f"they are quantised by {method}, and {', '.join(_READERS)} are supported")
    return reader(quantization)


def as_weights(stored: Checkpoint, reader: LinearReader) -> Checkpoint:
    """The checkpoint with one weight for each linear that it stores quantised: the values that it stands for."""
    linears: dict[str, dict[str, str]] = {}
    for name in stored.shapes:
        linear, _, part = name.rpartition(".")
        if part in reader.parts:
            linears.setdefault(linear, {})[part] = name
    made: dict[str, MadeTensor] = {}
    hidden: set[str] = set()
    for linear, names in linears.items():
        shape = reader.shape(linear, {part: stored.shapes[name] for part, name in names.items()})
        if shape is not None:
            hidden.update(names.values())
            made[f"{linear}.weight"] = MadeTensor(shape, partial(_matrices, stored, reader, linear, names, shape))
    return DerivedCheckpoint(stored, made, hidden)


def _matrices(
    stored: Checkpoint, reader: LinearReader, linear: str, names: Mapping[str, str], shape: tuple[int, int]
) -> list[list[Matrix]]:
    def load() -> Blocks:
        return reader.read(linear, {part: stored.tensor(name) for part, name in names.items()})

    return [[BlockMatrix(shape, reader.block_format(linear), load)]]


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GptqReader:
    """Reads qweight int32 [inputs / 8, outputs], scales [groups, outputs], qzeros int32 [groups, outputs / 8] and
    g_idx [inputs].
    """

    parts: ClassVar = frozenset(("qweight", "scales", "qzeros", "g_idx"))

    group_size: int
    """Inputs with one scale; -1 for all."""
    is_symmetric: bool
    zeros_minus_one: bool
    """Whether zeros are stored less one, as in the first version of the format."""
    needs_order: bool
    """Whether inputs are grouped by their activation, so that g_idx must be there."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        _check_common(config, "GPTQ", config.get("bits"), config.get("group_size", 128))
        layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if config.get("is_marlin_format") or layout not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(f"GPTQ weights in the layout {layout} are not supported (gptq and gptq_v2 are)")
        if (packed := str(config.get("pack_dtype") or "int32").removeprefix("torch.")) != "int32":
            raise UnsupportedModelError(f"GPTQ weights packed in {packed} are not supported (int32 is)")
        rules = [rule for rule in config.get("dynamic") or () if not rule.startswith("-:")]
        if rules:
            raise UnsupportedModelError(f"GPTQ weights with settings of their own ({rules[0]}) are not supported")
        for feature in ("adapter", "rotation"):
            if config.get(feature):
                raise UnsupportedModelError(f"GPTQ weights with {feature} {config[feature]} are not supported")
        return cls(
            config.get("group_size", 128), config.get("sym", True), layout == "gptq", bool(config.get("desc_act"))
        )

    def shape(self, name: str, shapes: Mapping[str, Shape]) -> tuple[int, int] | None:
        if "qweight" not in shapes:
            return None
        words, outputs = shapes["qweight"]
        return outputs, words * _IN_WORD

    def block_format(self, name: str) -> int:
        return Q4_ZERO

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        words = _tensor(tensors, name, "qweight", None, None)
        inputs, outputs = words.shape[0] * _IN_WORD, words.shape[1]
        groups = _num_groups(name, inputs, self.group_size)
        scales = _tensor(tensors, name, "scales", groups, outputs)
        zeros = self._zeros(_tensor(tensors, name, "qzeros", groups, -(-outputs // _IN_WORD)))[:, :outputs]
        if (group_of := tensors.get("g_idx")) is None and self.needs_order:
            raise UnsupportedModelError(f"{name} has inputs grouped by their activation (desc_act) and no g_idx")
        return _four_bits(
            name, lambda start, stop: _nibbles(words[:, start:stop].t()), inputs, scales.t(), zeros.t(), group_of
        )

    def _zeros(self, words: Tensor) -> Tensor:
        """[groups, outputs]. Some programs write the zeros of symmetric weights as they are in either version."""
        stored = _nibbles(words)
        if not self.zeros_minus_one or (self.is_symmetric and bool((stored == _ZERO).all())):
            return stored
        return _nibbles(words + 0x11111111)  # whole words, as GPTQModel subtracts: a zero of 0 borrows from the next


@dataclass(frozen=True, slots=True)
class AwqReader:
    """Reads qweight int32 [inputs, outputs / 8], scales [groups, outputs], qzeros int32 [groups, outputs / 8]."""

    parts: ClassVar = frozenset(("qweight", "scales", "qzeros"))

    group_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        group_size = config.get("group_size", config.get("q_group_size", 128))
        _check_common(config, "AWQ", config.get("bits", config.get("w_bit")), group_size)
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        if layout != "gemm" or config.get("backend") == "llm-awq":
            raise UnsupportedModelError(f"AWQ weights in the layout {layout} are not supported (gemm of AutoAWQ is)")
        if not config.get("zero_point", True):
            raise UnsupportedModelError("AWQ weights without zero points are not supported")
        return cls(group_size)

    def shape(self, name: str, shapes: Mapping[str, Shape]) -> tuple[int, int] | None:
        if "qweight" not in shapes:
            return None
        inputs, words = shapes["qweight"]
        return words * _IN_WORD, inputs

    def block_format(self, name: str) -> int:
        return Q4_ZERO

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        words = _tensor(tensors, name, "qweight", None, None)
        inputs, outputs = words.shape[0], words.shape[1] * _IN_WORD
        groups = _num_groups(name, inputs, self.group_size)
        scales = _tensor(tensors, name, "scales", groups, outputs)
        zeros = _tensor(tensors, name, "qzeros", groups, words.shape[1])

        def levels(start: int, stop: int) -> Tensor:
            return self._in_order(words[:, start // _IN_WORD : stop // _IN_WORD])

        return _four_bits(name, levels, inputs, scales.t(), self._in_order(zeros), None)

    @staticmethod
    def _in_order(words: Tensor) -> Tensor:
        """The numbers of words [n, outputs / 8]: uint8 [outputs, n]."""
        columns = words.t().contiguous()
        numbers = torch.empty(_IN_WORD * len(columns), len(words), dtype=torch.uint8)
        for place, output in enumerate(_AWQ_ORDER):
            numbers[output::_IN_WORD] = columns >> place * 4 & 15
        return numbers


# -- compressed-tensors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How a group of linears is stored."""

    targets: tuple[str, ...]
    bits: int
    group_size: int
    """-1 for one scale per output."""
    is_symmetric: bool
    needs_order: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], layout: str) -> Self:
        weights = group.get("weights") or {}
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        is_symmetric = weights.get("symmetric", True)
        group_size: Any = weights.get("group_size") if strategy == "group" else -1
        what = f"compressed-tensors weights with {bits} bits of type {weights.get('type')}"
        is_packed = layout == "pack-quantized"
        if weights.get("type", "int") != "int" or bits not in (4, 8) or (bits == 4 and not is_packed):
            raise UnsupportedModelError(f"{what} in the layout {layout} are not supported")
        per_output = strategy == "channel" or (strategy == "tensor" and not is_packed)
        if not per_output and (bits != 4 or strategy != "group"):
            raise UnsupportedModelError(f"{what} and scales per {strategy} are not supported")
        if bits == 8 and not is_symmetric:
            raise UnsupportedModelError(f"{what} and zero points are not supported")
        _check_group_size("compressed-tensors", group_size)
        for side in ("input", "output"):
            if (activations := group.get(f"{side}_activations")) and activations.get("dynamic") is not True:
                raise UnsupportedModelError(
                    f"compressed-tensors {side}s of linears that are rounded with stored scales are not supported"
                )
        needs_order = weights.get("actorder") in (True, "group", "dynamic")
        return cls(tuple(group.get("targets") or ()), bits, group_size, is_symmetric, needs_order)

    def rank(self, name: str) -> int | None:
        """How well the targets match a linear: 0 by its name, 1 by an expression, 2 by its class; None if none does."""
        ranks = [
            0 if target == name else 1 if target.startswith("re:") else 2
            for target in self.targets
            if target in (name, "Linear") or (target.startswith("re:") and re.match(target[3:], name))
        ]
        return min(ranks, default=None)


@dataclass(frozen=True, slots=True)
class CompressedReader:
    """Reads weight_packed int32 [outputs, inputs / 8] or weight int8 [outputs, inputs], with scales and zeros."""

    parts: ClassVar = frozenset(
        ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "weight")
    )

    schemes: tuple[_Scheme, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnsupportedModelError("sparse weights of compressed-tensors are not supported")
        if (config.get("transform_config") or {}).get("config_groups"):
            raise UnsupportedModelError("transforms of compressed-tensors (transform_config) are not supported")
        if config.get("kv_cache_scheme"):
            logger.warning("The checkpoint's kv_cache_scheme is ignored: --kv-cache-dtype decides how keys are stored.")
        schemes = []
        for group in (config.get("config_groups") or {}).values():
            layout = str(group.get("format") or config.get("format"))
            if layout not in ("pack-quantized", "int-quantized", "naive-quantized"):
                raise UnsupportedModelError(f"compressed-tensors weights in the layout {layout} are not supported")
            schemes.append(_Scheme.of(group, layout))
        return cls(tuple(schemes))

    def shape(self, name: str, shapes: Mapping[str, Shape]) -> tuple[int, int] | None:
        if "weight_packed" in shapes:  # the inputs fill their words, or are refused when they are read
            outputs, words = shapes["weight_packed"]
            return outputs, words * 32 // self._scheme(name).bits
        if "weight_scale" in shapes and "weight" in shapes:
            outputs, inputs = shapes["weight"]
            return outputs, inputs
        return None

    def block_format(self, name: str) -> int:
        return Q8_0 if self._scheme(name).bits == 8 else Q4_ZERO

    def _scheme(self, name: str) -> _Scheme:
        ranked = [(rank, scheme) for scheme in self.schemes if (rank := scheme.rank(name)) is not None]
        if not ranked:
            raise UnsupportedModelError(f"{name} is quantised, and no group of config_groups has it as a target")
        return min(ranked, key=lambda ranked: ranked[0])[1]

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        scheme = self._scheme(name)
        return self._read_eight(name, tensors) if scheme.bits == 8 else self._read_four(name, tensors, scheme)

    @staticmethod
    def _read_four(name: str, tensors: Mapping[str, Tensor], scheme: _Scheme) -> Blocks:
        words = _tensor(tensors, name, "weight_packed", None, None)
        outputs, inputs = map(int, _tensor(tensors, name, "weight_shape", 2))
        _require_shape(words, f"{name}.weight_packed", outputs, -(-inputs // _IN_WORD))
        groups = _num_groups(name, inputs, scheme.group_size)
        scales = _tensor(tensors, name, "weight_scale", outputs, groups)
        zeros = torch.full((outputs, groups), _ZERO, dtype=torch.uint8)
        if not scheme.is_symmetric:
            stored = _tensor(tensors, name, "weight_zero_point", None, groups)
            if stored.dtype == torch.int32:  # packed along the outputs
                stored = _nibbles(stored.t())[:, :outputs].t()
                zeros = _require_shape(stored, f"{name}.weight_zero_point", outputs, groups)
            else:
                zeros = (_require_shape(stored, f"{name}.weight_zero_point", outputs, groups) + _ZERO).to(torch.uint8)
        group_of = tensors.get("weight_g_idx")
        if group_of is not None and bool((group_of < 0).all()):
            group_of = None  # never set
        if group_of is None and scheme.needs_order:
            raise UnsupportedModelError(f"{name} has inputs grouped by their activation (actorder) and no weight_g_idx")
        return _four_bits(name, lambda start, stop: _nibbles(words[start:stop]), inputs, scales, zeros, group_of)

    @staticmethod
    def _read_eight(name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        if "weight_packed" in tensors:
            words = _tensor(tensors, name, "weight_packed", None, None)
            outputs, inputs = map(int, _tensor(tensors, name, "weight_shape", 2))
            weight = (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)
        else:
            weight = _tensor(tensors, name, "weight", None, None)
            outputs, inputs = weight.shape
            if weight.dtype != torch.int8:
                raise UnsupportedModelError(f"{name}.weight is {weight.dtype}, and int8 was expected")
        _require_shape(weight, f"the integers of {name}", outputs, inputs)
        _num_groups(name, inputs, -1)
        scales = tensors.get("weight_scale", torch.empty(0)).float().flatten()
        if len(scales) not in (1, outputs):
            raise UnsupportedModelError(f"{name} has {len(scales)} scales for {outputs} outputs")
        blocks = torch.empty(outputs, inputs // _BLOCK, 2 + _BLOCK, dtype=torch.uint8)
        blocks[..., :2] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
        blocks[..., 2:] = weight.view(torch.uint8).reshape(outputs, -1, _BLOCK)
        return Blocks(Q8_0, blocks.flatten(1), output_scales=scales.expand(outputs).contiguous())


_READERS: Mapping[str, Callable[[Mapping[str, Any]], LinearReader]] = {
    "gptq": GptqReader.of,
    "awq": AwqReader.of,
    "compressed-tensors": CompressedReader.of,
}


# -- parts -------------------------------------------------------------------------------------------------------------


def _check_common(config: Mapping[str, Any], method: str, bits: object, group_size: object) -> None:
    if bits != 4:
        raise UnsupportedModelError(f"{method} weights with {bits} bits are not supported (4 are)")
    _check_group_size(method, group_size)


def _check_group_size(method: str, size: object) -> None:
    if not isinstance(size, int) or (size != -1 and (size <= 0 or size % _BLOCK)):
        raise UnsupportedModelError(
            f"{method} weights with groups of {size} inputs are not supported (multiples of {_BLOCK} are)"
        )


def _tensor(tensors: Mapping[str, Tensor], name: str, part: str, *shape: int | None) -> Tensor:
    if part not in tensors:
        raise UnsupportedModelError(f"{name} has no tensor {part}, which its weights need")
    return _require_shape(tensors[part], f"{name}.{part}", *shape)


def _require_shape(tensor: Tensor, name: str, *shape: int | None) -> Tensor:
    """The tensor, if it has this shape; None stands for any number."""
    fits = len(shape) == tensor.dim() and all(
        size in (None, has) for size, has in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise UnsupportedModelError(f"{name} has the shape {list(tensor.shape)}, and [{wanted}] was expected")
    return tensor


def _num_groups(name: str, inputs: int, group_size: int) -> int:
    size = inputs if group_size == -1 else group_size
    if inputs % _BLOCK or inputs % size:
        raise UnsupportedModelError(f"{name} has {inputs} inputs, which are no multiple of {max(group_size, _BLOCK)}")
    return inputs // size


def _nibbles(words: Tensor) -> Tensor:
    """The 4-bit numbers of int32 words [n, m], the lowest first: uint8 [n, 8 m]."""
    if words.dtype != torch.int32:
        raise UnsupportedModelError(f"packed weights are {words.dtype}, and int32 was expected")
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def _four_bits(
    name: str,
    levels: Callable[[int, int], Tensor],
    inputs: int,
    scales: Tensor,
    zeros: Tensor,
    group_of: Tensor | None,
) -> Blocks:
    """Blocks of scale * (level - zero), made of a few outputs at a time.

    Args:
        name: the linear's name.
        levels: uint8 [stop - start, inputs] of the outputs [start, stop), whose number is a multiple of `_IN_WORD`
            except at the end.
        inputs: weights of an output.
        scales: [outputs, groups].
        zeros: uint8 [outputs, groups].
        group_of: [inputs] the group of each input; None if groups are in order.
    """
    outputs, groups = scales.shape
    order = None if group_of is None else _order(name, group_of, inputs, groups)
    halves, output_scales = _as_halves(name, scales.contiguous())
    per_group = inputs // groups // _BLOCK
    blocks = torch.empty(outputs, inputs // _BLOCK, 3 + _HALF_BLOCK, dtype=torch.uint8)
    blocks[..., :2] = halves.repeat_interleave(per_group, 1).view(torch.uint8).view(outputs, -1, 2)
    blocks[..., 2] = zeros.repeat_interleave(per_group, 1)
    for start in range(0, outputs, _OUTPUTS_AT_ONCE):
        rows = blocks[start : start + _OUTPUTS_AT_ONCE]
        numbers = levels(start, start + len(rows))
        numbers = numbers if order is None else numbers[:, order]
        pairs = numbers.reshape(len(rows), -1, 2, _HALF_BLOCK)
        rows[..., 3:] = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return Blocks(
        Q4_ZERO,
        blocks.flatten(1),
        output_scales=output_scales,
        input_order=None if order is None else order.int(),
    )


def _order(name: str, group_of: Tensor, inputs: int, groups: int) -> Tensor | None:
    """Inputs by their groups, or None if they are in this order."""
    in_order = torch.arange(inputs) // (inputs // groups)
    given = _require_shape(group_of, f"the groups of {name}", inputs).long()
    if torch.equal(given, in_order):
        return None
    order = given.argsort(stable=True)
    if not torch.equal(given[order], in_order):
        raise UnsupportedModelError(f"{name} has groups of different sizes")
    return order


def _as_halves(name: str, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [outputs, groups] in half precision, and a power of two for each output that they are multiplied with."""
    if not scales.isfinite().all():
        raise UnsupportedModelError(f"{name} has scales that are no finite numbers")
    if scales.dtype == torch.float16:
        return scales, torch.ones(len(scales))
    exact = scales.float()
    exponents = torch.frexp(exact.abs().amax(1)).exponent - 15  # so that the largest is below 2^15
    powers = torch.ldexp(torch.ones(len(scales)), exponents)
    halves = (exact / powers[:, None]).half()
    if not torch.equal(halves.float() * powers[:, None], exact):
        raise UnsupportedModelError(f"{name} has scales in {scales.dtype} that half precision cannot hold")
    return halves, powers

"""Rotary positions whose angles depend only on the position: cos and sin of a model's layers, as transformers computes
them.
"""

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.spec.families import ModelFamily
from model_runner.spec.layer_family import Config, head_dim

logger = logging.getLogger("samewise.runner")

_POSITIONS = 1024
"""Cos and sin are computed for this many positions at a time, starting at a multiple."""


class RotaryTable:
    """Cos and sin of all positions used so far."""

    def __init__(self, frequencies: Tensor, factor: float = 1.0, axes: Tensor | None = None) -> None:
        """Takes the values of Frequencies."""
        self._frequencies = frequencies
        self._factor = factor
        self._axes = None if axes is None else axes.repeat(2)
        self._cos, self._sin = self._part(0)
        self.dim = self._cos.shape[1]
        self.struct: CData = CPU.new("SwRotary", self._pointers())

    def reach(self, length: int) -> None:
        """Extend the table to all positions below `length`; it at least doubles."""
        known = len(self._cos)
        if length <= known:
            return
        parts = [self._part(start) for start in range(known, max(length, 2 * known), _POSITIONS)]
        cos = torch.cat([self._cos, *(part for part, _ in parts)])
        sin = torch.cat([self._sin, *(part for _, part in parts)])
        self._cos, self._sin = cos, sin  # both or, if memory runs out, neither
        self.struct.cos, self.struct.sin = self._pointers()

    def of_axes(self, positions: Tensor) -> "RotaryTable":
        """A table with a row for each of these tokens, from its positions [3, tokens] in time, height and width."""
        assert self._axes is not None, "the model has positions in three axes"
        places = positions[self._axes].mT.contiguous(), torch.arange(self.dim)  # [tokens, dim] and [dim]
        table = copy.copy(self)
        table._cos, table._sin = self._cos[places], self._sin[places]
        table.struct = CPU.new("SwRotary", table._pointers())
        return table

    def _pointers(self) -> tuple[CData, CData]:
        return pointer(self._cos, *self._cos.shape), pointer(self._sin, *self._sin.shape)

    def _part(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _POSITIONS)
        half = positions[:, None].float() * self._frequencies
        angles = torch.cat((half, half), dim=-1)
        return angles.cos() * self._factor, angles.sin() * self._factor


class Frequencies(NamedTuple):
    """How the pairs of a head turn."""

    angles: Tensor
    """[dim / 2] float32, each pair's angle per position."""
    factor: float
    """On cos and sin."""
    axes: Tensor | None = None
    """[dim / 2] the axis whose position turns each pair: 0 time, 1 height, 2 width. None for one position."""


def rotary_frequencies(family: ModelFamily, config: Config) -> dict[str | None, Frequencies] | None:
    """The frequencies of each kind of layer, or of all kinds as None.

    Returns:
        None if angles depend on more than the position.
    """
    kinds = sorted(set(config.layer_types)) if family.rotary_by_kind else [None]
    frequencies: dict[str | None, Frequencies] = {}
    for kind in kinds:
        parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        width = head_dim(config)
        if parameters["rope_type"] != "default" or family.rotates_partially:
            width = int(width * parameters.get("partial_rotary_factor", 1.0))
        found = _frequencies(parameters, width, config.max_position_embeddings)
        if found is None:
            return None
        frequencies[kind] = Frequencies(*found, _axes(family, parameters, len(found[0])))
    return frequencies


def _axes(family: ModelFamily, parameters: Mapping[str, Any], pairs: int) -> Tensor | None:
    """The axis of each pair: they take turns, until the height and the width have theirs."""
    if family.rotary_sections is None:
        return None
    sections = parameters.get("mrope_section", family.rotary_sections)
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _frequencies(parameters: Mapping[str, Any], width: int, max_positions: int) -> tuple[Tensor, float] | None:
    """Each pair's angle per position, and the factor on cos and sin; None for an unknown type."""
    powers: Tensor = parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    match parameters["rope_type"]:
        case "default":
            return 1.0 / powers, 1.0
        case "linear":
            return 1.0 / powers / parameters["factor"], 1.0
        case "llama3":
            return _llama3(parameters, 1.0 / powers), 1.0
        case "yarn":
            return _yarn(parameters, powers, max_positions)
        case "longrope" if is_fixed(parameters):
            factors = torch.tensor(parameters["long_factor"], dtype=torch.float32)
            return 1.0 / (factors * powers), _long_rope_factor(parameters, max_positions)
    return None


def fix_long_rope(config: Any, max_model_len: int | None) -> None:
    """Choose LongRoPE's factors (Ding et al., arXiv:2402.13753) for good, so that they depend on no request's length.

    They are the long ones if requests may be longer than the model was first trained for, otherwise the short ones.

    Args:
        config: a model's configuration; its rotary parameters are changed in place.
        max_model_len: the most tokens of a request; None is the most that the model supports.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") == "longrope" and not is_fixed(kind):
            longest = max_model_len or text.max_position_embeddings
            original = kind["original_max_position_embeddings"]
            chosen = "long" if longest > original else "short"
            kind["long_factor"] = kind["short_factor"] = kind[f"{chosen}_factor"]
            logger.info(
                "positions  LongRoPE's %s factors, for up to %d tokens (%d at first)", chosen, longest, original
            )


def is_fixed(parameters: Mapping[str, Any]) -> bool:
    """Whether LongRoPE's factors are the same for every length."""
    return "long_factor" in parameters and bool(parameters["long_factor"] == parameters["short_factor"])


def _long_rope_factor(parameters: Mapping[str, Any], max_positions: int) -> float:
    """The factor on cos and sin."""
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(parameters: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by the factor, short ones are kept, others interpolated."""
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < original / high) * ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)


def _yarn(parameters: Mapping[str, Any], powers: Tensor, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv:2309.00071)."""
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"] or max_positions / original
    num_pairs = len(powers)
    theta = parameters["rope_theta"]

    def pair_that_turns(times: float) -> float:
        return num_pairs * 2 * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(parameters.get("beta_fast") or 32)
    high = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_pairs * 2 - 1)
    ramp = (torch.arange(num_pairs, dtype=torch.float32) - low) / ((high if high != low else high + 0.001) - low)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_factor(parameters, factor)


def _yarn_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """The factor on cos and sin."""
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def at(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return at(scale) / at(scale_all) if scale and scale_all else at(1.0)

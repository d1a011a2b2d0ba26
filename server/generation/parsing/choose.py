"""All formats by name, and how to recognise a model's format from its chat template."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from server.generation.parsing.formats.deepseek import DeepseekDsml, DeepseekV3
from server.generation.parsing.formats.gemma4 import Gemma4
from server.generation.parsing.formats.glm import Glm
from server.generation.parsing.formats.harmony import Harmony
from server.generation.parsing.formats.json_calls import GRANITE, PHI, Hermes
from server.generation.parsing.formats.kimi import KimiK2, KimiK3
from server.generation.parsing.formats.llama3_json import Llama3Json
from server.generation.parsing.formats.mistral import Mistral
from server.generation.parsing.formats.pythonic import Pythonic
from server.generation.parsing.formats.qwen3_xml import Qwen3Xml
from server.generation.parsing.output_parser import THINK_TAGS, ThinkTags, ToolFormat

_ALL_FORMATS: Sequence[ToolFormat] = (
    DeepseekDsml(),
    DeepseekV3(),
    Gemma4(),
    Glm(),
    GRANITE,
    Harmony(),
    Hermes(),
    KimiK2(),
    KimiK3(),
    Llama3Json(),
    Mistral(),
    PHI,
    Pythonic(),
    Qwen3Xml(),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({tools.name: tools for tools in _ALL_FORMATS})
REASONING_TAGS: Mapping[str, ThinkTags] = MappingProxyType({tags.name: tags for tags in THINK_TAGS})
FULL_OUTPUT_FORMATS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"harmony": (), "kimi_k3": ("<|open|>think<|sep|>",)}
)
"""Formats that also include reasoning and text, with the texts by which a prompt opens the reasoning."""

_FORMATS_BY_TEXT = (
    ("｜DSML｜", "deepseek_dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("<|tool_call>", "gemma4"),
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_xml"),
    ("<arg_key>", "glm"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("functools[", "phi"),
    ("<|tool|>", "phi"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
)
"""A text that identifies a format in a chat template. The first match counts."""


def tool_format(template: str) -> ToolFormat | None:
    """The format of calls of a model with this chat template; None if it is unknown."""
    return next((TOOL_FORMATS[name] for text, name in _FORMATS_BY_TEXT if text in template), None)


def reasoning_tags(template: str) -> ThinkTags | None:
    """The reasoning tags of a model with this chat template; None if it has none that are known."""
    return next((tags for tags in THINK_TAGS if tags.begin in template or tags.end in template), None)

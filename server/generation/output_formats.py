"""The formats in which a model writes reasoning and tool calls, from its chat template or the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.generation import generic_tools
from server.generation.parsing.choose import (
    FULL_OUTPUT_FORMATS,
    REASONING_TAGS,
    TOOL_FORMATS,
    reasoning_tags,
    tool_format,
)
from server.generation.parsing.output_parser import Expected
from server.generation.tools import ToolUse
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

NONE = "none"
"""Setting for a model without reasoning."""


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """How to parse an output into reasoning, text and calls. Only names, so that other processes can use it."""

    tool_format: str | None = None
    """Name of the format of calls; None if nothing may be called."""
    reasoning: str | None = None
    """Name of the reasoning tags; None if the model has none."""
    expected: Expected = field(default_factory=Expected)
    controls: Mapping[int, str] = field(default_factory=dict)
    """Markers that are control tokens: token id to text."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools that take free text."""
    only_calls: bool = False
    """Whether text around calls is part of their format, and dropped."""


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Names of the formats that a model writes."""

    tool_format: str
    """Format of its calls."""
    reasoning: str | None = None
    """Tags of its reasoning; None if it has none."""

    @classmethod
    def of(
        cls, template: ChatTemplate | None, tools: str | None = None, reasoning: str | None = None
    ) -> "ModelFormats":
        """The formats from the settings, otherwise from the template.

        Raises ValueError for an unknown name, and for a format of calls that the model will not write.
        """
        _check_name("tool_parser", tools, TOOL_FORMATS)
        for_tools = None if template is None else template.with_tools
        if for_tools is not None and not for_tools.knows_tools and tools not in (None, generic_tools.FORMAT):
            taught = f"so calls are written in the format {generic_tools.FORMAT!r} and {tools!r} would not find them"
            raise ValueError(f"tool_parser: the model's chat template does not support tools, {taught}")
        _check_name("reasoning_parser", reasoning, {**REASONING_TAGS, NONE: None})
        source = "" if template is None else template.source
        found = tool_format(for_tools.source) if for_tools is not None and for_tools.knows_tools else None
        tags = reasoning_tags(source)
        by_template = None if tags is None else tags.name
        return cls(
            tool_format=tools or (generic_tools.FORMAT if found is None else found.name),
            reasoning=by_template if reasoning is None else None if reasoning == NONE else reasoning,
        )

    def parser_config(
        self, tokenizer: Tokenizer, prompt: str, tools: ToolUse | None, *, is_constrained: bool, has_constraint: bool
    ) -> ParserConfig | None:
        """How to parse the answer to a prompt, given as text; None if all of it is text.

        `is_constrained` says that a grammar constrains the calls, `has_constraint` that it also constrains an answer
        without calls.
        """
        needs_parser = tools is not None or self.tool_format in FULL_OUTPUT_FORMATS
        if not needs_parser and self.reasoning is None:
            return None
        offered = () if tools is None else tools.callable
        only_calls = tools is not None and tools.mode == "required"
        return ParserConfig(
            tool_format=self.tool_format if needs_parser else None,
            reasoning=self.reasoning,
            expected=Expected(
                tools={tool.name: tool.parameters for tool in offered},
                only_offered=True,
                has_constraint=has_constraint,
                is_thinking=self.is_thinking(prompt),
                reasons_to_its_end=is_constrained and (has_constraint or only_calls),
                calls_are_whole=is_constrained,
            ),
            controls=self.controls(tokenizer),
            custom_tools=frozenset(tool.name for tool in offered if tool.is_custom),
            only_calls=only_calls,
        )

    def is_thinking(self, prompt: str) -> bool:
        """Whether the prompt, given as text, has already opened the reasoning."""
        if self.reasoning is not None:
            return prompt.rstrip().endswith(REASONING_TAGS[self.reasoning].begin)
        return any(prompt.endswith(opening) for opening in FULL_OUTPUT_FORMATS.get(self.tool_format, ()))

    def opening(self, prompt: str) -> str:
        """The end of the prompt that opens the reasoning, from its tag on; empty if it does not."""
        if self.reasoning is None or not self.is_thinking(prompt):
            return ""
        return prompt[prompt.rindex(REASONING_TAGS[self.reasoning].begin) :]

    def controls(self, tokenizer: Tokenizer) -> Mapping[int, str]:
        """The markers that are control tokens, by token id."""
        markers = set(TOOL_FORMATS[self.tool_format].markers)
        if self.reasoning is not None:
            markers |= {*REASONING_TAGS[self.reasoning].markers}
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {token: marker for marker, token in ids.items() if token is not None and token in tokenizer.control_ids}


def _check_name(setting: str, name: str | None, known: Mapping[str, object]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{setting}: unknown value {name!r}; use one of {', '.join(sorted(known))}")

"""The formats in which a model writes reasoning and tool calls, from its chat template or the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.generation import generic_tools
from server.generation.parsing.choose import (
    READ_EVERYTHING,
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
"""As a setting: the model has no reasoning."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How an output is told apart into reasoning, text and calls. Made of names, so that it can go to any process."""

    tool_format: str | None = None
    """None: nothing may be called."""
    reasoning: str | None = None
    """Name of the tags; None: the model has none."""
    expected: Expected = field(default_factory=Expected)
    controls: Mapping[int, str] = field(default_factory=dict)
    """Tokens that are markers of these, with their texts."""
    custom_tools: frozenset[str] = frozenset()
    """Names of those that take free text."""
    only_calls: bool = False
    """Whether what stands beside calls belongs to their format, and to no text."""


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """What a model writes, by the names of the formats."""

    tool_format: str
    """Of its calls."""
    reasoning: str | None = None
    """Tags of its reasoning, if it has any."""

    @classmethod
    def of(
        cls, template: ChatTemplate | None, tools: str | None = None, reasoning: str | None = None
    ) -> "ModelFormats":
        """By the settings, or else by the template.

        Raises ValueError for a name that is not known, and for a format of calls that the model is not going to write.
        """
        _check_name("tool_parser", tools, TOOL_FORMATS)
        if template is not None and not template.knows_tools and tools not in (None, generic_tools.FORMAT):
            taught = f"so it is told to write calls as {generic_tools.FORMAT!r} does; {tools!r} would find none of them"
            raise ValueError(f"tool_parser: the model's chat template knows no tools, {taught}")
        _check_name("reasoning_parser", reasoning, {**REASONING_TAGS, NONE: None})
        source = "" if template is None else template.source
        found = tool_format(source) if template is not None and template.knows_tools else None
        tags = reasoning_tags(source)
        by_template = None if tags is None else tags.name
        return cls(
            tool_format=tools or (generic_tools.FORMAT if found is None else found.name),
            reasoning=by_template if reasoning is None else None if reasoning == NONE else reasoning,
        )

    def reading(
        self, tokenizer: Tokenizer, prompt: str, tools: ToolUse | None, *, is_held: bool, has_form: bool
    ) -> Reading | None:
        """How the answer to a prompt, given as text, is read; None if all of it is text.

        `is_held` says that a grammar holds the calls, and `has_form` that it holds an answer without any, too.
        """
        is_told_apart = tools is not None or self.tool_format in READ_EVERYTHING
        if not is_told_apart and self.reasoning is None:
            return None
        offered = () if tools is None else tools.callable
        only_calls = tools is not None and tools.mode == "required"
        return Reading(
            tool_format=self.tool_format if is_told_apart else None,
            reasoning=self.reasoning,
            expected=Expected(
                tools={tool.name: tool.parameters for tool in offered},
                only_offered=True,
                has_form=has_form,
                is_thinking=self.is_thinking(prompt),
                reasons_to_its_end=is_held and (has_form or only_calls),
                calls_are_whole=is_held,
            ),
            controls=self.controls(tokenizer),
            custom_tools=frozenset(tool.name for tool in offered if tool.is_custom),
            only_calls=only_calls,
        )

    def is_thinking(self, prompt: str) -> bool:
        """Whether the prompt, given as text, has begun the reasoning."""
        if self.reasoning is not None:
            return prompt.rstrip().endswith(REASONING_TAGS[self.reasoning].begin)
        return any(prompt.endswith(opening) for opening in READ_EVERYTHING.get(self.tool_format, ()))

    def controls(self, tokenizer: Tokenizer) -> Mapping[int, str]:
        """The markers that are control tokens, by their ids."""
        markers = set(TOOL_FORMATS[self.tool_format].markers)
        if self.reasoning is not None:
            markers |= {*REASONING_TAGS[self.reasoning].markers}
        ids = {marker: tokenizer.token_id(marker) for marker in markers}
        return {token: marker for marker, token in ids.items() if token is not None and token in tokenizer.control_ids}


def _check_name(setting: str, name: str | None, known: Mapping[str, object]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{setting}: there is no {name!r}; there is {', '.join(sorted(known))}")

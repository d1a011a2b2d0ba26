"""Reasoning before an answer: whether, how much, and how it is returned, under the names of several servers."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.generation import ConversationFields, ReasoningEffort
from server.api.fields.rules import (
    SUPPORTED_VALUES_ONLY,
    RequestModel,
    hint,
    not_together,
    related,
)

Think = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["low", "medium", "high", "max"], Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<boolean>"),
]
_TOOLS = ("tools", "functions")
_SHOWN: Mapping[str, bool] = {"parsed": True, "deepseek": True, "hidden": False}
_SEPARATE: Mapping[str, bool] = {"parsed": True, "deepseek": True, "raw": False, "none": False}
"""Whether a value of `reasoning_format` returns the reasoning separately; `_SHOWN`: whether it returns it."""


class ThinkingSwitch(RequestModel):
    """Whether to think, in the format of DeepSeek and GLM."""

    type: Literal["enabled", "disabled"]


class ReasoningConfig(RequestModel):
    """Reasoning settings in OpenRouter's format."""

    effort: ReasoningEffort | None = hint("Same as `reasoning_effort`.", "")
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Same as `thinking_token_budget`.")
    enabled: bool | None = hint("Same as `thinking`, as true or false.", "")
    exclude: bool | None = Field(None, description="Return no reasoning: the opposite of `include_reasoning`.")
    summary: Literal["auto", "concise", "detailed"] | None = hint(
        "How to summarize the reasoning.", "Reasoning is returned unchanged."
    )


_NOTHING = ReasoningConfig()


class ReasoningFields(ConversationFields):
    """Reasoning settings of a chat completion, under all of their names."""

    reasoning_effort: ReasoningEffort | None = hint(
        "How much to think first. Passed to a chat template that has a variable of this name.", ""
    )
    thinking: ThinkingSwitch | None = hint(
        "Whether to think first, if the chat template has a switch for it. Otherwise ignored and reported.", ""
    )
    think: Think | None = Field(
        None, description="Ollama's name for `thinking` (true or false) and `reasoning_effort` (a string)."
    )
    enable_thinking: bool | None = Field(None, description="Qwen's name for `thinking`, as true or false.")
    reasoning: ReasoningConfig | None = Field(None, description="OpenRouter's form of these settings.")

    include_reasoning: bool | None = Field(
        None, description="Return the reasoning; on by default. Its tokens count as usage either way."
    )
    separate_reasoning: bool | None = Field(
        None,
        description="Return the reasoning separately from the content; on by default. If off, the content is the whole "
        "text, with tags around the reasoning.",
        json_schema_extra=related(excludes=_TOOLS, on=True),
    )
    reasoning_format: Annotated[
        Literal["parsed", "auto", "deepseek", "hidden", "raw", "none"] | None, SUPPORTED_VALUES_ONLY
    ] = Field(
        None,
        description="`hidden`: same as `include_reasoning: false`; `raw` and `none`: same as `separate_reasoning: "
        "false`; other values: the reasoning is returned separately from the content.",
    )
    stream_reasoning: bool | None = hint(
        "Whether the reasoning is streamed token by token.", "Reasoning is streamed as it is generated.", on=True
    )

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        settings = self.reasoning_settings
        for name, path, value in self._sent_settings():
            first_path, first_value = settings.get(name, (path, value))
            if value not in (None, first_value):
                raise not_together(path, first_path)
        if not self.is_separate:
            unseparated, _ = settings["separates_reasoning"]
            if not self.is_shown:
                raise not_together(unseparated, settings["shows_reasoning"][0])
            tools = next((name for name in _TOOLS if getattr(self, name, None)), None)
            if tools is not None:
                raise not_together(unseparated, tools)
        return self

    @cached_property
    def reasoning_settings(self) -> Mapping[str, tuple[str, Any]]:
        """The requested settings by the pipeline's names: the client's name for each, and the value."""
        first: dict[str, tuple[str, Any]] = {}
        for name, path, value in self._sent_settings():
            if value is not None:
                first.setdefault(name, (path, value))
        return first

    @property
    def is_separate(self) -> bool:
        """Whether the reasoning is returned separately from the content."""
        return self.reasoning_settings.get("separates_reasoning", ("", True))[1] is True

    @property
    def is_shown(self) -> bool:
        """Whether the reasoning is returned."""
        return self.reasoning_settings.get("shows_reasoning", ("", True))[1] is True

    def _sent_settings(self) -> Iterator[tuple[str, str, Any]]:
        asked = self.reasoning or _NOTHING
        yield "thinking", "thinking", None if self.thinking is None else self.thinking.type == "enabled"
        yield "thinking", "think", self.think if isinstance(self.think, bool) else None
        yield "thinking", "enable_thinking", self.enable_thinking
        yield "thinking", "reasoning.enabled", asked.enabled
        yield "reasoning_effort", "reasoning_effort", self.reasoning_effort
        yield "reasoning_effort", "think", self.think if isinstance(self.think, str) else None
        yield "reasoning_effort", "reasoning.effort", asked.effort
        yield "thinking_budget", *self.named_value("thinking_token_budget")
        yield "thinking_budget", "reasoning.max_tokens", asked.max_tokens
        yield "shows_reasoning", "include_reasoning", self.include_reasoning
        yield "shows_reasoning", "reasoning.exclude", None if asked.exclude is None else not asked.exclude
        yield "shows_reasoning", "reasoning_format", _SHOWN.get(self.reasoning_format or "")
        yield "separates_reasoning", "separate_reasoning", self.separate_reasoning
        yield "separates_reasoning", "reasoning_format", _SEPARATE.get(self.reasoning_format or "")

"""How to think before an answer, and what is returned of it: one set of wishes under the names of several servers."""

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
    same_as,
)

Think = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["low", "medium", "high", "max"], Tag("<string>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<boolean>"),
]
_TOOLS = ("tools", "functions")
_SHOWN: Mapping[str, bool] = {"parsed": True, "deepseek": True, "hidden": False}
_SEPARATE: Mapping[str, bool] = {"parsed": True, "deepseek": True, "raw": False, "none": False}
"""What values of `reasoning_format` say."""


class ThinkingSwitch(RequestModel):
    """Whether to think, as DeepSeek's and GLM's APIs have it."""

    type: Literal["enabled", "disabled"]


class ReasoningConfig(RequestModel):
    """How to think first, as OpenRouter has it."""

    effort: ReasoningEffort | None = hint("The same as `reasoning_effort`.", "")
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="The same as `thinking_token_budget`.")
    enabled: bool | None = hint("The same as `thinking`, as true or false.", "")
    exclude: bool | None = Field(None, description="Return no reasoning: the contrary of `include_reasoning`.")
    summary: Literal["auto", "concise", "detailed"] | None = hint(
        "How the reasoning is summed up.", "Reasoning is returned as it is."
    )


_NOTHING = ReasoningConfig()


class ReasoningFields(ConversationFields):
    """Wishes for the reasoning of a chat completion."""

    reasoning_effort: ReasoningEffort | None = hint(
        "How much to think first. Given to a chat template that has a variable of this name.", ""
    )
    thinking: ThinkingSwitch | None = hint(
        "Whether to think first, where the chat template has a switch for it; else reported.", ""
    )
    think: Think | None = Field(
        None, description="Ollama's name of `thinking`, as true or false, and of `reasoning_effort`, as a string."
    )
    enable_thinking: bool | None = Field(None, description="Qwen's name of `thinking`, as true or false.")
    thinking_budget: int | None = same_as("thinking_token_budget", "Qwen's name.", ge=0, le=2**31 - 1)
    reasoning: ReasoningConfig | None = Field(None, description="OpenRouter's way to say all of this.")

    include_reasoning: bool | None = Field(
        None, description="Return the reasoning; on by default. Its tokens count either way."
    )
    separate_reasoning: bool | None = Field(
        None,
        description="Return the reasoning apart from the content; on by default. Otherwise the content is all of the "
        "text, with the tags around the reasoning.",
        json_schema_extra=related(excludes=_TOOLS, on=True),
    )
    reasoning_format: Annotated[
        Literal["parsed", "auto", "deepseek", "hidden", "raw", "none"] | None, SUPPORTED_VALUES_ONLY
    ] = Field(
        None,
        description="`hidden`: as `include_reasoning: false`; `raw` or `none`: as `separate_reasoning: false`; the "
        "others: the reasoning is returned apart from the content.",
    )
    stream_reasoning: bool | None = hint(
        "Whether the reasoning is streamed token by token.", "Reasoning is streamed as it comes.", on=True
    )

    @model_validator(mode="after")
    def _check_wishes(self) -> Self:
        wishes = self.wishes
        for name, path, value in self._wishes():
            said_by, said = wishes.get(name, (path, value))
            if value not in (None, said):
                raise not_together(path, said_by)
        if not self.is_separate:
            unseparated, _ = wishes["separates_reasoning"]
            if not self.is_shown:
                raise not_together(unseparated, wishes["shows_reasoning"][0])
            tools = next((name for name in _TOOLS if getattr(self, name, None)), None)
            if tools is not None:
                raise not_together(unseparated, tools)
        return self

    @cached_property
    def wishes(self) -> Mapping[str, tuple[str, Any]]:
        """By the pipeline's names: the client's name of each wish, and the wish."""
        first: dict[str, tuple[str, Any]] = {}
        for name, path, value in self._wishes():
            if value is not None:
                first.setdefault(name, (path, value))
        return first

    @property
    def is_separate(self) -> bool:
        """Whether the reasoning is returned separately from the content."""
        return self.wishes.get("separates_reasoning", ("", True))[1] is True

    @property
    def is_shown(self) -> bool:
        """Whether the reasoning is returned."""
        return self.wishes.get("shows_reasoning", ("", True))[1] is True

    def _wishes(self) -> Iterator[tuple[str, str, Any]]:
        asked = self.reasoning or _NOTHING
        yield "thinking", "thinking", None if self.thinking is None else self.thinking.type == "enabled"
        yield "thinking", "think", self.think if isinstance(self.think, bool) else None
        yield "thinking", "enable_thinking", self.enable_thinking
        yield "thinking", "reasoning.enabled", asked.enabled
        yield "reasoning_effort", "reasoning_effort", self.reasoning_effort
        yield "reasoning_effort", "think", self.think if isinstance(self.think, str) else None
        yield "reasoning_effort", "reasoning.effort", asked.effort
        yield "thinking_budget", *self.said("thinking_token_budget")
        yield "thinking_budget", "reasoning.max_tokens", asked.max_tokens
        yield "shows_reasoning", "include_reasoning", self.include_reasoning
        yield "shows_reasoning", "reasoning.exclude", None if asked.exclude is None else not asked.exclude
        yield "shows_reasoning", "reasoning_format", _SHOWN.get(self.reasoning_format or "")
        yield "separates_reasoning", "separate_reasoning", self.separate_reasoning
        yield "separates_reasoning", "reasoning_format", _SEPARATE.get(self.reasoning_format or "")

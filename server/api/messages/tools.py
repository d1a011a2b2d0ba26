"""Tools in Anthropic's format."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.rules import EchoedModel, RequestModel, hint, no_effect, problem, related, tag_by_type
from server.api.fields.structured import STRICT
from server.api.fields.tools import MAX_TOOLS, HiddenTools, ToolName, cache_control, result_schema
from server.api.messages.blocks import CacheControl
from server.errors import InvalidRequestError, shorten
from server.generation.notices import Notice
from server.generation.tools import Tool, ToolUse

_OF_ANTHROPIC = re.compile(r"[a-z0-9_]+_20\d{6}|mcp_toolset")
_SEARCHES = "tool_search_tool"


class SchemaTool(RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = Field(None, description="Always `custom`.")
    name: ToolName
    description: str | None = Field(None, description="The purpose of the tool, for the model.")
    input_schema: dict[str, Any] = Field(description="A JSON schema of the arguments object.")
    strict: bool | None = Field(None, description=STRICT)
    defer_loading: bool | None = Field(
        None, description="Hide the tool from the model until a `tool_reference` in a result names it."
    )
    cache_control: CacheControl | None = cache_control()
    return_: dict[str, Any] | None = result_schema(alias="return")
    eager_input_streaming: bool | None = no_effect("Arguments are streamed as they are generated.")
    input_examples: list[dict[str, Any]] | None = hint("Examples of arguments.", "No chat template shows them.")
    allowed_callers: list[str] | None = hint(
        "Allowed callers of the tool.", "Only the model calls tools.", off=[["direct"]]
    )

    def tool(self, path: str) -> Tool:
        """The tool for the pipeline; `path` is its path in the request."""
        path = f"{path}.input_schema"
        return Tool(self.name, self.description, self.input_schema, bool(self.strict), path=path)


class AnthropicTool(EchoedModel):
    """One of Anthropic's own tools, which have no schema: ignored and reported."""

    type: str = Field(description="Such as `web_search_20250305`.")
    name: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if not _OF_ANTHROPIC.fullmatch(self.type):
            known = "'custom' and the types of Anthropic's own tools"
            message = f"Invalid value: '{shorten(self.type)}'. Supported values are: {known}."
            raise problem("invalid_value", message, "type")
        return self

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield Notice(path, f"This server has no tool '{shorten(self.type)}'.")


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind in (None, "custom") else "<anthropic>"


AnyTool = Annotated[
    Annotated[SchemaTool, Tag("<custom>")] | Annotated[AnthropicTool, Tag("<anthropic>")], Discriminator(_tool_tag)
]


class _Choice(RequestModel):
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class AutoChoice(_Choice):
    """Text or calls."""

    type: Literal["auto"]


class AnyChoice(_Choice):
    """Calls only."""

    type: Literal["any"]


class NamedChoice(_Choice):
    """Calls of one tool only."""

    type: Literal["tool"]
    name: str


class NoneChoice(RequestModel):
    """Text only; the model still sees the tools."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[NamedChoice, Tag("<tool>")]
    | Annotated[NoneChoice, Tag("<none>")],
    Discriminator(tag_by_type("auto")),
]


class MessagesToolFields(HiddenTools):
    """The tools, and which of them to call."""

    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Tools that the model may call.",
        json_schema_extra=related(excludes=["ignore_eos", "beam_search"]),
    )  # fmt: skip
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto`, the default with tools: text or calls. `none`: text only; the model still sees the tools. "
        "`any`: calls only. `tool`: calls of that tool.",
    )

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names: set[str] = set()
        for index, tool in self._with_schema:
            if tool.name in names:
                path = f"tools[{index}]"
                raise problem("invalid_value", f"Invalid '{path}': there are two tools called '{tool.name}'.", path)
            names.add(tool.name)
        if isinstance(self.tool_choice, AnyChoice | NamedChoice):
            self._check_choice(self.tool_choice, names)
        return self

    def _check_choice(self, choice: AnyChoice | NamedChoice, names: Collection[str]) -> None:
        """Refuse a choice of tools that do not exist."""
        if isinstance(choice, AnyChoice):
            if not names:
                message = "Invalid '{path}': calls are required, but the request has no tools."
                raise problem("invalid_value", message, "tool_choice")
        elif any(tool.name == choice.name for tool in self.tools or () if isinstance(tool, AnthropicTool)):
            message = (
                f"Unsupported value: '{{path}}' requires '{shorten(choice.name)}', which this server does not have."
            )
            raise problem("unsupported_value", message, "tool_choice")
        elif choice.name not in names:
            message = f"Invalid '{{path}}': there is no tool called '{shorten(choice.name)}'."
            raise problem("invalid_value", message, "tool_choice")

    @property
    def tool_names(self) -> Collection[str]:
        """The names of all tools, deferred or not."""
        return {tool.name for _, tool in self._with_schema}

    @property
    def _with_schema(self) -> Sequence[tuple[int, SchemaTool]]:
        return [(index, tool) for index, tool in enumerate(self.tools or ()) if isinstance(tool, SchemaTool)]

    def _loaded(self, loaded: Collection[str]) -> list[Tool]:
        """The tools that are not deferred, or were loaded or chosen."""
        if isinstance(self.tool_choice, NamedChoice):
            loaded = {*loaded, self.tool_choice.name}
        searches = any(isinstance(tool, AnthropicTool) and tool.type.startswith(_SEARCHES) for tool in self.tools or ())
        return [
            tool.tool(f"tools[{index}]")
            for index, tool in self._with_schema
            if not tool.defer_loading
            or searches
            or tool.name in loaded  # without the ignored search tool, nothing would load them
        ]

    def shown_tools(self, loaded: Collection[str]) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees, in the form of chat templates; `loaded` is as in `tool_use`."""
        return self.shown(self._loaded(loaded), are_callable=not isinstance(self.tool_choice, NoneChoice))

    def tool_use(self, loaded: Collection[str]) -> ToolUse | None:
        """The tools that the answer may call; `loaded` are deferred tools that results have named. None: none.

        Raises InvalidRequestError if a call is required and there is no tool.
        """
        choice = self.tool_choice or AutoChoice(type="auto")
        if isinstance(choice, NoneChoice):
            return None
        tools = self._loaded(loaded)
        if not tools and isinstance(choice, AnyChoice):
            message = "Invalid 'tool_choice': calls are required, but all tools are deferred and none was found yet."
            raise InvalidRequestError(message, param="tool_choice", code="invalid_value")
        if not tools:
            return None
        return ToolUse(
            tools,
            "auto" if isinstance(choice, AutoChoice) else "required",
            (choice.name,) if isinstance(choice, NamedChoice) else None,
            is_parallel=not choice.disable_parallel_tool_use,
        )

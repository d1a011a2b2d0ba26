"""Tools in the format of OpenAI's chat completions, including the deprecated functions."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.rules import Opaque, RequestModel, no_effect, problem, related, tag_by_type
from server.api.fields.structured import MAX_TEXT, STRICT
from server.generation.tools import TextFormat, Tool, ToolUse

MAX_TOOLS = 512
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ToolName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.:-]+$")]


def cache_control() -> Any:
    """The default of Anthropic's field `cache_control`, which tools and parts of messages have."""
    return no_effect("Every prefix is cached while there is room.")


def result_schema(alias: str | None = None) -> Any:
    """The default of a field with the schema of a tool's results."""
    return no_effect("A JSON schema of the results, which the model does not see.", alias=alias)


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: ToolName
    description: str | None = Field(None, description="The purpose of the tool, for the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments object; if omitted, the function takes no arguments."
    )
    strict: bool | None = Field(None, description=STRICT)
    return_: Opaque | None = result_schema(alias="return")

    def tool(self, path: str) -> Tool:
        """The tool for the pipeline; `path` is its path in the request."""
        parameters = NO_ARGUMENTS if self.parameters is None else self.parameters
        return Tool(self.name, self.description, parameters, bool(self.strict), path=f"{path}.parameters")


class FunctionTool(RequestModel):
    """A function as a tool."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Opaque | None = cache_control()

    def tool(self, path: str) -> Tool:
        """The tool for the pipeline; `path` is the path of this object in the request."""
        return self.function.tool(f"{path}.function")


class AnyText(RequestModel):
    """Any text."""

    type: Literal["text"]


class GrammarDefinition(RequestModel):
    """A grammar or a regular expression."""

    syntax: Literal["lark", "regex"] = Field(description="The language of the definition.")
    definition: str = Field(
        max_length=MAX_TEXT, description="The whole text matches it. Parts that cannot be enforced are reported."
    )


class GrammarFormat(RequestModel):
    """Text that matches a grammar or a regular expression."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


CustomFormat = Annotated[
    Annotated[AnyText, Tag("<text>")] | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(tag_by_type("text")),
]


class CustomDefinition(RequestModel):
    """The definition of a custom tool."""

    name: ToolName
    description: str | None = Field(None, description="The purpose of the tool, for the model.")
    format: CustomFormat | None = Field(None, description="The format of its input; by default any text.")


class CustomTool(RequestModel):
    """A tool that takes text instead of arguments."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: Opaque | None = cache_control()

    def tool(self, path: str) -> Tool:
        """The tool for the pipeline; `path` is the path of this object in the request."""
        asked, form = self.custom.format, None
        if isinstance(asked, GrammarFormat):
            grammar = asked.grammar
            form = TextFormat(grammar.syntax, grammar.definition, f"{path}.custom.format.grammar.definition")
        return Tool.custom(self.custom.name, self.custom.description, form)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(tag_by_type("function")),
]


class ToolRef(RequestModel):
    """A reference to a tool by its name."""

    name: str


class FunctionChoice(RequestModel):
    """The function to call."""

    type: Literal["function"]
    function: ToolRef

    @property
    def names(self) -> Sequence[str]:
        """The tools that may be called."""
        return (self.function.name,)


class CustomChoice(RequestModel):
    """The custom tool to call."""

    type: Literal["custom"]
    custom: ToolRef

    @property
    def names(self) -> Sequence[str]:
        """The tools that may be called."""
        return (self.custom.name,)


ToolByName = Annotated[
    Annotated[FunctionChoice, Tag("<function>")] | Annotated[CustomChoice, Tag("<custom>")],
    Discriminator(tag_by_type("function")),
]


class AllowedTools(RequestModel):
    """A subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[ToolByName] = Field(min_length=1, max_length=MAX_TOOLS, description="Tools that may be called.")


class AllowedChoice(RequestModel):
    """A choice among a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> Sequence[str]:
        """The tools that may be called."""
        return [name for one in self.allowed_tools.tools for name in one.names]


def choice_shape(value: object) -> str:
    """Tag of a union of string and object, for pydantic's Discriminator."""
    return "<string>" if isinstance(value, str) else "<object>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")]
    | Annotated[
        Annotated[FunctionChoice, Tag("<function>")]
        | Annotated[CustomChoice, Tag("<custom>")]
        | Annotated[AllowedChoice, Tag("<allowed_tools>")],
        Tag("<object>"),
        Discriminator(tag_by_type("function")),
    ],
    Discriminator(choice_shape),
]
FunctionCallChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<string>")] | Annotated[ToolRef, Tag("<object>")],
    Discriminator(choice_shape),
]


TOOL_CHOICE = (
    "`auto`, the default with tools: text or calls. `none`: text only; the model still sees the tools. "
    "`required`: calls only. A tool: a call of that tool. `allowed_tools`: calls of these tools only."
)


class HiddenTools(RequestModel):
    """Whether a model sees tools that it may not call."""

    exclude_tools_when_tool_choice_none: bool | None = Field(
        None, description="Whether the choice `none` also hides the tools from the model; vLLM's setting of this name."
    )

    def shown(self, tools: Iterable[Tool], *, are_callable: bool) -> Sequence[Mapping[str, Any]]:
        """The tools for the chat template: all of them, unless none may be called and the request hides them then."""
        if not are_callable and self.exclude_tools_when_tool_choice_none:
            return ()
        return tuple(tool.for_template() for tool in tools)


class ToolFields(HiddenTools):
    """The tools, and which of them to call."""

    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Tools that the model may call.",
        json_schema_extra=related(excludes=["functions", "ignore_eos", "use_beam_search", "beam_search"]),
    )  # fmt: skip
    tool_choice: ToolChoice | None = Field(
        None,
        description=TOOL_CHOICE,
        json_schema_extra=related(requires=["tools"], off=["none", "auto"]),
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; on by default.")
    functions: list[FunctionDefinition] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Older form of `tools`, answered by a `function_call`.",
        json_schema_extra=related(excludes=["ignore_eos", "use_beam_search", "beam_search"]),
    )  # fmt: skip
    function_call: FunctionCallChoice | None = Field(
        None, description="Older form of `tool_choice`.",
        json_schema_extra=related(requires=["functions"], off=["none", "auto"]),
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names: set[str] = set()
        for path, tool in self._offered:
            if tool.name in names:
                raise problem("invalid_value", f"Invalid '{path}': there are two tools called '{tool.name}'.", path)
            names.add(tool.name)
        for name in self._chosen or ():
            if name not in names:
                field = "function_call" if self.functions else "tool_choice"
                message = f"Invalid '{field}': there is no tool called '{name}'."
                raise problem("invalid_value", message, field)
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None: none."""
        tools = [tool for _, tool in self._offered]
        if not tools or self.tool_choice == "none" or self.function_call == "none":
            return None
        is_parallel = self.parallel_tool_calls is not False and not self.functions
        if isinstance(self.tool_choice, AllowedChoice):
            return ToolUse(tools, self.tool_choice.allowed_tools.mode, self._chosen, is_parallel)
        if self._chosen is not None:
            return ToolUse(tools, "required", self._chosen, is_parallel=False)
        return ToolUse(tools, "required" if self.tool_choice == "required" else "auto", None, is_parallel)

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees, in the form of chat templates."""
        return self.shown((tool for _, tool in self._offered), are_callable=self.tool_use is not None)

    @property
    def _chosen(self) -> Sequence[str] | None:
        """The names of the tools that may be called, if not all."""
        if isinstance(self.tool_choice, FunctionChoice | CustomChoice | AllowedChoice):
            return self.tool_choice.names
        return (self.function_call.name,) if isinstance(self.function_call, ToolRef) else None

    @cached_property
    def _offered(self) -> Sequence[tuple[str, Tool]]:
        """The tools and their paths."""
        return [
            (path := f"{name}[{index}]", tool.tool(path))
            for name, tools in (("tools", self.tools), ("functions", self.functions))
            for index, tool in enumerate(tools or ())
        ]

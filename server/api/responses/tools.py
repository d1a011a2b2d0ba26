"""Tools and the choice among them. The model sees flat names of tools in namespaces."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from server.api.fields.rules import EchoedModel, Opaque, RequestModel, hint, tag_by_type
from server.api.fields.structured import STRICT
from server.api.fields.tools import (
    MAX_TOOLS,
    NO_ARGUMENTS,
    AnyText,
    GrammarDefinition,
    ToolName,
    cache_control,
    choice_shape,
    result_schema,
)
from server.errors import InvalidRequestError
from server.generation.notices import Notice
from server.generation.tools import TextFormat, Tool, ToolUse

_BY_PROGRAMS = "Only the model calls tools."
_NOT_DEFERRED = "All tools are shown to the model from the beginning."
_SEPARATOR = "__"
"""Separates namespace and tool in the model's name of a tool."""


class _Callable(RequestModel):
    """The fields of functions and custom tools."""

    name: ToolName
    description: str | None = Field(None, description="The purpose of the tool, for the model.")
    defer_loading: bool | None = hint("Hide the tool until the model searches for it.", _NOT_DEFERRED)
    allowed_callers: list[str] | None = hint("Allowed callers of the tool.", _BY_PROGRAMS, off=[["direct"]])
    cache_control: Opaque | None = cache_control()


class FunctionTool(_Callable):
    """A function as a tool."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of the arguments object; if omitted, the function takes no arguments."
    )
    strict: bool | None = Field(None, description=STRICT)
    output_schema: Opaque | None = result_schema()
    return_: Opaque | None = result_schema(alias="return")

    def tool(self, name: str, path: str) -> Tool:
        """The tool for the pipeline, under the model's name `name`; `path` is its path in the body."""
        parameters = NO_ARGUMENTS if self.parameters is None else self.parameters
        return Tool(name, self.description, parameters, bool(self.strict), path=f"{path}.parameters")


class GrammarFormat(GrammarDefinition):
    """Text that matches a grammar or a regular expression."""

    type: Literal["grammar"]


InputFormat = Annotated[
    Annotated[AnyText, Tag("<text>")] | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(tag_by_type("text")),
]


class CustomTool(_Callable):
    """A tool that takes text instead of arguments."""

    type: Literal["custom"]
    format: InputFormat | None = Field(None, description="The format of its input; by default any text.")

    def tool(self, name: str, path: str) -> Tool:
        form = None
        if isinstance(self.format, GrammarFormat):
            form = TextFormat(self.format.syntax, self.format.definition, f"{path}.format.definition")
        return Tool.custom(name, self.description, form)


NamedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(tag_by_type("function")),
]


class Namespace(RequestModel):
    """Tools under a common name, which is returned with their calls."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(
        None, description="The purpose of all of its tools. The model sees it before each tool's description."
    )
    tools: list[NamedTool] = Field(max_length=MAX_TOOLS, fail_fast=True, description="The tools.")


class HostedTool(EchoedModel):
    """A tool that OpenAI's servers run. This server has none, so it is ignored and reported."""

    type: Literal[
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
        "computer", "computer_use_preview", "code_interpreter", "image_generation", "mcp", "tool_search", "local_shell",
        "shell", "apply_patch", "programmatic_tool_calling",
    ]  # fmt: skip

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield Notice(path, f"This server has no tool '{self.type}'.")


HOSTED = frozenset(HostedTool.model_fields["type"].annotation.__args__)  # type: ignore[union-attr]


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "function")
    return "<any hosted tool>" if isinstance(kind, str) and kind in HOSTED else f"<{kind}>"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[Namespace, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<any hosted tool>")],
    Discriminator(_tool_tag),
]


class ToolRef(RequestModel):
    """A reference to a tool by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = Field(None, description="The tool's namespace.")


AllowedTool = Annotated[
    Annotated[ToolRef, Tag("<named>")] | Annotated[HostedTool, Tag("<any hosted tool>")],
    Discriminator(lambda value: "<any hosted tool>" if _tool_tag(value) == "<any hosted tool>" else "<named>"),
]


class AllowedTools(RequestModel):
    """A subset of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS, description="Tools that may be called.")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")]
    | Annotated[
        Annotated[ToolRef, Tag("<function>")]
        | Annotated[ToolRef, Tag("<custom>")]
        | Annotated[AllowedTools, Tag("<allowed_tools>")]
        | Annotated[HostedTool, Tag("<any hosted tool>")],
        Tag("<object>"),
        Discriminator(_tool_tag),
    ],
    Discriminator(choice_shape),
]


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None


@dataclass(slots=True)
class OfferedTools:
    """All tools of a request, under the model's names."""

    tools: list[Tool] = field(default_factory=list)
    names: dict[str, QualifiedName] = field(default_factory=dict)
    """The client's names, by the model's names."""

    def add(self, tools: Sequence[FunctionTool | CustomTool | Namespace | HostedTool], path: str) -> None:
        """Add the tools at this path of the body. Raises InvalidRequestError for a name that is taken."""
        for index, tool in enumerate(tools):
            at = f"{path}[{index}]"
            match tool:
                case Namespace():
                    for number, inner in enumerate(tool.tools):
                        name = QualifiedName(inner.name, tool.name)
                        self._add(inner, name, f"{at}.tools[{number}]", tool.description)
                case FunctionTool() | CustomTool():
                    self._add(tool, QualifiedName(tool.name), at)

    def model_name(self, name: QualifiedName) -> str:
        """The model's name of a tool, even if the tool is not offered."""
        known = next((ours for ours, theirs in self.names.items() if theirs == name), None)
        return known or _flat(name)

    def named(self, refs: Sequence[ToolRef], path: str) -> Sequence[str]:
        """The model's names of these tools. Raises InvalidRequestError for one that is not offered."""
        return [self._named(ref, path) for ref in refs]

    def _add(self, tool: FunctionTool | CustomTool, name: QualifiedName, path: str, common: str | None = None) -> None:
        if name in self.names.values():
            message = f"Invalid '{path}': there are two tools called '{name.name}'."
            raise InvalidRequestError(message, param=path, code="invalid_value")
        flat = _flat(name)
        while flat in self.names:  # a name that contains the separator may equal one in a namespace
            flat += "_"
        self.names[flat] = name
        made = tool.tool(flat, path)
        described = "\n\n".join(filter(None, (common, made.description)))
        self.tools.append(replace(made, description=described or made.description))

    def _named(self, ref: ToolRef, path: str) -> str:
        wanted = QualifiedName(ref.name, ref.namespace)
        if wanted in self.names.values():
            return self.model_name(wanted)
        alike = [ours for ours, theirs in self.names.items() if ref.namespace is None and ref.name == theirs.name]
        if len(alike) != 1:
            message = f"Invalid '{path}': there is no tool called '{ref.name}'."
            raise InvalidRequestError(message, param=path, code="invalid_value")
        return alike[0]


def _flat(name: QualifiedName) -> str:
    return name.name if name.namespace is None else f"{name.namespace}{_SEPARATOR}{name.name}"


Choice = Literal["none", "auto", "required"] | ToolRef | AllowedTools | HostedTool | None


def tool_use(offer: OfferedTools, choice: Choice, *, is_parallel: bool) -> ToolUse | None:
    """The tools that the answer may call, or None. Raises InvalidRequestError if the chosen tool does not exist."""
    match choice:
        case "none":
            return None
        case HostedTool():
            raise _not_here(choice.type)
        case ToolRef():
            return ToolUse(offer.tools, "required", offer.named([choice], "tool_choice"), is_parallel=False)
        case AllowedTools():
            refs = [tool for tool in choice.tools if isinstance(tool, ToolRef)]
            if not refs and choice.mode == "required":
                raise _not_here(next(tool.type for tool in choice.tools))
            allowed = offer.named(refs, "tool_choice.tools")
            return ToolUse(offer.tools, choice.mode, allowed, is_parallel) if allowed else None
        case "required" if not offer.tools:
            message = (
                "Invalid 'tool_choice': calls are required, but the request has no tools that this server supports."
            )
            raise InvalidRequestError(message, param="tool_choice", code="invalid_value")
    mode: Literal["auto", "required"] = "required" if choice == "required" else "auto"
    return ToolUse(offer.tools, mode, None, is_parallel) if offer.tools else None


def _not_here(kind: str) -> InvalidRequestError:
    message = f"Unsupported value: 'tool_choice' requires '{kind}', which this server does not have."
    return InvalidRequestError(message, param="tool_choice", code="unsupported_value")


def as_sent(names: Mapping[str, QualifiedName], name: str) -> dict[str, str]:
    """The properties of an answer that name a tool, by the model's name."""
    qualified = names.get(name, QualifiedName(name))
    space = {} if qualified.namespace is None else {"namespace": qualified.namespace}
    return {"name": qualified.name, **space}

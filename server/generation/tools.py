"""Tools that a model may call, in the form that all APIs are converted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.lark import regex_of_lark
from server.generation.constraints.texts import Regex
from server.generation.notices import Notice

CUSTOM_INPUT = "input"
"""The single argument of the function that a custom tool, called with free text, becomes for the model."""
_SYNTAXES = {"lark": "grammar in Lark", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of a custom tool's text: a grammar or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: str
    path: str
    """Path of the definition."""

    def described(self) -> str:
        """The format as an instruction to the model."""
        return f"Its input fits this {_SYNTAXES[self.syntax]}:\n{self.definition}"

    def pattern(self) -> str:
        """The format as a regular expression. Raises ConstraintError for what cannot be enforced."""
        found = self.definition if self.syntax == "regex" else regex_of_lark(self.definition, self.path)
        Regex(found, self.path).terminal()
        return found


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Any
    """A JSON schema of the arguments object."""
    is_strict: bool = False
    """Whether a schema that cannot be enforced is refused."""
    is_custom: bool = False
    """Whether the client wants the one argument's text instead of the arguments."""
    path: str = ""
    """Path of the schema, or of a custom tool's format."""
    pattern: str | None = None
    """Regular expression for a custom tool's whole text."""
    left_out: Sequence[Notice] = ()
    """Notices of parts of the definition that are not enforced."""

    @classmethod
    def custom(cls, name: str, description: str | None, text_format: TextFormat | None = None) -> "Tool":
        """A tool that takes text. A format that cannot be enforced is described to the model and reported."""
        if text_format is None:
            return cls(name, description, _custom_parameters(), is_custom=True)
        described = "\n\n".join(filter(None, (description, text_format.described())))
        try:
            pattern = text_format.pattern()
        except ConstraintError as error:
            notice = Notice(text_format.path, f"Not enforced: {error.reason}")
            return cls(name, described, _custom_parameters(), is_custom=True, path=text_format.path, left_out=(notice,))
        return cls(name, described, _custom_parameters(), is_custom=True, path=text_format.path, pattern=pattern)

    @property
    def schema(self) -> Any:
        """The schema that the arguments must fit."""
        return self.parameters if self.pattern is None else _custom_parameters(pattern=f"^(?:{self.pattern})$")

    def for_template(self) -> Mapping[str, Any]:
        """The tool in the form of chat templates."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


def _custom_parameters(**of_text: str) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", **of_text}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how they may be called."""

    tools: Sequence[Tool]
    mode: Literal["auto", "required"] = "auto"
    """auto: text, calls or both. required: at least one call, and nothing else."""
    allowed: Sequence[str] | None = None
    """Names of the tools that may be called; None: all. The model sees all tools."""
    is_parallel: bool = True
    """Whether more than one call is allowed."""

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]

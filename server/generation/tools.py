"""Tools that a model may call, and how: the one form that the pipeline knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.generation.constraints.fragment import ConstraintError
from server.generation.constraints.lark import regex_of_lark
from server.generation.constraints.texts import Regex
from server.generation.notices import Notice

CUSTOM_INPUT = "input"
"""A custom tool is called with free text; for the model it is a function with this one argument."""
_SYNTAXES = {"lark": "grammar in Lark", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class TextForm:
    """What a custom tool's text is to fit as a whole."""

    syntax: Literal["lark", "regex"]
    definition: str
    path: str
    """Of the definition."""

    def described(self) -> str:
        """For the model."""
        return f"Its input fits this {_SYNTAXES[self.syntax]}:\n{self.definition}"

    def pattern(self) -> str:
        """The same as a regular expression. Raises ConstraintError for what cannot be enforced."""
        found = self.definition if self.syntax == "regex" else regex_of_lark(self.definition, self.path)
        Regex(found, self.path).terminal()
        return found


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Any
    """A JSON schema of the object of its arguments."""
    is_strict: bool = False
    """Whether a schema that cannot be enforced is refused."""
    is_custom: bool = False
    """Whether the client wants the one argument's text in place of the arguments."""
    path: str = ""
    """Of the schema, or of a custom tool's form."""
    pattern: str | None = None
    """What a custom tool's text fits as a whole."""
    left_out: Sequence[Notice] = ()
    """What of the definition is not enforced."""

    @classmethod
    def custom(cls, name: str, description: str | None, form: TextForm | None = None) -> "Tool":
        """One that takes text. A form that cannot be enforced is told to the model and reported."""
        if form is None:
            return cls(name, description, _custom_parameters(), is_custom=True)
        described = "\n\n".join(filter(None, (description, form.described())))
        try:
            pattern = form.pattern()
        except ConstraintError as error:
            notice = Notice(form.path, f"Not enforced: {error.reason}")
            return cls(name, described, _custom_parameters(), is_custom=True, path=form.path, left_out=(notice,))
        return cls(name, described, _custom_parameters(), is_custom=True, path=form.path, pattern=pattern)

    @property
    def schema(self) -> Any:
        """What the arguments are held to."""
        return self.parameters if self.pattern is None else _custom_parameters(pattern=f"^(?:{self.pattern})$")

    def for_template(self) -> Mapping[str, Any]:
        """As chat templates take it."""
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
    """What an answer may call."""

    tools: Sequence[Tool]
    mode: Literal["auto", "required"] = "auto"
    """auto: text, or calls, or both. required: at least one call, and nothing else."""
    allowed: Sequence[str] | None = None
    """Names of those that may be called; None: all. The model is told of all."""
    is_parallel: bool = True
    """Whether there may be more than one call."""

    @property
    def callable(self) -> Sequence[Tool]:
        """Those that may be called."""
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]

"""Tools that a model may call, and how: the one form that the pipeline knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

CUSTOM_INPUT = "input"
"""A custom tool is called with free text; for the model it is a function with this one argument."""
_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


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
    """Of the schema."""

    @classmethod
    def custom(cls, name: str, description: str | None) -> "Tool":
        """One that takes free text."""
        return cls(name, description, _CUSTOM_PARAMETERS, is_strict=True, is_custom=True)

    def for_template(self) -> Mapping[str, Any]:
        """As chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


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

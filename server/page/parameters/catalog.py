"""The fields of a chat request, from what the server says of them. No I/O in here."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from server.page.described import Described, Fields, Schema

Kind = Literal["boolean", "choice", "integer", "number", "text", "texts", "json"]

OF_THE_PAGE = frozenset(
    {
        *("messages", "model", "stream", "stream_options", "n", "best_of"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_token_sources"),
        *("add_generation_prompt", "continue_final_message", "use_beam_search", "beam_search"),
        *("length_penalty", "early_stopping", "functions", "function_call", "user", "safety_identifier"),
    }
)
"""What the page itself says in a request, or shows in views of their own."""
_NO_BOUND = 2**31 - 1
"""Whoever says so means that the number has to fit somewhere, which nobody asks about."""
_MOST_EXACT = 2**53
_FIRST = ("temperature", "top_p", "top_k", "min_p", "max_completion_tokens", "max_tokens", "seed", "stop")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request."""

    name: str
    kind: Kind
    description: str = ""
    default: Any = None
    minimum: float | None = None
    """Where it says nothing of bounds, there are none."""
    maximum: float | None = None
    choices: tuple[Any, ...] = ()
    """Of a `choice`."""
    excludes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    is_hint: bool = False
    """Left out, and reported, where it means nothing."""

    @property
    def range(self) -> str:
        """In words; empty without bounds."""
        low = "" if (self.minimum or 0) <= -_NO_BOUND else _number(self.minimum)
        high = "" if (self.maximum or 0) >= _NO_BOUND else _number(self.maximum)
        if low and high:
            return f"{low} to {high}"
        return f"at least {low}" if low else f"at most {high}" if high else ""

    def shows(self, value: Any) -> bool:
        """Whether a control of its kind shows this value as it is. Browsers round whole numbers that are too large."""
        match self.kind:
            case "boolean":
                return isinstance(value, bool)
            case "choice":
                return value in self.choices
            case "integer" | "number":
                return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_EXACT
            case "text":
                return isinstance(value, str)
            case "texts":
                return isinstance(value, list) and all(isinstance(line, str) for line in value)
            case _:
                return True

    def parse(self, text: str) -> Any:
        """The value that was typed. Raises ValueError, with a message for whoever typed it."""
        if self.kind == "texts":
            return [line for line in text.splitlines() if line]
        if self.kind != "json":
            return text
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"This is no JSON: {error}") from None

    def format(self, value: Any) -> str:
        """The reverse."""
        if self.kind == "texts" and isinstance(value, list):
            return "\n".join(str(line) for line in value)
        return msgspec.json.format(msgspec.json.encode(value)).decode() if self.kind == "json" else str(value)


def has_fields(described: Fields, names: Iterable[str]) -> bool:
    """Whether the server does something with all of these. `described` is what it says of them.

    A server that says nothing is taken for one that knows what OpenAI's does.
    """
    if not described:
        return _OPENAI_NAMES.issuperset(names)
    return all(name in described and described[name].is_known for name in names)


def fields_of(described: Fields, also: Collection[str] = ()) -> dict[str, Field]:
    """Those that can be set, the usual ones first. `described` is what the server says of them.

    `also` has names of fields of the page that can be set nevertheless.

    A server that says nothing is taken for one that knows what OpenAI's does.
    """
    hidden = OF_THE_PAGE.difference(also)
    known = {name: one for name, one in described.items() if one.is_known}
    found = {name: _field_of(name, one) for name, one in known.items() if name not in hidden} or OPENAI
    order = {name: at for at, name in enumerate(_FIRST)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def conflicts(name: str, fields: Mapping[str, Field], chosen: Iterable[str]) -> list[str]:
    """Which of the chosen fields this one cannot go together with."""
    excluded = fields[name].excludes if name in fields else ()
    return [other for other in chosen if other != name and other in excluded]


def _field_of(name: str, described: Described) -> Field:
    alternatives = described.values.alternatives
    one = alternatives[0] if len(alternatives) == 1 else Schema()
    return Field(
        name,
        _kind_of(one),
        description=described.description or "",
        default=described.default,
        minimum=one.lower,
        maximum=one.upper,
        choices=one.enum,
        excludes=described.excludes,
        requires=described.requires,
        is_hint=described.support == "hint",
    )


def _kind_of(schema: Schema) -> Kind:
    if schema.enum:
        return "choice"
    if schema.type == "array":
        return "texts" if schema.items == {"type": "string"} else "json"
    kinds: Mapping[Any, Kind] = {"boolean": "boolean", "integer": "integer", "number": "number", "string": "text"}
    return kinds.get(schema.type, "json")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


OPENAI: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("temperature", "number", "0 picks the most probable token.", 1, 0, 2),
        Field("top_p", "number", "Draws from the most probable tokens of this mass.", 1, 0, 1),
        Field("max_completion_tokens", "integer", "Most tokens of an answer.", minimum=1),
        Field("max_tokens", "integer", "Older name of max_completion_tokens.", minimum=1),
        Field("seed", "integer", "The same seed gives the same answer, as far as the server can."),
        Field("stop", "texts", "Texts, one a line, before which an answer ends."),
        Field("presence_penalty", "number", "Against tokens that were there.", 0, -2, 2),
        Field("frequency_penalty", "number", "Against tokens, by how often they were there.", 0, -2, 2),
        Field("reasoning_effort", "choice", "How much to think first.", choices=("minimal", "low", "medium", "high")),
        Field("response_format", "json", 'Such as {"type": "json_object"}.'),
        Field("tools", "json", "What the model may call."),
        Field("tool_choice", "json", 'Such as "auto".'),
    )
}
"""Where a server does not tell."""
_OPENAI_NAMES = frozenset({*OPENAI, "n", "logprobs", "top_logprobs"})

"""A conversation as a tree of turns, each of which may have several versions. No I/O."""

import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

import msgspec

from server.page.answer import Answer

Role = Literal["user", "assistant", "tool"]
_TITLE_LENGTH = 60
_MOST_TURNS = 5_000
_MOST_CHARACTERS = 5_000_000
"""Roughly a browser's storage limit for all conversations together."""


class PictureName(msgspec.Struct, frozen=True):
    """A picture of a message, without its content."""

    id: str
    name: str
    num_bytes: int


_NONE: Mapping[str, str] = MappingProxyType({})


class Turn(Answer, kw_only=True, omit_defaults=True):
    """A message of the user, of the assistant, or of a tool."""

    id: int
    """Microseconds since 1970 or later: unique across tabs, and larger than all earlier turns' ids."""
    parent: int | None = None
    role: Role
    chosen: int | None = None
    """Id of the child that is shown."""
    tool_call_id: str | None = None
    """The call that a tool's turn answers."""
    pictures: Sequence[PictureName] = ()
    """Pictures before the text."""
    request: dict[str, Any] | None = None
    """The answer's request without messages, including its seed."""
    system: str | None = None
    """The system message that an answer was requested with; None: use the conversation's."""
    prefix: str | None = None
    """Given text that the answer starts with, if it branches off another answer."""
    seconds: float | None = None
    """Seconds from the request to the end; None until the answer has ended."""

    def request_body(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The request that produces (and reproduces) this answer to `messages`."""
        body = {**(self.request or {}), "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.prefix is not None:
            body["messages"].append({"role": "assistant", "content": self.prefix})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def message(self, pictures: Mapping[str, str] = _NONE) -> dict[str, Any]:
        """The turn as a message of a chat request, with these data URLs of pictures, by id."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        urls = [pictures[picture.id] for picture in self.pictures if picture.id in pictures]
        if urls:
            text = [{"type": "text", "text": self.content}] if self.content else []
            message["content"] = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), *text]
        if self.tool_calls:
            message |= {"tool_calls": self.tool_calls, "content": self.content or None}
            if self.reasoning:
                # Only with calls: the model continues this reasoning once it has their results.
                message["reasoning_content"] = self.reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tree of turns, of which one path from root to leaf is shown."""

    id: str
    title: str = ""
    updated: float = 0.0
    """Unix time in seconds."""
    system: str = ""
    turns: dict[int, Turn] = {}
    first: int | None = None
    """Id of the root turn that is shown."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a stored conversation. Raises ValueError if it is invalid."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if len(found.turns) > 2 * _MOST_TURNS:
            raise ValueError(f"it has {len(found.turns):,} turns; at most {2 * _MOST_TURNS:,} are supported")
        for number, turn in found.turns.items():
            if turn.id != number:
                raise ValueError(f"turn {number} has the id {turn.id}")
            if turn.parent is not None and (turn.parent not in found.turns or turn.parent >= number):
                raise ValueError(f"turn {number} has the parent {turn.parent}, which is not an earlier turn")
        chosen = [(None, found.first), *((turn.id, turn.chosen) for turn in found.turns.values())]
        for parent, child in chosen:
            if child is not None and (child not in found.turns or found.turns[child].parent != parent):
                raise ValueError(f"turn {child} is chosen for turn {parent}, which is not its parent")
        return found

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def is_full(self) -> bool:
        """Whether the conversation has reached the limit of the browser or the page."""
        num_characters = sum(len(turn.content) + len(turn.reasoning) for turn in self.turns.values())
        return len(self.turns) >= _MOST_TURNS or num_characters >= _MOST_CHARACTERS

    def path(self) -> list[Turn]:
        """The shown turns, from the root."""
        turns = []
        at = self.first
        while at is not None and at in self.turns:
            turns.append(self.turns[at])
            at = self.turns[at].chosen
        return turns

    def path_to(self, turn: Turn | None) -> list[Turn]:
        """The turns from the root to this one, included; empty for None."""
        turns: list[Turn] = []
        while turn is not None:
            turns.append(turn)
            turn = None if turn.parent is None else self.turns[turn.parent]
        return turns[::-1]

    def merge(self, other: Self) -> None:
        """Add another tab's turns without changing which turns are shown."""
        for number, turn in other.turns.items():
            self.turns.setdefault(number, turn)

    def versions(self, turn: Turn) -> list[Turn]:
        """All versions of this turn, the oldest first."""
        return [other for _, other in sorted(self.turns.items()) if other.parent == turn.parent]

    def add(self, parent: Turn | None, role: Role, content: str = "", **properties: Any) -> Turn:
        """Add a turn after `parent` (None: a new root), and show it."""
        turn = Turn(
            id=max(time.time_ns() // 1000, max(self.turns, default=0) + 1),
            parent=None if parent is None else parent.id,
            role=role,
            content=content,
            **properties,
        )
        self.turns[turn.id] = turn
        self.choose(turn)
        if not self.title and role == "user":
            self.title = title_of(content) or "Image"
        return turn

    def choose(self, turn: Turn) -> None:
        """Select this version of a turn to be shown."""
        if turn.parent is None:
            self.first = turn.id
        else:
            self.turns[turn.parent].chosen = turn.id

    def open_calls(self) -> list[dict[str, Any]]:
        """Tool calls at the end of the shown path that have no result yet."""
        path = self.path()
        answered = set()
        while path and path[-1].role == "tool":
            answered.add(path.pop().tool_call_id)
        return [call for call in path[-1].tool_calls if call.get("id") not in answered] if path else []

    def lacks_pictures(self, held: Collection[str]) -> bool:
        """Whether a picture of the shown path is not among those with these ids."""
        return any(picture.id not in held for turn in self.path() for picture in turn.pictures)

    def messages_before(self, turn: Turn, pictures: Mapping[str, str] = _NONE) -> list[dict[str, Any]]:
        """The messages that precede this turn, with the system message; `pictures` are data URLs by id."""
        before = self.path_to(None if turn.parent is None else self.turns[turn.parent])
        system = self.system if turn.system is None else turn.system
        start = [{"role": "system", "content": system}] if system else []
        return [*start, *(one.message(pictures) for one in before)]

    def to_markdown(self) -> str:
        """The shown path as a Markdown document."""
        parts = [f"# {self.title or 'Conversation'}"]
        if self.system:
            parts.append(f"**System**\n\n{self.system}")
        for turn in self.path():
            named = "".join(f"*{picture.name}*\n\n" for picture in turn.pictures)
            parts.append(f"**{turn.role.capitalize()}**\n\n{named}{turn.content}")
            parts += [f"```json\n{msgspec.json.encode(call).decode()}\n```" for call in turn.tool_calls]
        return "\n\n".join(parts) + "\n"

    def to_messages(self, request: Mapping[str, Any]) -> str:
        """The shown path as the JSON body of a request that continues it, without pictures."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        body = {**request, "messages": [*start, *(turn.message() for turn in self.path())]}
        return msgspec.json.format(msgspec.json.encode(body)).decode()


def name_of_call(call: Mapping[str, Any]) -> str:
    """The name of the called tool."""
    return str((call.get("function") or call.get("custom") or {}).get("name") or "the tool")


def title_of(text: str) -> str:
    """The first line, shortened between words."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    if len(line) <= _TITLE_LENGTH:
        return line
    return line[:_TITLE_LENGTH].rpartition(" ")[0] + " …" if " " in line[:_TITLE_LENGTH] else line[:_TITLE_LENGTH] + "…"

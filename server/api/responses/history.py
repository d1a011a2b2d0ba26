"""From the items of a conversation to messages as chat templates take them."""

from collections.abc import Iterable, Mapping
from typing import Any

from server.api.fields.messages import arguments_of
from server.api.responses.items import (
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    HostedItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    text_of,
)
from server.api.responses.tools import Offer, QualifiedName
from server.errors import InvalidRequestError, shorten
from server.generation.tools import CUSTOM_INPUT

_SUMMARY = "Summary of the conversation so far:\n\n{summary}"


class History:
    """Messages, made of items in their order.

    What the assistant thought, said and called in one turn is one message, as it is in chat completions.
    """

    def __init__(self, offer: Offer) -> None:
        """`offer` knows what the model calls the tools that were called."""
        self.messages: list[dict[str, Any]] = []
        self.paths: dict[str, str] = {}
        """Where the client finds parts of messages that a template may not show."""
        self._offer = offer
        self._called: set[str] = set()
        """The ids of the calls so far."""
        self._is_open = False
        """Whether the last message is the assistant's, with room for more."""

    def add_text(self, role: str, text: str) -> None:
        """A message of somebody else than the assistant."""
        self.messages.append({"role": role, "content": text})
        self._is_open = False

    def add(self, items: Iterable[tuple[str, InputItem]]) -> None:
        """Add the next items, given with their paths. What is no part of a conversation is passed over.

        Raises InvalidRequestError for the result of a call that was not made before.
        """
        for path, item in items:
            match item:
                case MessageItem(role="assistant"):
                    self._say(text_of(item.content))
                case MessageItem():
                    self.add_text(item.role, text_of(item.content))
                case ReasoningItem():
                    self._think(item.text, path)
                case FunctionCallItem():
                    self._call(item, arguments_of(item.arguments))
                case CustomCallItem():
                    self._call(item, {CUSTOM_INPUT: item.input})
                case HostedItem():
                    self._called.add(item.call_id or "")
                case CallOutputItem():
                    self._check_called(item, path)
                    message = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                    self.messages.append(message)
                    self._is_open = False
                case CompactionItem():
                    self.add_text("user", _SUMMARY.format(summary=item.summary))

    def _say(self, text: str) -> None:
        message = self._turn(has="content")
        message["content"] = text

    def _think(self, text: str, path: str) -> None:
        if text:
            message = self._turn(has="reasoning_content")
            message["reasoning_content"] = text
            self.paths[f"messages[{len(self.messages) - 1}].reasoning_content"] = path

    def _check_called(self, item: CallOutputItem, path: str) -> None:
        if item.call_id not in self._called:
            kind = item.type.removesuffix("_call_output").replace("_", " ")
            message = f"No tool call found for {kind} call output with call_id {shorten(item.call_id)}."
            raise InvalidRequestError(message, param=f"{path}.call_id", code="invalid_value")

    def _call(self, item: FunctionCallItem | CustomCallItem, arguments: object) -> None:
        self._called.add(item.call_id)
        name = self._offer.model_name(QualifiedName(item.name, item.namespace))
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn(has="").setdefault("tool_calls", []).append(call)

    def _turn(self, has: str) -> dict[str, Any]:
        """The assistant's message that goes on with a part of this kind; what comes before others begins a new one."""
        parts = ("reasoning_content", "content", "tool_calls")
        later = parts[parts.index(has) :] if has else ()
        if not self._is_open or any(self.messages[-1].get(part) for part in later):
            self.messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]


def as_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item as it is stored and listed: with its type and a status, and with its content in parts."""
    kind = item.get("type") or "message"
    stored = {**item, "type": kind}
    if kind == "message" and isinstance(item["content"], str):
        of_assistant = {"type": "output_text", "annotations": []}
        part = of_assistant if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [{**part, "text": item["content"]}]
    if kind != "reasoning":
        stored["status"] = item.get("status") or "completed"
    return stored

"""Converts Anthropic's messages to messages for a chat template."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.messages.blocks import ImageBlock, InputMessage, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from server.errors import shorten
from server.generation.notices import Notice
from server.generation.sent_images import SentImages


@dataclass(slots=True)
class History:
    """A conversation for a chat template, built message by message."""

    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """The messages for the template."""
    paths: dict[str, str] = field(default_factory=dict)
    """Paths in the client's request, by paths in these messages."""
    tools: Collection[str] = ()
    """The names of all tools."""
    loaded: set[str] = field(default_factory=set)
    """The names of tools that results have loaded."""
    notices: list[Notice] = field(default_factory=list)
    """Notices of ignored parts."""
    images: SentImages = field(default_factory=SentImages)
    """The images of all messages."""
    _calls: Sequence[str] = field(default=(), init=False)
    """Ids of the calls of the last message that has any."""

    @classmethod
    def of(cls, system: str, messages: Sequence[InputMessage], tools: Collection[str]) -> "History":
        """The history of a request with tools of these names. Raises InvalidRequestError for an unreadable image."""
        history = cls(tools=tools)
        if system:
            history.messages.append({"role": "system", "content": system})
        for index, message in enumerate(messages):
            if message.role == "assistant":
                history._add_assistant(message, f"messages[{index}]")
            else:
                history._add_other(message, f"messages[{index}]")
        return history

    def _add_assistant(self, message: InputMessage, path: str) -> None:
        thoughts = [
            (block.thought, f"{path}.content[{place}].thinking")
            for place, block in enumerate(message.blocks)
            if isinstance(block, ThinkingBlock) and block.thought
        ]
        calls = [block for block in message.blocks if isinstance(block, ToolUseBlock)]
        shown: dict[str, Any] = {"role": "assistant"}
        if thoughts:
            shown["reasoning_content"] = "\n".join(thought for thought, _ in thoughts)
            self.paths[f"messages[{len(self.messages)}].reasoning_content"] = thoughts[0][1]
        if calls:
            shown["tool_calls"] = [_call(call) for call in calls]
            self._calls = [call.id for call in calls]
        self.messages.append({**shown, "content": message.text})

    def _add_other(self, message: InputMessage, path: str) -> None:
        """Add results before texts, because templates expect results right after calls. Results are in the order of the
        calls, because not all templates show which result belongs to which call.
        """
        results = [
            (block, f"{path}.content[{place}]")
            for place, block in enumerate(message.blocks)
            if isinstance(block, ToolResultBlock)
        ]
        for result, at in results:
            self._load(result, at)
        for result, at in sorted(results, key=lambda pair: self._place(pair[0])):
            text = result.text(self.tools, self.images, at)
            self.messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
        if not results or any(isinstance(block, TextBlock | ImageBlock) for block in message.blocks):
            self.messages.append({"role": message.role, "content": message.shown(self.images, path)})

    def _load(self, result: ToolResultBlock, path: str) -> None:
        for place, name in result.found:
            if name in self.tools:
                self.loaded.add(name)
            else:
                reason = f"There is no tool called '{shorten(name)}'."
                self.notices.append(Notice(f"{path}.content[{place}].tool_name", reason))

    def _place(self, result: ToolResultBlock) -> int:
        return self._calls.index(result.tool_use_id) if result.tool_use_id in self._calls else len(self._calls)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}

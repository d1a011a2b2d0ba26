"""The items of a response's output, and the events that tell of them, from what the model does.

An item is made of pieces. Whole and streamed answers are made here alike, so that they cannot differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import to_builtins

from server.api.openai.logprobs import chat_logprobs
from server.api.responses.opaque import sealed
from server.api.responses.tools import QualifiedName, as_sent
from server.generation.events import Delta, OutputToken, ReasoningDelta, TextDelta, ToolCallBegin, ToolCallDelta
from server.text.tokenizer import Tokenizer

Told = dict[str, Any]
"""An event as it is told, without its number."""
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How the output is told."""

    names: Mapping[str, QualifiedName]
    """Of the tools for the client, by the model's."""
    logprobs: bool
    summarizes: bool
    """Whether reasoning is told as a summary."""
    seals: bool
    """Whether it is told sealed, too."""


class Output:
    """The output of one response as it grows."""

    def __init__(self, response_id: str, form: OutputForm, tokenizer: Tokenizer) -> None:
        self.items: list[Item] = []
        """Those that have ended."""
        self._suffix = response_id.partition("_")[2]
        self._form = form
        self._tokenizer = tokenizer
        self._open: _OpenItem | None = None

    def add(self, event: Delta) -> Iterator[Told]:
        """What the model does next."""
        match event:
            case TextDelta(text="") if type(self._open) is not _Message:
                pass  # tokens of a call's end, or the one that ends an answer of nothing
            case TextDelta():
                yield from self._in(_Message)
                yield from self._piece(event.text, self._logprobs(event.tokens))
            case ReasoningDelta():
                yield from self._in(_Summary if self._form.summarizes else _Reasoning)
                yield from self._piece(event.text)
            case ToolCallBegin():
                yield from self.end()
                kind = _CustomCall if event.is_custom else _FunctionCall
                yield from self._begin(kind, call_id=event.id, **as_sent(self._form.names, event.name))
            case ToolCallDelta():
                yield from self._piece(event.text)

    def end(self, status: str = "completed") -> Iterator[Told]:
        """The item that is open has ended, with this status."""
        if self._open is None:
            return
        ended, self._open = self._open, None
        yield from ended.end(status)
        item = ended.item(status)
        self.items.append(item)
        yield {"type": "response.output_item.done", "output_index": ended.index, "item": item}

    def end_all(self, *, is_cut: bool) -> Iterator[Told]:
        """The model has ended, or was cut off. An answer of nothing is an empty message."""
        if not self.items and self._open is None:
            yield from self._begin(_Message)
        yield from self.end("incomplete" if is_cut else "completed")

    def _in(self, kind: "type[_OpenItem]") -> Iterator[Told]:
        """What is next is part of such an item, and begins one if none is open."""
        if type(self._open) is not kind:
            yield from self.end()
            yield from self._begin(kind)

    def _begin(self, kind: "type[_OpenItem]", **fields: Any) -> Iterator[Told]:
        index = len(self.items)
        seals = {"seals": True} if self._form.seals and issubclass(kind, _Reasoning) else {}
        self._open = kind(f"{kind.prefix}_{self._suffix}{index:02x}", index, {**fields, **seals})
        yield {"type": "response.output_item.added", "output_index": index, "item": self._open.item("in_progress")}
        yield from self._open.begin()

    def _piece(self, text: str, logprobs: Sequence[Told] = ()) -> Iterator[Told]:
        assert self._open is not None, "an item was begun"
        yield self._open.piece(text, logprobs)

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Sequence[Told]:
        if not self._form.logprobs:
            return ()
        content: Sequence[Told] = to_builtins(chat_logprobs(self._tokenizer, tokens).content)
        return content


class _OpenItem:
    """An item while it is made: added, pieces, done."""

    prefix: ClassVar[str]
    event: ClassVar[str]
    """What its pieces are called."""
    key: ClassVar[str]
    """Of all of its text, when it has ended."""

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any]) -> None:
        self.id = item_id
        self.index = index
        self.fields = fields
        self.text = ""
        self._pieces: list[str] = []

    def item(self, status: str) -> Item:
        """As it is now."""
        raise NotImplementedError

    def begin(self) -> Iterator[Told]:
        """What is told after it was added."""
        yield from ()

    def piece(self, text: str, logprobs: Sequence[Told]) -> Told:
        """The next piece of its text."""
        self._pieces.append(text)
        return self.at(f"{self.event}.delta", delta=text)

    def end(self, status: str) -> Iterator[Told]:
        """What is told before it is done."""
        self.text = "".join(self._pieces)
        yield self.at(f"{self.event}.done", **{self.key: self.text})

    def at(self, kind: str, **fields: Any) -> Told:
        """An event of this item."""
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}


class _FunctionCall(_OpenItem):
    prefix, event, key = "fc", "response.function_call_arguments", "arguments"

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "function_call", "status": status, **self.fields, self.key: self.text}

    def end(self, status: str) -> Iterator[Told]:
        for event in super().end(status):
            yield {**event, "name": self.fields["name"]}


class _CustomCall(_OpenItem):
    prefix, event, key = "ctc", "response.custom_tool_call_input", "input"

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "custom_tool_call", "status": status, **self.fields, self.key: self.text}


class _PartItem(_OpenItem):
    """An item with one part, which holds its text."""

    key = "text"
    part_event: ClassVar[str] = "response.content_part"
    part_index: ClassVar[str] = "content_index"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any]) -> None:
        super().__init__(item_id, index, fields)
        self._has_part = False

    def part(self) -> Told:
        """The part as it is now."""
        raise NotImplementedError

    def parts(self) -> list[Told]:
        """The part, if there is one yet."""
        return [self.part()] if self._has_part else []

    def begin(self) -> Iterator[Told]:
        self._has_part = True
        yield self.at(f"{self.part_event}.added", part=self.part())

    def end(self, status: str) -> Iterator[Told]:
        yield from super().end(status)
        yield self.at(f"{self.part_event}.done", part=self.part())

    def at(self, kind: str, **fields: Any) -> Told:
        return super().at(kind, **{self.part_index: 0}, **fields)


class _Message(_PartItem):
    prefix, event = "msg", "response.output_text"

    def __init__(self, item_id: str, index: int, fields: Mapping[str, Any]) -> None:
        super().__init__(item_id, index, fields)
        self._logprobs: list[Told] = []

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": self.parts()}

    def part(self) -> Told:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def piece(self, text: str, logprobs: Sequence[Told]) -> Told:
        self._logprobs += logprobs
        return {**super().piece(text, ()), "logprobs": list(logprobs)}

    def end(self, status: str) -> Iterator[Told]:
        done, *others = super().end(status)
        yield {**done, "logprobs": list(self._logprobs)}
        yield from others


class _Reasoning(_PartItem):
    prefix, event = "rs", "response.reasoning_text"

    def item(self, status: str) -> Item:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": self.parts(),
            **self._seal(status),
        }

    def part(self) -> Told:
        return {"type": "reasoning_text", "text": self.text}

    def _seal(self, status: str) -> Item:
        if not self.fields.get("seals"):
            return {}
        return {"encrypted_content": "" if status == "in_progress" else sealed(reasoning=self.text)}


class _Summary(_Reasoning):
    event = "response.reasoning_summary_text"
    part_event = "response.reasoning_summary_part"
    part_index = "summary_index"

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": self.parts(), **self._seal(status)}

    def part(self) -> Told:
        return {"type": "summary_text", "text": self.text}

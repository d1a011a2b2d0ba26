"""A message, whole or as the events of a stream. What is made here is what the models of objects.py describe."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from server.api.generation_api import Answering
from server.api.messages.arguments import as_written
from server.api.messages.errors import error_frame
from server.api.messages.intent import MessageOptions
from server.api.messages.signature import signature_of
from server.api.openai.answer import score_of
from server.errors import ApiError
from server.generation.events import (
    ChoiceEnd,
    Event,
    FinishedBy,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    Usage,
)
from server.generation.notices import as_warnings
from server.generation.result import WholeCall, WholeChoice, WholePart, WholeReasoning, WholeText
from server.http.ascii_json import ascii_json


def _event(kind: str, **rest: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + ascii_json({"type": kind, **rest}) + b"\n\n"


class MessagesAnswer:
    """Implements Answer."""

    keep_alive = _event("ping")

    def __init__(self, answering: Answering, options: MessageOptions) -> None:
        self._answering = answering
        self._run = answering.run
        self._options = options
        self._blocks = _Blocks(hides_thinking=options.hides_thinking)
        self._has_begun = False

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """See Answer."""
        (choice,) = choices
        content = [self._block(part) for part in choice.parts]
        end = self._end(choice.finish_reason, choice.stop_reason)
        return msgspec.json.encode({**self._message(content), **end, **score_of(choice.beam)})

    def frame(self, event: Event) -> bytes:
        """See Answer."""
        head = b"" if self._has_begun else self._begin()
        match event:
            case ChoiceEnd():
                delta = {**self._end(event.reason, event.stop_reason), **score_of(event.beam)}
                usage = _usage(self._run.usage)
                return head + self._blocks.close() + _event("message_delta", delta=delta, usage=usage)
            case TextDelta():
                return head + self._blocks.text(event.text)
            case ReasoningDelta():
                return head + self._blocks.thinking(event.text)
            case ToolCallBegin():
                return head + self._blocks.call(event.id, event.name)
            case ToolCallDelta():
                return head + self._blocks.arguments(event.text)

    def end(self) -> bytes:
        """See Answer."""
        return _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return error_frame(error, self._answering.request_id)

    def _begin(self) -> bytes:
        self._has_begun = True
        nothing = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
        return _event("message_start", message={**self._message([]), **nothing}) + self.keep_alive

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """All but its end."""
        plan = self._run.plan
        return {
            "id": plan.id,
            "type": "message",
            "role": "assistant",
            "model": plan.model,
            "content": content,
            "usage": _usage(self._run.usage),
            "system_fingerprint": self._answering.fingerprint,
            "seed": plan.seed,
            **({} if plan.verification == "match" else {"verification": plan.verification}),
            **as_warnings(plan.notices),
        }

    def _block(self, part: WholePart) -> dict[str, Any]:
        match part:
            case WholeText():
                return _text_block(part.text)
            case WholeReasoning():
                hidden = part.text if self._options.hides_thinking else ""
                return _thinking_block("" if hidden else part.text, signature_of(hidden))
            case WholeCall():
                return _call_block(part.id, part.name, as_written(part.text or "{}"))

    def _end(self, reason: FinishedBy, stop: str | int | None) -> dict[str, Any]:
        sequence = self._answering.tokenizer.token_text(stop) if isinstance(stop, int) else stop
        return {
            "stop_reason": self._stop_reason(reason, sequence),
            "stop_sequence": sequence,
            "stop_details": None,
            "container": None,
        }

    def _stop_reason(self, reason: FinishedBy, sequence: str | None) -> str:
        if reason == "length":
            return "model_context_window_exceeded" if self._options.is_cut_by_context else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason == "tool_calls" else "end_turn"


class _Blocks:
    """The blocks of a stream, one after the other."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._hidden: list[str] = []
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._index = -1

    def text(self, piece: str) -> bytes:
        """Goes on with a text, or begins one."""
        if not piece:
            return b""
        head = b"" if self._open == "text" else self._begin("text", _text_block(""))
        return head + self._delta("text_delta", text=piece)

    def thinking(self, piece: str) -> bytes:
        """Goes on with thinking, or begins it."""
        if not piece:
            return b""
        head = b"" if self._open == "thinking" else self._begin("thinking", _thinking_block("", ""))
        if self._hides_thinking:
            self._hidden.append(piece)
            return head
        return head + self._delta("thinking_delta", thinking=piece)

    def call(self, id_: str, name: str) -> bytes:
        """Begins a call."""
        return self._begin("tool_use", _call_block(id_, name, {}))

    def arguments(self, piece: str) -> bytes:
        """Goes on with it."""
        return self._delta("input_json_delta", partial_json=piece)

    def close(self) -> bytes:
        """Ends the block that is open, if one is."""
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta("signature_delta", signature=signature_of("".join(self._hidden)))
            self._hidden.clear()
        self._open = None
        return signature + _event("content_block_stop", index=self._index)

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]) -> bytes:
        before = self.close()
        self._open = kind
        self._index += 1
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **piece: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **piece})


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def _thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _call_block(id_: str, name: str, arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _usage(usage: Usage) -> dict[str, Any]:
    """A MessageUsage of objects.py."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_written_tokens,
        "cache_creation": {
            "ephemeral_1h_input_tokens": 0,
            "ephemeral_5m_input_tokens": usage.cache_written_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }

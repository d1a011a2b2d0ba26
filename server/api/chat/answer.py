"""A chat completion, whole or in chunks."""

from collections.abc import Sequence
from typing import Any

from server.api.chat.intent import ChatOptions
from server.api.generation_api import Answering
from server.api.openai.answer import OpenAIAnswer, StreamUsage, score_of, tokens_of
from server.api.openai.logprobs import chat_logprobs, prompt_logprobs
from server.generation.events import (
    ChoiceEnd,
    Delta,
    Event,
    FinishedBy,
    OutputToken,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from server.generation.result import WholeCall, WholeChoice
from server.http.ascii_json import ascii_json


class ChatAnswer(OpenAIAnswer):
    """Implements Answer. A stream has the role of each choice, its text and its end."""

    def __init__(self, answering: Answering, options: ChatOptions) -> None:
        kind = "chat.completion.chunk" if answering.run.plan.stream else "chat.completion"
        usage = StreamUsage(options.include_usage, options.continuous_usage)
        super().__init__(answering, usage, object=kind, service_tier="default")
        self._options = options
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """See Answer."""
        (prompt,) = self.run.prompts
        extra: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None, **self._prompt_ids()}
        if self._options.prompt_logprobs is not None:
            reported = prompt.prompt_logprobs or ()
            extra["prompt_logprobs"] = prompt_logprobs(self.tokenizer, reported, self._options.prompt_logprobs)
        told = (self._choice(index, choice) for index, choice in enumerate(choices))
        return self.body(told, **extra)

    def frame(self, event: Event) -> bytes:
        """See Answer."""
        role = b"" if event.choice in self._begun else self._role(event.choice)  # the first chunk, so written first
        if isinstance(event, ReasoningDelta) and self._options.hides_reasoning and not event.tokens:
            return role
        return role + (self._end(event) if isinstance(event, ChoiceEnd) else self._delta(event))

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            **score_of(choice.beam),
            "token_ids": None,
            **self._tokens_of(choice.tokens),
        }

    def _role(self, choice: int) -> bytes:
        self._begun.add(choice)
        delta = {"role": "assistant", "content": self._options.echoed}
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk_before(ascii_json(entry), self._prompt_ids())

    def _message(self, choice: WholeChoice) -> dict[str, Any]:
        text = self._options.echoed + choice.text
        reasoning = None if self._options.hides_reasoning else choice.reasoning or None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not text else text,
            "refusal": None,
            "annotations": [],
            "reasoning_content": reasoning,
            "reasoning": reasoning,
        }
        if not choice.calls:
            return message
        if self._options.calls_functions:
            (call,) = choice.calls[:1]
            return {**message, "function_call": {"name": call.name, "arguments": call.text}}
        return {**message, "tool_calls": [_whole_call(call) for call in choice.calls]}

    def _delta(self, event: Delta) -> bytes:
        return self.chunk(
            {
                "index": event.choice,
                "delta": self._delta_of(event),
                "logprobs": self._logprobs(event.tokens),
                "finish_reason": None,
                **self._tokens_of(event.tokens),
            }
        )

    def _delta_of(self, event: Delta) -> dict[str, Any]:
        match event:
            case TextDelta():
                return {"content": event.text}
            case ReasoningDelta() if self._options.hides_reasoning:
                return {}
            case ReasoningDelta():
                return {"reasoning_content": event.text, "reasoning": event.text}
            case ToolCallBegin() if self._options.calls_functions:
                return {"function_call": {"name": event.name, "arguments": ""}}
            case ToolCallDelta() if self._options.calls_functions:
                return {"function_call": {"arguments": event.text}}
            case ToolCallBegin():
                call = _call_body(event.is_custom, "", name=event.name)
                return {"tool_calls": [{"index": event.call, "id": event.id, **call}]}
            case ToolCallDelta():
                call = _call_body(event.is_custom, event.text)
                del call["type"]
                return {"tool_calls": [{"index": event.call, **call}]}

    def _end(self, event: ChoiceEnd) -> bytes:
        return self.chunk(
            {
                "index": event.choice,
                "delta": {},
                "logprobs": None,
                "finish_reason": self._finish_reason(event.reason),
                "stop_reason": event.stop_reason,
                **score_of(event.beam),
            }
        )

    def _finish_reason(self, reason: FinishedBy) -> str:
        return "function_call" if reason == "tool_calls" and self._options.calls_functions else reason

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        options = self._options
        if not options.logprobs:
            return None
        return chat_logprobs(self.tokenizer, tokens, as_ids=options.tokens_as_ids, lists_own=options.lists_own_logprob)

    def _tokens_of(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        options = self._options
        return tokens_of(tokens, ids=options.return_token_ids, sources=options.return_token_sources)

    def _prompt_ids(self) -> dict[str, Any]:
        prompt = self.run.prompts[0].request.prompt
        return {"prompt_token_ids": list(prompt)} if self._options.return_token_ids else {}


def _whole_call(call: WholeCall) -> dict[str, Any]:
    return {"id": call.id, **_call_body(call.is_custom, call.text, name=call.name)}


def _call_body(is_custom: bool, text: str, **name: str) -> dict[str, Any]:
    if is_custom:
        return {"type": "custom", "custom": {**name, "input": text}}
    return {"type": "function", "function": {**name, "arguments": text}}

"""A chat completion, whole or in chunks."""

from collections.abc import Sequence
from typing import Any

from server.api.chat.intent import ChatOptions
from server.api.generation_api import Answering
from server.api.openai.answer import OpenAIAnswer, StreamUsage, score_of
from server.api.openai.logprobs import chat_logprobs, prompt_logprobs
from server.generation.events import ChoiceEnd, Event, OutputToken, TextDelta
from server.generation.result import WholeChoice


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
        extra: dict[str, Any] = {}
        if self._options.prompt_logprobs is not None:
            reported = prompt.prompt_logprobs or ()
            extra["prompt_logprobs"] = prompt_logprobs(self.tokenizer, reported, self._options.prompt_logprobs)
        return self.body(
            [self._choice(index, choice) for index, choice in enumerate(choices)], **extra, **self._prompt_ids()
        )

    def frame(self, event: Event) -> bytes:
        """See Answer."""
        role = b"" if event.choice in self._begun else self._role(event.choice)  # the first chunk, so written first
        return role + (self._text(event) if isinstance(event, TextDelta) else self._end(event))

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **score_of(choice.beam),
            **self._ids(choice.tokens),
        }

    def _role(self, choice: int) -> bytes:
        self._begun.add(choice)
        delta = {"role": "assistant", "content": ""}
        return self.chunk(
            {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}, self._prompt_ids()
        )

    def _text(self, event: TextDelta) -> bytes:
        return self.chunk(
            {
                "index": event.choice,
                "delta": {"content": event.text},
                "logprobs": self._logprobs(event.tokens),
                "finish_reason": None,
                **self._ids(event.tokens),
            }
        )

    def _end(self, event: ChoiceEnd) -> bytes:
        return self.chunk(
            {
                "index": event.choice,
                "delta": {},
                "logprobs": None,
                "finish_reason": event.reason,
                "stop_reason": event.stop_reason,
                **score_of(event.beam),
            }
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, tokens) if self._options.logprobs else None

    def _ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self._options.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        prompt = self.run.prompts[0].request.prompt
        return {"prompt_token_ids": list(prompt)} if self._options.return_token_ids else {}

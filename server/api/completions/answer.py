"""A completion, whole or in chunks. With echo, every choice begins with the prompt, as if it had been generated."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.api.completions.intent import CompletionOptions
from server.api.generation_api import Answering
from server.api.openai.answer import OpenAIAnswer, StreamUsage, score_of, tokens_of
from server.api.openai.logprobs import completion_logprobs, prompt_logprobs, trimmed
from server.generation.events import ChoiceEnd, Event, OutputToken, TextDelta
from server.generation.result import WholeChoice
from server.generation.run import PromptRun
from server.text.detokenizer import make_detokenizer


class CompletionAnswer(OpenAIAnswer):
    """Implements Answer. A stream has the echo of each choice, its text and its end."""

    def __init__(self, answering: Answering, options: CompletionOptions) -> None:
        usage = StreamUsage(options.include_usage, options.continuous_usage)
        super().__init__(answering, usage, object="text_completion")
        self._options = options
        self._echoes = options.echoes if options.echoes is not None else [""] * len(self.run.prompts)
        self._begun: set[int] = set()
        self._last_text: TextDelta | None = None

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """See Answer."""
        best = best_choices(choices, self.run.plan.n, self._options.num_answers)
        return self.body([self._choice(index, choice) for index, choice in enumerate(best)])

    def frame(self, event: Event) -> bytes:
        """See Answer. The end of a choice comes in one chunk with the last of its text."""
        if isinstance(event, TextDelta) and event.is_last:
            self._last_text = event
            return b""
        text, self._last_text = (event, None) if isinstance(event, TextDelta) else (self._last_text, None)
        entry = self._text(text or TextDelta(event.choice, ""))
        if isinstance(event, ChoiceEnd):
            entry.update(_end_of(event))
        return self._begin(event.choice, entry) + self.chunk(entry)

    def _begin(self, choice: int, entry: dict[str, Any]) -> bytes:
        """The echo of a choice, before its first chunk. What belongs to the prompt comes with whichever is first."""
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        prompt = self._prompt_of(choice)
        if self._options.echoes is None:
            entry.update(self._prompt_ids(prompt))
            return b""
        echo = self._entry(choice, self._echoes[prompt.index], self._echo_tokens(prompt))
        return self.chunk({**echo, **self._tokens_of(()), **self._prompt_ids(prompt)})

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        prompt = self._prompt_of(index)
        echo, text = self._echoes[prompt.index], choice.text
        tokens = [*self._echo_tokens(prompt), *_shifted(choice.tokens, len(echo))]
        extra = self._prompt_ids(prompt) | self._tokens_of(choice.tokens)
        if self._options.prompt_logprobs is not None:
            reported = prompt.prompt_logprobs or ()
            extra["prompt_logprobs"] = prompt_logprobs(self.tokenizer, reported, self._options.prompt_logprobs)
        entry = self._entry(index, echo + text, tokens)
        end = ChoiceEnd(index, choice.finish_reason, choice.stop_reason, choice.beam)
        return {**entry, **_end_of(end), **extra}

    def _text(self, event: TextDelta) -> dict[str, Any]:
        shift = len(self._echoes[self._prompt_of(event.choice).index])
        entry = self._entry(event.choice, event.text, _shifted(event.tokens, shift))
        entry.update(self._tokens_of(event.tokens))
        return entry

    def _entry(self, index: int, text: str, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """What a choice has, with these tokens in its logprobs."""
        wants_logprobs = self._options.logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(self.tokenizer, tokens) if wants_logprobs else None,
            "finish_reason": None,
            "stop_reason": None,
            "seed": self.run.plan.seed_of(self._prompt_of(index).index),
        }

    def _prompt_of(self, index: int) -> PromptRun:
        return self.run.prompts[index // self._options.num_answers]

    def _tokens_of(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        options = self._options
        return tokens_of(tokens, ids=options.return_token_ids, sources=options.return_token_sources)

    def _prompt_ids(self, prompt: PromptRun) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.request.prompt)} if self._options.return_token_ids else {}

    def _echo_tokens(self, prompt: PromptRun) -> list[OutputToken]:
        """The prompt's tokens for the logprobs of an echo; the first has none."""
        if self._options.echoes is None or self._options.logprobs is None:
            return []
        reported = [trimmed(token, self._options.logprobs) for token in prompt.prompt_logprobs or ()]
        skip = self.run.plan.options.skip_special_tokens
        detokenizer = make_detokenizer(self.tokenizer, skip_special_tokens=skip)
        tokens: list[OutputToken] = []
        offset, end = 0, len(self._echoes[prompt.index])
        for token, logprobs in zip(prompt.request.prompt, [None, *reported], strict=True):
            tokens.append(OutputToken(token, min(offset, end), logprobs))
            offset += len(detokenizer.push(token))
        return tokens


def best_choices(choices: Sequence[WholeChoice], generated: int, wanted: int) -> Sequence[WholeChoice]:
    """Of so many choices generated for each prompt the wanted ones, those of the highest logprob per token first.

    The lower index comes first among equals. If all are wanted, they stay in their order, as in a stream.
    """
    if generated == wanted:
        return choices
    best: list[WholeChoice] = []
    for start in range(0, len(choices), generated):
        best += sorted(choices[start : start + generated], key=_mean_logprob, reverse=True)[:wanted]
    return best


def _mean_logprob(choice: WholeChoice) -> float:
    """Over all tokens, one that ended the choice included; 0 where there are none."""
    logprobs = [token.logprobs.logprob for token in choice.tokens if token.logprobs is not None]
    return sum(logprobs) / max(len(logprobs), 1)


def _shifted(tokens: Sequence[OutputToken], shift: int) -> Sequence[OutputToken]:
    """The tokens behind so much more text."""
    if not shift:
        return tokens
    return [msgspec.structs.replace(token, offset=token.offset + shift) for token in tokens]


def _end_of(event: ChoiceEnd) -> dict[str, Any]:
    return {"finish_reason": event.reason, "stop_reason": event.stop_reason, **score_of(event.beam)}

"""A completion, whole or in chunks. With echo, every choice begins with the prompt, as if it had been generated."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from server.api.completions.intent import CompletionOptions
from server.api.completions.prompt_part import PromptPart
from server.api.generation_api import Answering
from server.api.openai.answer import OpenAIAnswer, StreamUsage, score_of, tokens_of
from server.api.openai.logprobs import completion_logprobs
from server.generation.events import ChoiceEnd, Event, OutputToken, TextDelta
from server.generation.result import WholeChoice
from server.generation.run import PromptRun
from server.http.ascii_json import ascii_json


class CompletionAnswer(OpenAIAnswer):
    """Implements Answer. A stream has the echo of each choice, its text and its end."""

    def __init__(self, answering: Answering, options: CompletionOptions) -> None:
        usage = StreamUsage(options.include_usage, options.continuous_usage)
        super().__init__(answering, usage, object="text_completion")
        self._options = options
        self._begun: set[int] = set()
        self._last_echo = -1, b""
        """The prompt whose echo a stream sent last, and that echo: a prompt's choices mostly begin together."""
        self._last_text: TextDelta | None = None

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """See Answer."""
        best = best_choices(choices, self.run.plan.n, self._options.num_answers)
        return self.body(self._choices(best))

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
        if self._last_echo[0] != prompt.index:
            self._last_echo = prompt.index, self._echo(prompt)
        return self.chunk_before(b'{"index":%d,' % choice + self._last_echo[1], {})

    def _echo(self, prompt: PromptRun) -> bytes:
        """The chunk of the echo of any choice, from behind its index on."""
        part = self._part(prompt)
        entry = self._entry(prompt, part.echo, part.tokens)
        return ascii_json({**entry, **self._tokens_of(()), **self._prompt_ids(prompt)})[1:]

    def _choices(self, choices: Sequence[WholeChoice]) -> Iterator[dict[str, Any]]:
        for prompt in self.run.prompts:
            part = self._part(prompt)
            first = prompt.index * self._options.num_answers
            for index, choice in enumerate(choices[first : first + self._options.num_answers], first):
                yield {"index": index, **self._choice(index, choice, prompt, part)}

    def _choice(self, index: int, choice: WholeChoice, prompt: PromptRun, part: PromptPart) -> dict[str, Any]:
        logprobs = None
        if self._options.logprobs is not None:
            logprobs = part.logprobs(_shifted(choice.tokens, len(part.echo)))
        end = ChoiceEnd(index, choice.finish_reason, choice.stop_reason, choice.beam)
        return {
            **self._entry(prompt, part.text(choice.text), ()),
            "logprobs": logprobs,
            **_end_of(end),
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
            **self._tokens_of(choice.tokens),
            **part.reports,
        }

    def _text(self, event: TextDelta) -> dict[str, Any]:
        prompt = self._prompt_of(event.choice)
        shift = 0 if self._options.echoes is None else len(self._options.echoes[prompt.index])
        entry = self._entry(prompt, event.text, _shifted(event.tokens, shift))
        return {"index": event.choice, **entry, **self._tokens_of(event.tokens)}

    def _entry(self, prompt: PromptRun, text: str | msgspec.Raw, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """What a choice of the prompt has beside its index, with these tokens in its logprobs."""
        wants_logprobs = self._options.logprobs is not None
        return {
            "text": text,
            "logprobs": completion_logprobs(self.tokenizer, tokens, as_ids=self._options.tokens_as_ids)
            if wants_logprobs
            else None,
            "finish_reason": None,
            "stop_reason": None,
            "seed": self.run.plan.seed_of(prompt.index),
        }

    def _part(self, prompt: PromptRun) -> PromptPart:
        skips = self.run.plan.options.skip_special_tokens
        return PromptPart(prompt, self._options, self.tokenizer, skip_special_tokens=skips)

    def _prompt_of(self, index: int) -> PromptRun:
        return self.run.prompts[index // self._options.num_answers]

    def _tokens_of(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        options = self._options
        return tokens_of(tokens, ids=options.return_token_ids, sources=options.return_token_sources)

    def _prompt_ids(self, prompt: PromptRun) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.request.prompt)} if self._options.return_token_ids else {}


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

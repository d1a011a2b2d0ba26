"""A completion, whole or in chunks. With `echo`, every choice begins with the prompt, as if it had been generated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from scheduler.interface import BeamScore
from server.api.answer_object import AnswerObject, doc
from server.api.completions.schema import CompletionRequest
from server.api.dialect import AnswerContext
from server.api.openai.answer import (
    FINISH_REASON,
    OUTPUT_IDS,
    PROMPT_IDS,
    PROMPT_LOGPROBS,
    CumulativeLogprob,
    Envelope,
    OpenAIAnswer,
    OpenAIOptions,
    Score,
    StopReason,
    StreamUsage,
    TokenSources,
    openai_options,
    score_of,
)
from server.api.openai.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    prompt_logprobs,
    trimmed,
)
from server.generation.events import ChoiceEnd, Event, FinishedBy, OutputToken, TextDelta
from server.generation.planning.plan import Plan
from server.generation.result import WholeChoice
from server.generation.run import PromptRun
from server.http.event_stream import ascii_json
from server.text.detokenizer import make_detokenizer
from server.text.tokenizer import Tokenizer


class CompletionChoice(AnswerObject):
    """One of the answers to one of the prompts; in a stream, a chunk's addition to it."""

    index: Annotated[int, doc("Index of the prompt times `n`, plus the index of the answer.")]
    text: Annotated[str, doc("The text; with `echo`, the prompt and the text.")]
    logprobs: Annotated[CompletionLogprobs | None, doc("Null unless the request asked for them.")]
    finish_reason: Annotated[
        Literal["stop", "length"] | None,
        doc(f"{FINISH_REASON} In a stream, null except in a choice's last chunk."),
    ] = None
    stop_reason: StopReason = None
    score: Score = UNSET
    cumulative_logprob: CumulativeLogprob = UNSET
    seed: Annotated[int, doc("Extension: with this seed, the prompt alone gets the same answers.")]
    token_ids: Annotated[Sequence[int] | UnsetType | None, doc(OUTPUT_IDS)] = UNSET
    token_sources: TokenSources = UNSET
    prompt_token_ids: Annotated[
        Sequence[int] | UnsetType | None, doc(f"{PROMPT_IDS} In a stream, only in a choice's first chunk.")
    ] = UNSET
    prompt_logprobs: Annotated[PromptLogprobs | UnsetType | None, doc(PROMPT_LOGPROBS)] = UNSET


class Completion(Envelope):
    """Response schema for POST /v1/completions, and for the events of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: Annotated[
        Sequence[CompletionChoice], doc("In a stream one; none in the chunk with the usage of the whole request.")
    ]
    usage: StreamUsage = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions(OpenAIOptions):
    """Request fields that the answer depends on."""

    logprobs: int | None
    num_answers: int
    """Choices returned for each prompt."""
    echoes: Sequence[str] | None
    """The text of each prompt, with `echo`."""


def completion_options(body: CompletionRequest, plan: Plan, tokenizer: Tokenizer) -> CompletionOptions:
    """The CompletionOptions of a body."""
    return CompletionOptions(
        **openai_options(body),
        logprobs=body.num_logprobs,
        num_answers=body.num_answers,
        echoes=_echoes(body, plan, tokenizer) if body.echo else None,
    )


def _echoes(body: CompletionRequest, plan: Plan, tokenizer: Tokenizer) -> Sequence[str]:
    """The prompts as the client wrote them; decoded if they came as tokens or were truncated."""
    skip = plan.options.skip_special_tokens
    return [
        written
        if isinstance(written, str) and body.truncate_prompt_tokens is None
        else tokenizer.decode(request.prompt, skip_special_tokens=skip)
        for written, request in zip(body.prompts, plan.requests, strict=True)
    ]


class PromptPart:
    """A prompt's part in its choices, encoded once for all of them: the echo, and reports about the prompt."""

    def __init__(
        self, prompt: PromptRun, options: CompletionOptions, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> None:
        self._prompt = prompt
        self._options = options
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self.echo = "" if options.echoes is None else options.echoes[prompt.index]

    def text(self, own: str) -> str:
        """The echo and a choice's own text; already encoded if there is an echo."""
        return cast("str", msgspec.Raw(self._encoded_echo[:-1] + msgspec.json.encode(own)[1:])) if self.echo else own

    def logprobs(self, own: Sequence[OutputToken]) -> CompletionLogprobs | None:
        """The logprobs of the echo and of a choice's own tokens, whose offsets count the echo."""
        if self._options.logprobs is None:
            return None
        lists = self._logprobs_of(_shifted(own, len(self.echo)))
        joined: dict[str, Any] = {name: _joined(self._encoded_logprobs[name], values) for name, values in lists.items()}
        return CompletionLogprobs(**joined)

    @property
    def tokens(self) -> list[OutputToken]:
        """The prompt's tokens for the logprobs of an echo. The first token has no logprobs."""
        if self._options.echoes is None or self._options.logprobs is None:
            return []
        reported = [trimmed(token, self._options.logprobs) for token in self._prompt.prompt_logprobs or ()]
        detokenizer = make_detokenizer(self._tokenizer, skip_special_tokens=self._skips_special)
        tokens: list[OutputToken] = []
        offset, end = 0, len(self.echo)
        for token, logprobs in zip(self._prompt.request.prompt, [None, *reported], strict=True):
            tokens.append(OutputToken(token, min(offset, end), logprobs))
            offset += len(detokenizer.push(token))
        return tokens

    @cached_property
    def reports(self) -> dict[str, Any]:
        """The properties that report the prompt in a choice of a whole answer."""
        reports: dict[str, Any] = {}
        if self._options.return_token_ids:
            reports["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(self._prompt.request.prompt))
        if self._options.prompt_logprobs is not None:
            reported = self._prompt.prompt_logprobs or ()
            reports["prompt_logprobs"] = prompt_logprobs(self._tokenizer, reported, self._options.prompt_logprobs)
        return reports

    @cached_property
    def _encoded_echo(self) -> bytes:
        return msgspec.json.encode(self.echo)

    @cached_property
    def _encoded_logprobs(self) -> dict[str, bytes]:
        return {name: msgspec.json.encode(values) for name, values in self._logprobs_of(self.tokens).items()}

    def _logprobs_of(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        return asdict(completion_logprobs(self._tokenizer, tokens, as_ids=self._options.tokens_as_ids))


def _joined(before: bytes, values: Sequence[Any]) -> msgspec.Raw:
    """An encoded list, continued with these values."""
    comma = b"," if values and before != b"[]" else b""
    return msgspec.Raw(before[:-1] + comma + msgspec.json.encode(values)[1:])


class CompletionAnswer(OpenAIAnswer):
    """Implements Answer. A stream has the echo of each choice, its text and its end."""

    def __init__(self, answering: AnswerContext, options: CompletionOptions) -> None:
        super().__init__(answering, options, Completion, Completion)
        self._options = options
        self._begun: set[int] = set()
        self._last_echo = -1, b""
        """The last prompt whose echo a stream sent, and the echo: a prompt's choices mostly begin together."""
        self._last_text: TextDelta | None = None

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        best = best_choices(choices, self.run.plan.n, self._options.num_answers)
        return self.body(self._choices(best))

    def frame(self, event: Event) -> bytes:
        """Write an event. The last text of a choice waits for its end, so that one chunk has both."""
        if isinstance(event, TextDelta) and event.is_last:
            self._last_text = event
            return b""
        text, self._last_text = (event, None) if isinstance(event, TextDelta) else (self._last_text, None)
        echo, ids = self._begin(event.choice)
        end = _end_of(event.reason, event.stop_reason, event.beam) if isinstance(event, ChoiceEnd) else {}
        return echo + self.chunk(self._piece(text or TextDelta(event.choice, ""), {**end, **ids}))

    def _begin(self, choice: int) -> tuple[bytes, dict[str, Any]]:
        """The echo of a choice, and more properties of its first chunk. Whichever comes first reports the prompt."""
        if choice in self._begun:
            return b"", {}
        self._begun.add(choice)
        prompt = self._prompt_of(choice)
        if self._options.echoes is None:
            return b"", self._prompt_ids(prompt)
        if self._last_echo[0] != prompt.index:
            self._last_echo = prompt.index, self._echo(prompt)
        return self.chunk_before(b'{"index":%d' % choice + self._last_echo[1]), {}

    def _echo(self, prompt: PromptRun) -> bytes:
        """The JSON of an echo, without its beginning up to the choice's index, which the caller adds."""
        part = self._part(prompt)
        choice = CompletionChoice(
            index=0,
            text=part.echo,
            logprobs=self._logprobs(part.tokens),
            seed=self.run.plan.seed_of(prompt.index),
            **self.tokens_of(()),
            **self._prompt_ids(prompt),
        )
        return ascii_json(choice).removeprefix(b'{"index":0')

    def _choices(self, choices: Sequence[WholeChoice]) -> Iterator[CompletionChoice]:
        for prompt in self.run.prompts:
            part = self._part(prompt)
            first = prompt.index * self._options.num_answers
            for index, choice in enumerate(choices[first : first + self._options.num_answers], first):
                yield self._choice(index, choice, part)

    def _choice(self, index: int, choice: WholeChoice, part: PromptPart) -> CompletionChoice:
        reports = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        return CompletionChoice(
            index=index,
            text=part.text(choice.text),
            logprobs=part.logprobs(choice.tokens),
            **_end_of(choice.finish_reason, choice.stop_reason, choice.beam),
            seed=self.run.plan.seed_of(index // self._options.num_answers),
            **{**reports, **self.tokens_of(choice.tokens), **part.reports},
        )

    def _piece(self, delta: TextDelta, rest: dict[str, Any]) -> CompletionChoice:
        prompt = self._prompt_of(delta.choice)
        shift = 0 if self._options.echoes is None else len(self._options.echoes[prompt.index])
        return CompletionChoice(
            index=delta.choice,
            text=delta.text,
            logprobs=self._logprobs(_shifted(delta.tokens, shift)),
            seed=self.run.plan.seed_of(prompt.index),
            **self.tokens_of(delta.tokens),
            **rest,
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> CompletionLogprobs | None:
        if self._options.logprobs is None:
            return None
        return completion_logprobs(self.tokenizer, tokens, as_ids=self._options.tokens_as_ids)

    def _part(self, prompt: PromptRun) -> PromptPart:
        skips = self.run.plan.options.skip_special_tokens
        return PromptPart(prompt, self._options, self.tokenizer, skip_special_tokens=skips)

    def _prompt_of(self, index: int) -> PromptRun:
        return self.run.prompts[index // self._options.num_answers]

    def _prompt_ids(self, prompt: PromptRun) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.request.prompt)} if self._options.return_token_ids else {}


def best_choices(choices: Sequence[WholeChoice], generated: int, wanted: int) -> Sequence[WholeChoice]:
    """The `wanted` best of each prompt's `generated` choices, by their mean logprob per token, best first.

    The lower index comes first among equals. If all are wanted, they stay in their order, as in a stream.
    """
    if generated == wanted:
        return choices
    best: list[WholeChoice] = []
    for start in range(0, len(choices), generated):
        best += sorted(choices[start : start + generated], key=_mean_logprob, reverse=True)[:wanted]
    return best


def _mean_logprob(choice: WholeChoice) -> float:
    """The mean logprob of all tokens, including one that ended the choice; 0 without tokens."""
    logprobs = [token.logprobs.logprob for token in choice.tokens if token.logprobs is not None]
    return sum(logprobs) / max(len(logprobs), 1)


def _shifted(tokens: Sequence[OutputToken], shift: int) -> Sequence[OutputToken]:
    """The tokens with `shift` more characters before them."""
    if not shift:
        return tokens
    return [replace(token, offset=token.offset + shift) for token in tokens]


def _end_of(reason: FinishedBy, stop_reason: str | int | None, beam: BeamScore | None) -> dict[str, Any]:
    return {"finish_reason": reason, "stop_reason": stop_reason, **score_of(beam)}

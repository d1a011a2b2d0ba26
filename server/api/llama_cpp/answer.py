"""A completion in llama.cpp's format, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.api.answer_object import WARNINGS, AnswerObject, Warnings, doc
from server.api.dialect import AnswerContext
from server.api.llama_cpp.errors import error_frame
from server.api.llama_cpp.intent import LlamaOptions
from server.api.openai.logprobs import finite
from server.errors import ApiError
from server.generation.events import ChoiceEnd, Event, FinishedBy, OutputToken, TextDelta
from server.generation.notices import Notice
from server.generation.result import WholeChoice
from server.http.event_stream import ascii_json


class LlamaTopToken(AnswerObject):
    """A candidate token and its log-probability."""

    id: Annotated[int, doc("The token's id.")]
    token: Annotated[str, doc("The token's text, without bytes that are not whole characters.")]
    bytes: Annotated[Sequence[int], doc("The token's bytes.")]
    logprob: Annotated[float, doc("The token's log-probability; -9999 is minus infinity.")]


class LlamaTokenProbs(LlamaTopToken):
    """A token of the output, with the most probable alternatives."""

    top_logprobs: Annotated[Sequence[LlamaTopToken], doc("The most probable tokens at this position.")]


class LlamaTimings(AnswerObject):
    """Token counts and times of a completion."""

    cache_n: Annotated[int, doc("Prompt tokens that were in the prefix cache.")]
    prompt_n: Annotated[int, doc("Prompt tokens that were computed.")]
    prompt_ms: Annotated[float, doc("From the request's arrival to the first token.")]
    prompt_per_token_ms: Annotated[float, doc("`prompt_ms` / `prompt_n`.")]
    prompt_per_second: Annotated[float, doc("Prompt tokens computed per second.")]
    predicted_n: Annotated[int, doc("Output tokens.")]
    predicted_ms: Annotated[float, doc("From the first token to the last.")]
    predicted_per_token_ms: Annotated[float, doc("`predicted_ms` / `predicted_n`.")]
    predicted_per_second: Annotated[float, doc("Output tokens per second; 0 if there is only one.")]


class LlamaChunk(AnswerObject):
    """An event with the next piece of text. A completion's last event is a LlamaCompletion without `content`."""

    index: Annotated[int, doc("Index of the completion, over all prompts.")]
    content: Annotated[str, doc("A piece of the text.")]
    tokens: Annotated[Sequence[int], doc("Ids of the tokens that this piece completes.")]
    stop: Annotated[bool, doc("Whether the completion has ended: always false.")] = False
    id_slot: Annotated[Literal[-1], doc("There are no fixed slots.")] = -1
    tokens_predicted: Annotated[int, doc("Output tokens so far.")]
    tokens_evaluated: Annotated[int, doc("Prompt tokens.")]
    timings: Annotated[LlamaTimings | UnsetType, doc("With `timings_per_token`.")] = UNSET
    completion_probabilities: Annotated[Sequence[LlamaTokenProbs] | UnsetType, doc("With `n_probs`.")] = UNSET
    warnings: Annotated[Sequence[Notice] | UnsetType, doc(f"{WARNINGS} In the first event.")] = UNSET


class LlamaCompletion(AnswerObject):
    """A completion. With several prompts or `n_cmpl`, the answer is an array of completions; with `response_fields`,
    completions have only these properties.
    """

    index: Annotated[int, doc("Index of the completion, over all prompts.")]
    content: Annotated[str, doc("The text; empty at the end of a stream.")] = ""
    tokens: Annotated[Sequence[int], doc("The output's token ids, with `return_tokens`.")] = ()
    id_slot: Annotated[Literal[-1], doc("There are no fixed slots.")] = -1
    stop: Annotated[bool, doc("Whether the completion has ended: always true.")] = True
    model: Annotated[str, doc("The model's name.")]
    tokens_predicted: Annotated[int, doc("Output tokens.")]
    tokens_evaluated: Annotated[int, doc("Prompt tokens.")]
    generation_settings: Annotated[Mapping[str, Any], doc("The effective settings, by llama.cpp's names.")]
    prompt: Annotated[str, doc("The prompt, special tokens included.")]
    has_new_line: Annotated[bool, doc("Whether the output has a line break.")]
    truncated: Annotated[bool, doc("Whether the context was full before the output ended.")]
    stop_type: Annotated[Literal["eos", "limit", "word"], doc("What ended the output.")]
    stopping_word: Annotated[str, doc("The string of `stop` that ended the output, or empty.")]
    tokens_cached: Annotated[int, doc("Prompt tokens that were in the prefix cache.")]
    timings: LlamaTimings
    completion_probabilities: Annotated[
        Sequence[LlamaTokenProbs] | UnsetType, doc("With `n_probs`; not at the end of a stream.")
    ] = UNSET
    warnings: Warnings = UNSET


class LlamaAnswer:
    """Implements Answer. Events of a stream have the text, and a completion's last event has everything else."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, answering: AnswerContext, options: LlamaOptions) -> None:
        self._run = answering.run
        self._tokenizer = answering.tokenizer
        self._options = options
        self._warnings = answering.run.plan.notices or UNSET
        self._has_new_line: set[int] = set()

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        results = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return msgspec.json.encode(results[0] if len(results) == 1 else results)

    def frame(self, event: Event) -> bytes:
        if isinstance(event, ChoiceEnd):
            content = self._end(event)
        else:
            assert isinstance(event, TextDelta), "a completion is nothing but text"
            content = self._chunk(event)
        self._warnings = UNSET  # only the first event has them
        return b"data: " + ascii_json(content) + b"\n\n"

    def end(self) -> bytes:
        """Nothing: llama.cpp does not mark the end of a stream."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error_frame(error)

    def _chunk(self, event: TextDelta) -> object:
        if "\n" in event.text:
            self._has_new_line.add(event.choice)
        prompt, choice = divmod(event.choice, self._run.plan.n)
        run = self._run.prompts[prompt]
        chunk = LlamaChunk(
            index=event.choice,
            content=event.text,
            tokens=[token.id for token in event.tokens],
            tokens_predicted=run.choices[choice].num_tokens,
            tokens_evaluated=len(run.request.prompt),
            timings=self._timings(prompt, choice) if self._options.timings_per_token else UNSET,
            completion_probabilities=self._probabilities(event.tokens),
            warnings=self._warnings,
        )
        return self._chosen(chunk)

    def _end(self, event: ChoiceEnd) -> object:
        has_new_line = event.choice in self._has_new_line
        return self._completion(event.choice, event.reason, event.stop_reason, has_new_line=has_new_line)

    def _whole(self, index: int, choice: WholeChoice) -> object:
        return self._completion(
            index,
            choice.finish_reason,
            choice.stop_reason,
            content=choice.text,
            tokens=[token.id for token in choice.tokens] if self._options.return_tokens else (),
            has_new_line="\n" in choice.text,
            completion_probabilities=self._probabilities(choice.tokens),
        )

    def _completion(self, index: int, reason: FinishedBy, stop_reason: str | int | None, **text: Any) -> object:
        """A LlamaCompletion, or its properties that the request chose; `text` has the properties about its text."""
        plan, options = self._run.plan, self._options
        prompt, choice = divmod(index, plan.n)
        run = self._run.prompts[prompt]
        word = stop_reason if isinstance(stop_reason, str) else None
        completion = LlamaCompletion(
            index=index,
            model=plan.model,
            tokens_predicted=run.choices[choice].num_tokens,
            tokens_evaluated=len(run.request.prompt),
            generation_settings={**options.settings, "seed": plan.seed_of(prompt)},
            prompt="" if options.prompts is None else options.prompts[prompt],
            truncated=reason == "length" and options.is_cut_by_context[prompt],
            stop_type="limit" if reason == "length" else "eos" if word is None else "word",
            stopping_word=word or "",
            tokens_cached=run.num_cached_tokens,
            timings=self._timings(prompt, choice),
            warnings=self._warnings,
            **text,
        )
        return self._chosen(completion)

    def _timings(self, prompt: int, choice: int) -> LlamaTimings:
        run = self._run.prompts[prompt]
        before_s, after_s = self._run.seconds_of(prompt, choice)
        cached = run.num_cached_tokens
        return LlamaTimings(
            cache_n=cached,
            **_speed("prompt", len(run.request.prompt) - cached, before_s),
            **_speed("predicted", run.choices[choice].num_tokens, after_s),
        )

    def _probabilities(self, tokens: Sequence[OutputToken]) -> Sequence[LlamaTokenProbs] | UnsetType:
        """An entry for each token, if the request asks for them."""
        if not self._options.n_probs or not tokens:
            return UNSET
        entries = []
        for token in tokens:
            reported = token.logprobs
            assert reported is not None, "the engine reports logprobs for every token of a choice that asked for them"
            top = [LlamaTopToken(**self._token(token_id, logprob)) for token_id, logprob in reported.top]
            entries.append(LlamaTokenProbs(**self._token(token.id, reported.logprob), top_logprobs=top))
        return entries

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"id": token, "token": raw.decode(errors="ignore"), "bytes": list(raw), "logprob": finite(logprob)}

    def _chosen(self, result: LlamaChunk | LlamaCompletion) -> object:
        """The properties that `response_fields` names, and always the warnings."""
        if not self._options.response_fields:
            return result
        properties = msgspec.to_builtins(result)
        chosen = {name: properties[name] for name in ("warnings",) if name in properties}
        for path in self._options.response_fields:
            value: Any = properties
            for step in path.split("/"):
                value = value.get(step, UNSET) if isinstance(value, Mapping) else UNSET
            if value is not UNSET:
                chosen[path] = value
        return chosen


def _speed(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }

"""A completion in llama.cpp's form, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from server.api.generation_api import Answering
from server.api.llama_cpp.errors import error_frame
from server.api.llama_cpp.intent import LlamaOptions
from server.api.openai.logprobs import finite
from server.errors import ApiError
from server.generation.events import ChoiceEnd, Event, FinishedBy, OutputToken, TextDelta
from server.generation.notices import as_warnings
from server.generation.result import WholeChoice
from server.http.ascii_json import ascii_json

_NO_SLOT = -1


class LlamaAnswer:
    """Implements Answer. The events of a completion bring its text, and the last one all else."""

    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, answering: Answering, options: LlamaOptions) -> None:
        self._run = answering.run
        self._tokenizer = answering.tokenizer
        self._options = options
        self._warnings = as_warnings(answering.run.plan.notices)
        self._has_new_line: set[int] = set()

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        """See Answer."""
        results = [self._result(index, choice) for index, choice in enumerate(choices)]
        return msgspec.json.encode(results[0] if len(results) == 1 else results)

    def frame(self, event: Event) -> bytes:
        """See Answer."""
        if isinstance(event, ChoiceEnd):
            last = self._end(event.choice, event.reason, event.stop_reason)
            last |= {"has_new_line": event.choice in self._has_new_line}
            return _event(self._chosen({**last, **self._taken_warnings()}))
        assert isinstance(event, TextDelta), "a completion is nothing but text"
        if "\n" in event.text:
            self._has_new_line.add(event.choice)
        return _event(self._chunk(event))

    def end(self) -> bytes:
        """The end of a stream, which llama.cpp does not mark."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that an error ends."""
        return error_frame(error)

    def _chunk(self, event: TextDelta) -> dict[str, Any]:
        prompt, choice = divmod(event.choice, self._run.plan.n)
        run = self._run.prompts[prompt]
        chunk = {
            "index": event.choice,
            "content": event.text,
            "tokens": [token.id for token in event.tokens],
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": run.choices[choice].num_tokens,
            "tokens_evaluated": len(run.request.prompt),
        }
        if self._options.timings_per_token:
            chunk["timings"] = self._timings(event.choice)
        return {**chunk, **self._probabilities(event.tokens), **self._taken_warnings()}

    def _result(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        result = self._end(index, choice.finish_reason, choice.stop_reason)
        result |= {"content": choice.text, "has_new_line": "\n" in choice.text}
        if self._options.return_tokens:
            result["tokens"] = [token.id for token in choice.tokens]
        return self._chosen({**result, **self._probabilities(choice.tokens), **self._warnings})

    def _end(self, index: int, reason: FinishedBy, stop_reason: str | int | None) -> dict[str, Any]:
        """A LlamaCompletion without its text."""
        plan, options = self._run.plan, self._options
        prompt, choice = divmod(index, plan.n)
        run = self._run.prompts[prompt]
        word = stop_reason if isinstance(stop_reason, str) else None
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": plan.model,
            "tokens_predicted": run.choices[choice].num_tokens,
            "tokens_evaluated": len(run.request.prompt),
            "generation_settings": {**options.settings, "seed": plan.seed_of(prompt)},
            "prompt": "" if options.prompts is None else options.prompts[prompt],
            "has_new_line": False,
            "truncated": reason == "length" and options.is_cut_by_context[prompt],
            "stop_type": "limit" if reason == "length" else "eos" if word is None else "word",
            "stopping_word": word or "",
            "tokens_cached": run.num_cached_tokens,
            "timings": self._timings(index),
        }

    def _timings(self, index: int) -> dict[str, Any]:
        """A LlamaTimings."""
        prompt, choice = divmod(index, self._run.plan.n)
        run = self._run.prompts[prompt]
        before_s, after_s = self._run.seconds_of(prompt, choice)
        cached = run.num_cached_tokens
        return {
            "cache_n": cached,
            **_speed("prompt", len(run.request.prompt) - cached, before_s),
            **_speed("predicted", run.choices[choice].num_tokens, after_s),
        }

    def _probabilities(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """A LlamaTokenProbs for each token, if the request asks for them."""
        if not self._options.n_probs or not tokens:
            return {}
        entries = []
        for token in tokens:
            reported = token.logprobs
            assert reported is not None, "the engine reports logprobs for every token of a choice that asked for them"
            top = [self._token(token_id, logprob) for token_id, logprob in reported.top]
            entries.append({**self._token(token.id, reported.logprob), "top_logprobs": top})
        return {"completion_probabilities": entries}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """A LlamaTopToken."""
        raw = self._tokenizer.token_bytes(token)
        return {"id": token, "token": raw.decode(errors="ignore"), "bytes": list(raw), "logprob": finite(logprob)}

    def _chosen(self, result: dict[str, Any]) -> dict[str, Any]:
        """The properties that `response_fields` names; what was left out of the request is told in any case."""
        if not self._options.response_fields:
            return result
        chosen = {name: result[name] for name in ("warnings",) if name in result}
        for path in self._options.response_fields:
            value: Any = result
            for step in path.split("/"):
                value = value.get(step, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is not _MISSING:
                chosen[path] = value
        return chosen

    def _taken_warnings(self) -> Mapping[str, Any]:
        """The warnings, for the first event alone."""
        told, self._warnings = self._warnings, {}
        return told


_MISSING = object()


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + ascii_json(content) + b"\n\n"


def _speed(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
    }

"""What a completion's choices repeat of their prompt, made and encoded once for all of them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from server.api.completions.intent import CompletionOptions
from server.api.openai.logprobs import completion_logprobs, prompt_logprobs, trimmed
from server.generation.events import OutputToken
from server.generation.run import PromptRun
from server.text.detokenizer import make_detokenizer
from server.text.tokenizer import Tokenizer


class PromptPart:
    """The part of one prompt in its choices: the echo, and what is reported of the prompt."""

    def __init__(
        self, prompt: PromptRun, options: CompletionOptions, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> None:
        self._prompt = prompt
        self._options = options
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self.echo = "" if options.echoes is None else options.echoes[prompt.index]

    def text(self, own: str) -> str | msgspec.Raw:
        """The echo and a choice's own text, as JSON."""
        return msgspec.Raw(self._encoded_echo[:-1] + msgspec.json.encode(own)[1:]) if self.echo else own

    def logprobs(self, own: Sequence[OutputToken]) -> dict[str, Any]:
        """A CompletionLogprobs of the echo and of a choice's own tokens, whose offsets count the echo."""
        lists = completion_logprobs(self._tokenizer, own, as_ids=self._options.tokens_as_ids)
        return {name: _joined(self._encoded_logprobs[name], values) for name, values in lists.items()}

    @property
    def tokens(self) -> list[OutputToken]:
        """The prompt's tokens for the logprobs of an echo; the first has none."""
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
    def reports(self) -> dict[str, msgspec.Raw]:
        """What else a choice of a whole answer tells of the prompt."""
        reports: dict[str, msgspec.Raw] = {}
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
        lists = completion_logprobs(self._tokenizer, self.tokens, as_ids=self._options.tokens_as_ids)
        return {name: msgspec.json.encode(values) for name, values in lists.items()}


def _joined(before: bytes, values: Sequence[Any]) -> msgspec.Raw:
    """A list as JSON that goes on with these values."""
    comma = b"," if values and before != b"[]" else b""
    return msgspec.Raw(before[:-1] + comma + msgspec.json.encode(values)[1:])

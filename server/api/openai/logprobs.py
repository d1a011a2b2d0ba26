"""Log-probabilities in the shapes of the API. Minus infinity, which JSON does not have, becomes -9999.

What is made here is what the models of objects.py describe, as plain JSON.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec

from model_runner.contract import TokenLogprobs
from server.generation.events import OutputToken
from server.text.tokenizer import Tokenizer

NO_PROBABILITY = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[OutputToken], *, as_ids: bool = False, lists_own: bool = False
) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions: a ChatLogprobs.

    `as_ids` has tokens written as their ids; with `lists_own` each token is among its own alternatives.
    """
    content = []
    for token in tokens:
        reported = _reported(token)
        own = _top(tokenizer, token.id, reported.logprob, as_ids=as_ids)
        top = [_top(tokenizer, token_id, logprob, as_ids=as_ids) for token_id, logprob in reported.top]
        if lists_own and token.id not in (token_id for token_id, _ in reported.top):
            top.insert(0, own)
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[OutputToken], *, as_ids: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of completions, parallel lists: a CompletionLogprobs. `as_ids` has tokens written as ids.

    A token without logprobs (the first of a prompt) has null. The token itself is always among the alternatives, which
    are therefore up to one more than were asked for.
    """
    alternatives: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprobs is None:
            alternatives.append(None)
            continue
        top = {_written(tokenizer, token.id, as_ids=as_ids): finite(token.logprobs.logprob)}
        for token_id, logprob in token.logprobs.top:
            top.setdefault(_written(tokenizer, token_id, as_ids=as_ids), finite(logprob))
        alternatives.append(top)
    return {
        "tokens": [_written(tokenizer, token.id, as_ids=as_ids) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": alternatives,
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokenizer: Tokenizer, reported: Sequence[TokenLogprobs], count: int) -> msgspec.Raw:
    """VLLM's `prompt_logprobs` as JSON: null for the first token, then for each token its own and the `count` best."""
    encoded = [b"null", *(msgspec.json.encode(_prompt_token(tokenizer, token, count)) for token in reported)]
    return msgspec.Raw(b"[" + b",".join(encoded) + b"]")


def _prompt_token(tokenizer: Tokenizer, token: TokenLogprobs, count: int) -> dict[str, Any]:
    ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(token.top[:count], start=1)]
    entries: dict[str, Any] = {}
    for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]:
        text = tokenizer.token_text(token_id)
        entries.setdefault(str(token_id), {"logprob": finite(logprob), "rank": rank, "decoded_token": text})
    return entries


def trimmed(token: TokenLogprobs, count: int) -> TokenLogprobs:
    """With no more than `count` alternatives."""
    return TokenLogprobs(token.token_id, token.logprob, token.rank, token.top[:count])


def _written(tokenizer: Tokenizer, token: int, *, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.token_text(token)


def _top(tokenizer: Tokenizer, token: int, logprob: float, *, as_ids: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": _written(tokenizer, token, as_ids=as_ids), "logprob": finite(logprob), "bytes": list(raw)}


def _reported(token: OutputToken) -> TokenLogprobs:
    assert token.logprobs is not None, "the engine reports logprobs for every token of a choice that asked for them"
    return token.logprobs


def finite(logprob: float) -> float:
    """The number as JSON has it."""
    return logprob if isfinite(logprob) else NO_PROBABILITY

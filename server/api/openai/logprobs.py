"""Log-probabilities in the formats of OpenAI and vLLM. Minus infinity, which JSON lacks, becomes -9999."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Annotated, cast

import msgspec

from model_runner.contract import TokenLogprobs
from model_runner.image import Image
from server.api.answer_object import AnswerObject, doc
from server.generation.events import OutputToken
from server.text.tokenizer import Tokenizer

NO_PROBABILITY = -9999.0


class TopLogprob(AnswerObject):
    """One token and its log-probability."""

    token: Annotated[str, doc(r"The token's text; `bytes:\xe2` and so on if it is not whole characters.")]
    logprob: Annotated[float, doc("-9999 if the probability is zero.")]
    bytes: Annotated[Sequence[int] | None, doc("The token's bytes.")]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable alternatives."""

    top_logprobs: Annotated[Sequence[TopLogprob], doc("Up to `top_logprobs` of the request, best first.")]


class ChatLogprobs(AnswerObject):
    """Log-probabilities of a chat completion."""

    content: Annotated[Sequence[TokenLogprob] | None, doc("One entry for each token of the answer.")]
    refusal: Annotated[None, doc("Always null.")] = None


class CompletionLogprobs(AnswerObject):
    """Log-probabilities of a completion, as parallel lists."""

    tokens: Annotated[Sequence[str], doc("Texts of the tokens, written as in chat completions.")]
    token_logprobs: Annotated[Sequence[float | None], doc("Null for the first token of an echoed prompt.")]
    top_logprobs: Annotated[
        Sequence[Mapping[str, float] | None],
        doc("Logprobs by token text, best first, always including the token itself. Null if it has no logprobs."),
    ]
    text_offset: Annotated[Sequence[int], doc("Characters of `text` before each token.")]


class PromptLogprob(AnswerObject):
    """An alternative for a token of the prompt."""

    logprob: Annotated[float, doc("-9999 if the probability is zero.")]
    rank: Annotated[int, doc("1 is the most probable.")]
    decoded_token: Annotated[str, doc("The token's text.")]


PromptLogprobs = Sequence[Mapping[str, PromptLogprob] | None]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[OutputToken], *, as_ids: bool = False, lists_own: bool = False
) -> ChatLogprobs:
    """`choices[].logprobs` of chat completions.

    `as_ids` writes tokens as their ids; `lists_own` includes each token in its own alternatives.
    """
    content = []
    for token in tokens:
        reported = _reported(token)
        own = _top(tokenizer, token.id, reported.logprob, as_ids=as_ids)
        top = [_top(tokenizer, token_id, logprob, as_ids=as_ids) for token_id, logprob in reported.top]
        if lists_own and token.id not in (token_id for token_id, _ in reported.top):
            top.insert(0, own)
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[OutputToken], *, as_ids: bool = False
) -> CompletionLogprobs:
    """`choices[].logprobs` of completions. `as_ids` writes tokens as ids.

    A token without logprobs (the first of a prompt) has null. The token itself is always among the alternatives, so
    there may be one more than requested.
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
    return CompletionLogprobs(
        tokens=[_written(tokenizer, token.id, as_ids=as_ids) for token in tokens],
        token_logprobs=[None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
        top_logprobs=alternatives,
        text_offset=[token.offset for token in tokens],
    )


def prompt_logprobs(
    tokenizer: Tokenizer, reported: Sequence[TokenLogprobs], count: int, images: Sequence[Image] = ()
) -> PromptLogprobs:
    """The `prompt_logprobs` of vLLM: null for the first token, then for each token its own and the `count` best.

    They are null at the places of images, where the model sees no token. They are encoded token by token, because one
    call would block other threads for long.
    """
    encoded = [b"null", *(msgspec.json.encode(_prompt_token(tokenizer, token, count)) for token in reported)]
    for run in (run for image in images for run in image.runs):
        encoded[run.place : run.place + run.length] = [b"null"] * run.length
    return cast("PromptLogprobs", msgspec.Raw(b"[" + b",".join(encoded) + b"]"))


def _prompt_token(tokenizer: Tokenizer, token: TokenLogprobs, count: int) -> Mapping[str, PromptLogprob]:
    ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(token.top[:count], start=1)]
    entries: dict[str, PromptLogprob] = {}
    for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]:
        text = tokenizer.token_text(token_id)
        entries.setdefault(str(token_id), PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text))
    return entries


def trimmed(token: TokenLogprobs, count: int) -> TokenLogprobs:
    """The logprobs with at most `count` alternatives."""
    return TokenLogprobs(token.token_id, token.logprob, token.rank, token.top[:count])


def _written(tokenizer: Tokenizer, token: int, *, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.token_text(token)


def _top(tokenizer: Tokenizer, token: int, logprob: float, *, as_ids: bool) -> TopLogprob:
    text, raw = _written(tokenizer, token, as_ids=as_ids), tokenizer.token_bytes(token)
    return TopLogprob(token=text, logprob=finite(logprob), bytes=list(raw))


def _reported(token: OutputToken) -> TokenLogprobs:
    assert token.logprobs is not None, "the engine reports logprobs for every token of a choice that asked for them"
    return token.logprobs


def finite(logprob: float) -> float:
    """The number, with -9999 for minus infinity."""
    return logprob if isfinite(logprob) else NO_PROBABILITY

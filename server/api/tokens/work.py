"""From the body of a request to the tokenizer to that of its answer, wherever the tokenizer is."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from server.api.intake import IntakeContext
from server.api.tokens.schema import DetokenizeRequest, TokenizeRequest
from server.generation.notices import Notice, as_headers, as_warnings, to_report
from server.generation.planning.sampling import check_tokens
from server.generation.prompt import render
from server.generation.request import Conversation
from server.http.json_body import validated


@dataclass(frozen=True, slots=True)
class Tokenized:
    """An answer as it is sent."""

    content: bytes
    """A TokenizeResponse."""
    headers: Mapping[str, str]


def tokenize_body(context: IntakeContext, body: bytes) -> Tokenized:
    """The tokens of what the body has. Raises ApiError."""
    asked = validated(TokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    special = asked.add_special_tokens if asked.add_special_tokens is not None else asked.messages is None
    text, left_out = _text(context, asked)
    notices = to_report([*asked.left_out(), *left_out], strict=context.settings.strict)
    tokens = context.tokenizer.encode(text, add_special_tokens=special)
    answer = {"count": len(tokens), "max_model_len": context.info.max_model_len, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [context.tokenizer.token_text(token) for token in tokens]
    return Tokenized(msgspec.json.encode({**answer, **as_warnings(notices)}), as_headers(notices))


def detokenize_body(context: IntakeContext, body: bytes) -> bytes:
    """A DetokenizeResponse. Raises ApiError."""
    asked = validated(DetokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    check_tokens(asked.tokens, "tokens", context.info.vocab_size)
    return msgspec.json.encode({"prompt": context.tokenizer.decode(asked.tokens, skip_special_tokens=False)})


def _text(context: IntakeContext, asked: TokenizeRequest) -> tuple[str, list[Notice]]:
    if asked.messages is None:
        return asked.prompt or "", []
    conversation = Conversation(
        messages=tuple(message.for_template() for message in asked.messages),
        variables=asked.chat_template_kwargs or {},
        open_turn=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_last=bool(asked.continue_final_message),
    )
    return render(context.tokenizer.chat_template, conversation)

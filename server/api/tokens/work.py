"""From the body of a request to the tokenizer to that of its answer, wherever the tokenizer is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from server.api.intake import LARGE_BYTES, IntakeContext
from server.api.tokens.schema import DetokenizeRequest, TokenizeRequest
from server.generation.notices import Notice, as_headers, as_warnings, to_report
from server.generation.planning.decoding_rules import check_tokens
from server.generation.prompt import render
from server.http.json_body import validated
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokenized:
    """An answer as it is sent."""

    content: bytes
    """A TokenizeResponse."""
    headers: Mapping[str, str]


def tokenize_body(context: IntakeContext, body: bytes) -> Tokenized:
    """The tokens of what the body has. Raises ApiError."""
    asked = context.validated(TokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    text, left_out = _text(context, asked)
    notices = to_report([*asked.left_out(), *left_out], strict=context.settings.strict)
    tokenizer = context.tokenizer
    if asked.parse_special is False:
        context.weigh(LARGE_BYTES)
        tokens = tokenizer.encode_as_text(text, add_special_tokens=asked.adds_special)
    else:
        tokens = tokenizer.encode(text, add_special_tokens=asked.adds_special)
    answer = {
        "count": len(tokens),
        "max_model_len": context.info.max_model_len,
        "tokens": [_piece(tokenizer, token) for token in tokens] if asked.with_pieces else tokens,
        "token_strs": [tokenizer.token_name(token) for token in tokens] if asked.return_token_strs else None,
    }
    return Tokenized(msgspec.json.encode({**answer, **as_warnings(notices)}), as_headers(notices))


def detokenize_body(context: IntakeContext, body: bytes) -> bytes:
    """A DetokenizeResponse. Raises ApiError."""
    asked = validated(DetokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    check_tokens(asked.tokens, "tokens", context.info.vocab_size)
    text = context.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text, "content": text})


def _text(context: IntakeContext, asked: TokenizeRequest) -> tuple[str, list[Notice]]:
    tools = tuple(tool.tool(f"tools[{index}]").for_template() for index, tool in enumerate(asked.tools or ()))
    conversation = asked.conversation(opens_turn=True, tools=tools)
    return (asked.text, []) if conversation is None else render(context.tokenizer.chat_template, conversation)


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    text = tokenizer.whole_text(token)
    return {"id": token, "piece": list(tokenizer.token_bytes(token)) if text is None else text}

"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the model's tokenizer for clients that have none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Self

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from model_runner.image import Image
from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.body_worker import LARGE_BYTES, BodyContext
from server.api.dialect import Dialect
from server.api.endpoint import tokens_of_body
from server.api.fields.decoding import TokenId
from server.api.fields.messages import ConversationFields
from server.api.fields.rules import RequestModel, problem, related
from server.api.fields.tools import MAX_TOOLS, AnyTool
from server.api.openapi import answers, takes
from server.api.services import ModelDep, ServicesDep
from server.generation.notices import Notice, as_headers, to_report
from server.generation.planning.decoding_rules import check_tokens
from server.generation.request import GenerationRequest
from server.http.responses import json_response
from server.text.tokenizer import Tokenizer


class TokenizeRequest(ConversationFields):
    """Request schema for POST /tokenize: vLLM's `prompt` or `messages`, or llama.cpp's `content`."""

    model: str | None = Field(None, description="Name of the served model; optional.")
    prompt: str | None = Field(
        None, description="A text. Exactly one of `prompt`, `messages` and `content` is required.",
        json_schema_extra=related(excludes=["messages", "content"]),
    )  # fmt: skip
    content: str | None = Field(
        None, description="llama.cpp's name for `prompt`; special tokens are not added by default.",
        json_schema_extra=related(excludes=["messages"]),
    )  # fmt: skip
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True,
        description="With `messages`: the tools that the model may call, as in chat completions.",
        json_schema_extra=related(requires=["messages"]),
    )  # fmt: skip
    add_special_tokens: bool | None = Field(
        None, description="On by default for `prompt`, off for `messages` and `content`."
    )
    add_special: bool | None = Field(None, description="The same as `add_special_tokens`.")
    parse_special: bool | None = Field(
        None,
        description="Off: special tokens spelled out in the text are tokenized as plain text. Not with `messages`.",
    )
    return_token_strs: bool | None = Field(None, description="Also return each token as the vocabulary spells it.")
    with_pieces: bool | None = Field(None, description="Return each token with its text.")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.prompt is None and self.messages is None and self.content is None:
            message = "Exactly one of 'prompt', 'messages' and 'content' is required."
            raise problem("missing_required_parameter", message, "prompt")
        if self.messages is not None and self.parse_special is False:
            message = "'parse_special' needs a text: the chat template writes special tokens."
            raise problem("invalid_parameter_combination", message, "parse_special")
        if self.add_special is not None and self.add_special_tokens not in (None, self.add_special):
            message = "'add_special' and 'add_special_tokens' are names of one setting, but have different values."
            raise problem("invalid_parameter_combination", message, "add_special")
        return self

    @property
    def text(self) -> str:
        """The text of the prompt, if there are no messages."""
        return self.prompt or self.content or ""

    @property
    def adds_special(self) -> bool:
        """Whether the tokenizer's begin and end tokens are added."""
        sent = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if sent is None else sent


class TokenPiece(AnswerObject):
    """A token and its text."""

    id: Annotated[int, doc("The token's id.")]
    piece: Annotated[str | Sequence[int], doc("The token's text, or its bytes if they are not whole characters.")]


class ImagePlace(AnswerObject):
    """An image in a prompt."""

    start: Annotated[int, doc("Index of its first token in `tokens`.")]
    num_tokens: Annotated[int, doc("Tokens at its places, without the text around them.")]


class TokenizeResponse(AnswerObject):
    """Response schema for POST /tokenize."""

    count: Annotated[int, doc("Number of tokens.")]
    max_model_len: Annotated[int, doc("Prompt and output together, in tokens.")]
    tokens: Annotated[Sequence[int | TokenPiece], doc("Ids of the tokens; with `with_pieces`, objects.")]
    token_strs: Annotated[Sequence[str | None] | None, doc("The vocabulary's spellings, with `return_token_strs`.")]
    images: Annotated[Sequence[ImagePlace] | UnsetType, doc("The images of the messages, if there are any.")] = UNSET
    warnings: Warnings = UNSET


class DetokenizeRequest(RequestModel):
    """Request schema for POST /detokenize."""

    model: str | None = Field(None, description="Name of the served model; optional.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True, description="Ids of tokens of the model.")]


class DetokenizeResponse(AnswerObject):
    """Response schema for POST /detokenize."""

    prompt: Annotated[str, doc("The text, special tokens included.")]
    content: Annotated[str, doc("Same as `prompt`, under llama.cpp's name.")]
    warnings: Warnings = UNSET


class TokenizerInfo(AnswerObject, forbid_unknown_fields=False):
    """Response schema for GET /tokenizer_info, with everything in the model's `tokenizer_config.json`."""

    tokenizer_class: Annotated[str, doc("The tokenizer's class in transformers.")]
    vocab_size: Annotated[int, doc("Tokens in the tokenizer; the model may have fewer or more.")]
    model_max_length: Annotated[int, doc("The server's limit: prompt and output together, in tokens.")]
    eos_token_ids: Annotated[Sequence[int], doc("Tokens that end the model's output.")]
    bos_token: Annotated[str | None, doc("Begins a text; null: there is none.")]
    eos_token: Annotated[str | None, doc("Ends a text; null: there is none.")]
    pad_token: Annotated[str | None, doc("Pads texts; null: there is none.")]
    unk_token: Annotated[str | None, doc("Replaces unknown text; null: there is none.")]
    chat_template: Annotated[str | None, doc("The Jinja source; null: the model has none.")]


_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503)

router = APIRouter(tags=["Tokenizer"])


@router.post("/tokenize", responses=answers(TokenizeResponse, *_ERRORS), openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request, services: ServicesDep) -> Response:
    """Tokenize a prompt, or messages after the chat template."""
    return json_response(*await tokens_of_body(request, services, tokenize_body))


@router.post("/detokenize", responses=answers(DetokenizeResponse, *_ERRORS), openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request, services: ServicesDep) -> Response:
    """Turn token ids into text, special tokens included."""
    return json_response(*await tokens_of_body(request, services, detokenize_body))


@router.get("/tokenizer_info", responses=answers(TokenizerInfo, 401, 404, 503))
async def tokenizer_info(served: ModelDep) -> Response:
    """The tokenizer's configuration, for evaluation harnesses that use a remote tokenizer.

    503 until the model's context is known.
    """
    tokenizer = served.tokenizer
    special = tokenizer.special_tokens
    template = tokenizer.chat_template
    info = TokenizerInfo(
        tokenizer_class=tokenizer.tokenizer_class,
        vocab_size=tokenizer.vocab_size,
        model_max_length=served.context_length(),
        eos_token_ids=served.model.defaults.eos_token_ids,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=None if template is None else template.source,
    )
    return json_response({**tokenizer.config, **msgspec.structs.asdict(info)})


def tokenize_body(context: BodyContext, body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The content and the headers of a TokenizeResponse. Raises ApiError."""
    asked = context.validated(TokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    tokens, images, notices = _tokens(context, asked)
    tokenizer = context.tokenizer
    answer = TokenizeResponse(
        count=len(tokens),
        max_model_len=context.info.max_model_len,
        tokens=[_piece(tokenizer, token) for token in tokens] if asked.with_pieces else tokens,
        token_strs=[tokenizer.token_name(token) for token in tokens] if asked.return_token_strs else None,
        images=[ImagePlace(start=image.start, num_tokens=image.num_rows) for image in images] or UNSET,
        warnings=notices or UNSET,
    )
    return msgspec.json.encode(answer), as_headers(notices)


def detokenize_body(context: BodyContext, body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The content and the headers of a DetokenizeResponse. Raises ApiError."""
    asked = context.validated(DetokenizeRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    check_tokens(asked.tokens, "tokens", context.info.vocab_size)
    text = context.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    notices = to_report(asked.ignored(), strict=context.settings.strict)
    answer = DetokenizeResponse(prompt=text, content=text, warnings=notices or UNSET)
    return msgspec.json.encode(answer), as_headers(notices)


def _tokens(context: BodyContext, asked: TokenizeRequest) -> tuple[Sequence[int], Sequence[Image], Sequence[Notice]]:
    """The tokens of the text or of the messages, the images, and notices of ignored parts."""
    tokenizer, ignored = context.tokenizer, tuple(asked.ignored())
    tools = tuple(tool.tool(f"tools[{index}]").for_template() for index, tool in enumerate(asked.tools or ()))
    conversation = asked.conversation(opens_turn=True, tools=tools)
    if conversation is not None:
        prompt = replace(conversation, adds_special=asked.adds_special)
        request = GenerationRequest(
            model=asked.model, may_omit_model=True, prompts=(prompt,), paths={"prompt": "messages"}, notices=ignored
        )
        return context.planner().tokenize(request)
    notices = to_report(ignored, strict=context.settings.strict)
    if asked.parse_special is not False:
        return tokenizer.encode(asked.text, add_special_tokens=asked.adds_special), (), notices
    context.weigh(LARGE_BYTES)
    return tokenizer.encode_as_text(asked.text, add_special_tokens=asked.adds_special), (), notices


def _piece(tokenizer: Tokenizer, token: int) -> TokenPiece:
    text = tokenizer.whole_text(token)
    return TokenPiece(id=token, piece=list(tokenizer.token_bytes(token)) if text is None else text)


DIALECT = Dialect(router, requests={"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest})

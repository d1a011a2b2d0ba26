"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the model's tokenizer for clients that have none."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import Dialect
from server.api.endpoint import from_body
from server.api.openapi import documented_errors, takes
from server.api.services import ServicesDep
from server.api.tokens.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.api.tokens.work import detokenize_body, tokenize_body
from server.http.responses import json_response

_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503)

router = APIRouter(tags=["Tokenizer"])


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    responses=documented_errors(*_ERRORS),
    openapi_extra=takes(TokenizeRequest),
)
async def tokenize(request: Request, services: ServicesDep) -> Response:
    """The tokens of a prompt, or of messages after the chat template."""
    answer = await from_body(request, services, tokenize_body)
    return json_response(answer.content, answer.headers)


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    responses=documented_errors(*_ERRORS),
    openapi_extra=takes(DetokenizeRequest),
)
async def detokenize(request: Request, services: ServicesDep) -> Response:
    """The text of tokens, special tokens included."""
    return json_response(await from_body(request, services, detokenize_body))


@router.get("/tokenizer_info", responses=documented_errors(401, 503))
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """What evaluation harnesses ask a remote tokenizer for."""
    tokenizer = services.tokenizer
    special = tokenizer.special_tokens
    template = tokenizer.chat_template
    return TokenizerInfo.model_validate(
        {
            **tokenizer.config,
            "tokenizer_class": tokenizer.tokenizer_class,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": services.info().max_model_len,
            "eos_token_ids": list(services.model.defaults.eos_token_ids),
            **{name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "chat_template": None if template is None else template.source,
        }
    )


DIALECT = Dialect(router, requests={"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest})

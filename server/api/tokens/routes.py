"""POST /tokenize, POST /detokenize and GET /tokenizer_info: the model's tokenizer for clients that have none."""

import asyncio

from fastapi import APIRouter, Response

from server.http.body import JSONRoute
from server.api.answers.answer import encode
from server.generation.prompt import render_prompt
from server.api.tokens.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.http.responses import documented_errors, json_response
from server.http.services import Services, ServicesDep

_ERRORS = (400, 401, 404, 413, 415, 500, 503)

router = APIRouter(tags=["Tokenizer"], route_class=JSONRoute)
info_router = APIRouter(tags=["Tokenizer"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=documented_errors(*_ERRORS))
async def tokenize(body: TokenizeRequest, services: ServicesDep) -> Response:
    """The tokens of a prompt, or of messages after the chat template."""
    if body.model is not None:
        services.check_model(body.model)
    max_model_len = services.info().max_model_len
    text = await _text(body, services)
    special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
    tokens = await encode(services, text, add_special_tokens=special)
    answer = TokenizeResponse(count=len(tokens), max_model_len=max_model_len, tokens=tokens)
    if body.return_token_strs:
        answer = answer.model_copy(update={"token_strs": [services.tokenizer.token_text(token) for token in tokens]})
    return json_response(answer)


async def _text(body: TokenizeRequest, services: Services) -> str:
    if body.messages is None:
        return body.prompt or ""
    return await asyncio.to_thread(
        render_prompt,
        services.tokenizer.chat_template,
        body.messages,
        body.chat_template_kwargs or {},
        open_turn=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_last=bool(body.continue_final_message),
    )


@router.post("/detokenize", response_model=DetokenizeResponse, responses=documented_errors(*_ERRORS))
async def detokenize(body: DetokenizeRequest, services: ServicesDep) -> Response:
    """The text of tokens, special tokens included."""
    if body.model is not None:
        services.check_model(body.model)
    services.planner().check_tokens(body.tokens, "tokens")
    text = await asyncio.to_thread(services.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))


@info_router.get("/tokenizer_info", responses=documented_errors(401, 503))
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """What evaluation harnesses ask a remote tokenizer for."""
    tokenizer = services.tokenizer
    special = tokenizer.special_tokens
    template = tokenizer.chat_template
    return TokenizerInfo(
        tokenizer_class=tokenizer.tokenizer_class,
        vocab_size=tokenizer.vocab_size,
        model_max_length=services.info().max_model_len,
        eos_token_ids=list(services.model.defaults.eos_token_ids),
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=None if template is None else template.source,
    )

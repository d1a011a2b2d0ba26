"""POST /v1/chat/completions."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from model_runner.contract import Breaker
from server.http.body import JSONRoute
from server.api.answers.answer import (
    Head,
    UsageReport,
    WholeChoice,
    collect,
    encode,
    make_head,
    make_usage,
    new_id,
    score_of,
    spell_breakers,
    start_run,
    unless_gone,
)
from server.generation.choice_text import OutputToken, Piece
from server.api.answers.logprobs import chat_logprobs, prompt_logprobs
from server.generation.prompt import render_prompt
from server.api.chat.schema import ChatCompletionRequest, Message
from server.api.answers.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from server.generation.run import Run
from server.http.sse import event_stream
from server.http.openapi import GENERATION_ERRORS, streamed
from server.generation.planning.planner import NEGATIVE_PROMPT, Planner, Wanted
from server.http.responses import documented_errors, json_response
from server.http.services import Services, ServicesDep

router = APIRouter(route_class=JSONRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: streamed(ChatCompletionChunk), **documented_errors(*GENERATION_ERRORS)},
    tags=["OpenAI"],
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, services: ServicesDep) -> Response:
    """Answer a conversation."""
    services.check_model(body.model)
    planner = services.planner()
    text = await _render(services, body, body.messages)
    if body.truncate_prompt_tokens is None:
        planner.check_text(text, "messages")
    tokens = await encode(services, text, add_special_tokens=False)
    prediction = await _prediction(services, planner, body)
    negative_prompt = await _negative_prompt(services, planner, body)
    wanted = _wanted(body, prediction, negative_prompt, await spell_breakers(services, body))
    plan = planner.plan(new_id("chatcmpl"), body, [tokens], wanted)
    head = await make_head(services, plan)
    answer = _ChatAnswer(body, start_run(services, request, plan), head, services)
    if body.stream:
        chunks = answer.chunks()
        return await event_stream(request, chunks, services.settings)
    choices = await unless_gone(request, collect(answer.run))
    return json_response(await asyncio.to_thread(answer.whole, choices))  # many logprobs take a while


async def _render(services: Services, body: ChatCompletionRequest, messages: list[Message]) -> str:
    return await asyncio.to_thread(
        render_prompt,
        services.tokenizer.chat_template,
        messages,
        body.chat_template_kwargs or {},
        open_turn=body.opens_turn,
        continue_last=bool(body.continue_final_message),
    )


async def _negative_prompt(services: Services, planner: Planner, body: ChatCompletionRequest) -> list[int] | None:
    """The tokens of the conversation with another system message, the first if there are several."""
    system = body.guidance.negative_prompt if body.guidance else None
    if system is None:
        return None
    messages: list[Message] = list(body.messages)
    first = next((index for index, message in enumerate(messages) if message.role in ("system", "developer")), None)
    if first is not None:
        del messages[first]
    messages.insert(first or 0, Message(role="system", content=system))
    text = await _render(services, body, messages)
    planner.check_text(text, NEGATIVE_PROMPT)
    return await encode(services, text, add_special_tokens=False)


async def _prediction(services: Services, planner: Planner, body: ChatCompletionRequest) -> list[int] | None:
    """The tokens of the predicted output."""
    if body.prediction is None:
        return None
    planner.check_text(body.prediction.text, "prediction")
    return await encode(services, body.prediction.text, add_special_tokens=False)


def _wanted(
    body: ChatCompletionRequest,
    prediction: list[int] | None,
    negative_prompt: list[int] | None,
    breakers: tuple[Breaker, ...],
) -> Wanted:
    named = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    return Wanted(
        prompt_param="messages",
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        max_tokens_param=named,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        num_choices=body.num_answers,
        breakers=breakers,
        prediction=prediction,
        negative_prompt=negative_prompt,
    )


class _ChatAnswer:
    """One answer, whole or in chunks."""

    def __init__(self, body: ChatCompletionRequest, run: Run, head: Head, services: Services) -> None:
        self.run = run
        self._body = body
        self._head = head
        self._tokenizer = services.tokenizer

    def whole(self, choices: list[WholeChoice]) -> ChatCompletion:
        (prompt,) = self.run.prompts
        extra: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            reported = prompt.prompt_logprobs or ()
            extra["prompt_logprobs"] = prompt_logprobs(self._tokenizer, reported, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            extra["prompt_token_ids"] = list(prompt.request.prompt)
        return ChatCompletion(
            **self._head,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=make_usage(self.run),
            **extra,
        )

    def _choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=choice.text, refusal=None, annotations=[]),
            logprobs=self._logprobs(choice.tokens),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **score_of(choice.beam),
            **self._ids(choice.tokens),
        )

    async def chunks(self) -> AsyncGenerator[ChatCompletionChunk]:
        """The role of each choice, its text, its end; then the usage, if it was asked for."""
        usage = UsageReport(self.run, self._body.stream_options)
        begun: set[int] = set()
        async with aclosing(self.run.pieces()) as pieces:
            async for index, piece in pieces:
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(usage, self._role(index), first=True)
                for choice in self._deltas(index, piece):
                    yield self._chunk(usage, choice)
        if usage.at_end:
            yield ChatCompletionChunk(**self._head, choices=[], usage=make_usage(self.run))

    def _chunk(self, usage: UsageReport, choice: ChatChunkChoice, *, first: bool = False) -> ChatCompletionChunk:
        extra: dict[str, Any] = {**usage.in_chunk()}
        if first and self._body.return_token_ids:
            extra["prompt_token_ids"] = list(self.run.prompts[0].request.prompt)
        return ChatCompletionChunk(**self._head, choices=[choice], **extra)

    def _role(self, index: int) -> ChatChunkChoice:
        delta = ChatDelta(role="assistant", content="")
        return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def _deltas(self, index: int, piece: Piece) -> Iterator[ChatChunkChoice]:
        """The text, if there is any or tokens have to be reported; then the end."""
        reports_tokens = self._body.logprobs or self._body.return_token_ids
        if piece.text or (piece.tokens and reports_tokens):
            yield self._text(index, piece)
        if piece.finish_reason is not None:
            yield self._end(index, piece)

    def _text(self, index: int, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=piece.text),
            logprobs=self._logprobs(piece.tokens),
            finish_reason=None,
            **self._ids(piece.tokens),
        )

    def _end(self, index: int, piece: Piece) -> ChatChunkChoice:
        reason: Any = piece.finish_reason
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(),
            logprobs=None,
            finish_reason=reason,
            stop_reason=piece.stop_reason,
            **score_of(piece.beam),
        )

    def _logprobs(self, tokens: list[OutputToken] | tuple[OutputToken, ...]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, tokens) if self._body.logprobs else None

    def _ids(self, tokens: list[OutputToken] | tuple[OutputToken, ...]) -> dict[str, Any]:
        return {"token_ids": [token.id for token in tokens]} if self._body.return_token_ids else {}

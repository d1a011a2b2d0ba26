"""What the body of a chat completion asks for."""

from dataclasses import dataclass

from server.api.chat.schema import ChatCompletionRequest
from server.api.fields.openai import shared_fields
from server.generation.planning.plan import Plan
from server.generation.request import Conversation, GenerationRequest
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the answer has to know of the body."""

    logprobs: bool
    prompt_logprobs: int | None
    return_token_ids: bool
    return_token_sources: bool
    include_usage: bool
    calls_functions: bool
    """Whether calls are told in the older form."""
    continuous_usage: bool
    hides_reasoning: bool
    echoed: str
    """What the content of each choice begins with."""
    tokens_as_ids: bool
    lists_own_logprob: bool
    """Whether each token is among the tokens whose logprobs are reported at its place."""


def chat_intent(body: ChatCompletionRequest) -> GenerationRequest:
    """The body's fields as a request."""
    max_tokens = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    tools, wishes = body.tool_use, body.wishes
    wished = {name: value for name, (_, value) in wishes.items()}
    conversation = Conversation(
        messages=tuple(message.for_template() for message in body.messages),
        tools=() if tools is None else tuple(tool.for_template() for tool in tools.tools),
        variables=body.chat_template_kwargs or {},
        thinks=wished.get("thinking"),
        effort=wished.get("reasoning_effort"),
        open_turn=body.opens_turn,
        continue_last=bool(body.continue_final_message),
        adds_special=bool(body.add_special_tokens),
    )
    return GenerationRequest(
        **shared_fields(
            body,
            {
                "prompt": "messages",
                "max_tokens": max_tokens,
                "logprobs": "top_logprobs" if body.top_logprobs else "logprobs",
                "thinking_budget": "thinking_token_budget",
                "continue_last": "continue_final_message",
                "echoes": "echo",
                **{name: path for name, (path, _) in wishes.items()},
            },
            body.constraint,
        ),
        id_prefix="chatcmpl-",
        prompts=(conversation,),
        tools=tools,
        thinking_budget=wished.get("thinking_budget"),
        separates_reasoning=body.is_separate,
        echoes=bool(body.echoed),
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        num_choices=body.num_answers,
        num_repeats=body.num_answers if body.stream or body.echoed else 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=None if body.prediction is None else body.prediction.text,
    )


def chat_options(body: ChatCompletionRequest, plan: Plan, tokenizer: Tokenizer) -> ChatOptions:
    """What the answer has to know of the body."""
    return ChatOptions(
        logprobs=bool(body.logprobs),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_token_sources=bool(body.return_token_sources),
        include_usage=body.include_usage,
        calls_functions=bool(body.functions),
        continuous_usage=body.continuous_usage,
        hides_reasoning=not body.is_shown,
        echoed=body.echoed,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        lists_own_logprob=bool(body.logprob_token_ids),
    )

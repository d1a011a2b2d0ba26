"""The body of POST /v1/chat/completions, and what it asks for."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from server.api.fields.messages import Content, Message, text_of
from server.api.fields.openai import AccountFields, SamplingFields, shared_fields
from server.api.fields.reasoning import ReasoningFields
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    SUPPORTED_VALUES_ONLY,
    Refused,
    RequestModel,
    hint,
    no_effect,
    refused,
    related,
)
from server.api.fields.tools import ToolFields
from server.generation.notices import Notice
from server.generation.request import Conversation, GenerationRequest


class Prediction(RequestModel):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content = Field(description="The text.")

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)


class ChatCompletionRequest(ToolFields, AccountFields, ReasoningFields, SamplingFields):
    """OpenAI's fields with OpenAI's limits, and the extensions under vLLM's names."""

    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, oldest first.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="By default half of the context, at most 32,768 tokens, and never more than its rest.",
    )
    max_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Older name of max_completion_tokens.",
        json_schema_extra=related(excludes=["max_completion_tokens"]),
    )  # fmt: skip
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of so many alternatives.", json_schema_extra=related(requires=["logprobs"])
    )

    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; on by default.")
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of answering it.",
        json_schema_extra=related(excludes=["add_generation_prompt"]),
    )  # fmt: skip
    echo: bool | None = Field(
        None, description="Begin the content with the last message's, if that is the assistant's or is continued."
    )

    prediction: Prediction | None = Field(
        None,
        description="What the answer will probably be: where that is right, it comes faster. Only with speculation by "
        "`prediction`, which is then the default, or `auto`.",
        examples=[{"type": "content", "content": "def add(a, b):\n    return a + b\n"}],
    )

    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1), SUPPORTED_VALUES_ONLY] = (
        no_effect("Text is the only one.")
    )

    verbosity: Literal["low", "medium", "high"] | None = hint(
        "How long an answer should be.", "The length is not controlled."
    )
    store: bool | None = hint("Whether the answer is kept.", "Nothing is stored.")

    audio: Refused = refused("Audio output.")
    moderation: Refused = refused("Moderation.")
    web_search_options: Refused = refused("Web search.")
    best_of: Annotated[Literal[1] | None, SUPPORTED_ONLY] = refused("Choosing the best of several outputs.")
    chat_template: Refused = refused("Templates of the request's own.")
    documents: Refused = refused("Documents for the template.")

    def left_out(self, path: str = "") -> Iterator[Notice]:
        """See RequestModel."""
        yield from super().left_out(path)
        if self.logprob_token_ids and self.top_logprobs:
            yield Notice(
                "top_logprobs", "The tokens of 'logprob_token_ids' are reported in place of the most probable."
            )

    @property
    def echoed(self) -> str:
        """The text that the content begins with."""
        last = self.messages[-1]
        if not self.echo or (self.opens_turn and last.role != "assistant"):
            return ""
        return str(last.for_template()["content"])

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


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

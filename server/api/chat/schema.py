"""Request schema for POST /v1/chat/completions, and its conversion to a GenerationRequest."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from server.api.fields.decoding import NumAlternatives
from server.api.fields.foreign import NPredict, NProbs, NumPredict
from server.api.fields.generation import MAX_TOKENS
from server.api.fields.messages import Message, TextContent, for_template, text_of
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
    same_as,
)
from server.api.fields.tools import ToolFields
from server.generation.notices import Notice
from server.generation.request import Conversation, GenerationRequest


class Prediction(RequestModel):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: TextContent = Field(description="The predicted text.")

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)


class ChatCompletionRequest(ToolFields, AccountFields, ReasoningFields, SamplingFields):
    """Request schema for POST /v1/chat/completions: OpenAI's fields and limits, and extensions under vLLM's names."""

    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, oldest first.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description=MAX_TOKENS,
    )
    max_tokens: int | None = same_as("max_completion_tokens", "Older name.", ge=1, le=2**31 - 1)
    n_predict: NPredict = same_as("max_completion_tokens", "llama.cpp's name; -1 is no limit.")
    num_predict: NumPredict = same_as("max_completion_tokens", "Ollama's name; 0 or less is no limit.")
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: NumAlternatives | None = Field(
        None,
        description="Report this many alternatives for each token, at most the setting `max_logprobs`.",
        json_schema_extra=related(requires=["logprobs"]),
    )
    n_probs: NProbs = same_as("top_logprobs", "llama.cpp's name, which needs no `logprobs`; 0 reports nothing.")

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
        description="The expected answer: parts that are right are generated faster. Works only with speculation by "
        "`prediction`, which is then the default, or `auto`.",
        examples=[{"type": "content", "content": "def add(a, b):\n    return a + b\n"}],
    )

    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1), SUPPORTED_VALUES_ONLY] = (
        no_effect("Only text is supported.")
    )

    verbosity: Literal["low", "medium", "high"] | None = hint(
        "How long an answer should be.", "The length is not controlled."
    )
    store: bool | None = hint("Whether to store the answer.", "Chat completions are not stored.")

    audio: Refused = refused("Audio output.")
    moderation: Refused = refused("Moderation.")
    web_search_options: Refused = refused("Web search.")
    best_of: Annotated[Literal[1] | None, SUPPORTED_ONLY] = refused("Choosing the best of several outputs.")
    chat_template: Refused = refused("A chat template in the request.")
    documents: Refused = refused("Documents for the chat template.")

    def ignored(self, path: str = "") -> Iterator[Notice]:
        yield from super().ignored(path)
        if self.logprob_token_ids and self.top_logprobs:
            yield Notice(
                "top_logprobs", "The tokens of 'logprob_token_ids' are reported instead of the most probable ones."
            )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: no log-probabilities are reported."""
        return self.n_probs or (self.top_logprobs or 0 if self.logprobs else None)

    @property
    def echoed(self) -> str:
        """The text with which the content begins."""
        last = self.messages[-1]
        if not self.echo or (self.opens_turn and last.role != "assistant"):
            return ""
        return text_of(last.content) or last.refusal or ""

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def chat_intent(body: ChatCompletionRequest) -> GenerationRequest:
    """Convert a body."""
    max_tokens_path, max_tokens = body.named_value("max_completion_tokens")
    tools, settings = body.tool_use, body.reasoning_settings
    reasoning = {name: value for name, (_, value) in settings.items()}
    messages, images = for_template(body.messages)
    conversation = Conversation(
        messages=messages,
        images=images,
        tools=body.shown_tools,
        may_call=tools is not None,
        variables=body.chat_template_kwargs or {},
        thinks=reasoning.get("thinking"),
        effort=reasoning.get("reasoning_effort"),
        open_turn=body.opens_turn,
        continue_last=bool(body.continue_final_message),
        adds_special=bool(body.add_special_tokens),
    )
    return GenerationRequest(
        **shared_fields(
            body,
            {
                "prompt": "messages",
                "max_tokens": max_tokens_path,
                "logprobs": body.named_value("top_logprobs")[0] if body.num_logprobs else "logprobs",
                "thinking_budget": "thinking_token_budget",
                "continue_last": "continue_final_message",
                "echoes": "echo",
                **{name: path for name, (path, _) in settings.items()},
            },
            body.constraint,
        ),
        id_prefix="chatcmpl-",
        prompts=(conversation,),
        tools=tools,
        thinking_budget=reasoning.get("thinking_budget"),
        separates_reasoning=body.is_separate,
        echoes=bool(body.echoed),
        max_tokens=max_tokens,
        num_choices=body.num_answers,
        num_repeats=body.num_answers if body.stream or body.echoed else 1,
        logprobs=body.num_logprobs,
        prediction=None if body.prediction is None else body.prediction.text,
    )

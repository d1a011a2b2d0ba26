"""The fields of APIs that take a conversation where they also take a text, and do not answer it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from server.api.fields.messages import Message
from server.api.fields.rules import RequestModel, related
from server.generation.request import Conversation


class ConversationFields(RequestModel):
    """A conversation, and how the model's chat template writes it."""

    messages: list[Message] | None = Field(
        None, min_length=1, fail_fast=True, description="A conversation, as in chat completions."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Of messages: open the assistant's turn. `/tokenize` does by default, `/v1/embeddings` does not.",
        json_schema_extra=related(requires=["messages"]),
    )
    continue_final_message: bool | None = Field(
        None, description="Of messages: leave the last one open.",
        json_schema_extra=related(requires=["messages"], excludes=["add_generation_prompt"]),
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Of messages: variables that the chat template knows.",
        json_schema_extra=related(requires=["messages"]),
    )  # fmt: skip

    def conversation(self, *, opens_turn: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation | None:
        """What the fields say; None without messages. `opens_turn` is the default of `add_generation_prompt`."""
        if self.messages is None:
            return None
        is_open = opens_turn if self.add_generation_prompt is None else self.add_generation_prompt
        return Conversation(
            messages=tuple(message.for_template() for message in self.messages),
            tools=tools,
            variables=self.chat_template_kwargs or {},
            open_turn=is_open and not self.continue_final_message,
            continue_last=bool(self.continue_final_message),
        )

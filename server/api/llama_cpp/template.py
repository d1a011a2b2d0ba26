"""POST /apply-template: its request, and the work."""

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import Field

from server.api.fields.messages import Message
from server.api.fields.rules import RequestModel, related
from server.api.fields.tools import ToolFields
from server.api.intake import IntakeContext
from server.generation.notices import as_headers, as_warnings, to_report
from server.generation.prompt import render
from server.generation.request import Conversation


class ApplyTemplateRequest(ToolFields, RequestModel):
    """The part of a chat completion that becomes its prompt."""

    model: str | None = Field(None, description="The served model when left out.")
    messages: list[Message] = Field(min_length=1, fail_fast=True, description="The conversation, oldest first.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; on by default.")
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open.", json_schema_extra=related(excludes=["add_generation_prompt"])
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the chat template knows.")


def apply_template(context: IntakeContext, body: bytes) -> tuple[bytes, Mapping[str, str]]:
    """An AppliedTemplate for the body, and headers. Raises ApiError."""
    asked = context.validated(ApplyTemplateRequest, body)
    if asked.model is not None:
        context.model.check_name(asked.model)
    tools = asked.tool_use
    conversation = Conversation(
        messages=tuple(message.for_template() for message in asked.messages),
        tools=() if tools is None else tuple(tool.for_template() for tool in tools.tools),
        variables=asked.chat_template_kwargs or {},
        open_turn=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_last=bool(asked.continue_final_message),
    )
    text, left_out = render(context.tokenizer.chat_template, conversation)
    notices = to_report([*asked.left_out(), *left_out], strict=context.settings.strict)
    return msgspec.json.encode({"prompt": text, **as_warnings(notices)}), as_headers(notices)

"""Requests and answers of the tokenizer's endpoints."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from server.openai.protocol.chat import Message
from server.openai.protocol.common import TokenId
from server.openai.protocol.objects import ResponseModel
from server.openai.protocol.rules import RequestModel, problem, related

_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    model: str | None = Field(None, description="The served model when left out.")
    prompt: str | None = Field(None, json_schema_extra=related(excludes=["messages"]))
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = Field(None, description="On by default for a prompt, off for messages.")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(None, description="On by default.")
    continue_final_message: bool | None = Field(None, json_schema_extra=related(excludes=["add_generation_prompt"]))
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeRequest":
        if self.prompt is None and self.messages is None:
            raise problem("missing_required_parameter", "Exactly one of 'prompt' and 'messages' is required.", "prompt")
        if self.messages is None:
            for name in _CHAT_ONLY:
                if getattr(self, name) is not None:
                    raise problem("invalid_parameter_combination", f"'{name}' needs 'messages'.", name)
        return self


class TokenizeResponse(ResponseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Tokens to turn into text."""

    model: str | None = Field(None, description="The served model when left out.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    """Their text, special tokens included."""

    prompt: str


class TokenizerInfo(ResponseModel):
    """The tokenizer of the served model."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    eos_token_ids: list[int]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None

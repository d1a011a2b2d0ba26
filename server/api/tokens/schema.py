"""Requests and answers of the tokenizer's endpoints."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from server.api.fields.decoding import TokenId
from server.api.fields.messages import Message
from server.api.fields.rules import RequestModel, problem, related
from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel

_CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    model: str | None = Field(None, description="The served model when left out.")
    prompt: str | None = Field(
        None, description="A text; either this or `messages` is required.",
        json_schema_extra=related(excludes=["messages"]),
    )  # fmt: skip
    messages: list[Message] | None = Field(
        None, min_length=1, fail_fast=True, description="A conversation, as in chat completions."
    )
    add_special_tokens: bool | None = Field(None, description="On by default for a prompt, off for messages.")
    return_token_strs: bool | None = Field(None, description="Also return each token's text.")
    add_generation_prompt: bool | None = Field(
        None, description="Of messages: open the assistant's turn; on by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Of messages: leave the last one open.",
        json_schema_extra=related(excludes=["add_generation_prompt"]),
    )  # fmt: skip
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Of messages: variables that the chat template knows."
    )

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

    count: int = Field(description="How many tokens there are.")
    max_model_len: int = Field(description="Prompt and output together, in tokens.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(None, description="Their texts, with return_token_strs.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class DetokenizeRequest(RequestModel):
    """Tokens to turn into text."""

    model: str | None = Field(None, description="The served model when left out.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True, description="Ids of tokens of the model.")]


class DetokenizeResponse(ResponseModel):
    """Their text, special tokens included."""

    prompt: str = Field(description="The text.")


class TokenizerInfo(ResponseModel):
    """The tokenizer of the served model."""

    tokenizer_class: str = Field(description="Its name in transformers.")
    vocab_size: int = Field(description="Tokens that it knows; the model may have fewer or more.")
    model_max_length: int = Field(description="What the server takes: prompt and output together, in tokens.")
    eos_token_ids: list[int] = Field(description="Tokens that end the output by the model's own habit.")
    bos_token: str | None = Field(description="Begins a text; null: there is none.")
    eos_token: str | None = Field(description="Ends it; null: there is none.")
    pad_token: str | None = Field(description="Fills up; null: there is none.")
    unk_token: str | None = Field(description="Stands for what it does not know; null: there is none.")
    chat_template: str | None = Field(description="The Jinja source; null: the model has none.")

"""Requests and answers of the tokenizer's endpoints."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from server.api.fields.decoding import TokenId
from server.api.fields.messages import ConversationFields
from server.api.fields.rules import RequestModel, problem, related
from server.api.fields.tools import MAX_TOOLS, AnyTool
from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel


class TokenizeRequest(ConversationFields):
    """A prompt or messages, as vLLM has them, or a prompt as llama.cpp has it, under `content`."""

    model: str | None = Field(None, description="The served model when left out.")
    prompt: str | None = Field(
        None, description="A text; either this, `messages` or `content` is required.",
        json_schema_extra=related(excludes=["messages", "content"]),
    )  # fmt: skip
    content: str | None = Field(
        None, description="The same as `prompt`, as llama.cpp calls it: special tokens are not added by default.",
        json_schema_extra=related(excludes=["messages"]),
    )  # fmt: skip
    tools: list[AnyTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True,
        description="Of messages: tools that the model is told of, as in chat completions.",
        json_schema_extra=related(requires=["messages"]),
    )  # fmt: skip
    add_special_tokens: bool | None = Field(
        None, description="On by default for `prompt`, off for `messages` and `content`."
    )
    add_special: bool | None = Field(None, description="The same as `add_special_tokens`.")
    parse_special: bool | None = Field(
        None,
        description="Off: special tokens that the text spells are read as text like any other. Not with `messages`.",
    )
    return_token_strs: bool | None = Field(None, description="Also return each token as the vocabulary spells it.")
    with_pieces: bool | None = Field(None, description="Return each token with the text that it stands for.")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.prompt is None and self.messages is None and self.content is None:
            message = "Exactly one of 'prompt', 'messages' and 'content' is required."
            raise problem("missing_required_parameter", message, "prompt")
        if self.messages is not None and self.parse_special is False:
            message = "'parse_special' needs a text: the chat template writes special tokens."
            raise problem("invalid_parameter_combination", message, "parse_special")
        if self.add_special is not None and self.add_special_tokens not in (None, self.add_special):
            message = "'add_special' and 'add_special_tokens' are the same, and differ."
            raise problem("invalid_parameter_combination", message, "add_special")
        return self

    @property
    def text(self) -> str:
        """Of the prompt, where there are no messages."""
        return self.prompt or self.content or ""

    @property
    def adds_special(self) -> bool:
        """Whether tokens that begin and end every text are added."""
        said = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if said is None else said


class TokenPiece(ResponseModel):
    """A token and its text."""

    id: int = Field(description="Its id.")
    piece: str | list[int] = Field(description="Its text; its bytes, where these are no whole characters.")


class TokenizeResponse(ResponseModel):
    """The tokens of a prompt."""

    count: int = Field(description="How many tokens there are.")
    max_model_len: int = Field(description="Prompt and output together, in tokens.")
    tokens: list[int] | list[TokenPiece] = Field(description="Their ids; with `with_pieces`, objects.")
    token_strs: list[str] | None = Field(description="As the vocabulary spells them, with `return_token_strs`.")
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class DetokenizeRequest(RequestModel):
    """Tokens to turn into text."""

    model: str | None = Field(None, description="The served model when left out.")
    tokens: Annotated[list[TokenId], Field(fail_fast=True, description="Ids of tokens of the model.")]


class DetokenizeResponse(ResponseModel):
    """Their text, special tokens included."""

    prompt: str = Field(description="The text.")
    content: str = Field(description="The same, as llama.cpp calls it.")


class TokenizerInfo(ResponseModel):
    """The tokenizer of the served model, with all that its `tokenizer_config.json` says of it."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str = Field(description="Its name in transformers.")
    vocab_size: int = Field(description="Tokens that it knows; the model may have fewer or more.")
    model_max_length: int = Field(description="What the server takes: prompt and output together, in tokens.")
    eos_token_ids: list[int] = Field(description="Tokens that end the output by the model's own habit.")
    bos_token: str | None = Field(description="Begins a text; null: there is none.")
    eos_token: str | None = Field(description="Ends it; null: there is none.")
    pad_token: str | None = Field(description="Fills up; null: there is none.")
    unk_token: str | None = Field(description="Stands for what it does not know; null: there is none.")
    chat_template: str | None = Field(description="The Jinja source; null: the model has none.")

"""Request schemas for POST /v1/messages and /v1/messages/count_tokens, and their conversion."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.decoding import StopString
from server.api.fields.foreign import WholeNumber
from server.api.fields.generation import ConversationFields, OneAnswerFields, generation_fields
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    EchoedModel,
    Refused,
    RequestModel,
    hint,
    no_effect,
    not_together,
    problem,
    refused,
    related,
    same_as,
    tag_by_type,
)
from server.api.fields.structured import CONSTRAINT_FIELDS
from server.api.fields.tools import cache_control
from server.api.messages.blocks import CacheControl, InputMessage, SystemText, TextBlock, ToolUseBlock, text_of
from server.api.messages.history import History
from server.api.messages.tools import MessagesToolFields
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import JsonSchema
from server.generation.request import Conversation, GenerationRequest
from server.generation.settings import MAX_STOPS

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Error code at which clients send the whole conversation instead."""
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_PATHS = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "messages[].tool_calls[].function.arguments": "messages[].content[].input",
}

_MAX_TOKENS = "`max_tokens` says how many tokens there may be."
Display = Literal["summarized", "omitted"]


def _display(description: str) -> Any:
    """The default of the field `display`."""
    return hint(description, "Thinking is shown unchanged or not at all.", off=["omitted"])


class ThinkingOn(RequestModel):
    """Think first, up to a number of tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(
        ge=0, le=2**31 - 1, description="The most thinking tokens; after them the thinking is ended."
    )
    display: Display | None = _display("`omitted`: the thinking is only in the signature.")


class ThinkingAdaptive(RequestModel):
    """Think first, as long as the model chooses."""

    type: Literal["adaptive"]
    display: Display | None = _display("`omitted`: the thinking is only in the signature.")


class ThinkingOff(RequestModel):
    """Do not think first."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingOn, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingOff, Tag("<disabled>")],
    Discriminator(tag_by_type("enabled")),
]


class JsonFormat(RequestModel):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(
        alias="schema", description="A JSON schema. Keywords that cannot be enforced are ignored and reported."
    )
    name: str | None = no_effect("Your own name for the schema.")


class OutputConfig(RequestModel):
    """Reasoning effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = hint(
        "How much to think first. Passed to a chat template that has a variable `reasoning_effort`.", ""
    )
    format: JsonFormat | None = Field(None, description="Constrain the answer; any text by default.")
    task_budget: dict[str, Any] | None = hint(
        "The token budget of a whole task.", "The budget is not shown to the model."
    )


class Metadata(EchoedModel):
    """Metadata of the request."""

    user_id: str | None = no_effect("Your own id for the end user.", max_length=256)


class MessagesFields(MessagesToolFields, ConversationFields, OneAnswerFields):
    """Anthropic's fields, and extensions under vLLM's names."""

    messages: list[InputMessage] = Field(
        min_length=1, fail_fast=True,
        description="The conversation, oldest first. If the last message is the assistant's, it is continued; if it is "
        "empty, it is left out.",
    )  # fmt: skip
    system: SystemText | None = Field(None, description="The system prompt.")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = same_as(
        "stop", "Texts that end the output: Anthropic's name."
    )
    num_predict: WholeNumber | None = hint("Ollama: the most output tokens.", _MAX_TOKENS, off=[0, -1, -2])
    n_predict: WholeNumber | None = hint("llama.cpp: the most output tokens.", _MAX_TOKENS, off=[-1])
    output_config: OutputConfig | None = Field(
        None, description="Reasoning effort and format of the answer.",
        json_schema_extra=related(excludes=["ignore_eos", "output_format", *CONSTRAINT_FIELDS]),
    )  # fmt: skip
    output_format: JsonFormat | None = Field(
        None, description="Older name for `output_config.format`.",
        json_schema_extra=related(excludes=["ignore_eos", *CONSTRAINT_FIELDS]),
    )  # fmt: skip

    cache_control: CacheControl | None = cache_control()
    metadata: Metadata | None = no_effect("Metadata of the request.")
    service_tier: Literal["auto", "standard_only"] | None = no_effect("There is one tier.")
    user_profile_id: str | None = no_effect("Your own id for the end user.", max_length=256)

    thinking: Thinking | None = hint(
        "Whether to think first, if the chat template has a switch for it. Otherwise ignored and reported.", ""
    )  # fmt: skip
    context_management: dict[str, Any] | None = hint(
        "What to clear from a long conversation.", "Nothing is cleared.", off=[_KEEPS_ALL, {"edits": []}]
    )
    speed: Literal["standard", "fast"] | None = hint(
        "The speed of the answer.", "Answers are always as fast as possible.", off=["standard"]
    )
    inference_geo: str | None = hint("Where the model runs.", "The model runs on this server.")
    diagnostics: dict[str, Any] | None = hint("Why a prefix was not cached.", "`usage` reports the cached tokens.")

    thread: Refused = refused("Conversations that the server stores.")
    container: Refused = refused("A container that runs code.")
    mcp_servers: Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused(
        "MCP servers of tools."
    )
    compaction: Refused = refused("Summaries of the conversation.")
    fallbacks: Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused("Fallback models.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_thread(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("thread") is not None:
            message = "Unsupported parameter: '{path}' is not supported by this server. Send the whole conversation."
            raise problem(THREAD_UNSUPPORTED, message, "thread")
        return value

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        last = self.messages[-1]
        has_others = any(not isinstance(block, TextBlock) for block in last.blocks)
        calls = any(isinstance(block, ToolUseBlock) for block in last.blocks)
        is_alone = len(self.messages) == 1
        if last.role == "assistant" and (calls or (not last.text and (has_others or is_alone))):
            message = "Invalid '{path}': a last message of the assistant is continued, so it needs text and no calls."
            raise problem("invalid_value", message, f"messages[{len(self.messages) - 1}].content")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        name, budget = self.named_value("thinking_token_budget")
        if isinstance(self.thinking, ThinkingOn) and budget not in (None, self.thinking.budget_tokens):
            raise not_together(name, "thinking.budget_tokens")
        return self

    def asks(self, name: str) -> bool:
        config = self.output_config
        return super().asks(name) and not (name == "output_config" and (config is None or config.format is None))

    @property
    def continues(self) -> bool:
        """Whether the last message is continued."""
        return self.messages[-1].role == "assistant" and bool(self.messages[-1].text)

    @property
    def turns(self) -> Sequence[InputMessage]:
        """The messages, without an empty one of the assistant at their end, which asks for an answer like none."""
        is_empty = self.messages[-1].role == "assistant" and not self.continues
        return self.messages[:-1] if is_empty else self.messages

    @property
    def stop_strings(self) -> Sequence[str] | None:
        return super().stop_strings if self.stop_sequences is None else self.stop_sequences

    @property
    def constrained_by(self) -> str | None:
        form, path = self._format
        return super().constrained_by if form is None else path

    @property
    def constraint(self) -> Constraint | None:
        form, path = self._format
        return (
            super().constraint
            if form is None
            else JsonSchema(form.schema_, f"{path}.schema", self.json_style, is_strict=False)
        )

    @property
    def _format(self) -> tuple[JsonFormat | None, str]:
        """The answer's format in Anthropic's fields, and its path."""
        if self.output_config is not None and self.output_config.format is not None:
            return self.output_config.format, "output_config.format"
        return self.output_format, "output_format"


class MessagesRequest(MessagesFields):
    """Request schema for POST /v1/messages."""

    max_tokens: int = Field(
        ge=0, le=2**31 - 1,
        description="The most output tokens, never more than the context has left. With 0, the prompt is only "
        "computed and cached.",
    )  # fmt: skip


class CountTokensRequest(MessagesFields):
    """Request schema for POST /v1/messages/count_tokens."""

    max_tokens: int | None = no_effect("Nothing is generated.", ge=0)


def messages_intent(body: MessagesFields) -> GenerationRequest:
    """Convert a body."""
    history = History.of("" if body.system is None else text_of(body.system), body.turns, body.tool_names)
    tools = body.tool_use(history.loaded)
    effort = None if body.output_config is None else body.output_config.effort
    conversation = Conversation(
        messages=tuple(history.messages),
        images=history.images.all,
        tools=body.shown_tools(history.loaded),
        may_call=tools is not None,
        variables=body.chat_template_kwargs or {},
        effort=effort,
        thinks=None if body.thinking is None else not isinstance(body.thinking, ThinkingOff),
        open_turn=not body.continues,
        continue_last=body.continues,
    )
    budget_path, budget = body.named_value("thinking_token_budget")
    if isinstance(body.thinking, ThinkingOn):
        budget, budget_path = body.thinking.budget_tokens, "thinking.budget_tokens"
    stop = "stop" if body.stop_sequences is None else "stop_sequences"
    paths = {
        **_PATHS,
        "continue_last": f"messages[{len(body.messages) - 1}]",
        "thinking_budget": budget_path,
        "stop": stop,
        **history.paths,
    }
    fields = generation_fields(body, paths, body.constraint)
    return GenerationRequest(
        **{**fields, "notices": (*fields["notices"], *history.notices)},
        id_prefix="msg_",
        prompts=(conversation,),
        tools=tools,
        thinking_budget=budget,
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
    )

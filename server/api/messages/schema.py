"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens, and what they ask for."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.decoding import StopString
from server.api.fields.generation import ConversationFields, OneAnswerFields, generation_fields
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    EchoedModel,
    Refused,
    RequestModel,
    hint,
    no_effect,
    problem,
    refused,
    related,
    tag_by_type,
)
from server.api.fields.structured import FORMS
from server.api.messages.blocks import CacheControl, InputMessage, SystemText, ToolUseBlock, cache_control, text_of
from server.api.messages.history import History
from server.api.messages.tools import MessagesToolFields
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import LooseJson
from server.generation.request import Conversation, GenerationRequest
from server.generation.settings import MAX_STOPS

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Of this code, clients send their whole history instead."""
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_PATHS = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "messages[].tool_calls[].function.arguments": "messages[].content[].input",
}

Display = Literal["summarized", "omitted"]


def _display(description: str) -> Any:
    """The default of the field of this name."""
    return hint(description, "Thinking is shown as it is, or not at all.", off=["omitted"])


class ThinkingOn(RequestModel):
    """Think first."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=0, le=2**31 - 1, description="Tokens of thinking after which its end is forced.")
    display: Display | None = _display("`omitted`: the thinking comes as a signature.")


class ThinkingAdaptive(RequestModel):
    """Think first, for as long as the model likes."""

    type: Literal["adaptive"]
    display: Display | None = _display("As above.")


class ThinkingOff(RequestModel):
    """Do not."""

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
        alias="schema", description="A JSON schema; what of it cannot be enforced is reported."
    )
    name: str | None = no_effect("Your own name for it.")


class OutputConfig(RequestModel):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = hint(
        "How much to think first. Given to a chat template that has a variable `reasoning_effort`.", ""
    )
    format: JsonFormat | None = Field(None, description="Hold the answer to a form; any text by default.")
    task_budget: dict[str, Any] | None = hint(
        "Tokens that the model is to get by with in a whole task.", "The model is not told of it."
    )


class Metadata(EchoedModel):
    """Of the request."""

    user_id: str | None = no_effect("Your own id of the end user.", max_length=256)


class MessagesFields(MessagesToolFields, ConversationFields, OneAnswerFields):
    """Anthropic's fields, and the extensions under vLLM's names."""

    messages: list[InputMessage] = Field(
        min_length=1, fail_fast=True,
        description="The conversation, oldest first. A last message of the assistant is continued.",
    )  # fmt: skip
    system: SystemText | None = Field(None, description="What the model is told first.")
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Texts that end the output.", json_schema_extra=related(excludes=["stop"])
    )
    output_config: OutputConfig | None = Field(
        None, description="How the answer is made.",
        json_schema_extra=related(excludes=["ignore_eos", "output_format", *FORMS]),
    )  # fmt: skip
    output_format: JsonFormat | None = Field(
        None, description="Older name of output_config.format.",
        json_schema_extra=related(excludes=["ignore_eos", *FORMS]),
    )  # fmt: skip

    cache_control: CacheControl | None = cache_control()
    metadata: Metadata | None = no_effect("Of the request.")
    service_tier: Literal["auto", "standard_only"] | None = no_effect("There is one tier.")
    user_profile_id: str | None = no_effect("Your own id of the end user.", max_length=256)

    thinking: Thinking | None = hint(
        "Whether to think first, where the chat template has a switch for it; else reported.", ""
    )  # fmt: skip
    context_management: dict[str, Any] | None = hint(
        "What to clear of the conversation when it grows.", "Nothing is cleared.", off=[_KEEPS_ALL, {"edits": []}]
    )
    speed: Literal["standard", "fast"] | None = hint(
        "How fast the answer is to come.", "It comes as fast as it can.", off=["standard"]
    )
    inference_geo: str | None = hint("Where the model is to run.", "It runs where this server is.")
    diagnostics: dict[str, Any] | None = hint(
        "Why a prefix was not found in the cache.", "`usage` says what was found."
    )

    thread: Refused = refused("Conversations that the server keeps.")
    container: Refused = refused("A place to run code.")
    mcp_servers: Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused(
        "Servers of tools."
    )
    compaction: Refused = refused("Summaries of the conversation.")
    fallbacks: Annotated[Annotated[list[Any], Field(max_length=0)] | None, SUPPORTED_ONLY] = refused("Other models.")

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
        calls = any(isinstance(block, ToolUseBlock) for block in last.blocks)
        if self.continues and (calls or not last.text):
            message = "Invalid '{path}': the last message is the assistant's, which is continued: it needs text, and no"
            raise problem("invalid_value", f"{message} calls.", f"messages[{len(self.messages) - 1}].content")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if isinstance(self.thinking, ThinkingOn) and self.thinking_token_budget is not None:
            message = "Setting 'thinking_token_budget' and 'thinking.budget_tokens' at the same time is not supported."
            raise problem("invalid_parameter_combination", message, "thinking_token_budget")
        return self

    def asks(self, name: str) -> bool:
        """See RequestModel."""
        config = self.output_config
        return super().asks(name) and not (name == "output_config" and (config is None or config.format is None))

    @property
    def continues(self) -> bool:
        """Whether the last message is continued."""
        return self.messages[-1].role == "assistant"

    @property
    def stop_strings(self) -> Sequence[str] | None:
        """See DecodingFields."""
        return super().stop_strings if self.stop_sequences is None else self.stop_sequences

    @property
    def constrained_by(self) -> str | None:
        """See StructuredFields."""
        form, path = self._form
        return super().constrained_by if form is None else path

    @property
    def constraint(self) -> Constraint | None:
        """See StructuredFields."""
        form, path = self._form
        return super().constraint if form is None else LooseJson.read(form.schema_, f"{path}.schema")

    @property
    def _form(self) -> tuple[JsonFormat | None, str]:
        """Anthropic's own, and its path."""
        if self.output_config is not None and self.output_config.format is not None:
            return self.output_config.format, "output_config.format"
        return self.output_format, "output_format"


class MessagesRequest(MessagesFields):
    """A conversation to answer."""

    max_tokens: int = Field(
        ge=0, le=2**31 - 1,
        description="Tokens of output at most, and never more than the context has room for. With 0 the prompt is "
        "computed, and cached.",
    )  # fmt: skip


class CountTokensRequest(MessagesFields):
    """A conversation of which the tokens are counted."""

    max_tokens: int | None = no_effect("Nothing is generated.", ge=0)


def messages_intent(body: MessagesFields) -> GenerationRequest:
    """The body's fields as a request."""
    history = History.of("" if body.system is None else text_of(body.system), body.messages, body.tool_names)
    tools = body.tool_use(history.loaded)
    effort = None if body.output_config is None else body.output_config.effort
    conversation = Conversation(
        messages=tuple(history.messages),
        tools=() if tools is None else tuple(tool.for_template() for tool in tools.tools),
        variables=body.chat_template_kwargs or {},
        effort=effort,
        thinks=None if body.thinking is None else not isinstance(body.thinking, ThinkingOff),
        open_turn=not body.continues,
        continue_last=body.continues,
    )
    budget, budget_path = body.thinking_token_budget, "thinking_token_budget"
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

"""What the body of a message asks for."""

from dataclasses import dataclass

from server.api.fields.generation import generation_fields
from server.api.messages.blocks import text_of
from server.api.messages.history import History
from server.api.messages.schema import MessagesFields, MessagesRequest, ThinkingOff, ThinkingOn
from server.generation.planning.plan import Plan
from server.generation.request import Conversation, GenerationRequest
from server.text.tokenizer import Tokenizer

_PATHS = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "messages[].tool_calls[].function.arguments": "messages[].content[].input",
}


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """What the answer has to know of the body."""

    hides_thinking: bool
    is_cut_by_context: bool
    """Whether there was room for less output than was asked for."""


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


def message_options(body: MessagesRequest, plan: Plan, tokenizer: Tokenizer) -> MessageOptions:
    """What the answer has to know of the body."""
    display = None if body.thinking is None or isinstance(body.thinking, ThinkingOff) else body.thinking.display
    return MessageOptions(display == "omitted", plan.requests[0].max_tokens < body.max_tokens)

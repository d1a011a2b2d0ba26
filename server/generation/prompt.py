"""From the messages of a request to the text of its prompt."""

from collections.abc import Mapping
from typing import Any

from server.errors import InvalidRequestError, shorten
from server.api.chat.schema import Message
from server.text.chat_template import ChatTemplate, ChatTemplateError

_MUST_SHOW = frozenset({"name", "tool_calls", "refusal"})
"""Parts of a message that may not be lost in silence: the template shows them, or the request is refused."""


def render_prompt(
    template: ChatTemplate | None,
    messages: list[Message],
    variables: Mapping[str, Any],
    *,
    open_turn: bool,
    continue_last: bool,
) -> str:
    """The prompt's text, special tokens included. `variables` are the request's chat_template_kwargs.

    Raises InvalidRequestError if the model has no template or the template does not take the messages as they are.
    """
    if template is None:
        message = "This model has no chat template. Use /v1/completions."
        raise InvalidRequestError(message, param="messages", code="unsupported_parameter")
    for name in variables:
        if name not in template.variables:
            path = f"chat_template_kwargs.{shorten(name)}"
            message = f"Unknown parameter: '{path}'. The model's chat template has no such variable."
            raise InvalidRequestError(message, param=path, code="unknown_parameter")
    dumped = [_dump(message) for message in messages]
    if continue_last and not messages[-1].text:
        message = "'continue_final_message' needs a final message with content."
        raise InvalidRequestError(message, param="continue_final_message", code="invalid_value")
    try:
        text = (
            template.render_open(dumped, variables=variables)
            if continue_last
            else template.render(dumped, add_generation_prompt=open_turn, variables=variables)
        )
        _check_shown(template, dumped, variables)
    except ChatTemplateError as error:
        reason = shorten(str(error), 200)
        message = f"The model's chat template does not accept these messages: {reason}"
        raise InvalidRequestError(message, param="messages", code="invalid_value") from error
    return text


def _dump(message: Message) -> dict[str, Any]:
    """The message as templates expect it: text as one string, and only the keys that have a value."""
    keys = message.model_dump(include={"role", "name", "tool_calls", "tool_call_id", "refusal"}, exclude_none=True)
    return {**keys, "content": message.text}


def _check_shown(template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
    """Checks each role by itself, since templates treat roles differently."""
    first: dict[tuple[str, str], int] = {}
    for index, message in enumerate(messages):
        for key in message.keys() & _MUST_SHOW:
            first.setdefault((key, message["role"]), index)
    for (key, role), index in first.items():
        if template.ignores(key, role, messages, variables=variables):
            path = f"messages[{index}].{key}"
            problem = f"Unsupported parameter: '{path}' is not supported by this model's chat template."
            raise InvalidRequestError(problem, param=path, code="unsupported_parameter")

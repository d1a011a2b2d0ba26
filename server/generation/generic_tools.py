"""Tools for models whose chat template does not support them: they are described in the messages.

The system message lists the tools. Calls use the Hermes format and are parsed as such. Results come back in a user
message, because such models expect no other sender.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
FORMAT = "hermes"
"""Name of the format of calls."""
_INTRODUCTION = """You can call functions. They are, with the JSON schema of their arguments:

{tools}

To call one, write nothing but this, with its name and a JSON object of its arguments, once for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
The results come in the next message. If no function is needed, answer without a call."""


def with_description(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """The messages with the tools described in the first system message, or in a new one."""
    if not tools:
        return messages
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *messages]


def spelled_out(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with calls and results as text; successive results become one message.

    If a message has several calls, each result names its call.
    """
    spelled: list[Message] = []
    titles: Mapping[str, str] = {}
    for message in messages:
        if message["role"] != "tool":
            titles = _titles(message.get("tool_calls", ()))
            spelled.append(_with_calls(message))
            continue
        title = titles.get(message.get("tool_call_id", ""), "")
        result = f"<tool_response>\n{title}{message['content']}\n</tool_response>"
        if spelled and spelled[-1].get("holds_results"):
            spelled[-1] = {**spelled[-1], "content": f"{spelled[-1]['content']}\n{result}"}
        else:
            spelled.append({"role": "user", "content": result, "holds_results": True})
    return [{key: value for key, value in message.items() if key != "holds_results"} for message in spelled]


def _titles(calls: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """A heading for each call's result, by call id; empty for a single call."""
    if len(calls) < 2:
        return {}
    return {
        call["id"]: f"Result of call {number}, {call['function']['name']}:\n"
        for number, call in enumerate(calls, 1)
        if "id" in call
    }


def _with_calls(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [_spell(call["function"]) for call in message["tool_calls"]]
    content = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _spell(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {written}}}\n</tool_call>'

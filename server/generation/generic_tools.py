"""Tools for models whose chat template knows none: the whole of it is written into the messages.

The system message lists the tools, and calls are written as Hermes models write them; so they are read by that format.
Results come back in a message of the user, as models without tools expect none from anybody else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
FORMAT = "hermes"
"""How calls are written."""
_INTRODUCTION = """You can call functions. They are, with the JSON schema of their arguments:

{tools}

To call one, write nothing but this, with its name and a JSON object of its arguments, once for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
The results come in the next message. If no function is needed, answer without a call."""


def with_description(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """The messages with the tools described in the first system message, or in one of their own."""
    if not tools:
        return messages
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *messages]


def spelled_out(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with calls and results as text; results that follow each other are one message.

    Of several calls in a message, results say which one they belong to.
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
    """What stands above the results of these calls, by their ids; nothing where there is one call."""
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

"""The smallest agent: a model that calls one tool until it has an answer."""

import json
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
tool = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "List the files of a folder.",
        "parameters": {
            "type": "object",
            "properties": {"folder": {"type": "string"}},
            "required": ["folder"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "How many Python files are in the folder scheduler?"}]
for turn in range(4):
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[tool],
        tool_choice="required" if turn == 0 else "auto",
        seed=7,
        max_completion_tokens=200,
    )
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        folder = json.loads(call.function.arguments)["folder"]
        names = sorted(path.name for path in Path(folder).glob("*"))
        print(f"called list_files({folder!r}): {len(names)} names")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(names)})
    if not message.tool_calls:
        print(message.content)
        break

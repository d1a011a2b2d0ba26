"""The example of docs/how-to/images.md: asks a model about a picture."""

import base64
from pathlib import Path

from openai import OpenAI  # pip install openai

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
picture = base64.b64encode(Path("picture.png").read_bytes()).decode()
answer = client.chat.completions.create(
    model="SmolVLM-256M-Instruct",
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            ],
        }
    ],
)
print(answer.choices[0].message.content, answer.usage.prompt_tokens_details)

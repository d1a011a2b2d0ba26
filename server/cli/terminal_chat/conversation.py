"""The messages so far."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Conversation:
    """Messages and the options that every request of the conversation is sent with."""

    def __init__(self, model: str, system: str | None, options: Mapping[str, Any]) -> None:
        self.model = model
        self._options = dict(options)
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._start)

    @property
    def messages(self) -> list[dict[str, str]]:
        return list(self._messages)

    def request(self, question: str) -> dict[str, Any]:
        """The request body that asks this next."""
        asked = [*self._messages, {"role": "user", "content": question}]
        return {"model": self.model, "messages": asked, "stream": True, **self._options}

    def add(self, question: str, answer: str) -> None:
        """Keep a question with its answer."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._start)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: model, options, messages. Raises OSError."""
        content = {"model": self.model, **self._options, "messages": self._messages}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

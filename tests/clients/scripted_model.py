"""A model that plays the part of an agent's: reads a file by a tool, tells what it says, and remembers it."""

import re
from collections.abc import Callable

from scheduler.interface import EngineRequest
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import Script
from tests.server.tiny_model import END

FIRST = "Read secret.txt and tell me the word in it."
SECOND = "Once more: which word was it?"
THIRD = "Now as JSON."
_TURN = re.compile(r"<\|start\|>(user|tool)\n(.*?)<\|end\|>", re.DOTALL)
_WORD = re.compile(r"word-[a-z]+")


def agents_model(tokenizer: Tokenizer, call: str) -> Script:
    """A script whose output depends only on the prompt: a client that loses some history gets another answer.

    `call` is the text of the call that reads the file.
    """

    def script(request: EngineRequest, choice: int) -> list[int]:
        prompt = tokenizer.decode(request.prompt, skip_special_tokens=False)
        return [*_answer(prompt, call).encode(), END]

    return script


def _answer(prompt: str, call: str) -> str:
    turns = _TURN.findall(prompt)
    role, last = turns[-1] if turns else ("", "")
    seen = _WORD.findall(prompt)
    if role == "tool":
        found = _WORD.findall(last)
        return f"It says {found[-1]}." if found else f"The tool failed: {last.strip()}"
    if SECOND in last:
        return f"Again: {seen[-1]}." if seen else "I have forgotten."
    if THIRD in last:
        return '{"word": "%s"}' % (seen[-1] if seen else "forgotten")
    return call if FIRST in last else "A conversation."


Serve = Callable[[str], str]
"""From the text of the call to the address of a server with this model."""

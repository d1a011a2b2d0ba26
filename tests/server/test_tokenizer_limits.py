"""A tokenizer that gives up on a text refuses a request; one that would take for ever is refused at the start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from server.text.tokenizer import MAX_ADDED, MAX_LENGTH, Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import COMPLETIONS, client_of, completion
from tests.server.tiny_model import byte_level_tokenizer, write_folder


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder whose tokenizer.json is changed."""
    path = write_folder(folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def split_at(expression: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}

    return change


def added(*texts: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        known = content["added_tokens"]
        first = known[-1]["id"] + 1
        known += [{**known[-1], "id": first + index, "content": text} for index, text in enumerate(texts)]

    return change


async def test_a_text_on_which_an_expression_gives_up(
    make_app: Callable[..., FastAPI], tmp_path: Path, engine: FakeEngine
) -> None:
    """On the event loop, in a thread and in a worker process: the request is refused, and the next one answered."""
    bad = "a" * 40 + "b"
    async with client_of(make_app(changed(tmp_path / "m", split_at("(a+)+$")))) as client:
        for prompt in (bad, bad + "c" * 5000, bad + "c" * 200_000):
            answer = await client.post(COMPLETIONS, json=completion(prompt=prompt, truncate_prompt_tokens=5))
            assert answer.status_code == 400, answer.text
            assert "cannot split this text" in answer.json()["error"]["message"]
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 200


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (added(*(f"<x{index}>" for index in range(MAX_ADDED))), f"added tokens, but at most {MAX_ADDED}"),
        (added("<" + "x" * MAX_LENGTH + ">"), f"token of 1026 characters, but at most {MAX_LENGTH}"),
        (lambda content: content["model"]["vocab"].update({"x" * 5000: 999}), "token of 5000 characters"),
        (split_at("(a|a|a"), "is damaged"),
    ],
)
def test_vocabularies_that_are_refused(change: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        Tokenizer.from_folder(changed(tmp_path / "m", change))


class _Watched:
    """A model of a tokenizer that counts how often all of its vocabulary is read."""

    def __init__(self) -> None:
        self.model = byte_level_tokenizer()
        self.num_reads = 0

    def __getattr__(self, name: str) -> Any:
        self.num_reads += name == "get_vocab"
        return getattr(self.model, name)


def test_no_request_reads_the_whole_vocabulary() -> None:
    """It takes a third of a second if it has 400,000 tokens, in which nobody else is answered."""
    watched = _Watched()
    tokenizer = Tokenizer(watched, {}, None)  # type: ignore[arg-type]
    at_start = watched.num_reads
    assert 0 < tokenizer.fewest_tokens("a" * 100) <= len(tokenizer.encode("a" * 100, add_special_tokens=True))
    assert watched.num_reads == at_start

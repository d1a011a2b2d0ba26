"""Training prompts for heads: templates filled with topics, and passages of Python's documentation.

Topics come from prompts.json, passages from docstrings of the running Python's standard library; questions that the
model wrote (`own_prompts`) are mixed in. The same seed and Python version give the same prompts. `held_out_prompts`
share no template and no topic with these.
"""

import importlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from model_runner.json_files import read_object

_DATA = read_object(Path(__file__).with_name("prompts.json"))
TOPICS: Mapping[str, Sequence[str]] = _DATA["training"]
"""Topics of the training prompts, by kind. `documented` lists Python modules."""
HELD_OUT: Mapping[str, Sequence[str]] = _DATA["held_out"]
"""Prompts that no head is trained on, by kind. They share nothing with the topics."""
PASSAGE_CHARACTERS = (200, 900)
"""Minimum length of a docstring, and the length that longer ones are cut to."""
OWN_SHARE = 0.65
"""Fraction of prompts that the model wrote, if there are any."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the model."""

    text: str
    kind: Literal["chat", "plain", "opening"] = "chat"
    """`chat` becomes a user message in the chat template. `plain` is continued as it is. `opening` is the beginning of
    the chat template, so that the model writes a user message."""


def passages(modules: Sequence[str]) -> list[str]:
    """Docstrings of the modules and of everything that they define, in a fixed order, without duplicates."""
    shortest, longest = PASSAGE_CHARACTERS
    found: dict[str, None] = {}
    for name in modules:
        module = importlib.import_module(name)
        members = [module, *(member for _, member in sorted(vars(module).items()) if _is_documented(member))]
        for text in (inspect.getdoc(member) for member in members):
            if text is not None and len(text) >= shortest:
                found[text[:longest].rsplit(" ", 1)[0]] = None
    return list(found)


def _is_documented(member: object) -> bool:
    return inspect.isclass(member) or inspect.isroutine(member)


def training_prompts(own: Sequence[Prompt] = (), seed: int = 0) -> Iterator[Prompt]:
    """An endless stream that depends on the seed, with the model's own prompts mixed in.

    Few of the other prompts repeat within some thousands.
    """
    source = random.Random(seed)
    topics = {**TOPICS, "passages": passages(TOPICS["documented"])}
    kinds = [*_DATA["kinds"], _DATA["beginnings"]]
    weights = [kind["weight"] for kind in kinds]
    next_own = cycle(own)
    while True:
        if own and source.random() < OWN_SHARE:
            yield next(next_own)
            continue
        (kind,) = source.choices(kinds, weights)
        if kind is not _DATA["beginnings"]:
            yield Prompt(_filled(kind, source, topics))
        elif source.randint(0, 1):
            words = source.choice(topics["passages"]).split(" ")
            yield Prompt(" ".join(words[: source.randint(12, 40)]), "plain")
        else:
            yield Prompt(_filled(kind, source, topics), "plain")


class _Fields(dict[str, str]):
    """The fields of a prompt. A field without a value is drawn from the topics of its name."""

    def __init__(self, source: random.Random, topics: Mapping[str, Sequence[str]]) -> None:
        self._source = source
        self._topics = topics

    def __missing__(self, name: str) -> str:
        return self._source.choice(self._topics[name])


def _filled(kind: Mapping[str, Any], source: random.Random, topics: Mapping[str, Sequence[str]]) -> str:
    """A random prompt of a kind: first its fields are drawn, from topics or a range of numbers, then its template."""
    fields = _Fields(source, topics)
    for name, values in kind["fields"].items():
        value = source.choice(topics[values]) if isinstance(values, str) else str(source.randint(*values))
        fields[name], fields[name.capitalize()] = value, value[0].upper() + value[1:]
    template: str = source.choice(kind["templates"])
    return template.format_map(fields)


def held_out_prompts() -> dict[str, list[Prompt]]:
    """The prompts by kind; `passage` and `plain` use docstrings that no training prompt uses."""
    trained = set(passages(TOPICS["documented"]))
    found = [text for text in passages(HELD_OUT["documented"]) if text not in trained]
    requests = _DATA["held_out_passages"]
    chosen = found[:: len(found) // 16][:16]
    prompts = {kind: [Prompt(text) for text in texts] for kind, texts in HELD_OUT.items() if kind != "documented"}
    prompts["passage"] = [Prompt(requests[i % 2].format(passage=text)) for i, text in enumerate(chosen[::2])]
    prompts["plain"] = [Prompt(" ".join(text.split(" ")[:24]), "plain") for text in chosen[1::2]]
    return prompts

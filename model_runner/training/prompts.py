"""Training prompts for heads: templates filled with topics, and passages of Python's documentation.

Topics come from prompts.json, passages from docstrings of the running Python's standard library; questions that the
model wrote (`own_prompts`) are mixed in. The same seed and Python version give the same prompts. `held_out_prompts`
share no template and no topic with these.
"""

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

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
    maker = _Maker(source)
    makers, weights = zip(*maker.kinds, strict=True)
    next_own = cycle(own)
    while True:
        if own and source.random() < OWN_SHARE:
            yield next(next_own)
        else:
            yield source.choices(makers, weights)[0]()


class _Maker:
    """Makes prompts of each kind."""

    def __init__(self, source: random.Random) -> None:
        self._pick = source.choice
        self._number = source.randint
        self._passages = passages(TOPICS["documented"])
        self.kinds: tuple[tuple[Callable[[], Prompt], float], ...] = (
            (self._about_subject, 10),
            (self._story, 4),
            (self._code, 5),
            (self._sentence, 3),
            (self._list, 3),
            (self._arithmetic, 2),
            (self._conversation, 1),
            (self._passage, 4),
            (self._plain, 3),
        )

    def _about_subject(self) -> Prompt:
        subject, other = self._pick(TOPICS["subjects"]), self._pick(TOPICS["subjects"])
        return Prompt(
            self._pick(
                (
                    f"Explain {subject} to a child.",
                    f"Explain {subject} in detail.",
                    f"What should everybody know about {subject}?",
                    f"Write a short essay about {subject}.",
                    f"Write a blog post about {subject} with headings.",
                    f"List five facts about {subject}.",
                    f"What are the advantages and disadvantages of {subject}?",
                    f"Give me a step-by-step guide to {subject} for beginners.",
                    f"How has {subject} changed over the last hundred years?",
                    f"Why does {subject} matter?",
                    f"Compare {subject} with {other}.",
                    f"Write three quiz questions about {subject} with answers.",
                    f"What are common misunderstandings about {subject}?",
                    f"Summarise the most important ideas about {subject} in one paragraph.",
                    f"I know nothing about {subject}. Where do I start?",
                    f"Write an outline for a talk about {subject}.",
                    f"Write a formal email to a colleague about {subject}.",
                    f"Describe {subject} in exactly three sentences.",
                    f"Act as a teacher and introduce {subject}.",
                    f"Make a table with two columns about {subject}: term and meaning.",
                    f"{subject[0].upper()}{subject[1:]}?",
                )
            )
        )

    def _story(self) -> Prompt:
        who, where, what = self._pick(TOPICS["characters"]), self._pick(TOPICS["places"]), self._pick(TOPICS["events"])
        form = self._pick(TOPICS["forms"])
        return Prompt(
            self._pick(
                (
                    f"Write a {form} about {who} who {what} {where}.",
                    f"Write a {form} that takes place {where}.",
                    f"Describe {who} {where}.",
                    f"Begin a novel {where}: {who} {what}.",
                    f"Invent a title and a summary for a film about {who} who {what}.",
                )
            )
        )

    def _code(self) -> Prompt:
        task, language = self._pick(TOPICS["code_tasks"]), self._pick(TOPICS["languages"])
        return Prompt(
            self._pick(
                (
                    f"Write a {language} function that {task}.",
                    f"Write a {language} program that {task}, and explain how it works.",
                    f"Show me how one {task} in {language}.",
                    f"Write a Python function that {task}, with type hints and a docstring.",
                    f"Write tests for a Python function that {task}.",
                )
            )
        )

    def _sentence(self) -> Prompt:
        sentence = self._pick(TOPICS["sentences"])
        if self._number(0, 1):
            return Prompt(f"Translate into {self._pick(TOPICS['tongues'])}: {sentence}")
        return Prompt(f"{self._pick(TOPICS['rewrites'])}: {sentence}")

    def _list(self) -> Prompt:
        topic, count = self._pick(TOPICS["list_topics"]), self._number(3, 12)
        return Prompt(
            self._pick(
                (
                    f"List {count} {topic}.",
                    f"Give me {count} {topic}, each with one sentence of explanation.",
                    f"Suggest some {topic}.",
                    f"Give me a JSON array of {count} {topic}.",
                )
            )
        )

    def _arithmetic(self) -> Prompt:
        name, things = self._pick(TOPICS["names"]), self._pick(TOPICS["objects"])
        few, many = self._number(2, 12), self._number(13, 90)
        return Prompt(
            self._pick(
                (
                    f"{name} has {many} {things} and gives away {few}. How many {things} are left?",
                    f"{name} buys {few} {things} for {many} cents each. How much is that? Think step by step.",
                    f"What is {many} times {few}?",
                    f"A box holds {few} {things}. How many boxes does {name} need for {many} {things}?",
                )
            )
        )

    def _conversation(self) -> Prompt:
        return Prompt(self._pick(TOPICS["greetings"]))

    def _passage(self) -> Prompt:
        request = self._pick(
            (
                "Summarise this text:",
                "Explain the following in plain words:",
                "What is this documentation about?",
                "Turn this into a bulleted list:",
                "Write an example that uses what is described here:",
                "Which questions does this text leave open?",
            )
        )
        return Prompt(f"{request}\n\n{self._pick(self._passages)}")

    def _plain(self) -> Prompt:
        """The beginning of a passage, or of a sentence about a subject, without the chat template."""
        if self._number(0, 1):
            words = self._pick(self._passages).split(" ")
            return Prompt(" ".join(words[: self._number(12, 40)]), "plain")
        subject = self._pick(TOPICS["subjects"])
        start = self._pick(
            (
                f"The history of {subject} begins",
                f"When people think of {subject}, they often",
                f"# {subject[0].upper()}{subject[1:]}\n\n",
                f"Chapter 1\n\nUntil that day she had never heard of {subject}.",
                f"Question: what is special about {subject}?\nAnswer:",
            )
        )
        return Prompt(start, "plain")


_PASSAGE_REQUESTS = (
    "Give the gist of the passage below in two sentences.\n\n{}",
    "Here is a reference text. Write a friendly introduction to it for newcomers.\n\n{}",
)


def held_out_prompts() -> dict[str, list[Prompt]]:
    """The prompts by kind; `passage` and `plain` use docstrings that no training prompt uses."""
    trained = set(passages(TOPICS["documented"]))
    found = [text for text in passages(HELD_OUT["documented"]) if text not in trained]
    chosen = found[:: len(found) // 16][:16]
    prompts = {kind: [Prompt(text) for text in texts] for kind, texts in HELD_OUT.items() if kind != "documented"}
    prompts["passage"] = [Prompt(_PASSAGE_REQUESTS[i % 2].format(text)) for i, text in enumerate(chosen[::2])]
    prompts["plain"] = [Prompt(" ".join(text.split(" ")[:24]), "plain") for text in chosen[1::2]]
    return prompts

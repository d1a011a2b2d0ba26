"""Reasoning between tags, before the answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.generation.parsing.parts import Part, Reasoning
from server.generation.parsing.reader import WHITESPACE, Reader, Steps


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags of a family of models. Whitespace that adjoins them is the template's and not the text's."""

    name: str
    """By which they can be chosen."""
    begin: str
    end: str
    control: str = ""
    """With which `begin` begins, where that alone may be a token."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that are control tokens, or may be, in the vocabularies of such models."""
        return self.control or self.begin, self.end

    def read(self, reader: Reader, *, is_begun: bool, ends: Sequence[str] = ()) -> Steps[None]:
        """Read the reasoning, if there is any, with what separates it from the answer.

        Args:
            reader: of the output.
            is_begun: whether the prompt has begun it.
            ends: texts that are no part of it, even if its end is missing; they are left unread.
        """
        opened = yield from reader.spaced_literal(self.begin)
        if opened is None and not is_begun:
            return
        yield from reader.skip(WHITESPACE)
        marker = yield from reader.until(self.end, emit=reasoning, trim=WHITESPACE, stops=ends)
        if marker is not None:
            yield from reader.skip(WHITESPACE)


def reasoning(text: str) -> Sequence[Part]:
    """Text of the reasoning, as a reader emits it."""
    return (Reasoning(text),)


THINK_TAGS = (
    ThinkTags("think", "<think>", "</think>"),
    ThinkTags("mistral_think", "[THINK]", "[/THINK]"),
    ThinkTags("seed_think", "<seed:think>", "</seed:think>"),
    ThinkTags("thought", "<thought>", "</thought>"),
    ThinkTags("gemma4", "<|channel>thought", "<channel|>", control="<|channel>"),
    ThinkTags("granite_think", "Here is my thought process:", "Here is my response:"),
)
"""All that are known."""

"""Fill in the middle: the special tokens with which code models mark a gap in a text, and the order they expect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Family:
    """Models with the same prompt format."""

    prefix: str
    suffix: str
    middle: str | None
    """Ends the prompt. None if the text before the gap ends it."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, in addition to the ones above and the model's EOS tokens."""
    suffix_first: bool = False
    repository: str | None = None
    """Begins a prompt that shows several files. None if the family has no format for them."""
    file: str | None = None
    """Begins each file of such a prompt."""


_FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    _Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<|end_of_text|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    # StarCoder, StarCoder2, Granite Code, Stable Code
    _Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>", "<|endoftext|>"),
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),  # DeepSeek-Coder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),  # GLM-4.5
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, ("[MIDDLE]",), suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FillInTokens:
    """The fill-in tokens of one tokenizer, as ids."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]
    """Tokens that end the middle, and never occur inside it."""
    repository: int | None = None
    file: int | None = None
    """Set if and only if `repository` is."""

    @classmethod
    def of(cls, added: Mapping[str, int]) -> "FillInTokens | None":
        """The fill-in tokens among a tokenizer's added tokens, found by text. None if no known family is complete."""
        for family in _FAMILIES:
            own = [family.prefix, family.suffix, *([] if family.middle is None else [family.middle])]
            if all(text in added for text in own):
                shows_files = family.repository in added and family.file in added
                return cls(
                    added[family.prefix],
                    added[family.suffix],
                    None if family.middle is None else added[family.middle],
                    family.suffix_first,
                    tuple(added[text] for text in (*own, *family.ends) if text in added),
                    added[family.repository] if shows_files and family.repository else None,
                    added[family.file] if shows_files and family.file else None,
                )
        return None

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """A prompt's tokens, from the tokens before and after the gap. The model writes the middle next."""
        prefix, suffix = [self.prefix, *before], [self.suffix, *after]
        parts = [*suffix, *prefix] if self.suffix_first else [*prefix, *suffix]
        return parts if self.middle is None else [*parts, self.middle]

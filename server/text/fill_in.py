"""Fill in the middle: the special tokens by which code models read a text with a gap, and the order they expect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Family:
    """Models that write their prompts alike."""

    prefix: str
    suffix: str
    middle: str | None
    """Ends the prompt. None: the text before the gap does."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, besides those above and those that end any output of the model."""
    suffix_first: bool = False
    repository: str | None = None
    """Begins a prompt that shows several files; None: the family has no pattern for them."""
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
    """The tokens of one tokenizer, by their ids."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]
    """End the middle: the model writes none of them inside it."""
    repository: int | None = None
    file: int | None = None
    """Both are there, or none of them is."""

    @classmethod
    def of(cls, added: Mapping[str, int]) -> "FillInTokens | None":
        """Those among a tokenizer's added tokens, by their exact texts; None if no known family is complete."""
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
        """The tokens of a prompt, given those of the texts before and after the gap; the middle follows them."""
        prefix, suffix = [self.prefix, *before], [self.suffix, *after]
        parts = [*suffix, *prefix] if self.suffix_first else [*prefix, *suffix]
        return parts if self.middle is None else [*parts, self.middle]

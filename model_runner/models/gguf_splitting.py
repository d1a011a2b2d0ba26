"""How text is split into pieces before bytes are merged to tokens, by what `tokenizer.ggml.pre` of a GGUF file names.

The file only names the way. llama.cpp knows what that means, transformers knows some, by its version. Names that are
not in the table here are refused: another way would give other tokens for some texts.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from model_runner.models.gguf_file import GgufFile
from model_runner.models.refusal import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS, _SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain(digits: str) -> str:
    """Words whatever their case."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}|{_MARKS}[\r\n]*|{_SPACES}"


def _cased(endings: str, digits: str) -> str:
    """Words that begin anew at a capital after a small letter."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}|{_MARKS}[\r\n/]*|{_SPACES}"


def _named(names: Iterable[str], way: str) -> dict[str, str]:
    return dict.fromkeys(names, way)


_GPT2, _DIGITS = "GPT-2's", "GPT-2's, with every digit a piece of its own"
_LLAMA3_NAMES = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
}
_WAYS = {
    **_named(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0"), _GPT2),
    **_named(("mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **_named(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **_named((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _plain(r"\p{N}{1,3}")),
    **_named(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _plain(r"\p{N}")),
    **_named(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
}
"""An expression for each name, or one of the two ways of GPT-2."""
_WHOLE_PIECES = _LLAMA3_NAMES | {"tekken"}
"""Names of vocabularies in which a piece that is a token is one, whatever the merges say."""


def check_splitting(file: GgufFile) -> None:
    """Raises UnsupportedModelError if the way in which the vocabulary splits text is not known."""
    name = _name(file)
    if name is not None and name not in _WAYS:
        raise UnsupportedModelError(
            f"how it splits text before tokens are made of it (tokenizer.ggml.pre = {name or 'nothing'}) is not known"
        )


def set_splitting(file: GgufFile, tokenizer: "Tokenizer") -> None:
    """Have a tokenizer split text in the way that the file names, which was checked."""
    from tokenizers import Regex  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split  # noqa: PLC0415

    name = _name(file)
    if name is None:
        return
    way = _WAYS[name]
    gpt2, no_further = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)
    if way == _GPT2:
        tokenizer.pre_tokenizer = gpt2
    elif way == _DIGITS:
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), gpt2])
    else:
        tokenizer.pre_tokenizer = Sequence([Split(Regex(way), behavior="isolated"), no_further])
    tokenizer.model.ignore_merges = name in _WHOLE_PIECES


def _name(file: GgufFile) -> str | None:
    """Of the way; empty if the file names none, None for vocabularies that are not of bytes: these do not split."""
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    return str(file.metadata.get("tokenizer.ggml.pre", ""))

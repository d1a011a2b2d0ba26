"""The tokenizer of a GGUF file as tokenizer.json: byte-level BPE, and BPE of sentencepiece."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from model_runner.gguf.header import GgufFile
from model_runner.refusal import UnsupportedModelError
from model_runner.vocabulary import (
    CONTROL,
    SPACE,
    USER_DEFINED,
    add_known,
    make_bpe,
    make_sentencepiece,
    merges_by_score,
    split_bytes,
    surround,
    whole_token,
)

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS, _SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain(digits: str) -> str:
    """Splits at the ends of words, upper and lower case alike."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}|{_MARKS}[\r\n]*|{_SPACES}"


_WITH_ACCENTS = rf"{_ENDINGS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
"""Like the above, with every digit a piece, and combining marks as parts of words."""
_IDEOGRAPHS, _KANA = r"\u4e00-\u9fa5", r"\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_IDEOGRAPHS}{_KANA}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_LATER_LETTERS = (
    r"\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}"
)
"""Cased letters that DeepSeek's list lacks."""
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_LATER_LETTERS}]]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    rf"[{_IDEOGRAPHS}\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    rf"[{_IDEOGRAPHS}\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)


def _cased(endings: str, digits: str) -> str:
    """Splits also before a capital letter that follows a small one."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}|{_MARKS}[\r\n/]*|{_SPACES}"


Split = str | tuple[str, ...]


def _named(names: Iterable[str], split: Split) -> dict[str, Split]:
    return dict.fromkeys(names, split)


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
_SPLITS: Mapping[str, Split] = {
    **_named(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0"), _GPT2),
    **_named(("mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **_named(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **_named((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), _plain(r"\p{N}{1,3}")),
    **_named(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _plain(r"\p{N}")),
    **_named(("solar-open", "grok-2"), _plain(r"\p{N}")),
    **_named(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "qwen35": _WITH_ACCENTS,
    **_named(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
    "seed-coder": rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
}
"""By `tokenizer.ggml.pre`: the expression that splits text, several that split one after the other, or one of GPT-2's
two ways. From llama.cpp's vocabulary."""
_WHOLE_PIECES = _LLAMA3_NAMES | {"tekken", "glm4", "glm5", "chatglm-bpe"}
"""Names of vocabularies where a piece that is a token is never split, whatever the merges say."""
_BEGINS = _LLAMA3_NAMES | {"tekken"}
"""Names of byte-level vocabularies that put the BOS token first unless the file says otherwise."""
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"),
    *("<turn|>", "<|tool_response>", "<|observation|>", "[e~["),
)
"""Control tokens, or tokens that users defined, that end an output wherever a vocabulary has them."""

_NAMED = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")
"""Names of special tokens in metadata, as the format spells them."""
_LOOKS_LIKE_CONTROL = re.compile(r"<\|[^<>|]+\|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file."""

    file: GgufFile
    tokens: Sequence[str]
    types: Sequence[int]
    """One for each token, by the numbers of sentencepiece."""

    @property
    def kind(self) -> object:
        return self.file.metadata.get("tokenizer.ggml.model")

    def special(self, name: str) -> int | None:
        """The id of a special token, such as "bos"; None if the file names none."""
        token: int | None = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The tokens that a file has. Raises UnsupportedModelError if there are none, or some without a type."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens[:1]):
        raise UnsupportedModelError("it has no vocabulary: tokenizer.ggml.tokens is missing")
    if _is_gemma(file):
        tokens = [SPACE * len(token) if token and set(token) == {" "} else token for token in tokens]
    return Vocabulary(file, tokens, _types(file, tokens))


def _types(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    """The type of each token; of a file without types, control tokens are those that it names or that look like it."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        named = {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED}
        is_control = (
            token in named or text in _ENDS or _LOOKS_LIKE_CONTROL.fullmatch(text) for token, text in enumerate(tokens)
        )
        return [CONTROL if control else 1 for control in is_control]
    if len(types) != len(tokens):
        raise UnsupportedModelError(f"it has types for {len(types)} of its {len(tokens)} tokens")
    return [int(kind) for kind in types]


def _is_gemma(file: GgufFile) -> bool:
    """Gemma's files spell tokens of several spaces with spaces, and their scores are not the order of merges."""
    kind = file.metadata.get("tokenizer.ggml.model")
    return kind == "gemma4" or (file.architecture.startswith("gemma") and kind == "llama")


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that a file describes.

    Raises:
        UnsupportedModelError: if its kind, or how it splits text, is unknown, or if it is incomplete.
    """
    if vocabulary.kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    elif vocabulary.kind == "gemma4":
        tokenizer = make_sentencepiece(
            vocabulary.tokens, _merges(vocabulary), _unknown(vocabulary), begins_with_space=False
        )
    else:
        raise UnsupportedModelError(
            f"its tokenizer is of the kind {vocabulary.kind}; gemma4, gpt2 and llama can be read"
        )
    words = zip(vocabulary.tokens, vocabulary.types, strict=True)
    add_known(tokenizer, [whole for word in words if word[0] and (whole := whole_token(*word)) is not None])
    _set_ends(vocabulary, tokenizer)
    return tokenizer


def split_text(name: str, tokenizer: Tokenizer) -> None:
    """Let a byte-level tokenizer split text as `tokenizer.ggml.pre` says. Raises UnsupportedModelError."""
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"how it splits text before tokens are made of it (tokenizer.ggml.pre = {name or 'nothing'}) is not known"
        )
    split = _SPLITS[name]
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == _GPT2:
        tokenizer.pre_tokenizer = gpt2
    elif split == _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    else:
        split_bytes(tokenizer, *((split,) if isinstance(split, str) else split))
    tokenizer.model.ignore_merges = name in _WHOLE_PIECES


def read_tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json: the texts of special tokens, and the chat template, or several by name."""
    metadata = vocabulary.file.metadata
    default = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names} | {"default": default}
    templates = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    template = default if len(templates) <= 1 else templates
    given = {"chat_template": template} if template is not None else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | _special_tokens(vocabulary) | given


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    tokens = vocabulary.tokens
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: vocabulary.special(key) for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None and token < len(tokens)}


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """The tokens that end an output: the file's own, and those that end a turn in every model that has them."""
    own = [vocabulary.special(key) for key in ("eos", "eot", "eom")]
    words = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    known = {text: token for token, (text, kind) in words if kind in (CONTROL, USER_DEFINED) and text in _ENDS}
    if "<|return|>" in known:
        known.pop("<|end|>", None)  # harmony's end of a message, after which the same answer goes on
    return list(dict.fromkeys(token for token in (*own, *known.values()) if token is not None))


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """GPT-2's kind: every byte is a letter of the vocabulary, and merges are given."""
    tokenizer = make_bpe(vocabulary.tokens, _merges(vocabulary))
    split_text(str(vocabulary.file.metadata.get("tokenizer.ggml.pre", "")), tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, ...]]:
    """The merges that a file lists."""
    return [tuple(merge.split(" ")) for merge in vocabulary.file.metadata.get("tokenizer.ggml.merges") or ()]


def _unknown(vocabulary: Vocabulary) -> str | None:
    return _special_tokens(vocabulary).get("unk_token")


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Sentencepiece's BPE: merges follow from the tokens' scores."""
    metadata, tokens = vocabulary.file.metadata, vocabulary.tokens
    if _is_gemma(vocabulary.file):
        scores: Sequence[float] = [-float(index) for index in range(len(tokens))]
    else:
        found = metadata.get("tokenizer.ggml.scores")
        scores = [] if found is None else list(map(float, found))
    if len(scores) != len(tokens):
        raise UnsupportedModelError(f"it has scores for {len(scores)} of its {len(tokens)} tokens")
    begins_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    merges = merges_by_score(tokens, scores)
    return make_sentencepiece(tokens, merges, _unknown(vocabulary), begins_with_space=begins_with_space)


def _set_ends(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """The tokens that are put around a prompt, which the file may say."""
    metadata = vocabulary.file.metadata
    begins_always = vocabulary.kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGINS
    begins = metadata.get("tokenizer.ggml.add_bos_token", begins_always)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    ids: Mapping[str, bool] = {"bos": begins, "eos": ends}
    around = (vocabulary.special(key) if wanted else None for key, wanted in ids.items())
    bos, eos = (None if token is None else (vocabulary.tokens[token], token) for token in around)
    surround(tokenizer, bos, eos)

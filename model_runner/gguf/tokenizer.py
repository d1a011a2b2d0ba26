"""The tokenizer of a GGUF file as tokenizer.json: byte-level BPE, and BPE of sentencepiece."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model_runner.gguf.header import GgufFile
from model_runner.models.refusal import UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens; all others are ordinary."""
_SPACE = "\u2581"
"""Stands for a space in the vocabularies of sentencepiece."""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS, _SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain(digits: str) -> str:
    """Splits at the ends of words, upper and lower case alike."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}|{_MARKS}[\r\n]*|{_SPACES}"


def _cased(endings: str, digits: str) -> str:
    """Splits also before a capital letter that follows a small one."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}|{_MARKS}[\r\n/]*|{_SPACES}"


def _named(names: Iterable[str], split: str) -> dict[str, str]:
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
_SPLITS = {
    **_named(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0"), _GPT2),
    **_named(("mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **_named(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **_named((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _plain(r"\p{N}{1,3}")),
    **_named(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _plain(r"\p{N}")),
    **_named(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
    "seed-coder": rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
}
"""By `tokenizer.ggml.pre`: the expression that splits text, or one of GPT-2's two ways. From llama.cpp's vocabulary."""
_WHOLE_PIECES = _LLAMA3_NAMES | {"tekken", "glm4", "chatglm-bpe"}
"""Names of vocabularies where a piece that is a token is never split, whatever the merges say."""
_BEGINS = _LLAMA3_NAMES | {"tekken"}
"""Names of byte-level vocabularies that put the BOS token first unless the file says otherwise."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
"""Control tokens that end an output wherever a vocabulary has them."""


def make_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that a file describes.

    Raises:
        UnsupportedModelError: if its kind, or how it splits text, is unknown, or if it is incomplete.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = _tokens(file)
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise UnsupportedModelError(f"its tokenizer is of the kind {kind}; gpt2 and llama can be read")
    _add_tokens(file, tokenizer, tokens)
    _set_ends(file, tokenizer, tokens)
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
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    tokenizer.model.ignore_merges = name in _WHOLE_PIECES


def read_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json: the texts of special tokens, and the chat template, or several by name."""
    default = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates") or []
    named = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in names} | {"default": default}
    templates = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    template = default if len(templates) <= 1 else templates
    given = {"chat_template": template} if template is not None else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | _special_tokens(file) | given


def _special_tokens(file: GgufFile) -> dict[str, str]:
    tokens = _tokens(file)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None and token < len(tokens)}


def end_tokens(file: GgufFile) -> list[int]:
    """The tokens that end an output: the file's own, and those that end a turn in every model that has them."""
    keys = ("eos", "eot", "eom")
    own = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    tokens, types = _tokens(file), _types(file)
    known = [token for token, text in enumerate(tokens) if text in _ENDS and types[token] == _CONTROL]
    return list(dict.fromkeys(token for token in (*own, *known) if token is not None))


def _tokens(file: GgufFile) -> Sequence[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens[:1]):
        raise UnsupportedModelError("it has no vocabulary: tokenizer.ggml.tokens is missing")
    if _is_gemma(file):
        return [_SPACE * len(token) if token and set(token) == {" "} else token for token in tokens]
    return tokens


def _is_gemma(file: GgufFile) -> bool:
    """Gemma's files spell tokens of several spaces with spaces, and their scores are not the order of merges."""
    return file.architecture.startswith("gemma") and file.metadata.get("tokenizer.ggml.model") == "llama"


def _types(file: GgufFile) -> Sequence[int]:
    tokens = _tokens(file)
    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UnsupportedModelError(f"it has types for {len(types)} of its {len(tokens)} tokens")
    return types


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """GPT-2's kind: every byte is a letter of the vocabulary, and merges are given."""
    merges = [tuple(merge.split(" ")) for merge in file.metadata.get("tokenizer.ggml.merges") or ()]
    tokenizer = _with_model(tokens, merges)
    split_text(str(file.metadata.get("tokenizer.ggml.pre", "")), tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Sentencepiece's BPE: merges follow from the tokens' scores, and rare characters become bytes."""
    if _is_gemma(file):
        scores: Sequence[float] = [-float(index) for index in range(len(tokens))]
    else:
        scores = file.metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise UnsupportedModelError(f"it has scores for {len(scores)} of its {len(tokens)} tokens")
    unknown = _special_tokens(file).get("unk_token")
    tokenizer = _with_model(tokens, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    begins_with_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins_with_space else spaces
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found += [(-score, ids[left], ids[right]) for left, right in pairs if left in ids and right in ids]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _with_model(tokens: Sequence[str], merges: Sequence[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises nothing more special
        raise UnsupportedModelError(f"its vocabulary and merges do not fit: {error}") from error


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Tokens that are found in text whole."""
    special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    added = [
        # Spaces are found as Gemma's tokens of several spaces after the normalizer has spelled them so.
        AddedToken(token, normalized=set(token) == {_SPACE}, special=special[kind])
        for token, kind in zip(tokens, _types(file), strict=True)
        if kind in special and token
    ]
    before = tokenizer.get_vocab_size()
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != before:
        raise UnsupportedModelError("it has added tokens that are not in its vocabulary")


def _set_ends(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """The tokens that are put around a prompt, which the file may say."""
    kind, name = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or name in _BEGINS)
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    ids = {"bos": begins, "eos": ends}
    around: Mapping[str, int | None] = {
        key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") if wanted else None for key, wanted in ids.items()
    }
    bos, eos = (None if token is None else (tokens[token], token) for token in around.values())
    if bos is None and eos is None:
        return
    single = [*(() if bos is None else (f"{bos[0]}:0",)), "$A:0", *(() if eos is None else (f"{eos[0]}:0",))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=[token for token in (bos, eos) if token is not None]
    )

"""Tokenizers of folders without a tokenizer.json: sentencepiece's tokenizer.model, and Mistral's tekken.json.

Formats: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, and
https://github.com/mistralai/mistral-common/blob/main/src/mistral_common/tokens/tokenizers/tekken.py.
"""

import base64
import importlib.util
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from model_runner.json_files import LARGE, find_object, read_object
from model_runner.refusal import UnsupportedModelError, few
from model_runner.vocabulary import (
    Token,
    add_known,
    byte_characters,
    make_bpe,
    make_sentencepiece,
    merges_by_score,
    split_bytes,
    surround,
    whole_token,
)

SENTENCEPIECE, TEKKEN = "tokenizer.model", "tekken.json"

_BPE = 2
"""Sentencepiece's number of the algorithm; 1 is unigram."""
_PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""Packages that transformers needs to read sentencepiece models: names on PyPI, and of the modules."""
_CONVERTIBLE = frozenset({"tokenizer.json", "vocab.json", "vocab.txt"})
"""Files of vocabularies that transformers converts without further packages."""
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_OLD_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Control tokens of a tekken.json that names none."""


@dataclass(frozen=True, slots=True)
class MadeTokenizer:
    """A tokenizer, and the content of its tokenizer_config.json."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]


def read_tokenizer(folder: Path) -> MadeTokenizer | None:
    """The tokenizer of a folder that has no tokenizer.json; None if transformers has to convert it.

    Raises:
        UnsupportedModelError: if a file is damaged, or its tokenizer is of another kind.
        OSError: if a file cannot be read.
    """
    if (folder / TEKKEN).is_file():
        return _read_tekken(folder)
    if (folder / SENTENCEPIECE).is_file():
        pieces = _parse_pieces(folder / SENTENCEPIECE)
        if pieces.algorithm == _BPE:
            return _make_sentencepiece(folder, pieces)
    _check_convertible(folder)
    return None


def _check_convertible(folder: Path) -> None:
    """Raise UnsupportedModelError if transformers cannot make a tokenizer of the files, or misses packages for it."""
    _refuse_named_files(folder)
    names = {file.name for file in folder.iterdir() if file.is_file()}
    if any(name.endswith(".model") for name in names):
        if missing := [name for name, module in _PACKAGES.items() if not _is_installed(module)]:
            raise UnsupportedModelError(
                f"its tokenizer is a sentencepiece model of another kind than BPE; transformers needs "
                f"{' and '.join(missing)} to read it; run `pip install {' '.join(missing)}`"
            )
    elif not names & _CONVERTIBLE:
        raise UnsupportedModelError(
            f"it has no tokenizer ({', '.join((SENTENCEPIECE, TEKKEN, *sorted(_CONVERTIBLE)))}); "
            "download it again, or add the tokenizer.json of the model it was made from"
        )


def _refuse_named_files(folder: Path) -> None:
    """Raise UnsupportedModelError if transformers would read a file that the tokenizer's configuration names."""
    for key, value in find_object(folder / "tokenizer_config.json").items():
        names_file = key in ("vocab", "merges") or key.endswith("_file")
        if names_file and isinstance(value, str) and Path(value).exists():
            raise UnsupportedModelError(f"its tokenizer_config.json names the file {value} as {key}; remove the entry")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


# -- sentencepiece -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The used parts of a sentencepiece model."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    algorithm: int
    ids: Mapping[str, int]
    """Special tokens by name, such as "bos"."""
    charsmap: bytes = field(repr=False)
    """Compiled replacements of characters; empty if there are none."""
    begins_with_space: bool
    merges_spaces: bool
    """Whether several spaces count as one, and those at the ends as none."""


def _make_sentencepiece(folder: Path, pieces: _Pieces) -> MadeTokenizer:
    config = {**find_object(folder / "special_tokens_map.json"), **find_object(folder / "tokenizer_config.json")}
    added = _added_tokens(folder, config)
    pieces = _renamed(pieces, added)
    special = {f"{name}_token": pieces.tokens[token] for name, token in pieces.ids.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special | config
    tokenizer = _sentencepiece(pieces, config)
    _add_tokens(tokenizer, pieces, added)
    wanted = {"bos": config.get("add_bos_token", True), "eos": config.get("add_eos_token", False)}
    ends = (_special(tokenizer, config, name) if is_wanted else None for name, is_wanted in wanted.items())
    surround(tokenizer, *ends)
    return MadeTokenizer(tokenizer, config)


def _sentencepiece(pieces: _Pieces, config: Mapping[str, Any]) -> Tokenizer:
    """Each stretch of text between special tokens gets its space in front, as sentencepiece would give it.

    `legacy: false` in the configuration gives it only to the beginning of the text, as in transformers.
    """
    begins = pieces.begins_with_space and config.get("add_prefix_space") is not False
    unknown = pieces.ids.get("unk")
    name = None if unknown is None else pieces.tokens[unknown]
    merges = merges_by_score(pieces.tokens, pieces.scores)
    tokenizer = make_sentencepiece(pieces.tokens, merges, name, begins_with_space=begins)
    if begins and config.get("legacy") is False:
        tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    before: list[normalizers.Normalizer] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.merges_spaces:
        before += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if before:
        tokenizer.normalizer = normalizers.Sequence([*before, tokenizer.normalizer])
    return tokenizer


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens by id that Hugging Face's files add to the model's own, or rename."""
    added = {
        int(token): AddedToken(content, normalized=False, special=False)
        for content, token in find_object(folder / "added_tokens.json").items()
    }
    for token, value in (config.get("added_tokens_decoder") or {}).items():
        flags = ("single_word", "lstrip", "rstrip", "special")
        added[int(token)] = AddedToken(
            value["content"], normalized=False, **{flag: bool(value.get(flag)) for flag in flags}
        )
    named = [config.get(f"{name}_token") for name in _NAMES] + list(config.get("additional_special_tokens") or ())
    texts = {value.get("content") if isinstance(value, dict) else value for value in named}
    return {
        token: AddedToken(
            value.content, normalized=False, special=True, lstrip=value.lstrip, rstrip=value.rstrip,
            single_word=value.single_word,
        )
        if value.content in texts
        else value
        for token, value in added.items()
    }  # fmt: skip


def _renamed(pieces: _Pieces, added: Mapping[int, AddedToken]) -> _Pieces:
    """The pieces with the names that Hugging Face's files give to placeholders, such as Mistral's [control_8]."""
    tokens = list(pieces.tokens)
    for token, value in added.items():
        if token < len(tokens):
            tokens[token] = value.content
    if len(set(tokens)) != len(tokens):
        raise UnsupportedModelError("its added_tokens_decoder gives two tokens the same text")
    return replace(pieces, tokens=tokens)


def _add_tokens(tokenizer: Tokenizer, pieces: _Pieces, added: Mapping[int, AddedToken]) -> None:
    """Tokens that are found in text whole: the model's own first, then those beyond its vocabulary in order."""
    words = enumerate(zip(pieces.tokens, pieces.types, strict=True))
    own = [found for index, word in words if (found := added.get(index) or whole_token(*word)) is not None]
    add_known(tokenizer, own)
    further = sorted((token, value) for token, value in added.items() if token >= len(pieces.tokens))
    for token, value in further:
        tokenizer.add_tokens([value])
        if tokenizer.token_to_id(value.content) != token:
            raise UnsupportedModelError(
                f"it gives the added token {value.content!r} the id {token}, but the next free one is "
                f"{tokenizer.get_vocab_size() - 1}"
            )


def _special(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> Token | None:
    """The special token with this name."""
    value = config.get(f"{name}_token")
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or (token := tokenizer.token_to_id(text)) is None:
        return None
    return text, token


def _parse_pieces(path: Path) -> _Pieces:
    """Parse a ModelProto."""
    try:
        tokens, scores, types = [], [], []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(piece.get(3, 1))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise _no_sentencepiece(path) from error
    ids = {"unk": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
    if not tokens or not isinstance(trainer.get(3, 1), int):
        raise _no_sentencepiece(path)
    return _Pieces(
        tokens=tokens,
        scores=scores,
        types=types,
        algorithm=trainer.get(3, 1),
        ids={name: token for name, token in ids.items() if 0 <= token < len(tokens)},
        charsmap=normalizer.get(2, b""),
        begins_with_space=bool(normalizer.get(3, 1)),
        merges_spaces=bool(normalizer.get(4, 1)),
    )


def _no_sentencepiece(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is no model of sentencepiece (or damaged); download it again, or add the model's tokenizer.json"
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a protobuf message's fields: integers, or bytes. Raises ValueError or IndexError."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << 64) if value >> 63 else value

    while place < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else -1)
        if not 0 <= size <= len(message) - place:
            raise ValueError("a field is longer than its message")
        yield key >> 3, message[place : place + size]
        place += size


# -- tekken ------------------------------------------------------------------------------------------------------------


def _read_tekken(folder: Path) -> MadeTokenizer:
    path = folder / TEKKEN
    content = read_object(path, most=LARGE)
    try:
        settings, special = content["config"], content.get("special_tokens")
        names = _OLD_TEKKEN if special is None else [entry["token_str"] for entry in special]
        num_special = settings["default_num_special_tokens"]
        names = [*names, *(f"<SPECIAL_{index}>" for index in range(len(names), num_special))]
        num_words = settings["default_vocab_size"] - num_special
        entries = content["vocab"][:num_words]
        words = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks, pattern = [entry["rank"] for entry in entries], settings["pattern"]
        is_whole = ranks == list(range(num_words)) and len({*names}) == len(names) == num_special
        numbered = special is None or [entry["rank"] for entry in special] == list(range(len(special)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{path} is damaged ({type(error).__name__}: {error}); download it again"
        ) from error
    if not is_whole or not numbered:
        raise UnsupportedModelError(f"{path} is damaged: its tokens are not numbered in order; download it again")
    tokenizer = _tekken(names, words, pattern)
    config = find_object(folder / "tokenizer_config.json")
    known = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special_tokens = {name: text for name, text in known.items() if text in names}
    bos = _special(tokenizer, special_tokens, "bos")
    surround(tokenizer, bos, None)
    return MadeTokenizer(tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens | config)


def _tekken(special: Sequence[str], words: Sequence[bytes], pattern: str) -> Tokenizer:
    """Byte-level BPE that merges the pair whose token comes first, after the special tokens."""
    letters = byte_characters()
    spelled = ["".join(letters[byte] for byte in word) for word in words]
    if twice := set(special) & set(spelled):
        raise UnsupportedModelError(f"its vocabulary repeats special tokens: {few(twice)}")
    merges = merges_by_score(spelled, [-float(rank) for rank in range(len(words))])
    tokenizer = make_bpe([*special, *spelled], merges, ignore_merges=True)
    split_bytes(tokenizer, pattern)
    tokenizer.decoder = decoders.ByteLevel()
    add_known(tokenizer, [AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer

"""Folders without a tokenizer.json: their tokens equal sentencepiece's, mistral-common's, or the definition's."""

import base64
import itertools
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model_runner.hub.conversion import convert_tokenizer
from model_runner.hub.tokenizer_files import MadeTokenizer, read_tokenizer
from model_runner.refusal import UnsupportedModelError
from model_runner.vocabulary import SPACE, byte_characters

TEXTS = [
    *("", " ", "   ", "hello world", " leading", "trailing ", "two  spaces   three", "tab\there\n\nnew\r\nlines"),
    *("héllo ﬁ ① Ünï", "日本語のテスト", "🎉🧪", "aaaaaaa aaa aa", "def f(x):\n    return x + 1\n", "1234567 12,5"),
    *("x\u00a0y\u3000z", "don't we'll", "<s> is no token </s>"),
]
CORPUS = [
    line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip() and "SPECIAL" not in line
]

# -- sentencepiece: a writer of its files, and its algorithm as it is defined ------------------------------------------

Piece = tuple[str, float, int]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES: list[Piece] = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
SPECIAL: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def wire(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def proto(pieces: Sequence[Piece], trainer: Mapping[int, int], normalizer: Mapping[int, int | bytes]) -> bytes:
    """A ModelProto."""
    body = b"".join(wire(1, wire(1, text.encode()) + wire(2, score) + wire(3, kind)) for text, score, kind in pieces)
    parts = (b"".join(wire(number, value) for number, value in spec.items()) for spec in (trainer, normalizer))
    return body + b"".join(wire(number, part) for number, part in zip((2, 3), parts, strict=True))


def learned(count: int) -> list[Piece]:
    """Pieces of the corpus, by the frequency of pairs."""
    lines = [(SPACE + line).replace(" ", SPACE) for line in CORPUS]
    letters = sorted(set("".join(lines)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=len(letters) + count, show_progress=False))
    vocabulary = tokenizer.get_vocab()
    found = sorted(vocabulary.keys() - set(letters), key=vocabulary.__getitem__)
    assert len(found) == count
    return [(piece, -float(index), NORMAL) for index, piece in enumerate([*found, *letters])]


def by_definition(text: str, pieces: Sequence[Piece], *, begins_with_space: bool) -> list[int]:
    """Merge the pair with the highest score, the leftmost of equals, until none is left; then spell bytes."""
    ids = {text: index for index, (text, _, _) in enumerate(pieces)}
    scores = {text: score for text, score, kind in pieces if kind == NORMAL}
    word = list(((SPACE if begins_with_space and text else "") + text).replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -place) for place, (a, b) in enumerate(itertools.pairwise(word)) if a + b in scores]
        if not pairs:
            break
        place = -max(pairs)[1]
        word[place : place + 2] = [word[place] + word[place + 1]]
    spelled = ([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in word)
    return [ids[piece] for pieces_of in spelled for piece in pieces_of]


PIECES = [*SPECIAL, *BYTES, *learned(200)]
IDENTITY = {4: 0}
"""A normalizer that changes nothing but spaces, with one in front."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., MadeTokenizer]:
    """Reads the tokenizer of a folder with these pieces and files."""

    def read(
        pieces: Sequence[Piece] = PIECES,
        trainer: Mapping[int, int] = {3: 2},
        normalizer: Mapping[int, int | bytes] = IDENTITY,
        **files: Any,
    ) -> MadeTokenizer:
        (tmp_path / "tokenizer.model").write_bytes(proto(pieces, trainer, normalizer))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        made = read_tokenizer(tmp_path)
        assert made is not None
        return made

    return read


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_pieces_are_merged_as_sentencepiece_defines_it(begins_with_space: bool, make: Callable[..., Any]) -> None:
    tokenizer = make(normalizer={3: int(begins_with_space), 4: 0}).tokenizer
    for text in [*TEXTS, *random.Random(1).sample(CORPUS, 60)]:
        if "<s>" in text or "</s>" in text or "<unk>" in text:
            continue
        expected = by_definition(text, PIECES, begins_with_space=begins_with_space)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.decode(expected) == text


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "gemma": {
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        "user_defined_symbols": ["<start_of_turn>", SPACE * 2, SPACE * 3],
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"},
    },
    "normalised": {"normalization_rule_name": "nmt_nfkc"},
    "without bytes": {"normalization_rule_name": "identity", "byte_fallback": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_library_that_trained_them(kind: str, tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentencepiece")
    options = {"model_type": "bpe", "vocab_size": 600, "byte_fallback": True, "minloglevel": 2, **KINDS[kind]}
    prefix = str(tmp_path / "tokenizer")
    library.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_prefix=prefix, **options)
    true = library.SentencePieceProcessor(model_file=f"{prefix}.model")
    made = read_tokenizer(tmp_path)
    assert made is not None
    control = ("<s>", "</s>", "<unk>", "<bos>", "<eos>")
    for text in [text for text in (*TEXTS, *CORPUS) if not any(token in text for token in control)]:
        ids = made.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == true.encode(text), text
        assert true.unk_id() in ids or made.tokenizer.decode(ids) == true.decode(ids)


def test_bos_comes_first_and_configurations_may_say_otherwise(make: Callable[..., Any]) -> None:
    made = make()
    assert made.tokenizer.encode("a").ids[0] == 1
    assert {made.config[f"{name}_token"] for name in ("unk", "bos", "eos")} == {"<unk>", "<s>", "</s>"}
    other = make(tokenizer_config={"add_bos_token": False, "add_eos_token": True, "chat_template": "hi"})
    assert other.tokenizer.encode("a").ids == [*made.tokenizer.encode("a").ids[1:], 2]
    assert other.config["chat_template"] == "hi"


def test_special_tokens_are_found_and_those_of_other_files_too(make: Callable[..., Any]) -> None:
    size = len(PIECES)
    named = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": True}
    made = make(
        tokenizer_config={"added_tokens_decoder": {str(size + 1): named, "300": {"content": "[INST]"}}},
        added_tokens={"<tool>": size},
        special_tokens_map={"eos_token": {"content": "<|im_end|>"}},
    )
    tokens = made.tokenizer.encode("<s>[INST]a<tool> b<|im_end|>  c", add_special_tokens=False).tokens
    assert [token.strip() for token in tokens if token[0] in "<["] == ["<s>", "[INST]", "<tool>", "<|im_end|>"]
    assert made.tokenizer.token_to_id("[INST]") == 300  # takes the place of a piece
    assert [token.content for token in made.tokenizer.get_added_tokens_decoder().values() if token.special] == [
        *("<unk>", "<s>", "</s>", "<|im_end|>")
    ]
    assert made.config["eos_token"] == {"content": "<|im_end|>"}


def test_only_the_beginning_gets_a_space_if_legacy_is_false(make: Callable[..., Any]) -> None:
    def tokens(**config: Any) -> list[str]:
        found: list[str] = make(tokenizer_config=config).tokenizer.encode("a</s>a", add_special_tokens=False).tokens
        return found

    assert tokens() == tokens(legacy=True) == tokens(legacy=None)
    assert "".join(tokens()) == f"{SPACE}a</s>{SPACE}a"
    assert "".join(tokens(legacy=False)) == f"{SPACE}a</s>a"
    assert "".join(tokens(add_prefix_space=False)) == "a</s>a"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: whole[:-9], "is no model of sentencepiece"),
        (lambda whole: whole[:700], "is no model of sentencepiece"),
        (lambda whole: b"", "is no model of sentencepiece"),
        (lambda whole: b"<html>no</html>", "is no model of sentencepiece"),
        (lambda whole: b"IQ== 0\nIg== 1\n", "is no model of sentencepiece"),
    ],
    ids=["truncated", "cut in the pieces", "empty", "a page", "tiktoken's form"],
)
def test_a_damaged_model_is_named(change: Callable[[bytes], bytes], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(change(proto(PIECES, {3: 2}, IDENTITY)))
    with pytest.raises(UnsupportedModelError, match=rf"^{path} {reason} .*; download it again"):
        read_tokenizer(tmp_path)


def test_other_algorithms_are_left_to_transformers(make: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_runner.hub.tokenizer_files._is_installed", lambda module: module != "sentencepiece")
        with pytest.raises(UnsupportedModelError, match=r"sentencepiece to read it; run `pip install sentencepiece`$"):
            make(trainer={3: 1})
        patch.setattr("model_runner.hub.tokenizer_files._is_installed", lambda module: True)
        assert read_tokenizer(tmp_path) is None


def test_what_cannot_be_a_tokenizer(make: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'<x>' the id 1000, but the next free one is \d+"):
        make(added_tokens={"<x>": 1000})
    with pytest.raises(UnsupportedModelError, match="two tokens the same text"):
        make(added_tokens={"<s>": 5})
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"it has no tokenizer \(tokenizer\.model, tekken\.json, tokenizer\.json,"
    ):
        read_tokenizer(tmp_path)


# -- tekken ------------------------------------------------------------------------------------------------------------

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def tekken_words() -> list[bytes]:
    """All bytes, then the tokens of a byte-level BPE of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    byte_of = {letter: byte for byte, letter in enumerate(byte_characters())}
    trained = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[letter] for letter in token) for token, _ in trained if len(token) > 1]
    return [*(bytes([byte]) for byte in range(256)), *merged]


def tekken(words: Sequence[bytes], names: Sequence[str] | None = NAMES, num_special: int = 10) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    extra = [{"rank": len(words), "token_bytes": base64.b64encode(b"beyond").decode(), "token_str": "beyond"}]
    special = names and [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    sizes = {"default_vocab_size": len(words) + num_special, "default_num_special_tokens": num_special}
    settings = {"pattern": PATTERN, "num_vocab_tokens": len(words) + 1, "version": "v7", **sizes}
    return {"config": settings, "vocab": [*vocab, *extra], "special_tokens": special}


def merge_by_rank(text: str, words: Sequence[bytes]) -> list[int]:
    """Tiktoken's algorithm: in each piece, merge the pair whose union has the lowest rank."""
    ranks = {word: rank for rank, word in enumerate(words)}
    found = []
    for piece in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while pairs := [
            (ranks[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks
        ]:
            place = min(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        found += [ranks[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def words() -> list[bytes]:
    return tekken_words()


def read_tekken(folder: Path, content: object) -> MadeTokenizer:
    (folder / "tekken.json").write_text(json.dumps(content))
    made = read_tokenizer(folder)
    assert made is not None
    return made


def test_ranks_are_merged_as_tiktoken_defines_it(words: list[bytes], tmp_path: Path) -> None:
    tokenizer = read_tekken(tmp_path, tekken(words)).tokenizer
    assert tokenizer.get_vocab_size() == len(words) + 10  # not beyond the default size
    for text in [*TEXTS, *CORPUS]:
        if any(name in text for name in NAMES):
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [10 + rank for rank in merge_by_rank(text, words)], text
        assert tokenizer.decode(ids) == text


def test_tokens_are_those_of_mistral_common(words: list[bytes], tmp_path: Path) -> None:
    library: Any = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    tokenizer = read_tekken(tmp_path, tekken(words)).tokenizer
    true = library.Tekkenizer.from_file(tmp_path / "tekken.json")
    for text in [text for text in (*TEXTS, *CORPUS) if not any(name in text for name in NAMES)]:
        assert tokenizer.encode(text).ids == true.encode(text, bos=True, eos=False), text
    assert [tokenizer.id_to_token(i) for i in range(10)] == [true.id_to_piece(i) for i in range(10)]


def test_a_folder_gets_its_tokenizer_and_keeps_its_files(words: list[bytes], tmp_path: Path) -> None:
    folder, target = tmp_path / "mistral", tmp_path / "target"
    folder.mkdir()
    (folder / "tekken.json").write_text(json.dumps(tekken(words)))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "hi", "eos_token": "[INST]"}))
    convert_tokenizer(folder, target)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("a").tokens == ["<s>", "a"]
    assert json.loads((target / "tokenizer_config.json").read_text()) == {
        **{"bos_token": "<s>", "eos_token": "[INST]", "unk_token": "<unk>"},
        **{"chat_template": "hi", "tokenizer_class": "PreTrainedTokenizerFast"},
    }
    assert (target / "config.json").read_text() == "{}"


def test_control_tokens_are_found_and_named(words: list[bytes], tmp_path: Path) -> None:
    made = read_tekken(tmp_path, tekken(words))
    tokens = made.tokenizer.encode("[INST]a[/INST]").tokens
    assert tokens == ["<s>", "[INST]", "a", "[/INST]"]
    assert made.tokenizer.id_to_token(9) == "<SPECIAL_9>"
    assert (made.config["bos_token"], made.config["eos_token"]) == ("<s>", "</s>")
    old = read_tekken(tmp_path, tekken(words, None, num_special=30))
    assert old.tokenizer.token_to_id("[TOOL_CALLS]") == 9
    assert old.tokenizer.token_to_id("<SPECIAL_20>") == 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": None}, "is damaged"),
        ({"vocab": [{"rank": 0}]}, "is damaged"),
        ({"vocab": []}, "is damaged"),
        ({"special_tokens": [{"rank": 3, "token_str": "<s>"}]}, "is damaged: its tokens are not numbered in order"),
    ],
)
def test_a_damaged_tekken_is_named(change: dict[str, Any], reason: str, words: list[bytes], tmp_path: Path) -> None:
    content = tekken(words)
    with pytest.raises(UnsupportedModelError, match=rf"tekken\.json {reason}.*; download it again$"):
        read_tekken(tmp_path, content | change)
    (tmp_path / "tekken.json").write_text(json.dumps(content)[:-5])
    with pytest.raises(UnsupportedModelError, match=r"tekken\.json is not valid JSON"):
        read_tokenizer(tmp_path)

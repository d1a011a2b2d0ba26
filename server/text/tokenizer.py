"""Text to tokens and back, from a model folder. Uses only the `tokenizers` library, and so starts quickly."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tokenizers import Tokenizer as TokenizerModel
from tokenizers import normalizers

from model_runner.contract import Breaker
from model_runner.encoders.folder import find_encoder
from model_runner.json_files import find_object
from model_runner.vocabulary import byte_characters
from server.errors import InvalidRequestError
from server.text.chat_template import ChatTemplate, TemplateSources
from server.text.dry_breakers import BreakerSpellings
from server.text.fill_in import FillInTokens
from server.text.template_files import read_templates

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LONG = 1 << 11
"""Characters from which a text is encoded by the library's batch function, which releases the GIL."""
_CONTINUED = "☺"
"""A character that SentencePiece-style tokenizers spell as bytes, which merge with nothing."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_PATH_NAMES = ("_file", "name_or_path")


MAX_ADDED = 32768
"""The most added tokens: llguidance takes a time that grows with their square, half a minute for these."""
MAX_LENGTH = 1024
"""The most characters of a token; llguidance ends at some thousands."""


def _is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up. The class of its error cannot be imported."""
    return type(error).__name__ == "PanicException"


def _survives(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method that raises InvalidRequestError for a text on which the tokenizer's expressions give up."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if not _is_panic(error):
                raise
        message = "The model's tokenizer cannot split this text into words: one of its expressions gives up on it. "
        raise InvalidRequestError(f"{message}Shorten what is repeated in the text, such as spaces.")

    return run


_LARGEST_ID = (1 << 32) - 1
"""The largest id that the tokenizers library takes."""


class Tokenizer:
    """A model's tokenizer with its special tokens and its chat template."""

    def __init__(self, model: TokenizerModel, config: Mapping[str, Any], templates: TemplateSources | None) -> None:
        """`config` is the content of tokenizer_config.json. The file's truncation and padding are turned off."""
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._longest_token = max(map(len, model.get_vocab()), default=0)  # here, because requests must not wait for it
        """The most characters that one token covers."""
        self.config = {name: value for name, value in config.items() if not name.endswith(_PATH_NAMES)}
        """tokenizer_config.json without the paths on its author's machine."""
        self.tokenizer_class = str(config.get("tokenizer_class", "PreTrainedTokenizerFast"))
        self.special_tokens = _special_tokens(config)
        """Special tokens as text, by name, such as "eos_token"."""
        added = model.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_ids = self.special_ids | {
            i for i, token in added.items() if token.content.startswith("<") and token.content.endswith(">")
        }
        """Tokens that never spell text, by llguidance's rule: special tokens, and tags such as Qwen's for reasoning and
        tool calls."""
        self.chat_template = (
            ChatTemplate(templates.default, self.special_tokens, templates.tool_use) if templates is not None else None
        )
        self.fill_in = FillInTokens.of({token.content: i for i, token in added.items()})
        """Tokens for filling in the middle. None if the tokenizer has none that are known here."""
        self._token_bytes = _ByteReader(model)

    @classmethod
    def from_folder(cls, folder: Path, templates: TemplateSources | None = None) -> "Tokenizer":
        """Load a model folder. Chat templates given here replace the folder's.

        Raises OSError or ValueError if a file is missing or invalid.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json.")
        config = find_object(folder / "tokenizer_config.json")
        config = {**find_object(folder / "special_tokens_map.json"), **config}
        try:
            model = TokenizerModel.from_file(str(path))
            model.encode("a")
        except BaseException as error:  # the library raises nothing more special
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise ValueError(f"{path} is damaged ({error}); download it again.") from error
        encoder = find_encoder(folder)
        if encoder is not None and encoder.lowercases:
            own = [] if model.normalizer is None else [model.normalizer]
            model.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        made = cls(model, config, templates or read_templates(folder, config))
        made._check_sizes(path)
        return made

    def _check_sizes(self, path: Path) -> None:
        """Raise ValueError for a vocabulary with which the model would never become ready."""
        num_added = len(self._model.get_added_tokens_decoder())
        if num_added > MAX_ADDED:
            raise ValueError(f"{path} has {num_added} added tokens, but at most {MAX_ADDED} are supported.")
        longest = self._longest_token
        if longest > MAX_LENGTH:
            raise ValueError(f"{path} has a token of {longest} characters, but at most {MAX_LENGTH} are supported.")

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded to more."""
        return self._model.get_vocab_size(with_added_tokens=True)

    @_survives
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's tokens. Long texts use the batch function, because only that one releases the GIL."""
        if len(text) < _LONG:
            return self._model.encode(text, add_special_tokens=add_special_tokens).ids
        return self._model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @_survives
    def encode_as_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's tokens, where special tokens count as ordinary text. The first call is slow."""
        return self._literal.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _literal(self) -> TokenizerModel:
        """A copy, because the library has this switch only for a whole tokenizer."""
        model = TokenizerModel.from_str(self._model.to_str())
        model.encode_special_tokens = True
        return model

    @_survives
    def encode_literally(self, text: str, *, continues: bool = False) -> list[int]:
        """The text's tokens, never special or fill-in tokens, however the text is spelled.

        A text that `continues` another gets no space before its first word.
        """
        if continues and self._prepends_space:
            before, tokens = self._without_added(_CONTINUED), self._without_added(_CONTINUED + text)
            if tokens[: len(before)] == before:
                return tokens[len(before) :]
        tokens = self.encode(text, add_special_tokens=False)
        return tokens if self._never_spelled.isdisjoint(tokens) else self._without_added(text)

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """The control tokens as text, the longest first."""
        texts = filter(None, map(self.token_name, self.control_ids))
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @cached_property
    def _never_spelled(self) -> frozenset[int]:
        return self.special_ids if self.fill_in is None else self.special_ids | set(self.fill_in.ends)

    @cached_property
    def beginning_ids(self) -> list[int]:
        """The special tokens that begin every encoded text."""
        encoded = self._model.encode("a", add_special_tokens=True)
        return [
            token
            for token, _ in takewhile(lambda pair: pair[1], zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        ]

    def without_beginning(self, text: str) -> str:
        """The text without the special tokens that begin every encoded text, if its tokens are the same with them."""
        beginning = self.decode(self.beginning_ids, skip_special_tokens=False)
        rest = text.removeprefix(beginning)
        if rest == text:
            return text
        whole = self.encode(text, add_special_tokens=False)
        return rest if self.encode(rest, add_special_tokens=True)[: len(whole)] == whole else text

    @cached_property
    def _prepends_space(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        parts = f"{self._model.normalizer} {self._model.pre_tokenizer}"
        habits = ("Prepend(", "prepend_scheme=always", "prepend_scheme=first", "add_prefix_space=True")
        return any(habit in parts for habit in habits)

    def _without_added(self, text: str) -> list[int]:
        """The text's tokens if the tokenizer had no added tokens."""
        model = self._model
        text = text if model.normalizer is None else model.normalizer.normalize_str(text)
        words = [(text, None)] if model.pre_tokenizer is None else model.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for word, _ in words for token in model.model.tokenize(word)]

    @_survives
    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """The tokens of a pair of texts, with the tokenizer's special tokens before, between and after.

        Also returns how many of them belong to the first text; None if the tokenizer gives all tokens the same type.
        """
        encoded = self._model.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
        names = self.config.get("model_input_names")
        has_types = 1 in encoded.type_ids and (names is None or "token_type_ids" in names)
        return encoded.ids, encoded.type_ids.index(1) if has_types else None

    @property
    def num_added(self) -> int:
        """How many special tokens are put around a text."""
        return self._model.num_special_tokens_to_add(is_pair=False)

    @_survives
    def encode_beginning(self, text: str, num_tokens: int) -> list[int]:
        """The first tokens of the text with the special tokens around them, at most `num_tokens` together."""
        encoded = self._model.encode_batch([text], add_special_tokens=False)[0]
        encoded.truncate(num_tokens - self.num_added)
        return self._model.post_process(encoded, add_special_tokens=True).ids

    @_survives
    def beginning(self, text: str, num_tokens: int) -> str:
        """The beginning of the text that takes at most `num_tokens` tokens, in whole characters."""
        spans = self._model.encode_batch([text], add_special_tokens=False)[0].offsets
        if len(spans) <= num_tokens:
            return text
        while num_tokens and spans[num_tokens][0] < spans[num_tokens - 1][1]:  # both are parts of one character
            num_tokens -= 1
        return text[: spans[num_tokens - 1][1]] if num_tokens else ""

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is the concatenated bytes of its tokens (`token_bytes`)."""
        return self._token_bytes.is_byte_level

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The tokens' text. Ids outside the vocabulary have none."""
        return self._model.decode([one for one in ids if one <= _LARGEST_ID], skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The id of a token, given its text in the vocabulary."""
        return self._model.token_to_id(text)

    def token_name(self, token_id: int) -> str | None:
        """The token's text in the vocabulary."""
        return self._model.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for, which may be part of a character."""
        return self._token_bytes(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """The token's text. None if its bytes are not whole characters."""
        return self._token_bytes.whole_text(token_id)

    def token_text(self, token_id: int) -> str:
        r"""The token as a string. Bytes that are not whole characters become `bytes:\\xe2\\x80`, as in OpenAI's API."""
        text = self.whole_text(token_id)
        if text is None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))
        return text

    def spell_breakers(self, breakers: Sequence[str], vocab_size: int) -> tuple[Breaker, ...]:
        """DRY's sequence breakers as tokens below `vocab_size`. Slow for new strings: not for the event loop."""
        return self._breaker_spellings(breakers, vocab_size)

    def forget_breakers(self) -> None:
        """Clear the cache of breakers."""
        self._breaker_spellings.forget()

    @cached_property
    def _breaker_spellings(self) -> BreakerSpellings:
        texts = [self.token_bytes(token) for token in range(self.vocab_size)]
        return BreakerSpellings(texts, lambda text: self.encode(text, add_special_tokens=False))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the text's number of tokens, found without encoding it."""
        if self._model.normalizer is not None or not self._longest_token:
            return 0
        return len(text) // self._longest_token


class _ByteReader:
    """Token id to bytes, by the convention of the tokenizer's decoder. Caches its results."""

    def __init__(self, model: TokenizerModel) -> None:
        self._model = model
        self._added = model.get_added_tokens_decoder()
        decoder = str(model.decoder)
        self.is_byte_level = decoder.startswith("ByteLevel")
        self._has_bytes = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self._byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def __call__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._read(token_id)
            if known:  # callers may pass any number; only tokens are cached
                self._known[token_id] = known
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text. None if its bytes are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            raw = self(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = None
        if raw:
            self._texts[token_id] = text
        return text

    def _read(self, token_id: int) -> bytes:
        token = self._model.id_to_token(token_id)
        if token is None:
            return b""
        if self._has_bytes:  # like the library's decoder: a token with any other character stands for itself
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return token.encode()
        if token_id in self._added:
            return token.encode()
        if self._byte_fallback:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace("\u2581", " ").encode()
        return self._model.decode([token_id], skip_special_tokens=False).encode()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name. Each is given as a string, or as an object with its content."""
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens

"""The abilities of a model (generating, embedding, scoring), read from its files."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from model_runner.encoders.folder import EncoderFolder, find_encoder, pooling_modes, read_modules
from model_runner.json_files import LARGE, find_object
from model_runner.refusal import classifies, is_bare
from model_runner.weights.safetensors_head import INDEX, SINGLE, read_safetensors_head
from server.errors import InvalidRequestError
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Embedding:
    """How the model embeds a text."""

    by: Literal["last", "mean", "modules"] = "last"
    """modules: by an encoder's sentence-transformers modules."""
    pooling: str = ""
    """With `modules`: the modes of their pooling, joined by `+`."""
    normalizes: bool = True
    is_trained: bool = False
    """Whether the model was trained for embeddings; other models return the hidden state of the last token."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before an input, by their names."""
    default_prompt: str | None = None
    """Name of the prompt that is used unless a request names one."""
    shortens: bool = False
    """Whether vectors can be shortened (Matryoshka)."""
    dimensions: tuple[int, ...] = ()
    """The lengths that vectors can be shortened to; empty: any."""
    similarity: str | None = None
    """The function that compares vectors, by the model's files: cosine, dot, euclidean or manhattan."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the model scores a document against a query."""

    by: Literal["classes", "logits"]
    tokens: tuple[int, ...] = ()
    """With `logits`: the token for yes and, if there is one, the token for no."""
    is_probability: bool = True
    """Whether a sigmoid turns the number into a probability."""
    instruction: str | None = None
    """The default instruction."""
    opens_turn: bool = False
    """Whether a template that knows queries and documents opens the assistant's turn."""

    def value(self, numbers: Sequence[float], *, is_raw: bool) -> float:
        """The score, from the engine's one number, or its two for yes and no. A raw score skips the sigmoid."""
        raw = numbers[0] - sum(numbers[1:])
        if is_raw or not self.is_probability:
            return raw
        return sigmoid(raw)


@dataclass(frozen=True, slots=True)
class Classification:
    """How the model classifies a text."""

    labels: tuple[str, ...]
    """Names of the classes."""
    are_exclusive: bool
    """Whether a text has one class: a softmax makes probabilities of the numbers, otherwise a sigmoid of each."""

    def probabilities(self, numbers: Sequence[float]) -> Sequence[float]:
        """The probabilities of the classes, from the numbers of the model's head."""
        if not self.are_exclusive:
            return [sigmoid(number) for number in numbers]
        highest = max(numbers)
        powers = [math.exp(number - highest) for number in numbers]
        return [power / sum(powers) for power in powers]


def sigmoid(number: float) -> float:
    """1 / (1 + exp(-number)), without overflow."""
    return 1 / (1 + math.exp(-number)) if number >= 0 else math.exp(number) / (1 + math.exp(number))


_PATHS = {"embed": "/v1/embeddings", "score": "/v1/score or /v1/rerank", "classify": "/v1/classify"}
"""The paths of abilities other than generation."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a model, and why it lacks others."""

    generates: bool = True
    is_encoder: bool = False
    """Whether it reads each text as a whole, in both directions, between the tokenizer's special tokens."""
    embedding: Embedding | None = None
    no_embedding: str = "It is not made for embeddings."
    scoring: Scoring | None = None
    no_scoring: str = "It is not made for scores: its configuration names neither a classification head nor tokens."
    classification: Classification | None = None
    no_classification: str = "It has no classification head."

    def check_generates(self, model: str) -> None:
        """Raise InvalidRequestError, which names the model, if it cannot generate text."""
        if not self.generates:
            can = [f"{name} ({_PATHS[name]})" for name in self.names]
            raise unable(model, "generate text", f"It can {' and '.join(can) or 'do nothing else, either'}.")

    @property
    def names(self) -> Sequence[str]:
        """The names of its abilities."""
        known = {
            "generate": self.generates,
            "embed": self.embedding is not None,
            "score": self.scoring is not None,
            "classify": self.classification is not None,
        }
        return [name for name, is_there in known.items() if is_there]

    def __str__(self) -> str:
        untrained = " (not trained for that)"
        is_guess = self.embedding is not None and not self.embedding.is_trained
        return ", ".join(f"{name}{untrained if name == 'embed' and is_guess else ''}" for name in self.names)


def unable(model: str, what: str, why: str) -> InvalidRequestError:
    """The error for a task that the model was not made for."""
    return InvalidRequestError(f"The model `{model}` cannot {what}. {why}", param="model", code="unsupported_model")


_WAYS: Mapping[str, Literal["last", "mean"]] = {"lasttoken": "last", "mean": "mean"}


class _UnsupportedError(Exception):
    """The model's files need something that is not supported; the message names it."""


def read_abilities(folder: Path, tokenizer: Tokenizer, score_tokens: Sequence[str] = ()) -> Abilities:
    """Read the abilities of the model in a folder; `score_tokens` is the setting of this name.

    Raises OSError or ValueError if a file is malformed or a score token does not exist.
    """
    files = _Files(folder)
    abilities = Abilities(files.generates, is_encoder=files.encoder is not None)
    try:
        abilities = replace(abilities, embedding=_embedding(files))
    except _UnsupportedError as error:
        abilities = replace(abilities, no_embedding=str(error))
    try:
        abilities = replace(abilities, classification=_classification(files))
    except _UnsupportedError as error:
        abilities = replace(abilities, no_classification=str(error))
    try:
        scoring = _scoring(files, tokenizer, score_tokens)
        if scoring is not None and scoring.by == "logits" and tokenizer.chat_template is None:
            raise _UnsupportedError("It scores by tokens, and has no chat template to be asked by.")
        return replace(abilities, scoring=scoring)
    except _UnsupportedError as error:
        return replace(abilities, no_scoring=str(error))


class _Files:
    """The configuration files in a model's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = find_object(folder / "config.json")
        self.sentences = find_object(folder / "config_sentence_transformers.json")
        self.transformer = find_object(folder / "sentence_bert_config.json")
        self.modules = dict(read_modules(folder)) if (folder / "modules.json").is_file() else {}
        self.architectures = self.config.get("architectures")
        self.encoder: EncoderFolder | None = find_encoder(folder)

    @property
    def classifies(self) -> bool:
        return classifies(self.architectures)

    @property
    def generates(self) -> bool:
        """A class with another head, or with none, was saved without a language-model head."""
        if self.encoder is not None or is_bare(self.architectures):
            return False
        return not (self.modules and self._lacks_head)

    @property
    def _lacks_head(self) -> bool:
        """Embedding models may name a class with a head, and have no weights for it."""
        names = _weight_names(self.folder)
        is_tied = self.config.get("tie_word_embeddings", True)
        return bool(names) and not is_tied and not any("lm_head" in name for name in names)

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts to put before an input, by their names."""
        return {name: str(text or "") for name, text in (self.sentences.get("prompts") or {}).items()}

    @property
    def num_classes(self) -> int:
        """Outputs of the classification head."""
        return self.config.get("num_labels") or len(self.config.get("id2label") or range(2))

    def of_module(self, kind: str) -> dict[str, Any] | None:
        """The configuration of a sentence-transformers module; None if there is no such module."""
        path = self.modules.get(kind)
        return None if path is None else find_object(self.folder / path / "config.json")


def _weight_names(folder: Path) -> Collection[str]:
    """Names of the checkpoint's weights; empty if it is not in safetensors."""
    if index := find_object(folder / INDEX, most=LARGE):
        return list(index.get("weight_map", {}))
    path = folder / SINGLE
    return list(read_safetensors_head(path)[0]) if path.is_file() else ()


def _embedding(files: _Files) -> Embedding:
    if files.classifies or "LogitScore" in files.modules:
        raise _UnsupportedError("It scores pairs of texts.")
    sizes = files.config.get("matryoshka_dimensions") or ()
    shortens = bool(sizes) or bool(files.config.get("is_matryoshka"))
    trained = Embedding(
        is_trained=True,
        prompts=files.prompts,
        default_prompt=files.sentences.get("default_prompt_name"),
        shortens=shortens,
        dimensions=tuple(sizes),
        similarity=files.sentences.get("similarity_fn_name"),
    )
    if (encoder := files.encoder) is not None:
        own = replace(trained, by="modules", pooling=encoder.pooling, normalizes=encoder.normalizes)
        return replace(own, is_trained=encoder.has_modules)
    if not files.modules:
        return Embedding(is_trained=not files.generates, shortens=shortens, dimensions=tuple(sizes))
    if unknown := files.modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise _UnsupportedError(f"Its modules.json names {', '.join(sorted(unknown))}, which is not supported.")
    if files.transformer.get("do_lower_case"):
        raise _UnsupportedError("Its sentence_bert_config.json has do_lower_case, which is not supported.")
    return replace(trained, by=_way(files.of_module("Pooling") or {}), normalizes="Normalize" in files.modules)


def _way(pooling: Mapping[str, Any]) -> Literal["last", "mean"]:
    names = pooling_modes(pooling)
    if len(names) != 1 or names[0] not in _WAYS:
        raise _UnsupportedError(f"Its way of pooling, {' and '.join(names) or 'none'}, is not supported.")
    if names == ["mean"] and pooling.get("include_prompt") is False:
        raise _UnsupportedError("Its pooling leaves out the prompt, which is not supported.")
    return _WAYS[names[0]]


def _scoring(files: _Files, tokenizer: Tokenizer, score_tokens: Sequence[str]) -> Scoring | None:
    prompts, default = files.sentences.get("prompts") or {}, files.sentences.get("default_prompt_name")
    template = (files.transformer.get("processing_kwargs") or {}).get("chat_template") or {}
    instruction, opens_turn = prompts.get(default), bool(template.get("add_generation_prompt"))
    named = list(score_tokens) or files.config.get("classifier_from_token") or []
    if named and files.encoder is not None:
        raise ValueError(f"score_tokens: {files.folder} is an encoder, which has no logits of tokens. Give none.")
    if named:
        tokens = _token_ids(tokenizer, named)
        return Scoring("logits", tokens, instruction=instruction, opens_turn=opens_turn)
    if (module := files.of_module("LogitScore")) is not None:
        ids = (module.get("true_token_id"), module.get("false_token_id"))
        tokens = tuple(int(token) for token in ids if token is not None)
        return Scoring("logits", tokens, _is_probability(files), instruction, opens_turn)
    if not files.classifies:
        return None
    if files.num_classes != 1:
        raise _UnsupportedError(f"Its classification head has {files.num_classes} classes; scoring needs one class.")
    return Scoring("classes", (), _is_probability(files), instruction, opens_turn)


def _token_ids(tokenizer: Tokenizer, named: Sequence[str]) -> tuple[int, ...]:
    """Ids of the words for no and yes, or of the word for yes alone; yes comes first."""
    ids = []
    for word in reversed(named):
        tokens = tokenizer.encode(str(word), add_special_tokens=False)
        if len(tokens) != 1 or len(named) > 2:
            raise ValueError(
                f"score_tokens: {word!r} has {len(tokens)} tokens. Give one or two words of one token each."
            )
        ids.append(tokens[0])
    return tuple(ids)


def _classification(files: _Files) -> Classification | None:
    if not files.classifies:
        return None
    if files.num_classes == 1:
        raise _UnsupportedError("Its head has one number, which is a score of the text.")
    names = files.config.get("id2label") or {}
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(files.num_classes))
    return Classification(labels, files.config.get("problem_type") != "multi_label_classification")


def _is_probability(files: _Files) -> bool:
    """Whether a sigmoid follows. It is the default where there is one number, as in sentence-transformers."""
    config = files.config
    named = str(
        files.sentences.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or "Sigmoid"
    )
    kind = named.rpartition(".")[2]
    if kind not in ("Identity", "Sigmoid"):
        raise _UnsupportedError(f"Its scores have the activation {named[:80]}, which is not supported.")
    return kind == "Sigmoid"

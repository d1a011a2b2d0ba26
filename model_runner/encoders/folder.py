"""The files of an encoder's folder: its task, its length, and sentence-transformers' modules. Imports no torch.

Formats: https://github.com/huggingface/sentence-transformers, version 6 (base/model.py, base/modules,
sentence_transformer/modules and cross_encoder/model.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner.json_files import find_object, is_safe_path, read_list
from model_runner.refusal import UnsupportedModelError, classifies, few, refused
from model_runner.weights.damage import naming_damage

_ENCODERS = frozenset({
    *("albert", "bert", "camembert", "distilbert", "electra", "ernie", "eurobert", "modernbert", "mpnet"),
    *("nomic_bert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
})  # fmt: skip
"""Model types whose attention is bidirectional, unless `is_decoder` is set."""
_BOTH = frozenset({"gemma3_text"})
"""Model types whose attention is bidirectional if `use_bidirectional_attention` is set."""
MODEL_TYPES = _ENCODERS | _BOTH
"""Model types of encoders."""
_TASKS = ("ForMaskedLM", "ForPreTraining", "ForCausalLM", "LMHeadModel", "Model")
"""Endings of classes whose encoder makes embeddings; their heads for tokens are not used."""
_TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")),
)
"""Names of the settings of a Transformer module, the current one first."""

_NOMIC = {
    **{"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "prenorm": False},
    **{"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False, "num_experts": 0},
}
"""Entries of NomicBERT's own configurations, which transformers ignores, with the values that it computes."""

_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The mode of pooling for each switch of older files, in the order in which vectors are joined."""


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """A step from a text's hidden states to its embedding."""

    kind: str
    """Pooling, Dense, LayerNorm, or Normalize, which divides the vector by its Euclidean norm."""
    folder: Path = Path()
    """Has the weights of a Dense module or a layer norm."""
    modes: tuple[str, ...] = ()
    """Modes of pooling, whose vectors are joined."""
    activation: str = ""
    """The name of a class in torch.nn, for a Dense module."""
    adds_input: bool = False
    """Whether a Dense module's input is added to its output, through the weight `residual` if sizes differ."""


_MEAN = SentenceModule("Pooling", modes=("mean",))


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    """An encoder's settings."""

    path: Path
    model_type: str
    classifies: bool
    """Whether the model has a head for classes or scores; otherwise it makes embeddings."""
    modules: tuple[SentenceModule, ...]
    """The steps from a text's hidden states to its embedding, in order; without sentence-transformers' files, the
    mean."""
    has_modules: bool
    """Whether sentence-transformers' files name the modules."""
    lowercases: bool
    """Whether texts are put in lower case before they are tokenised."""
    max_tokens: int | None
    """The longest text by the files of tokenizer and sentence-transformers; None: they name no limit."""

    @property
    def pooling(self) -> str:
        """The modes of pooling, joined by `+`."""
        return "+".join(mode for module in self.modules for mode in module.modes)

    @property
    def normalizes(self) -> bool:
        """Whether vectors have length 1 by default."""
        return self.modules[-1].kind == "Normalize"


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an encoder: every token of a text sees every other."""
    kind = config.get("model_type")
    if kind in _BOTH:
        return bool(config.get("use_bidirectional_attention"))
    return kind in _ENCODERS and not config.get("is_decoder")


def find_encoder(folder: Path) -> EncoderFolder | None:
    """Read an encoder's folder; None if it has another kind of model.

    Raises:
        UnsupportedModelError: if the model needs something that is not supported.
        OSError, ValueError: if a file is malformed.
    """
    with refused(f"{folder} cannot be read", ValueError, OSError), naming_damage(folder):
        return _read_encoder(folder)


def _read_encoder(folder: Path) -> EncoderFolder | None:
    config = find_object(folder / "config.json")
    if not is_encoder(config):
        return None
    kind = str(config["model_type"])
    architecture = str((config.get("architectures") or ["Model"])[0])
    has_classes = classifies(config.get("architectures"))
    if kind == "nomic_bert" and (
        other := [name for name in _NOMIC if (config.get(name) or _NOMIC[name]) != _NOMIC[name]]
    ):
        raise UnsupportedModelError(f"{folder} is a NomicBERT with another {few(other)}, which is not supported")
    if not has_classes and not architecture.endswith(_TASKS):
        raise UnsupportedModelError(
            f"{folder} (a {kind} model) has a head for another task ({architecture}); encoders are supported for "
            "embeddings, and with a head of the class ...ForSequenceClassification for scores and classes; give "
            "another checkpoint"
        )
    transformer = next((found for name in _TRANSFORMER_FILES if (found := find_object(folder / name))), {})
    has_modules = (folder / "modules.json").is_file()
    modules = tuple(_modules(folder)) if has_modules and not has_classes else (_MEAN,)
    limits = transformer.get("max_seq_length"), find_object(folder / "tokenizer_config.json").get("model_max_length")
    lengths = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 1 << 30]
    return EncoderFolder(
        path=folder,
        model_type=kind,
        classifies=has_classes,
        modules=modules,
        has_modules=has_modules,
        lowercases=bool(transformer.get("do_lower_case")),
        max_tokens=min(lengths, default=None),
    )


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Kinds and folders of sentence-transformers' modules; the model's own folder is empty.

    Raises:
        UnsupportedModelError: if the list is damaged, or names a folder outside of the model's.
        OSError: if it cannot be read.
    """
    path = folder / "modules.json"
    found = [(entry.get("type"), entry.get("path")) for entry in read_list(path)]
    if not all(isinstance(kind, str) and isinstance(place, str) for kind, place in found):
        raise UnsupportedModelError(f"{path} is no list of modules; download it again")
    modules = [(str(kind).rpartition(".")[2], str(place)) for kind, place in found]
    if outside := [place for _, place in modules if place and not is_safe_path(place)]:
        raise UnsupportedModelError(f"{path} names the folder {outside[0]!r}, which is outside of the model's")
    return modules


def _modules(folder: Path) -> Iterator[SentenceModule]:
    """The modules after the Transformer."""
    names = []
    for kind, path in read_modules(folder):
        names.append(kind)
        if kind == "Transformer":
            if path:
                raise _unsupported(folder, f"has its Transformer in the folder {path!r} instead of its own")
        elif kind != "Dropout":  # does nothing in evaluation
            yield _module(folder, kind, folder / path)
    if names[:2] != ["Transformer", "Pooling"] or names.count("Pooling") > 1:
        raise _unsupported(folder, f"names the modules {few(names) or 'none'}, not Transformer, Pooling and others")


def _module(folder: Path, kind: str, path: Path) -> SentenceModule:
    config = find_object(path / "config.json")
    named = config.get("module_input_name") or "sentence_embedding", config.get("module_output_name")
    if named[0] != "sentence_embedding" or named[1] not in (None, "sentence_embedding"):
        raise _unsupported(folder, f"has a module {kind} for {named[0]!r}, not for the embedding of a text")
    if kind == "Pooling":
        if config.get("include_prompt") is False:
            raise _unsupported(folder, "leaves the prompt out of its pooling")
        modes = pooling_modes(config) or ["mean"]
        if unknown := [mode for mode in modes if mode not in _SWITCHES.values()]:
            raise _unsupported(folder, f"has the pooling mode {unknown[0][:80]!r}")
        return SentenceModule(kind, modes=tuple(modes))
    if kind == "Dense":
        module, _, activation = str(config.get("activation_function") or "torch.nn.Tanh").rpartition(".")
        if not module.startswith("torch.nn"):
            raise _unsupported(folder, f"has a Dense module with the activation {activation!r}, which is not torch's")
        return SentenceModule(kind, path, activation=activation, adds_input=bool(config.get("use_residual")))
    if kind in ("LayerNorm", "Normalize"):
        return SentenceModule(kind, path)
    raise _unsupported(folder, f"names the module {kind[:80]!r}")


def pooling_modes(config: Mapping[str, Any]) -> list[str]:
    """The modes in the configuration of a Pooling module, in the order in which vectors are joined."""
    named = config.get("pooling_mode")
    if named is None:
        return [mode for switch, mode in _SWITCHES.items() if config.get(switch)]
    return [named] if isinstance(named, str) else list(map(str, named))


def _unsupported(folder: Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"modules.json of {folder} {what}; this is not supported, so give another model")

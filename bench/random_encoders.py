"""Creates encoders with random weights and the files of sentence-transformers, for tests and measurements."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
_COMMON: Mapping[str, Any] = {
    **{"vocab_size": len(_VOCABULARY) + 3, "max_position_embeddings": 300, "initializer_range": 0.3},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2},
}
_SIZES: Mapping[str, Any] = {
    **_COMMON,
    **{"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 4},
}
TEXTS = ["the quick brown fox", "a", "jumps over the lazy dog and runs away " * 4, "zebra quiz", "what " * 25]
"""With spaces, every word of k letters has k tokens; the longest text has 124, and two special ones."""

ENCODERS: dict[str, Mapping[str, Any]] = {
    "bert": _SIZES,
    "xlm-roberta": {**_SIZES, "type_vocab_size": 1},
    "mpnet": _SIZES,
    "distilbert": {**_COMMON, "dim": 48, "hidden_dim": 76, "n_layers": 3, "n_heads": 4},
    "modernbert": {**_SIZES, "local_attention": 24, "global_attn_every_n_layers": 3},
    "nomic_bert": _SIZES,
    "gemma3_text": {
        **_SIZES,
        **{"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True},
        **{"sliding_window": 24, "sliding_window_pattern": 3},
    },
    "electra": {**_SIZES, "embedding_size": 32},
    "eurobert": {**_SIZES, "num_key_value_heads": 2, "mask_token_id": 3},
}
"""Configurations by model type, which run in a millisecond."""
OTHER_ENCODERS: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("roberta", "camembert", "ernie", "roberta-prelayernorm", "xlm-roberta-xl"), _SIZES),
    "albert": {**_SIZES, "embedding_size": 32},
}
"""Types with BERT's layers and small changes."""


def save_small(folder: Path) -> Path:
    """Save a model in the form of bge-small: 12 layers of 384 numbers, 33 million weights. Words are split as above."""
    form: Mapping[str, Any] = {
        **{"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"vocab_size": 30522, "max_position_embeddings": 512, "initializer_range": 0.02},
    }
    return add_modules(save_encoder(folder, "bert", **form), pooling("cls", size=384), NORMALIZE)


def tokenizer(*, types: bool = True) -> Tokenizer:
    """A tokenizer that splits words into letters. The second text of a pair has type 1 if `types`."""
    vocabulary = {token: index for index, token in enumerate(_VOCABULARY)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    second = int(types)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second} </s>:{second}",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return made


def write(path: Path, content: object) -> None:
    """Write JSON, in folders that are made if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def save_encoder(folder: Path, kind: str, *, classes: int | None = None, **settings: Any) -> Path:
    """Save a random model of this kind and its tokenizer; with `classes`, one with a classification head."""
    torch.manual_seed(len(kind))
    config: Any = AutoConfig.for_model(kind, **{**(ENCODERS | OTHER_ENCODERS)[kind], **settings})
    maker: Any = AutoModel if classes is None else AutoModelForSequenceClassification
    if classes is not None:
        config.num_labels = classes
    maker.from_config(config).save_pretrained(folder)
    has_types = kind in ("albert", "bert", "electra", "ernie", "nomic_bert")
    tokenizer(types=has_types).save(str(folder / "tokenizer.json"))
    names = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    special = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names, "model_max_length": 256, **special},
    )
    return folder


def add_modules(folder: Path, *modules: tuple[str, Mapping[str, Any]], **settings: Any) -> Path:
    """Write sentence-transformers' files for a Transformer and these modules: kinds and configurations.

    Weights of a Dense module are random. `settings` go to config_sentence_transformers.json.
    """
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        write(folder / path / "config.json", config)
        if kind == "Dense":
            save_file(_dense_weights(config), folder / path / "model.safetensors")
    write(folder / "modules.json", entries)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 200, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine", **settings})
    return folder


def _dense_weights(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = config["out_features"], config["in_features"]
    weights = {"linear.weight": torch.randn(*shape, generator=generator) / 5}
    if config.get("bias", True):
        weights["linear.bias"] = torch.randn(shape[0], generator=generator)
    return weights


def pooling(*modes: str, size: int = 48) -> tuple[str, dict[str, Any]]:
    """A Pooling module with the switches of older files."""
    switches = {
        "cls": "cls_token",
        "max": "max_tokens",
        "mean": "mean_tokens",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean": "weightedmean_tokens",
        "lasttoken": "lasttoken",
    }
    on = {f"pooling_mode_{switch}": mode in modes for mode, switch in switches.items()}
    return "Pooling", {"word_embedding_dimension": size, **on}


def dense(
    inputs: int, outputs: int, activation: str = "torch.nn.modules.linear.Identity"
) -> tuple[str, dict[str, Any]]:
    """A Dense module."""
    return "Dense", {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}


NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})
MODULES: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "bert": [pooling("mean"), NORMALIZE],
    "xlm-roberta": [pooling("cls"), NORMALIZE],
    "mpnet": [pooling("mean"), NORMALIZE],
    "distilbert": [pooling("mean"), dense(48, 20, "torch.nn.modules.activation.Tanh")],
    "modernbert": [pooling("cls", "max", "mean"), NORMALIZE],
    "nomic_bert": [pooling("mean")],
    "gemma3_text": [pooling("mean"), dense(48, 90), dense(90, 48), NORMALIZE],
    "electra": [pooling("mean_sqrt_len_tokens", "weightedmean")],
    "eurobert": [pooling("lasttoken"), NORMALIZE],
}
"""The modules of each kind in tests; together they have every mode of pooling."""

"""Architectures of GGUF files: from metadata and names of tensors to a configuration and parameters of transformers.

A row of the table says what the metadata do not: the type of the model, names that differ from Llama's, how rows and
norms are stored. Every key of the metadata that belongs to the architecture must be read, and every tensor used;
anything else is an error, since it would be dropped in silence. What llama.cpp takes where a key is missing, and what
its converter changes in tensors, was looked up in its source.
"""

from collections.abc import Mapping

from model_runner.gguf.base_config import base_config
from model_runner.gguf.families.dense import DENSE
from model_runner.gguf.families.gemma import GEMMAS
from model_runner.gguf.families.latent import LATENT
from model_runner.gguf.families.mixtures import MIXTURES
from model_runner.gguf.families.recurrent import RECURRENT
from model_runner.gguf.header import GgufFile
from model_runner.gguf.layout import Architecture
from model_runner.gguf.metadata import Config, Metadata
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.size_check import check_sizes

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **GEMMAS, **LATENT, **MIXTURES, **RECURRENT}
"""By `general.architecture`."""

_NONE = {"position_embedding_type", "q_lora_rank", "sliding_window"}
"""Entries that mean something if they are None."""


def architecture_of(file: GgufFile) -> Architecture:
    """The row of the table. Raises UnsupportedModelError if there is none."""
    if file.architecture == "clip":
        raise UnsupportedModelError(
            "it holds the vision part of a model (general.architecture is clip); serve the file with the language model"
        )
    if not file.architecture:
        raise UnsupportedModelError("its metadata name no general.architecture")
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {file.architecture} cannot be read; these can: "
            f"{', '.join(sorted(ARCHITECTURES))}. If its original checkpoint in safetensors is supported, serve that"
        )
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> Config:
    """The content of config.json.

    Raises:
        UnsupportedModelError: if the file is of an unknown architecture, lacks metadata, or says something that no
            configuration can express.
    """
    architecture = architecture_of(file)
    keys = Metadata(file)
    check_sizes(keys.values, [tensor.shape for tensor in file.tensors.values()], "its metadata")
    base = base_config(keys, file, architecture)
    own = architecture.config(keys, base) if callable(architecture.config) else architecture.config
    config = base | {"model_type": architecture.model_type} | own
    if not keys.was_read("attention.value_length"):
        keys.expect("attention.value_length", base["head_dim"])
    keys.check_all_read()
    return {key: value for key, value in config.items() if value is not None or key in _NONE}

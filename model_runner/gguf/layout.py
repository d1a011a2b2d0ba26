"""How files of an architecture name and store tensors, compared with the parameters that transformers has for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from model_runner.gguf.metadata import Config, Metadata
from model_runner.gguf.weights import Array

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A difference between a stored tensor and its parameter. Functions take the configuration, too."""

    order: Callable[[Config, int], Array | None] | None = None
    """Returns the stored row of each of so many rows; None: they are in order."""
    input_order: Callable[[Config, int], Array | None] | None = None
    """Returns the input that each of so many stored columns belongs to; None: they are in order."""
    values: Callable[[Array], Array] | None = None
    """Returns the parameter's numbers. For small tensors only."""
    shape: Callable[[Config, Shape], Shape] | None = None
    """Returns the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How several tensors, in the order of their names, make one parameter."""

    shape: Callable[[Sequence[Shape]], Shape]
    values: Callable[[Sequence[Array]], Array]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture are read."""

    model_type: str
    config: Config | Callable[[Metadata, Config], Config] = field(default_factory=dict)
    """The entries to add or replace, or a function that makes them of the metadata and the base configuration."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Paths below a layer that differ from `LAYER`, or are added to it: of modules by the tensor's name without
    `.weight` or `.bias`, of parameters by the whole name. Tensors of one parameter are its rows, gate before up. A
    tensor whose path has {} is a stack of parameters, whose numbers stand there."""
    around: Mapping[str, str] = field(default_factory=dict)
    """Likewise for paths outside of layers."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By the tensor's name in a layer, without `.weight` or `.bias`."""
    combinations: Mapping[str, "Combination"] = field(default_factory=dict)
    """By the end of a path, where several tensors of one parameter are not its rows."""
    norm_adds_one: bool = False
    """Norms are stored as 1 + weight."""
    some_layers: bool = False
    """Some layers have no attention or no MLP, and 0 in the metadata for its size."""
    extra_layers: Callable[[str, int], str] = lambda path, layer: f"model.layers.{layer}.{path}"
    """The path of a part of a module for multi-token prediction, which files store as another layer."""
    own_keys: frozenset[str] = frozenset()
    """Keys of the base configuration that `config` reads: layers differ in them."""


AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Most models' paths outside of layers."""


def experts(path: str = "mlp.experts", router: str = "mlp.gate") -> dict[str, str]:
    """Paths of experts and their router."""
    gate_up, down = f"{path}.gate_up_proj", f"{path}.down_proj"
    stored = {"ffn_gate_exps": gate_up, "ffn_up_exps": gate_up, "ffn_down_exps": down, "ffn_gate_up_exps": gate_up}
    weights = {f"{name}.weight": parameter for name, parameter in stored.items()}
    return {**weights, **{f"{name}.bias": f"{own}_bias" for name, own in stored.items()}, "ffn_gate_inp": router}


def mlp(path: str, suffix: str = "") -> dict[str, str]:
    """Paths of an MLP; the one next to experts has the suffix `_shexp`."""
    return {f"ffn_{name}{suffix}": f"{path}.{name}_proj" for name in ("gate", "up", "down")}


LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **mlp("mlp"),
    **experts(),
    **mlp("mlp.shared_experts", "_shexp"),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
"""Most models' paths below a layer: Llama's, with experts as in DeepSeek-V3."""


# -- orders of rows ----------------------------------------------------------------------------------------------------


def _halves(heads: str) -> Change:
    """Rows 2i and 2i + 1 of a head become rows i and i + half: the way of rotary positions differs."""

    def order(config: Config, rows: int) -> Array:
        return np.arange(rows).reshape(config[heads], -1, 2).swapaxes(1, 2).reshape(rows)

    return Change(order)


PAIRS = {"attn_q": _halves("num_attention_heads"), "attn_k": _halves("num_key_value_heads")}
"""Rows of queries and keys are stored as neighbouring pairs."""


# -- values and shapes -------------------------------------------------------------------------------------------------


def _minus_one(values: Array) -> Array:
    return values - 1


def _log_of_negative(values: Array) -> Array:
    return np.log(-values.astype(np.float64)).astype(np.float32)


def flat(config: Config, shape: Shape) -> Shape:
    """The shape of a tensor that files store with another dimension."""
    return (int(np.prod(shape)),)


MINUS_ONE = Change(values=_minus_one)
"""Norms that are stored as 1 + weight."""
ONE_ROW = Change(shape=lambda config, shape: (1, *shape) if len(shape) == 1 else shape)
"""Files have a matrix without its only row's dimension."""
CONVOLUTION = Change(shape=lambda config, shape: (shape[0], 1, shape[1]) if len(shape) > 1 else shape)
"""Files have [channels, kernel]."""
FLAT = Change(shape=flat)
DECAY = Change(values=_log_of_negative, shape=flat)
"""Files have -exp(A_log)."""

MAMBA2 = {"ssm_conv1d": CONVOLUTION, "ssm_a": DECAY, "ssm_d": FLAT, "ssm_norm": FLAT}
"""Changes of a Mamba 2 mixer."""


def mamba2(path: str) -> dict[str, str]:
    """Paths of a Mamba 2 mixer."""
    return {
        "ssm_in": f"{path}.in_proj",
        "ssm_conv1d": f"{path}.conv1d",
        "ssm_dt.bias": f"{path}.dt_bias",
        "ssm_a": f"{path}.A_log",
        "ssm_d": f"{path}.D",
        "ssm_norm": f"{path}.norm",
        "ssm_out": f"{path}.out_proj",
    }

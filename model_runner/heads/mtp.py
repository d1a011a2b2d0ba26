"""Modules for multi-token prediction that come with a target's checkpoint, repeated for each further token.

The state of a position is the target's hidden state h there, after its final norm. A step joins it with the embedding e
of the next token, projection([norm(e); norm(h)]), and runs one decoder layer of the target's kind, with full attention.
The target's own head turns the normed result into logits. There are two forms, of a target with L decoder layers:

    DeepSeek-V3 (arXiv:2412.19437, section 2.2), GLM-4.5 to 4.7
        model.layers.{L}.enorm|hnorm|eh_proj|shared_head.norm.weight
        model.layers.{L}.self_attn.*, mlp.*, input_layernorm.weight, post_attention_layernorm.weight
        The next state is the layer's result. As in other servers, the embedding counts as zero at position 0.
        `embed_tokens` and `shared_head.head` repeat the target's weights.
    Qwen3-Next, Qwen3.5
        mtp.pre_fc_norm_embedding|pre_fc_norm_hidden|fc|norm.weight
        mtp.layers.0.self_attn.*, mlp.*, input_layernorm.weight, post_attention_layernorm.weight
        The next state is the layer's result after the last norm.

Layers and norms are transformers' own for the target's kind: Qwen's norms multiply by 1 + weight. Only one module is
supported, in floating types, of which float8 needs scales of blocks or of whole weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model_runner.attention.backend import AttentionOptions
from model_runner.features import LAST, Feature
from model_runner.heads.base import HeadsError, TargetShape
from model_runner.heads.checkpoint import HeadsCheckpoint, read_config
from model_runner.heads.layer import Attend, RecurrentHeads
from model_runner.kv_cache import KVShape
from model_runner.refusal import few
from model_runner.spec.model_folder import open_checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family's module differs from others."""

    prefix: str
    """Begins the names of its tensors; {} stands for the target's number of layers."""
    names: Mapping[str, str]
    """Published names of the parts of MTPHeads, after the prefix."""
    count: str
    """Entry of the configuration with the number of modules; 1 if absent."""
    zero_at_start: bool
    """Whether the embedding counts as zero at position 0."""
    keeps_norm: bool
    """Whether the next state is the one after the last norm."""
    repeated: frozenset[str] = frozenset()
    """Tensors that repeat the target's, after the prefix."""


_NEXTN = _Form(
    prefix="model.layers.{}.",
    names={
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "layer": "",
        "last_norm": "shared_head.norm",
    },
    count="num_nextn_predict_layers",
    zero_at_start=True,
    keeps_norm=False,
    repeated=frozenset({"embed_tokens.weight", "shared_head.head.weight", "self_attn.rotary_emb.inv_freq"}),
)
_QWEN = _Form(
    prefix="mtp.",
    names={
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "layer": "layers.0",
        "last_norm": "norm",
    },
    count="mtp_num_hidden_layers",
    zero_at_start=False,
    keeps_norm=True,
)
_FORMS = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_next": _QWEN,
}
"""By the model type of the target's text."""


class _Attention:
    """Replaces the step's attention (StepAttention) in a layer of the target's kind."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def of(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self._attend(query, key, value)


class MTPHeads(RecurrentHeads):
    """The module of one checkpoint."""

    kind = "mtp"

    def __init__(self, config: "PretrainedConfig", form: _Form) -> None:
        """Weights are on torch's meta device until they are loaded.

        Args:
            config: of the target's text, reduced to the module's one layer; becomes part of the layer.
            form: of the target's family.
        """
        from transformers import AutoModel  # noqa: PLC0415 - takes seconds, and most servers have no such heads

        from model_runner.modules.attention import ATTENTION_NAME, register_attention  # noqa: PLC0415 - as above

        super().__init__(None, needs=(LAST,))
        register_attention()
        text: Any = config
        auto: Any = AutoModel
        with torch.device("meta"):
            whole = auto.from_config(text, attn_implementation=ATTENTION_NAME, experts_implementation="eager")
            self.layer = whole.layers[0]
            self.last_norm: nn.Module = whole.norm
            self.embedding_norm = type(whole.norm)(text.hidden_size, text.rms_norm_eps)
            self.hidden_norm = type(whole.norm)(text.hidden_size, text.rms_norm_eps)
            self.projection = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
        self.rotary = type(whole.rotary_emb)(text)
        self.scale = self.layer.self_attn.scaling
        self.kv = _kv_of(text, self.layer.self_attn)
        self._form = form

    def first_state(self, features: Mapping[Feature, Tensor]) -> Tensor:
        return features[LAST]

    def step(self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self._form.zero_at_start:
            embedded = embedded.where((positions > 0).unsqueeze(1), 0.0)
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(state)], dim=-1)
        rows = self.projection(joined).unsqueeze(0)  # [1, n, d]
        rotation = self.rotary(rows, positions.unsqueeze(0))
        hidden: Tensor = self.layer(rows, position_embeddings=rotation, attention=_Attention(attend))[0]
        return self.last_norm(hidden) if self._form.keeps_norm else hidden

    def logits(self, state: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        return target_head(state if self._form.keeps_norm else self.last_norm(state))


def _kv_of(text: Any, attention: Any) -> KVShape:
    heads = text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        return KVShape(heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim)
    size, kv_heads = attention.head_dim, text.num_key_value_heads
    return KVShape(kv_heads, size, size, heads // kv_heads)


def has_mtp(config: Mapping[str, Any]) -> bool:
    """Whether checkpoints with this config.json come with a module, of a form that is supported or not."""
    text = _text_of(config)
    return bool(text.get(_NEXTN.count)) or _FORMS.get(str(text.get("model_type"))) is _QWEN


def comes_with_mtp(folder: Path) -> bool:
    """Whether a model's folder has the weights of a module of a supported form. Raises HeadsError."""
    text = _text_of(read_config(folder))
    form = _FORMS.get(str(text.get("model_type")))
    if form is None or (checkpoint := open_checkpoint(folder)) is None:
        return False
    prefix = form.prefix.format(text.get("num_hidden_layers"))
    return any(name.startswith(prefix) for name in checkpoint.shapes)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def load_mtp(folder: Path, config: Mapping[str, Any], target: TargetShape) -> MTPHeads:
    """Read the module of a target's checkpoint in a folder with this config.json. Raises HeadsError."""
    text = _text_of(config)
    form = _FORMS.get(str(text.get("model_type")))
    if form is None:
        raise HeadsError(f"{folder}: multi-token prediction of {text.get('model_type')} models is not supported")
    prefix = form.prefix.format(text.get("num_hidden_layers"))
    checkpoint = HeadsCheckpoint.read(folder, prefix)
    if text.get(form.count, 1) != 1:
        raise checkpoint.error("the model has several modules for multi-token prediction; only one is supported")
    if not checkpoint.names:
        raise checkpoint.error(f"the checkpoint has no weights of a module for multi-token prediction ({prefix}*)")
    own = _of_one_layer(text, has_experts=any(".mlp.gate." in name for name in checkpoint.names))
    checkpoint.check_hidden(own.hidden_size, target)
    heads = MTPHeads(own, form)
    _fill(heads, checkpoint, form, prefix)
    return heads.requires_grad_(requires_grad=False).eval()


def _of_one_layer(text: Mapping[str, Any], *, has_experts: bool) -> Any:
    """The target's configuration with only a layer of full attention."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - as above

    own = CONFIG_MAPPING[text["model_type"]].from_dict(dict(text))
    own.num_hidden_layers = 1
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }.items():
        if hasattr(own, name):
            setattr(own, name, value)
    return own


def _fill(heads: MTPHeads, checkpoint: HeadsCheckpoint, form: _Form, prefix: str) -> None:
    """Load all weights. Raises HeadsError if the checkpoint lacks one, or has one that the module does not use."""
    tensors = {}
    for name, value in heads.state_dict().items():
        part, _, rest = name.partition(".")
        published = prefix + ".".join(filter(None, [form.names[part], rest]))
        if ".experts." in name and published not in checkpoint.names:
            tensors[name] = _stacked_experts(checkpoint, published, value)
        else:
            tensors[name] = checkpoint.take(published, *value.shape)
    if unknown := {name for name in checkpoint.left if name.removeprefix(prefix) not in form.repeated}:
        raise checkpoint.error(f"they have weights that are not supported: {few(unknown)}")
    heads.load_state_dict(tensors, assign=True)


def _stacked_experts(checkpoint: HeadsCheckpoint, name: str, like: Tensor) -> Tensor:
    """All experts' matrices as [experts, outputs, inputs], of a checkpoint that has them one by one."""
    experts, outputs, inputs = like.shape
    base, _, kind = name.rpartition(".")
    matrices = []
    for index in range(experts):
        one = f"{base}.{index}."
        if kind == "gate_up_proj":
            halves = (checkpoint.take(f"{one}{part}_proj.weight", outputs // 2, inputs) for part in ("gate", "up"))
            matrices.append(torch.cat(list(halves)))
        else:
            matrices.append(checkpoint.take(f"{one}{kind}.weight", outputs, inputs))
    return torch.stack(matrices)

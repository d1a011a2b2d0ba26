"""Creates a folder with a model in the shape of Llama-3.1-8B and random weights, which the real server can load."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB_SIZE = 128256
NUM_SPECIAL = 256
BOS, EOS = VOCAB_SIZE - NUM_SPECIAL, VOCAB_SIZE - NUM_SPECIAL + 1
WEIGHT_STD, EMBEDDING_STD = 0.02, 0.5
INDEX = "model.safetensors.index.json"
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|special_6|>{{ message.role }}<|special_7|>
{{ message.content }}<|special_9|>{% endfor %}{% if add_generation_prompt %}<|special_6|>assistant<|special_7|>
{% endif %}"""


def llama_8b(num_layers: int = 32) -> LlamaConfig:
    """The released config.json of Llama-3.1-8B, with `num_layers` layers."""
    return LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def write_model(folder: Path, config: LlamaConfig, device: torch.device) -> int:
    """Write the model to the folder; returns the weights' size in bytes.

    Weights are drawn on the device, one shard for each layer. Norms are ones; other weights are normal with WEIGHT_STD,
    except embeddings (EMBEDDING_STD) and, as in GPT-2, projections into the residual stream, which are scaled down by
    the number of layers. So small errors stay small, as in trained models, and large ones are recognisable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    _write_tokenizer(folder, config.vocab_size)
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    total = 0
    for shard, names in _shards(_shapes(config)).items():
        weights = {name: _draw(shape, _std(name, config.num_hidden_layers), generator) for name, shape in names.items()}
        save_file(weights, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, shard)
        total += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return total


def _shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    """Shapes of all weights by their names in checkpoints."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _shards(shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, torch.Size]]:
    """Distribute weights to files: one for each layer, and one for each other weight."""
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        stem = "-".join(parts[:3] if parts[1] == "layers" else parts)
        shards.setdefault(f"{stem}.safetensors", {})[name] = shape
    return shards


def _std(name: str, num_layers: int) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_STD
    return WEIGHT_STD * (2 * num_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else WEIGHT_STD


def _draw(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weight.fill_(1) if len(shape) == 1 else weight.normal_(0, std, generator=generator)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer: a token per byte, filler words that no text uses, special tokens. All decode."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"Ġw{index}" for index in range(len(tokens), vocab_size - NUM_SPECIAL)]  # Ġ stands for a space
    special = [f"<|special_{index}|>" for index in range(NUM_SPECIAL)]
    vocab = {token: index for index, token in enumerate([*tokens, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[0], "eos_token": special[1]}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


def _added(special: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in special]

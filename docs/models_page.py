"""The page docs/reference/models.md, from the table of model families and the quantised checkpoints that load."""

from marked_pages import code, table

from model_runner.encoders.folder import MODEL_TYPES
from model_runner.gguf.architectures import ARCHITECTURES
from model_runner.images.layouts import FAMILIES as IMAGE_TYPES
from model_runner.spec.families import FAMILIES, WRAPPERS
from model_runner.spec.layer_family import DeltaNet, LayerFamily, Mamba2, Mixture, ShortConvolution
from model_runner.weights.checkpoint_quantization import _METHODS as METHODS

PAGE = """\
<!-- docs/generate.py writes this page -->

# Supported models

Samewise serves decoder-only language models that transformers knows, from a folder, a GGUF file or the Hugging Face
hub, and [encoders](#embedding-and-scoring-models) for embeddings and reranking. The start refuses a model that it
cannot serve exactly, with a reason, before any weight is loaded.

```bash
samewise serve Qwen/Qwen3-0.6B          # from the hub
samewise serve ./my-model               # a folder with config.json, tokenizer and safetensors
samewise serve ./my-model-Q4_K_M.gguf   # a GGUF file
```

[Model types](model-types.md) lists every `model_type`.

[Models](../how-to/models.md) lists all forms of names, and how models are downloaded.

`GET /v1/capabilities` says what the running model can do: generate, chat, call tools, reason, embed, score or
classify.

## Families with native kernels

On CPU, a step of these models is one native call ([how](../explanation/architecture/models.md#native-models)).
`config.json` has their `model_type`.

{families}
So do the language models in models for images or sounds of these types, if `text_config` has a type of the table:
{wrappers}.

A layer with an activation other than SiLU or GELU (tanh form), with experts in several groups or with attention in both
directions runs as other families do.

## Other families

A decoder-only model outside this table runs its own transformers modules, with the server's attention, int8 or int4
linear layers and experts. It is slower, and its answers also depend on the processor's instruction set and torch's
version. All else is [promised](../explanation/exactness.md) as for the others. [Model types](model-types.md) lists
every type that transformers knows, served or refused, as a command found them. The main reasons of refusals:

| model | reason |
|---|---|
| encoder-decoder, such as T5 | The scheduler has no encoder step. |
| recurrent layers of other kinds than below, such as RWKV's | Their states would not be kept. |
| layers that mix tokens outside of attention | Requests of a batch would mix. Each start tries it. |
| rotary scaling of type `dynamic`, which depends on the longest request | The same request would get other answers. |
| attention that transformers does not let a server replace | Its keys and values cannot be paged. |
| scores with a bias by distance (alibi), as in Bloom, MPT and Falcon-RW | The kernels have no such bias. |
| a head for another task, such as token classification | Its text would come from random weights. |
| audio and video | Only text and images are read. |

Layers may keep, instead of keys and values of all positions:

| layers | models |
|---|---|
| a window, or a chunk of positions | Gemma 2 to 4, gpt-oss, Mistral, OLMo 3, Llama 4 and others |
| latents (on CPU) | DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM 3, Kimi-Linear and others |
| index keys (only on CPU) | DeepSeek V3.2, GLM-5, A.X-K2, Hunyuan V4, Mistral Large 4, MiniMax M3, Qwen4 and others |
| compressed entries (only on CPU) | DeepSeek V4 |
| gated delta nets | Qwen3.5, Qwen3.6, Qwen3-Next, OLMo hybrid |
| Kimi delta attention | Kimi-Linear, Ling (`bailing_hybrid`) |
| selective scans (Mamba) | Mamba, Falcon-Mamba, Jamba, Zamba |
| Mamba 2 | Nemotron-H, Granite 4.0 H, Falcon-H1, Bamba, Zamba 2, Mamba 2 |
| lightning attention | MiniMax-Text-01 |
| short convolutions | LFM2, LFM3 |
| keys and values of an earlier layer | Gemma 3n, Gemma 4 |

All guarantees hold for models with recurrent layers, speculation and prefix caching included. They need
`--block-size 32`, the default, and cannot be draft models.

A multimodal model of another type than below is served for its text. The weights of its image and audio towers stay on
disk, and the log names them at startup.

## Images

These types take [images](../how-to/images.md), from safetensors files: {image_types}. On a CPU, a tower's linear layers
are int8 unless `--quantization none` is set, and the rest is float32.

Types that transformers can only process with torchvision or with other packages are served for their text. So are types
that need more than feature rows in place of tokens. ERNIE 4.5 VL chooses experts by images, Hunyuan VL has positions in
four axes, MiniCPM-V 4.7 places slices on a canvas of positions, and Ovis 2 has features of separators. DeepSeek VL with
two towers takes gigabytes for an image, which the memory plan does not know.

## LongRoPE

Phi-3.5, Phi-4-mini and others with rotary scaling of type `longrope` (also `su`) have two sets of factors. The server
chooses one set at startup and logs which:

| `--max-model-len` | factors |
|---|---|
| at most `original_max_position_embeddings`, 4096 for Phi-3.5 | short |
| more, or not set | long |

So the length of no request changes an answer. Transformers instead switches to the long factors when a text grows
beyond the original length, and keeps the keys that it computed with the short ones. With the original length as
`--max-model-len`, answers equal those that `generate` gives.

## Tokenizers

| file in the folder | read by |
|---|---|
| `tokenizer.json` | the tokenizers library |
| `tekken.json` (Mistral) | Samewise; the tokens are mistral-common's |
| `tokenizer.model` (sentencepiece, BPE) | Samewise; the tokens are sentencepiece's |
| another `.model` file, such as sentencepiece's unigram | transformers, which needs `sentencepiece` and `protobuf` |
| `vocab.json` or `vocab.txt` | transformers |

The first file of this list that exists is used. The others are converted to a `tokenizer.json` in the cache once. A
vocabulary has at most 32,768 added tokens, and no token of more than 1,024 characters.

A tokenizer_config.json with `legacy: false` puts sentencepiece's space only before the first word of a text, as in
transformers; otherwise it comes before the first word after each special token, too.

## Chat templates

The first of these places counts; `--chat-template` replaces them all:

1. `chat_template.jinja`, with `additional_chat_templates/*.jinja`
2. `chat_template` in `tokenizer_config.json`: one template, or several with names
3. `chat_template.json`, then `processor_config.json`

A GGUF file has them in `tokenizer.chat_template` and `tokenizer.chat_template.NAME`. A request with tools uses the
template `tool_use` if there is one, and all others use `default`. Templates with other names are not used.

Templates are read as a stranger's. One has at most 131,072 characters and 20,000 parts, and runs in a sandbox without
the filters `random`, `urlize`, `wordwrap` and `pprint`. A chat for which it takes [too much
work](../explanation/architecture/server.md#costly-bodies) gets a 400.

## End of an answer

An answer ends at any of these tokens, unless the request sets `ignore_eos`:

- `eos_token_id` of `generation_config.json`; if that names none, of `config.json` or its `text_config`
- `eos_token` of `tokenizer_config.json`
- the token that the chat template writes directly after an answer, if it is a usual one such as `<|im_end|>`,
  `<|eot_id|>`, `<end_of_turn>` or `<|end|>`

`GET /tokenizer_info` lists them as `eos_token_ids`.

## Quantised checkpoints

{formats}
In the model families above, the server reads these without other packages:

- GPTQ with 4 bits, in the layouts `gptq` and `gptq_v2`, also with `desc_act`
- AWQ with 4 bits, in the layout `gemm`
- compressed-tensors with 4 bits per group, or 8 bits per output
- MXFP4, for the experts of gpt-oss

Groups have a multiple of 32 inputs. Other bits, sparse weights and activations with stored scales are refused, or left
to the package `compressed-tensors`.

`--quantization` then chooses the type of the weights in memory: [settings](settings.md#quantization).

## GGUF files

If a model has several parts, name one of them. A key or tensor that the server does not use is an error that names it.
Files with these values of `general.architecture` are read:

{gguf}

A `llama` file may be a Mistral or Mixtral, `olmo2` an OLMo 3, and `deepseek2` a DeepSeek V2 or V3 or GLM 4.7 Flash.
Only the text of models with images is read; images need safetensors. A module for multi-token prediction in the file
serves `--speculation mtp`.

## Embedding and scoring models

Encoders of these values of `model_type` are served on the CPU, for embeddings or with a classification head:

{encoders}

`gemma3_text` is an encoder if its configuration sets `use_bidirectional_attention`, as EmbeddingGemma's does; a type
that is an encoder by default is none with `is_decoder`. Any other model with a sentence-transformers configuration
(`modules.json`) embeds with its pooling. A model with a classification head, or a reranker that answers yes or no,
scores or classifies: see [embeddings](api/embeddings.md).
"""
NAMES = {
    "cwm": "CWM",
    "dots1": "dots.llm1",
    "emu3_text_model": "Emu3 (text)",
    "exaone": "EXAONE 3.5",
    "exaone4": "EXAONE 4",
    "falcon_h1": "Falcon-H1",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "granitemoehybrid": "Granite 4, also with Mamba 2 (H)",
    "granitemoeshared": "Granite MoE with shared experts",
    "hyperclovax": "HyperCLOVA X",
    "internlm3": "InternLM 3",
    "iquestcoder": "IQuest-Coder",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 with experts",
    "llama": "Llama, SmolLM 1 and 2",
    "mellum": "Mellum 2",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "olmo_hybrid": "OLMo hybrid",
    "phi3": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "phi4_multimodal": "Phi-4-multimodal (text)",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen2-MoE, Qwen1.5-MoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5 with experts (text)",
    "qwen3_5_text": "Qwen3.5 (text)",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "solar_open": "Solar Open",
    "vaultgemma": "VaultGemma",
}


_RECURRENT = {DeltaNet: "gated delta nets", Mamba2: "Mamba 2", ShortConvolution: "short convolutions"}


def render_models() -> str:
    """The page."""
    if FAMILIES.keys() != NAMES.keys():
        raise SystemExit(f"docs/models_page.py: NAMES and the families differ in {FAMILIES.keys() ^ NAMES.keys()}")
    rows = [
        (NAMES[name], f"`{name}`", "; ".join(_variations(FAMILIES[name].layer)) or "none")
        for name in sorted(NAMES, key=lambda name: NAMES[name].lower())
    ]
    formats = table(
        ("format", "on CPU", "on CUDA", "needs, where it is not read by the server"),
        [
            (
                method.name,
                "read by the server" if method.reads else "plain weights",
                "plain weights" if method.dequantizes else "stored weights, with `--no-exact`",
                _needs(method.needs if method.dequantizes else method.kernels or ()),
            )
            for method in METHODS.values()
        ],
    )
    return PAGE.format(
        families=table(("family", "model type", "supported beyond Llama's layer"), rows),
        wrappers=code(sorted(WRAPPERS), " and "),
        formats=formats,
        gguf=code(sorted(ARCHITECTURES), " and "),
        encoders=code(sorted(MODEL_TYPES), " and "),
        image_types=code(sorted(IMAGE_TYPES), " and "),
    )


def _variations(family: LayerFamily) -> list[str]:
    """The features of a family's layers that Llama's layers do not have."""
    plain, plain_mixture, norms, mixture = LayerFamily(), Mixture(), family.norms, family.mixture
    shared = " and a shared MLP" if mixture is not None and mixture.gate_up else ""
    features = {
        "norms on queries and keys": norms.query is not None and not norms.heads_together,
        "norms over all queries, and over all keys": norms.heads_together,
        "norms after attention and MLP instead of before": norms.attention is None,
        "further norms after attention and MLP": norms.attention is not None and norms.mlp_post is not None,
        "norm factor 1 + weight": family.norm_adds_one,
        "sliding window": family.window is not plain.window,
        "soft cap on attention": family.softcap is not plain.softcap,
        "attention sinks": family.sinks is not None,
        "gated attention": family.gates_attention,
        _RECURRENT.get(type(family.recurrent), ""): family.recurrent is not None and not family.is_side_by_side,
        "attention and Mamba 2 side by side, with factors": family.is_side_by_side,
        "mixer and MLP in layers of their own": family.parts is not plain.parts,
        "layers without positions": family.uses_rotary is not plain.uses_rotary,
        "scaled residuals": family.residual_scale is not plain.residual_scale,
        "merged qkv weights": len(family.qkv) == 1,
        f"experts{shared}": mixture is not None,
        "biases of experts, and their clamped gate": mixture is not None and mixture.gate is not plain_mixture.gate,
    }
    return [name for name, is_there in features.items() if is_there]


def _needs(packages: tuple[str, ...]) -> str:
    return ", ".join(f"`{package.replace('_', '-')}`" for package in packages) or "nothing"

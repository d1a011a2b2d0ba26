"""Model folders without a model: tokenizers small enough to reason about, made in memory."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.text.tokenizer import byte_characters

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("l", "o"), ("lo", "w"), ("Ã", "©"), ("Ġ", "ð")]
SPACED = 262
"""A space and the first byte of an emoji."""
BOS, EOS, START, END = 300, 301, 302, 303
SPECIALS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|start|>": START, "<|end|>": END}
TEMPLATE = """{%- if messages[0].role not in ['system', 'user', 'assistant', 'tool'] -%}
    {{ raise_exception('Unexpected role ' ~ messages[0].role) }}
{%- endif -%}
{%- if tone is defined -%}tone={{ tone }};{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and loop.first -%}
        {{ raise_exception('The conversation may not begin with the assistant') }}
    {%- endif -%}
    <|start|>{{ message.role }}
{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}
{{ message.content | trim }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant
{% endif -%}"""


def byte_level_tokenizer() -> Tokenizer:
    """Token id = byte for the first 256, then the merges, then nothing up to 300, then the special tokens."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    vocab |= {f"<unused{index}>": index for index in range(len(vocab), BOS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    assert [tokenizer.token_to_id(text) for text in SPECIALS] == list(SPECIALS.values())
    tokenizer.enable_truncation(5)  # files in the wild have this; it must not matter
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """The conventions of Llama 2: spaces as ▁, one before the first word, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "hello", "o", "▁the", "é", "▁é", ".", "▁a", "b"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, *, template: str | None = TEMPLATE, generation: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Tiny", "bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END], **(generation or {})}))
    return folder

"""Fields taken from generation_config.json; all others are reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from server.generation.generation_config import load_defaults, not_taken
from server.text.tokenizer import Tokenizer
from tests.server.tiny_model import END, EOS, write_folder


def test_what_is_not_taken_is_named(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    folder = write_folder(tmp_path, generation={"temperature": 0.5})
    assert load_defaults(folder, tokenizer).values == {"temperature": 0.5}
    assert not caplog.records
    unusual = {"suppress_tokens": [1], "num_beam_groups": 2, "diversity_penalty": 0.5, "chat_format": "chatml"}
    write_folder(tmp_path, generation={**unusual, "encoder_repetition_penalty": 1.5, "watermarking_config": {"a": 1}})
    load_defaults(folder, tokenizer)
    (record,) = caplog.records
    names = "chat_format, diversity_penalty, encoder_repetition_penalty, num_beam_groups, suppress_tokens"
    assert f"sets {names}, watermarking_config, which" in record.message


def test_the_defaults_of_transformers_ask_for_nothing(tmp_path: Path):
    defaults = GenerationConfig._get_default_generation_params()
    assert len(defaults) > 20
    assert not_taken(defaults) == []
    assert not_taken(dict.fromkeys(GenerationConfig().to_dict())) == []
    GenerationConfig(do_sample=True, temperature=0.5, pad_token_id=1, return_dict_in_generate=True).save_pretrained(
        tmp_path
    )
    assert not_taken(json.loads((tmp_path / "generation_config.json").read_text())) == []


def test_all_else_that_transformers_knows_is_named():
    strange = dict.fromkeys(GenerationConfig._get_default_generation_params(), 0.123)
    assert not_taken(strange) == [
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values",
        "suppress_tokens",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("top_p", [1]),
        ("max_new_tokens", 0),
        ("max_new_tokens", float("inf")),
        ("stop_strings", ["a", ""]),
        ("stop_strings", 1),
        ("exponential_decay_length_penalty", [1]),
    ],
)
def test_values_that_are_not_what_they_should_be(tmp_path: Path, tokenizer: Tokenizer, key: str, value: Any):
    with pytest.raises(ValueError, match=f"generation_config.json: {key} is"):
        load_defaults(write_folder(tmp_path, generation={key: value}), tokenizer)


def folder_with(
    folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, tokenizer: dict[str, Any], template: str
) -> Path:
    write_folder(folder, template=template)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    path = folder / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    return folder


TURNS = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
"""As in ChatML."""
PARTS = "{% for m in messages %}<|start|>{{ m.content }}<|start|>more<|end|>{% endfor %}"
"""Where another control token than a usual end comes after the content."""
LAST = "{% for m in messages %}{{ m.content }}{% if loop.last %} <|eos|>{% else %}<|end|>{% endif %}{% endfor %}"
"""As in Harmony, where the end of a message does not end the answer."""
REFUSES = "{{ raise_exception('no') }}"
EOS_TEXT = {"eos_token": "<|eos|>"}


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_config", "template", "expected"),
    [
        ({}, None, {}, "plain", ()),
        ({}, None, EOS_TEXT, "plain", (EOS,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, EOS_TEXT, "plain", (EOS,)),
        ({"eos_token_id": 7}, None, {}, "plain", (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {}, "plain", (8, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": []}, {}, "plain", (7,)),
        ({"text_config": {"eos_token_id": 7}}, None, {}, "plain", (7,)),
        ({"eos_token_id": 7}, None, EOS_TEXT, "plain", (7, EOS)),
        ({"eos_token_id": EOS}, None, EOS_TEXT, TURNS, (EOS, END)),
        ({}, None, {}, TURNS, (END,)),
        ({}, None, {}, PARTS, ()),
        ({}, None, {}, LAST, (EOS,)),
        ({}, None, EOS_TEXT, REFUSES, (EOS,)),
        ({}, None, {"eos_token": "not a token"}, "plain", ()),
        ({}, None, {"eos_token": "a"}, "plain", (ord("a"),)),  # an ordinary token of the vocabulary
    ],
)
def test_what_ends_an_output(
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    tokenizer_config: dict[str, Any],
    template: str,
    expected: tuple[int, ...],
    tmp_path: Path,
):
    folder = folder_with(tmp_path, config, generation, tokenizer_config, template)
    assert load_defaults(folder, Tokenizer.from_folder(folder)).eos_token_ids == expected


@pytest.mark.parametrize("value", ["<|im_end|>", ["a"], {"a": 1}])
def test_an_eos_that_is_no_number_is_refused(value: object, tmp_path: Path, tokenizer: Tokenizer):
    folder = write_folder(tmp_path, generation={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is .*must be one or several integers"):
        load_defaults(folder, tokenizer)

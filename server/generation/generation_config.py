"""Defaults from a model's generation_config.json."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from model_runner.json_files import find_object
from server.generation.settings import DecodingSettings, facts_of
from server.text.tokenizer import Tokenizer

_FILE = "generation_config.json"
_KEYS: Mapping[str, str] = {
    name: facts.of_model for name, facts in facts_of(DecodingSettings).items() if facts.of_model is not None
}
"""Keys of the file, by the names of the fields whose defaults they set."""
_TAKEN = frozenset({*_KEYS.values(), "do_sample", "max_new_tokens", "eos_token_id"})
_WITHOUT_EFFECT = frozenset(
    {
        *("_commit_hash", "_from_model_config", "transformers_version"),
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # the tokenizer and its template begin a prompt
        *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
        *("low_memory", "max_cache_len", "prefill_chunk_size", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *(
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
        ),
        *("is_assistant", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),
    }
)
"""Keys that cannot change an answer here: memory, speed, further outputs of `generate`, transformers' speculation."""
_NEUTRAL: Mapping[str, object] = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""Transformers' defaults of all other keys, where they are not null, false or empty."""

_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>"),
    *("<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]"),
    *("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that count as an end where a chat template writes them directly after an answer."""

logger = logging.getLogger("samewise.model")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults that a model sets."""

    values: Mapping[str, object]
    """Defaults by the names of DecodingSettings. Fields without one are missing."""
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """EOS tokens; the file may name one or several."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the output."""
        stop = self.values.get("stop", ())
        assert isinstance(stop, tuple)
        return stop


def load_defaults(folder: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults in a model folder. Logs a warning about other keys that would change answers.

    EOS tokens come from generation_config.json, otherwise from config.json. Two are added to them: the tokenizer's
    `eos_token`, and the token with which the chat template ends an answer, if it is a usual one.

    Raises:
        ValueError: for an invalid value.
    """
    generation = find_object(folder / _FILE)
    if unused := not_taken(generation):
        logger.warning("%s sets %s, which this server ignores", _FILE, ", ".join(unused))
    eos = _token_ids(generation, _FILE) or _of_config(find_object(folder / "config.json"))
    values = {name: _value(generation, name, key) for name, key in _KEYS.items()}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return GenerationDefaults(
        values={name: value for name, value in values.items() if value is not None},
        max_tokens=_integer(generation, "max_new_tokens", least=1),
        eos_token_ids=tuple(dict.fromkeys((*eos, *_of_tokenizer(tokenizer)))),
    )


def not_taken(generation: Mapping[str, Any]) -> list[str]:
    """The ignored keys that would change answers, judged as transformers' `generate` reads them."""
    return sorted(
        key
        for key, value in generation.items()
        if key not in _TAKEN | _WITHOUT_EFFECT
        and not (value is None or value is False or value in ([], {}) or value == _NEUTRAL.get(key))
    )


def _of_config(config: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS tokens of config.json, where a multimodal model keeps them with its text part."""
    text = config.get("text_config")
    return _token_ids(config, "config.json") or _token_ids(text if isinstance(text, dict) else {}, "config.json")


def _of_tokenizer(tokenizer: Tokenizer) -> Iterator[int]:
    """EOS tokens that the tokenizer and its chat template know."""
    own = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
    if own is not None:
        yield own
    after = "" if tokenizer.chat_template is None else tokenizer.chat_template.after_answer().lstrip()
    ends = (tokenizer.token_id(end) for end in _TURN_ENDS if after.startswith(end))
    yield from (token for token in ends if token is not None and token in tokenizer.control_ids)


def _token_ids(config: Mapping[str, Any], file: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{file}: eos_token_id is {value!r}, but must be one or several integers.")
    return tuple(ids)


def _value(config: Mapping[str, Any], field: str, key: str) -> object:
    """The default of a field, converted to its type; None if the file does not set it."""
    if field in _READERS:
        return _READERS[field](config, key)
    return _integer(config, key) if int in get_args(_TYPES[field]) else _number(config, key)


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is not None and not isinstance(value, int | float):
        raise _wrong(key, value, "a number")
    return None if value is None else float(value)


def _integer(config: Mapping[str, Any], key: str, least: int | None = None) -> int | None:
    value = _number(config, key)
    if value is not None and not value.is_integer():
        raise _wrong(key, value, "an integer")
    if value is not None and least is not None and value < least:
        raise _wrong(key, value, f"at least {least}")
    return None if value is None else int(value)


def _start_and_factor(config: Mapping[str, Any], key: str) -> tuple[int, float] | None:
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong(key, value, "[start, factor]")
    return int(value[0]), float(value[1])


def _strings(config: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    value = config.get(key)
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return None
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise _wrong(key, value, "one or several strings")
    return tuple(strings)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], object]] = {
    "stop": _strings,
    "exponential_decay_length_penalty": _start_and_factor,
}
_TYPES = get_type_hints(DecodingSettings)


def _wrong(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{_FILE}: {key} is {value!r}, but must be {expected}.")

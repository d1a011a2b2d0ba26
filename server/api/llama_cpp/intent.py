"""Converts the bodies of POST /completion and POST /infill to generation requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.fields.samplers import STEPS, counted_notices, is_present
from server.api.llama_cpp.schema import InfillRequest, LlamaCompletionRequest, LlamaFields
from server.generation.constraints.fragment import Constraint
from server.generation.constraints.json_schema import JsonSchema
from server.generation.constraints.lark import Gbnf
from server.generation.notices import Notice
from server.generation.planning.plan import Plan
from server.generation.request import FillIn, GenerationRequest, Prompt
from server.generation.settings import DecodingSettings
from server.text.tokenizer import Tokenizer

_RANDOM_SEEDS = (None, -1, 2**32 - 1)
_SAME = (
    *("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
"""Fields with the same name as the native field."""
_NOT_WITH_MIROSTAT = (*("samplers", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability"),)
_ON_PATHS = {
    "num_choices": "n_cmpl",
    "reports_tokens": "return_tokens",
    "logprobs": "n_probs",
    "repetition_penalty": "repeat_penalty",
}


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Values from the request's body that the answer needs."""

    settings: Mapping[str, Any]
    """`generation_settings` without the seed."""
    prompts: Sequence[str] | None
    """Texts of the prompts, if the answer shows them."""
    is_cut_by_context: Sequence[bool]
    """For each prompt, whether the context has room for less output than the request asks for."""
    n_probs: int
    return_tokens: bool
    timings_per_token: bool
    response_fields: Sequence[str]


def completion_intent(body: LlamaCompletionRequest) -> GenerationRequest:
    """Convert a body of POST /completion."""
    return _request(body, body.prompts, {"max_tokens": body.named_value("n_predict")[0]})


def infill_intent(body: InfillRequest) -> GenerationRequest:
    """Convert a body of POST /infill."""
    before = [body.input_prefix, *([body.prompt] if body.prompt else [])]
    prompt = FillIn(before, body.input_suffix, "input_prefix", "input_suffix", body.files)
    return _request(body, [prompt], {"max_tokens": body.named_value("n_predict")[0], "prompt": "input_prefix"})


def _request(body: LlamaFields, prompts: Sequence[Prompt], paths: Mapping[str, str]) -> GenerationRequest:
    constraint = _constraint(body)
    form = "grammar" if body.grammar else "json_schema"
    n_predict = body.value_of("n_predict")
    return GenerationRequest(
        model=body.model,
        may_omit_model=True,
        prompts=tuple(prompts),
        id_prefix="cmpl-",
        decoding=decoding_of(body),
        biased_texts=tuple((text, bias) for text, bias in body.biases if isinstance(text, str)),
        max_tokens=None if n_predict == -1 else n_predict,
        may_fill_context=n_predict == -1,
        num_choices=body.n_cmpl or 1,
        num_repeats=body.n_cmpl or 1,
        seed=None if body.seed in _RANDOM_SEEDS else body.seed,
        logprobs=body.n_probs or None,
        echoes=_shows(body, "prompt"),
        reports_tokens=bool(body.stream or body.return_tokens),
        constraint=constraint,
        stream=bool(body.stream),
        paths={**_ON_PATHS, "echoes": "prompt", "constraint": form, **paths},
        notices=(*body.ignored(), *_not_followed(body)),
    )


def decoding_of(body: LlamaFields) -> DecodingSettings:
    """The body's decoding settings, with llama.cpp's defaults in place of the model's."""
    values: dict[str, Any] = {name: body.value_of(name) for name in _SAME}
    values |= {"temperature": max(0.0, body.value_of("temperature"))}
    values |= {"repetition_penalty": body.value_of("repeat_penalty")}
    if body.mirostat:
        values |= {name: off for name, off in STEPS.values() if name != "temperature"}
    decoding = DecodingSettings(
        **values,
        sampler_order=None if body.mirostat else "llama.cpp",
        dry_sequence_breakers=None if body.dry_sequence_breakers is None else tuple(body.dry_sequence_breakers),
        stop=tuple(body.stop or ()),
        ignore_eos=body.ignore_eos,
        logit_bias=_summed(body),
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        no_repeat_ngram_size=0,
    )
    return body.with_samplers(decoding, None if body.mirostat else body.samplers)


def _summed(body: LlamaFields) -> Mapping[str, float] | None:
    """The biases of token ids; several biases of one token add up."""
    sums: dict[str, float] = {}
    for token, bias in body.biases:
        if isinstance(token, int):
            sums[str(token)] = sums.get(str(token), 0.0) + bias
    return sums or None


def _not_followed(body: LlamaFields) -> Sequence[Notice]:
    """Notices of fields that have another effect than in llama.cpp."""
    notices = list(counted_notices(decoding_of(body), body.repeat_last_n, "repeat_last_n"))
    if body.mirostat:
        ignored = [name for name in _NOT_WITH_MIROSTAT if name in body.model_fields_set and body.asks(name)]
        notices += [Notice(name, "Mirostat replaces it.") for name in ignored]
    return notices


def _constraint(body: LlamaFields) -> Constraint | None:
    if body.grammar:
        return Gbnf(body.grammar, "grammar")
    return None if body.json_schema is None else JsonSchema(body.json_schema, "json_schema", body.json_style, False)


def _shows(body: LlamaFields, name: str) -> bool:
    return not body.response_fields or name in body.response_fields


def llama_options(body: LlamaFields, plan: Plan, tokenizer: Tokenizer) -> LlamaOptions:
    """The LlamaOptions of a body and its plan."""
    n_predict = body.value_of("n_predict")
    shown = [tokenizer.decode(one.prompt, skip_special_tokens=False) for one in plan.requests]
    return LlamaOptions(
        settings=generation_settings(body),
        prompts=shown if _shows(body, "prompt") else None,
        is_cut_by_context=[
            not plan.is_bounded if n_predict == -1 else one.max_tokens < n_predict for one in plan.requests
        ],
        n_probs=body.n_probs or 0,
        return_tokens=bool(body.stream or body.return_tokens),
        timings_per_token=bool(body.timings_per_token),
        response_fields=body.response_fields or (),
    )


def generation_settings(body: LlamaFields) -> Mapping[str, Any]:
    """The effective settings by llama.cpp's names; the seed -1 means that one is drawn."""
    decoding = decoding_of(body)
    n_predict = body.value_of("n_predict")
    same = {name: getattr(decoding, name) for name in _SAME}
    return {
        "seed": -1 if body.seed is None else body.seed,
        "temperature": decoding.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        **same,
        "repeat_last_n": body.value_of("repeat_last_n"),
        "repeat_penalty": decoding.repetition_penalty,
        "dry_sequence_breakers": list(body.value_of("dry_sequence_breakers")),
        "stop": list(decoding.stop or ()),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": bool(body.ignore_eos),
        "stream": bool(body.stream),
        "logit_bias": [
            {"token": token, "bias": False if bias == float("-inf") else bias} for token, bias in body.biases
        ],
        "n_probs": body.value_of("n_probs"),
        "min_keep": 0,
        "grammar": body.grammar or "",
        "samplers": [name for name in body.value_of("samplers") if is_present(name)],
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": False,
        "lora": [],
    }

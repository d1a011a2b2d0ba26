"""Decoding settings: one table of all fields that control how tokens are chosen, with their facts.

Names, ranges and defaults follow OpenAI, otherwise vLLM, transformers and llama.cpp: docs/explanation/decoding.md.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from model_runner.contract import Contrastive, DoLa, Dry, Mirostat, Verification, Xtc

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """Description, default and limits of one field, shared by all APIs."""

    description: str
    default: object = None
    """Value if neither the request nor the model sets one."""
    of_model: str | None = None
    """Key of generation_config.json for the model's default."""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Limits by pydantic's names: ge, gt, le, lt, min_length, max_length."""
    off: Sequence[object] = ()
    """Values that turn the field off, in addition to null, false and empty ones."""
    requires: Sequence[str] = ()
    """Fields that must also be active."""
    excludes: Sequence[str] = ()
    """Fields that must not also be active. The model's defaults of these fields are then ignored."""
    examples: Sequence[object] = ()
    is_required: bool = False

    def is_active(self, value: object) -> bool:
        """Whether a value makes the field active."""
        return is_active_value(value, self.off)


def is_active_value(value: object, off: Sequence[object]) -> bool:
    """Whether a value makes a field active: it is not null, false, empty or in `off`."""
    if value is None or value is False or value in ("", [], (), {}):
        return False
    return value not in off


def setting(description: str, **facts: Any) -> Any:
    """A field of a settings class. Takes the attributes of FieldFacts; limits may be given by their names."""
    names = {field.name for field in dataclasses.fields(FieldFacts)}
    limits = {name: value for name, value in facts.items() if name not in names}
    own = {name: value for name, value in facts.items() if name in names}
    metadata = {"facts": FieldFacts(description, limits=limits, **own)}
    if own.get("is_required"):
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=None, metadata=metadata)


def facts_of(settings: type) -> Mapping[str, FieldFacts]:
    """The facts of each field of a settings class, by name."""
    return _facts_of(settings)


@cache
def _facts_of(settings: Any) -> Mapping[str, FieldFacts]:
    return {field.name: field.metadata["facts"] for field in dataclasses.fields(settings)}


def active_fields(settings: Any) -> Iterator[str]:
    """Names of the active fields."""
    for name, facts in facts_of(type(settings)).items():
        if facts.is_active(getattr(settings, name)):
            yield name


def with_defaults(settings: _Settings, of_model: Mapping[str, object]) -> _Settings:
    """The settings with defaults: the request's value, otherwise the model's, otherwise the API's.

    The model's default is ignored if an active field of the request excludes the field.
    """
    facts = facts_of(type(settings))
    excluded = {other for name in active_fields(settings) for other in facts[name].excludes}
    values = {}
    for name, one in facts.items():
        value = getattr(settings, name)
        if value is None and name not in excluded:
            value = of_model.get(name)
        values[name] = one.default if value is None else value
    return type(settings)(**values)


MAX_BEAMS = 64
MAX_STOPS = 16
MAX_LOGIT_BIAS = 1024
MAX_CANDIDATES = 64
"""Tokens that contrastive search compares in a step."""
MAX_DRAFT_TOKENS = 64
DEFAULT_CANDIDATES = 4

_XTC, _MIROSTAT, _DRY = Xtc(0), Mirostat(), Dry(0)
_CONTRASTIVE, _DOLA = Contrastive(), DoLa("low")
DRY_BREAKERS = ("\n", ":", '"', "*")
_TRUNCATIONS = (
    *("top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc_probability"),
)
_DRAWING = (*(name for name in _TRUNCATIONS if name != "top_k"), "temperature", "mirostat", "sampler_order")
"""Fields for drawing tokens, which some strategies do not do. These may use top_k in another way."""
NOT_WITH_BEAMS = (*_DRAWING, "top_k", "best_of", "speculation", "prediction")
_OTHER_DECODING = ("use_beam_search", "beam_search", "penalty_alpha", "guidance")
"""Fields of other decoding strategies, which have their own use of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSettings:
    """Beam search: returns the sequences with the highest scores instead of drawing tokens."""

    width: int = setting(
        "Number of beams, over all groups; 1 is greedy decoding.", is_required=True, ge=1, le=MAX_BEAMS
    )
    length_penalty: float | None = setting(
        "Divides scores by length ** length_penalty. The default 1 compares means.",
        default=1.0, ge=-10, le=10,
    )  # fmt: skip
    early_stopping: bool | Literal["never"] | None = setting(
        "When to stop once `width` sequences have ended. `true`: at once. `false`, the default: when the best beam's "
        "present score is worse than all of them. `never`: when no beam can become better.",
        default=False,
    )  # fmt: skip
    num_return: int | None = setting(
        "Number of best sequences to return as choices; 1 by default.", default=1, ge=1, le=MAX_BEAMS
    )
    groups: int | None = setting(
        "Number of groups that search separately; 1 by default.", default=1, ge=1, le=MAX_BEAMS
    )
    diversity_penalty: float | None = setting(
        "Penalty on a token for each beam of an earlier group that has just chosen it. Above 0 only with more than one "
        "group.",
        default=0.0, ge=0, le=100,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveSettings:
    """Contrastive decoding, by default as O'Brien and Lewis. Li et al.: both weights 1, temperature 0.5."""

    alpha: float | None = setting(
        "Minimum probability of a token, relative to the highest; 0.1 by default.",
        default=_CONTRASTIVE.alpha, ge=0, le=1,
    )  # fmt: skip
    beta: float | None = setting(
        "Weight of the amateur's logits, which are subtracted; 0.5 by default.",
        default=_CONTRASTIVE.amateur_weight, ge=0, le=10,
    )  # fmt: skip
    expert_weight: float | None = setting("Weight of the model's own logits; 1 + beta by default.", gt=0, le=11)
    temperature: float | None = setting(
        "Divides the amateur's logits; 1 by default.", default=_CONTRASTIVE.temperature, ge=0.01, le=100
    )
    amateur: str | None = setting(
        "Name of the amateur; only the server's auxiliary model is available.", min_length=1, max_length=256
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoLaSettings:
    """DoLa: decoding by contrasting layers."""

    layers: Literal["low", "high"] | Sequence[int] = setting(
        "Candidate layers: `low` or `high` for every other layer of that half, or layer numbers. n is the input of "
        "layer n, so 0 is the embedding.",
        is_required=True,
    )
    alpha: float | None = setting(
        "Minimum probability of a token, relative to the highest; 0.1 by default.", default=_DOLA.alpha, ge=0, le=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceSettings:
    """Classifier-free guidance."""

    scale: float = setting(
        "Strength of the guidance away from the negative prompt; 1 changes nothing.", is_required=True, ge=0, le=100
    )
    negative_prompt: str | None = setting(
        "Text to steer away from. It replaces the prompt of a completion, or the system message of a chat. By default, "
        "only the prompt's last token is used.",
        min_length=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Speculation settings. Even an empty object turns speculation on if the server's default is off."""

    method: str | None = setting(
        "A method that GET /v1/capabilities lists. By default `prediction` if the request has a prediction, otherwise "
        "the server's default, or `auto` if that is off.",
        max_length=64,
    )
    num_tokens: int | None = setting(
        "Most draft tokens in a step, up to the server's own limit; 0 turns speculation off. By default chosen for "
        "each step.",
        ge=0, le=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    verify: Verification | None = setting(
        "`match`, the default, never changes the answer. `rejection` keeps the distribution but draws other tokens, so "
        "a seed does not reproduce the answer. `typical` is lossy: it changes the distribution.",
        default="match",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSettings:
    """How tokens are chosen and when to stop."""

    temperature: float | None = setting(
        "Sampling temperature; 0 is greedy. By default the model's own, or 1.",
        default=1.0,
        of_model="temperature",
        ge=0,
        le=2,
        off=[0],
    )
    top_p: float | None = setting(
        "Probability mass of nucleus sampling. By default the model's own, or 1.",
        default=1.0,
        of_model="top_p",
        ge=0,
        le=1,
        off=[1],
    )
    stop: Sequence[str] | None = setting(f"Up to {MAX_STOPS} strings that end the output.", of_model="stop_strings")
    presence_penalty: float | None = setting(
        "Subtracted from the logit of each token that occurs in the output.", default=0.0, ge=-2, le=2, off=[0]
    )
    frequency_penalty: float | None = setting(
        "Subtracted from a token's logit for each of its occurrences in the output.", default=0.0, ge=-2, le=2, off=[0]
    )
    logit_bias: Mapping[str, float] | None = setting(
        f"Maps token ids, as strings, to values added to their logits; at most {MAX_LOGIT_BIAS} tokens."
    )
    top_n_sigma: float | None = setting(
        "Keep logits at most this many standard deviations below the highest; 0 or less turns it off.",
        default=0.0, ge=-1, le=100, off=[0, -1],
    )  # fmt: skip
    epsilon_cutoff: float | None = setting(
        "Minimum probability of a token; 0 turns it off.", default=0.0, of_model="epsilon_cutoff", ge=0, lt=1, off=[0]
    )
    eta_cutoff: float | None = setting(
        "Minimum probability, lower at high entropy; 0 turns it off.",
        default=0.0, of_model="eta_cutoff", ge=0, lt=1, off=[0],
    )  # fmt: skip
    xtc_probability: float | None = setting(
        "Probability of excluding the top choices (XTC); 0 turns it off.", default=0.0, ge=0, le=1, off=[0]
    )
    xtc_threshold: float | None = setting(
        "Minimum probability of a top choice for XTC; above 0.5 there is none.",
        default=_XTC.threshold, ge=0, le=1, requires=["xtc_probability"], off=[_XTC.threshold],
    )  # fmt: skip
    mirostat: Literal[0, 2] | None = setting(
        "2 is Mirostat 2.0, which replaces all other truncations; 0 turns it off.",
        default=0, excludes=[*_TRUNCATIONS, "sampler_order"], off=[0],
    )  # fmt: skip
    mirostat_tau: float | None = setting(
        "Mirostat's target surprise, in bits.",
        default=_MIROSTAT.tau, ge=0, le=100, requires=["mirostat"], off=[_MIROSTAT.tau],
    )  # fmt: skip
    mirostat_eta: float | None = setting(
        "Mirostat's learning rate.",
        default=_MIROSTAT.eta, ge=0, le=1, requires=["mirostat"], off=[_MIROSTAT.eta],
    )  # fmt: skip
    dry_multiplier: float | None = setting(
        "Penalty on tokens that extend a repetition (DRY); 0 turns it off.", default=0.0, ge=0, le=100, off=[0]
    )
    dry_base: float | None = setting(
        "Growth of the DRY penalty per repeated token, as a factor.",
        default=_DRY.base, ge=1, le=100, requires=["dry_multiplier"], off=[_DRY.base],
    )  # fmt: skip
    dry_allowed_length: int | None = setting(
        "Length of the shortest repetition whose extension DRY penalises.",
        default=_DRY.allowed_length, ge=1, le=2**31 - 1, requires=["dry_multiplier"], off=[_DRY.allowed_length],
    )  # fmt: skip
    dry_penalty_last_n: int | None = setting(
        "Last tokens of prompt and output that DRY searches; -1 is all, 0 turns it off.",
        default=_DRY.last_n, ge=-1, le=2**31 - 1, requires=["dry_multiplier"], off=[_DRY.last_n, 0],
    )  # fmt: skip
    dry_sequence_breakers: Sequence[str] | None = setting(
        "Strings that end a repetition for DRY.",
        default=DRY_BREAKERS, requires=["dry_multiplier"], off=[list(DRY_BREAKERS)],
    )  # fmt: skip
    exponential_decay_length_penalty: tuple[float, float] | None = setting(
        "`[start, factor]`: after t > start tokens, EOS and stop tokens become more probable, by `factor ** (t - "
        "start)`. Refused if nothing can end the output (`ignore_eos` without `stop_token_ids`).",
        of_model="exponential_decay_length_penalty", examples=[[100, 1.05]],
    )  # fmt: skip
    sampler_order: str | Sequence[str] | None = setting(
        "The order of the steps between the greedy choice and the draw, with all steps in use; or the name of an "
        "order.",
        default="samewise", off=["samewise"], examples=["llama.cpp", ["top_k", "top_p", "temperature"]],
    )  # fmt: skip
    top_k: int | None = setting(
        "Keep the k most probable tokens; 0 or -1 turns it off.",
        default=0,
        of_model="top_k",
        ge=-1,
        le=2**31 - 1,
        off=[0, -1],
    )
    min_p: float | None = setting(
        "Minimum probability of a token, relative to the highest.", default=0.0, of_model="min_p", ge=0, le=1, off=[0]
    )
    typical_p: float | None = setting(
        "Probability mass of locally typical sampling; 1 turns it off.",
        default=1.0,
        of_model="typical_p",
        gt=0,
        le=1,
        off=[1],
    )
    penalty_alpha: float | None = setting(
        "Above 0: contrastive search, which draws nothing. Of the `top_k` most probable tokens "
        f"({DEFAULT_CANDIDATES} by default, at most {MAX_CANDIDATES}) it takes the one with the highest "
        "(1 - penalty_alpha) * probability - penalty_alpha * (largest similarity to an earlier token). "
        "A model's default is ignored.",
        default=0.0, ge=0, le=1, off=[0],
        excludes=[*_DRAWING, "speculation", "prediction", "use_beam_search", "beam_search"],
    )  # fmt: skip
    repetition_penalty: float | None = setting(
        "Divides positive logits of tokens in prompt or output, multiplies negative ones; 1 turns it off.",
        default=1.0, of_model="repetition_penalty", ge=0.01, le=100, off=[1],
    )  # fmt: skip
    no_repeat_ngram_size: int | None = setting(
        "No n-gram of this length occurs twice; 0 turns it off.",
        default=0, of_model="no_repeat_ngram_size", ge=0, le=2**31 - 1, off=[0],
    )  # fmt: skip
    bad_words: Sequence[str] | None = setting("Words that must not appear in the output.")
    allowed_token_ids: Sequence[int] | None = setting("Only these tokens may be chosen.")
    min_tokens: int | None = setting(
        "Minimum number of tokens before anything but max_tokens ends the output.", default=0, ge=0, le=2**31 - 1
    )
    ignore_eos: bool | None = setting("Continue after the end-of-sequence token.")
    stop_token_ids: Sequence[int] | None = setting("Tokens that end the output.")
    include_stop_str_in_output: bool | None = setting("Include the stop string or stop token in the output.")
    skip_special_tokens: bool | None = setting("Omit special tokens from the text; on by default.", default=True)
    beam_search: BeamSearchSettings | None = setting(
        "Search for the most probable output.",
        excludes=["use_beam_search", "n", *NOT_WITH_BEAMS],
        examples=[{"width": 4, "length_penalty": 1.0, "num_return": 2}],
    )
    contrastive: ContrastiveSettings | None = setting(
        "Contrastive decoding: the model's logits minus the logits of the server's auxiliary model.",
        excludes=["dola", *_OTHER_DECODING],
        examples=[{}, {"beta": 1, "expert_weight": 1, "temperature": 0.5}],
    )
    guidance: GuidanceSettings | None = setting(
        "Classifier-free guidance: strengthens the prompt's effect against a negative prompt.",
        excludes=["use_beam_search", "beam_search", "penalty_alpha"],
        examples=[{"scale": 1.5, "negative_prompt": "You are a rude assistant."}],
    )
    dola: DoLaSettings | None = setting(
        "Decoding by contrasting layers: the model's logits minus the logits of an earlier layer. A repetition_penalty "
        "of 1.2 is advised.",
        excludes=_OTHER_DECODING,
        examples=[{"layers": "low"}, {"layers": [8, 10, 12], "alpha": 0.2}],
    )
    speculation: Literal["off"] | SpeculationSettings | None = setting(
        "Speculation drafts tokens and verifies several at a time, for speed: `off`, or how. By default the server's "
        "setting.",
        off=["off"],
        examples=["off", {"method": "suffix", "num_tokens": 8}, {"verify": "rejection"}],
    )

    @property
    def breakers(self) -> Sequence[str]:
        """DRY's sequence breakers; empty while DRY is off."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return ()
        return DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

"""The table of all that says how tokens are chosen: each field once, with what is known of it.

Names, ranges and defaults are OpenAI's, else those of vLLM, transformers and llama.cpp. docs/decoding.md explains them.
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
    """One field, as every API has it."""

    description: str
    default: object = None
    """Where neither the request nor the model says anything."""
    of_model: str | None = None
    """The key of generation_config.json under which the model says what it is by default."""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By pydantic's names: ge, gt, le, lt, min_length, max_length."""
    off: Sequence[object] = ()
    """Values, besides null, false and what is empty, that ask for nothing."""
    requires: Sequence[str] = ()
    """Fields that must ask for something as well."""
    excludes: Sequence[str] = ()
    """Fields that it cannot go together with; their defaults of the model do not count beside it either."""
    examples: Sequence[object] = ()
    is_required: bool = False

    def asks(self, value: object) -> bool:
        """Whether a value of the field asks for anything."""
        return asks_for_anything(value, self.off)


def asks_for_anything(value: object, off: Sequence[object]) -> bool:
    """Whether it is none of the values that ask for nothing anywhere, nor one of those that do so here."""
    if value is None or value is False or value in ("", [], (), {}):
        return False
    return value not in off


def known(description: str, **facts: Any) -> Any:
    """A field of a settings class. Takes what FieldFacts has; limits may be given by their names."""
    names = {field.name for field in dataclasses.fields(FieldFacts)}
    limits = {name: value for name, value in facts.items() if name not in names}
    own = {name: value for name, value in facts.items() if name in names}
    metadata = {"facts": FieldFacts(description, limits=limits, **own)}
    if own.get("is_required"):
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=None, metadata=metadata)


def facts_of(settings: type) -> Mapping[str, FieldFacts]:
    """What is known of each field of a settings class, by name."""
    return _facts_of(settings)


@cache
def _facts_of(settings: Any) -> Mapping[str, FieldFacts]:
    return {field.name: field.metadata["facts"] for field in dataclasses.fields(settings)}


def asked(settings: Any) -> Iterator[str]:
    """The fields that ask for anything."""
    for name, facts in facts_of(type(settings)).items():
        if facts.asks(getattr(settings, name)):
            yield name


def filled(settings: _Settings, of_model: Mapping[str, object]) -> _Settings:
    """The settings where the request leaves nothing open: what it says, then the model, then the API.

    The model's default counts for nothing where the request asks for something that excludes the field.
    """
    facts = facts_of(type(settings))
    excluded = {other for name in asked(settings) for other in facts[name].excludes}
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
"""Tokens that contrastive search compares at one place."""
MAX_DRAFT_TOKENS = 64
DEFAULT_CANDIDATES = 4

_XTC, _MIROSTAT, _DRY = Xtc(0), Mirostat(), Dry(0)
_CONTRASTIVE, _DOLA = Contrastive(), DoLa("low")
DRY_BREAKERS = ("\n", ":", '"', "*")
_TRUNCATIONS = (
    *("top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc_probability"),
)
_DRAWING = (*(name for name in _TRUNCATIONS if name != "top_k"), "temperature", "mirostat", "sampler_order")
"""What says how tokens are drawn, which some strategies do not do. They may have a use of their own for top_k."""
NOT_WITH_BEAMS = (*_DRAWING, "top_k", "best_of", "speculation", "prediction")
_OTHER_DECODING = ("use_beam_search", "beam_search", "penalty_alpha", "guidance")
"""Fields that have their own idea of the scores, or of what to do with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSettings:
    """The sequences of the highest score, in place of drawn ones."""

    width: int = known("Beams in all; 1 is greedy decoding.", is_required=True, ge=1, le=MAX_BEAMS)
    length_penalty: float | None = known(
        "Scores are divided by length ** length_penalty; 1 by default, which compares means.",
        default=1.0, ge=-10, le=10,
    )  # fmt: skip
    early_stopping: bool | Literal["never"] | None = known(
        "When to stop once `width` sequences have ended: `true` at once, `false`, the default, when the best beam as "
        "it stands is worse than all of them, `never` when it can become no better.",
        default=False,
    )  # fmt: skip
    num_return: int | None = known(
        "How many of the best sequences are the choices; 1 by default.", default=1, ge=1, le=MAX_BEAMS
    )
    groups: int | None = known(
        "Parts of the beams that search by themselves; 1 by default.", default=1, ge=1, le=MAX_BEAMS
    )
    diversity_penalty: float | None = known(
        "What a token costs for each beam of an earlier group that has just taken it; above 0 with more than one "
        "group.",
        default=0.0, ge=0, le=100,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveSettings:
    """Contrastive decoding: an empty object is O'Brien and Lewis's; Li et al. have 1 and 1 for weights, and 0.5."""

    alpha: float | None = known(
        "Least share of the highest probability that a token needs; 0.1 by default.",
        default=_CONTRASTIVE.alpha, ge=0, le=1,
    )  # fmt: skip
    beta: float | None = known(
        "Factor of the amateur's logits, which are subtracted; 0.5 by default.",
        default=_CONTRASTIVE.amateur_weight, ge=0, le=10,
    )  # fmt: skip
    expert_weight: float | None = known("Factor of the model's own logits; 1 + beta by default.", gt=0, le=11)
    temperature: float | None = known(
        "Divides the amateur's logits; 1 by default.", default=_CONTRASTIVE.temperature, ge=0.01, le=100
    )
    amateur: str | None = known(
        "The server's auxiliary model, the only one that can be named.", min_length=1, max_length=256
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoLaSettings:
    """Decoding by contrasting layers."""

    layers: Literal["low", "high"] | Sequence[int] = known(
        "The candidates: every other layer of the lower or the upper half, or their numbers. n stands for what enters "
        "layer n, so 0 for the embedding.",
        is_required=True,
    )
    alpha: float | None = known(
        "Least share of the highest probability that a token needs; 0.1 by default.", default=_DOLA.alpha, ge=0, le=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceSettings:
    """Classifier-free guidance."""

    scale: float = known(
        "How far to go away from the negative prompt; 1 changes nothing.", is_required=True, ge=0, le=100
    )
    negative_prompt: str | None = known(
        "What to go away from. In a completion it stands in place of the prompt, in a chat in place of the system "
        "message. Left out: the prompt's last token alone.",
        min_length=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """An object asks for speculation, even an empty one where the server's default is off."""

    method: str | None = known(
        "A method of this server, as GET /v1/capabilities lists them. Left out: `prediction` beside a prediction, else "
        "the server's default, or `auto` where that is off.",
        max_length=64,
    )
    num_tokens: int | None = known(
        "At most so many draft tokens in a step, and never more than the server's own limit; 0 turns speculation off. "
        "Left out: chosen anew for each step.",
        ge=0, le=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    verify: Verification | None = known(
        "`match`, the default, never changes the answer. `rejection` keeps the distribution, but draws other tokens: "
        "the seed promises nothing. `typical` is lossy: it draws from another distribution.",
        default="match",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSettings:
    """How tokens are chosen and when to stop."""

    temperature: float | None = known(
        "0 is greedy. By default the model's own, or 1.", default=1.0, of_model="temperature", ge=0, le=2, off=[0]
    )
    top_p: float | None = known(
        "Mass of the nucleus. By default the model's own, or 1.", default=1.0, of_model="top_p", ge=0, le=1, off=[1]
    )
    stop: Sequence[str] | None = known(f"Up to {MAX_STOPS} strings that end the output.", of_model="stop_strings")
    presence_penalty: float | None = known(
        "Subtracted from the logit of each token that is in the output.", default=0.0, ge=-2, le=2, off=[0]
    )
    frequency_penalty: float | None = known(
        "Subtracted once for each time that the token is in the output.", default=0.0, ge=-2, le=2, off=[0]
    )
    logit_bias: Mapping[str, float] | None = known(
        f"Token id, as a string, to a value added to its logit; at most {MAX_LOGIT_BIAS} tokens."
    )
    top_n_sigma: float | None = known(
        "Keep logits at most so many standard deviations below the highest; 0 or less turns it off.",
        default=0.0, ge=-1, le=100, off=[0, -1],
    )  # fmt: skip
    epsilon_cutoff: float | None = known(
        "Least probability; 0 turns it off.", default=0.0, of_model="epsilon_cutoff", ge=0, lt=1, off=[0]
    )
    eta_cutoff: float | None = known(
        "Least probability, which falls as the entropy rises; 0 turns it off.",
        default=0.0, of_model="eta_cutoff", ge=0, lt=1, off=[0],
    )  # fmt: skip
    xtc_probability: float | None = known(
        "How often the top choices are excluded; 0 turns it off.", default=0.0, ge=0, le=1, off=[0]
    )
    xtc_threshold: float | None = known(
        "What makes a top choice: at least this probability; none above 0.5.",
        default=_XTC.threshold, ge=0, le=1, requires=["xtc_probability"], off=[_XTC.threshold],
    )  # fmt: skip
    mirostat: Literal[0, 2] | None = known(
        "2 is Mirostat 2.0, which replaces all other truncations; 0 turns it off.",
        default=0, excludes=[*_TRUNCATIONS, "sampler_order"], off=[0],
    )  # fmt: skip
    mirostat_tau: float | None = known(
        "Surprise to aim at, in bits.",
        default=_MIROSTAT.tau, ge=0, le=100, requires=["mirostat"], off=[_MIROSTAT.tau],
    )  # fmt: skip
    mirostat_eta: float | None = known(
        "How fast its bound is corrected.",
        default=_MIROSTAT.eta, ge=0, le=1, requires=["mirostat"], off=[_MIROSTAT.eta],
    )  # fmt: skip
    dry_multiplier: float | None = known(
        "Penalty on tokens that prolong a repetition; 0 turns it off.", default=0.0, ge=0, le=100, off=[0]
    )
    dry_base: float | None = known(
        "By what it grows with each repeated token.",
        default=_DRY.base, ge=1, le=100, requires=["dry_multiplier"], off=[_DRY.base],
    )  # fmt: skip
    dry_allowed_length: int | None = known(
        "The shortest repetition that is penalised when prolonged.",
        default=_DRY.allowed_length, ge=1, le=2**31 - 1, requires=["dry_multiplier"], off=[_DRY.allowed_length],
    )  # fmt: skip
    dry_penalty_last_n: int | None = known(
        "How many last tokens of prompt and output are searched; -1 is all, 0 turns it off.",
        default=_DRY.last_n, ge=-1, le=2**31 - 1, requires=["dry_multiplier"], off=[_DRY.last_n, 0],
    )  # fmt: skip
    dry_sequence_breakers: Sequence[str] | None = known(
        "Strings over which no repetition reaches.",
        default=DRY_BREAKERS, requires=["dry_multiplier"], off=[list(DRY_BREAKERS)],
    )  # fmt: skip
    exponential_decay_length_penalty: tuple[float, float] | None = known(
        "`[start, factor]`: after t > start tokens those that end the output get more probable, by `factor ** (t - "
        "start)`. Not where nothing ends it (`ignore_eos` without `stop_token_ids`).",
        of_model="exponential_decay_length_penalty", examples=[[100, 1.05]],
    )  # fmt: skip
    sampler_order: str | Sequence[str] | None = known(
        "The steps between the greedy choice and the draw, all that are used, in the order in which they act; or the "
        "name of an order.",
        default="samewise", off=["samewise"], examples=["llama.cpp", ["top_k", "top_p", "temperature"]],
    )  # fmt: skip
    top_k: int | None = known(
        "Keep the k best tokens; 0 or -1 turns it off.", default=0, of_model="top_k", ge=-1, le=2**31 - 1, off=[0, -1]
    )
    min_p: float | None = known(
        "Least share of the highest probability.", default=0.0, of_model="min_p", ge=0, le=1, off=[0]
    )
    typical_p: float | None = known(
        "Mass of locally typical sampling; 1 turns it off.", default=1.0, of_model="typical_p", gt=0, le=1, off=[1]
    )
    penalty_alpha: float | None = known(
        "Above 0: contrastive search, which draws nothing: of the `top_k` most probable tokens "
        f"({DEFAULT_CANDIDATES} by default, {MAX_CANDIDATES} at most) the one with the highest (1 - penalty_alpha) * "
        "probability - penalty_alpha * likeness to a token before it. Never the model's default.",
        default=0.0, ge=0, le=1, off=[0],
        excludes=[*_DRAWING, "speculation", "prediction", "use_beam_search", "beam_search"],
    )  # fmt: skip
    repetition_penalty: float | None = known(
        "Divides logits of tokens in prompt or output, or multiplies negative ones; 1 turns it off.",
        default=1.0, of_model="repetition_penalty", ge=0.01, le=100, off=[1],
    )  # fmt: skip
    no_repeat_ngram_size: int | None = known(
        "No n-gram of this length occurs twice; 0 turns it off.",
        default=0, of_model="no_repeat_ngram_size", ge=0, le=2**31 - 1, off=[0],
    )  # fmt: skip
    bad_words: Sequence[str] | None = known("Words that must not appear in the output.")
    allowed_token_ids: Sequence[int] | None = known("Only these tokens may be chosen.")
    min_tokens: int | None = known(
        "Until so many tokens were generated, nothing but max_tokens ends them.", default=0, ge=0, le=2**31 - 1
    )
    ignore_eos: bool | None = known("Go on after the end-of-sequence token.")
    stop_token_ids: Sequence[int] | None = known("Tokens that end the output.")
    include_stop_str_in_output: bool | None = known("Show what ended the output as well.")
    skip_special_tokens: bool | None = known("Leave special tokens out of the text; on by default.", default=True)
    beam_search: BeamSearchSettings | None = known(
        "Search for the most probable output.",
        excludes=["use_beam_search", "n", *NOT_WITH_BEAMS],
        examples=[{"width": 4, "length_penalty": 1.0, "num_return": 2}],
    )
    contrastive: ContrastiveSettings | None = known(
        "Contrastive decoding: what the model says, less what the server's auxiliary model says as well.",
        excludes=["dola", *_OTHER_DECODING],
        examples=[{}, {"beta": 1, "expert_weight": 1, "temperature": 0.5}],
    )
    guidance: GuidanceSettings | None = known(
        "Classifier-free guidance: go further in the direction in which the prompt changes the answer.",
        excludes=["use_beam_search", "beam_search", "penalty_alpha"],
        examples=[{"scale": 1.5, "negative_prompt": "You are a rude assistant."}],
    )
    dola: DoLaSettings | None = known(
        "Decoding by contrasting layers: what the model says, less what it would say before its last layers. A "
        "repetition_penalty of 1.2 is advised.",
        excludes=_OTHER_DECODING,
        examples=[{"layers": "low"}, {"layers": [8, 10, 12], "alpha": 0.2}],
    )
    speculation: Literal["off"] | SpeculationSettings | None = known(
        "Guess tokens ahead and verify several at a time, for speed: `off`, or how. By default as the server was "
        "started.",
        off=["off"],
        examples=["off", {"method": "suffix", "num_tokens": 8}, {"verify": "rejection"}],
    )

    @property
    def breakers(self) -> Sequence[str]:
        """DRY's sequence breakers; none where it is off."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return ()
        return DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

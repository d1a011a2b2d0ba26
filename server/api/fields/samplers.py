"""The samplers of the open field: their names, ranges and defaults are those of llama.cpp and transformers."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from model_runner.contract import Dry, Mirostat, Xtc
from server.api.fields.rules import SUPPORTED_VALUES_ONLY, RequestModel, problem, related, shape

XTC, MIROSTAT, DRY = Xtc(0), Mirostat(), Dry(0)
"""They know the defaults of the fields that belong to each."""
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 16
MAX_BREAKER_LENGTH = 40

OrderName = Literal["samewise", "llama.cpp"]
Step = Literal[
    "temperature", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc"
]
SamplerOrder = Annotated[
    Annotated[OrderName, Tag("<string>")]
    | Annotated[list[Step], Field(min_length=1, max_length=len(get_args(Step)), fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_LENGTH)]
LengthPenalty = Annotated[list[float], Field(min_length=2, max_length=2)]

MIROSTAT_REPLACES = (
    *("top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_k", "top_p", "min_p", "xtc_probability"),
    "sampler_order",
)
DRAWING = (
    *("temperature", "top_n_sigma", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_p", "min_p", "xtc_probability"),
    *("mirostat", "sampler_order"),
)
"""What says how tokens are drawn, which some strategies do not do. They may have a use of their own for top_k."""


class SamplerFields(RequestModel):
    """Truncations, penalties on repetition and length, and the order of the steps. docs/decoding.md explains them."""

    top_n_sigma: float | None = Field(
        None, ge=-1, le=100, description="Keep logits at most so many standard deviations below the highest; 0 or less "
        "turns it off.",
        json_schema_extra=related(off=[0, -1]),
    )  # fmt: skip
    epsilon_cutoff: float | None = Field(
        None, ge=0, lt=1, description="Least probability; 0 turns it off.", json_schema_extra=related(off=[0])
    )
    eta_cutoff: float | None = Field(
        None, ge=0, lt=1, description="Least probability, which falls as the entropy rises; 0 turns it off.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    xtc_probability: float | None = Field(
        None, ge=0, le=1, description="How often the top choices are excluded; 0 turns it off.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    xtc_threshold: float | None = Field(
        None, ge=0, le=1, description="What makes a top choice: at least this probability; none above 0.5.",
        json_schema_extra=related(requires=["xtc_probability"], off=[XTC.threshold]),
    )  # fmt: skip
    mirostat: Annotated[Literal[0, 2] | None, SUPPORTED_VALUES_ONLY] = Field(
        None, description="2 is Mirostat 2.0, which replaces all other truncations; 0 turns it off.",
        json_schema_extra=related(excludes=MIROSTAT_REPLACES, off=[0]),
    )  # fmt: skip
    mirostat_tau: float | None = Field(
        None, ge=0, le=100, description="Surprise to aim at, in bits.",
        json_schema_extra=related(requires=["mirostat"], off=[MIROSTAT.tau]),
    )  # fmt: skip
    mirostat_eta: float | None = Field(
        None, ge=0, le=1, description="How fast its bound is corrected.",
        json_schema_extra=related(requires=["mirostat"], off=[MIROSTAT.eta]),
    )  # fmt: skip
    dry_multiplier: float | None = Field(
        None, ge=0, le=100, description="Penalty on tokens that prolong a repetition; 0 turns it off.",
        json_schema_extra=related(off=[0]),
    )  # fmt: skip
    dry_base: float | None = Field(
        None, ge=1, le=100, description="By what it grows with each repeated token.",
        json_schema_extra=related(requires=["dry_multiplier"], off=[DRY.base]),
    )  # fmt: skip
    dry_allowed_length: int | None = Field(
        None, ge=1, le=2**31 - 1, description="The shortest repetition that is penalised when prolonged.",
        json_schema_extra=related(requires=["dry_multiplier"], off=[DRY.allowed_length]),
    )  # fmt: skip
    dry_penalty_last_n: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="How many last tokens of prompt and output are searched; -1 is all, 0 "
        "turns it off.",
        json_schema_extra=related(requires=["dry_multiplier"], off=[DRY.last_n, 0]),
    )  # fmt: skip
    dry_sequence_breakers: list[Breaker] | None = Field(
        None, max_length=MAX_BREAKERS, fail_fast=True, description="Strings over which no repetition reaches.",
        json_schema_extra=related(requires=["dry_multiplier"], off=[list(DRY_SEQUENCE_BREAKERS)]),
    )  # fmt: skip
    exponential_decay_length_penalty: LengthPenalty | None = Field(
        None, description="`[start, factor]`: after t > start tokens those that end the output get more probable, by "
        "`factor ** (t - start)`. Not where nothing ends it (`ignore_eos` without `stop_token_ids`).",
        examples=[[100, 1.05]],
    )  # fmt: skip
    sampler_order: SamplerOrder | None = Field(
        None, description="The steps between the greedy choice and the draw, all that are used, in the order in which "
        "they act; or the name of an order.",
        json_schema_extra=related(off=["samewise"]),
        examples=["llama.cpp", ["top_k", "top_p", "temperature"]],
    )  # fmt: skip

    @property
    def breakers(self) -> Sequence[str]:
        """DRY's sequence breakers; none where it is off."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return ()
        return DRY_SEQUENCE_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers

    @model_validator(mode="after")
    def _check_length_penalty(self) -> "SamplerFields":
        if self.exponential_decay_length_penalty is not None:
            start, factor = self.exponential_decay_length_penalty
            path = "exponential_decay_length_penalty"
            if start != int(start) or not 0 <= start < 2**31:
                message = "Invalid '{path}': Expected a whole number of tokens, at least 0."
                raise problem("invalid_value", message, f"{path}[0]")
            if not 0 < factor <= 100:
                raise problem("invalid_value", "Invalid '{path}': Expected a value > 0 and <= 100.", f"{path}[1]")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> "SamplerFields":
        order = self.sampler_order
        if isinstance(order, list) and len(set(order)) < len(order):
            index = next(index for index, step in enumerate(order) if step in order[:index])
            message = f"Invalid '{{path}}': '{order[index]}' is named twice."
            raise problem("invalid_value", message, f"sampler_order[{index}]")
        return self

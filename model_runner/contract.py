"""What the scheduler and the runner say to each other. Plain data: this module imports no torch.

A *key* names one choice of one request for as long as it runs. The scheduler deals in counts and block ids; tokens,
logits and probabilities stay in the runner until it commits them.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice turns logits into tokens. The defaults change nothing: they sample the model's own distribution.

    Every field is honoured; ranges are checked where the request comes in. The order in which the fields act is the
    order in which they stand here.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be chosen; None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output: the last token is blocked where the ones before it match."""
    min_tokens: int = 0
    """While fewer tokens than this were generated, every token of `stop_token_ids` is blocked."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the choice, end-of-sequence included unless the request ignores it."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt and output together; 0 turns it off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated."""
    presence_penalty: float = 0.0
    """Subtracted once if the token was generated at all."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy: the highest logit, the lowest id among equals."""
    typical_p: float = 1.0
    """Locally typical sampling (arXiv:2202.00666): the mass kept; 1 turns it off."""
    top_k: int = 0
    """Keep the k highest logits, and all that tie with the last; 0 turns it off."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this mass; 1 turns it off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the highest probability; 0 turns it off."""
    seed: int = 0
    """64-bit unsigned. Noise depends on (seed, choice, output position, stream, token id) and on nothing else."""
    choice: int = 0
    """Index of this choice among the request's n."""
    logprobs: int | None = None
    """Report the chosen token's logprob and this many alternatives; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A choice that the runner sees for the first time, or again after preemption."""

    key: str
    tokens: tuple[int, ...]
    """The prompt, then the output so far."""
    num_prompt: int
    """How many of `tokens` are the prompt."""
    num_computed: int
    """How many leading tokens already have their KV in the blocks (prefix cache or fork); below len(tokens)."""
    blocks: tuple[int, ...]
    """Block table at admission, before the `new_blocks` of the same step."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The share of one choice in a step."""

    key: str
    num_tokens: int
    """Committed tokens to compute now: a prompt chunk, or 1."""
    new_blocks: tuple[int, ...]
    """Appended to the choice's block table before the step."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies the fields in this order."""

    released: tuple[str, ...]
    """Choices that finished, were aborted or preempted since the last plan: forget them."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) blocks to copy before anything is written: copy-on-write of forks."""
    admitted: tuple[AdmittedRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, its rank in the vocabulary (1 is the most probable) and the top alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """The most probable (token id, logprob), best first, lower id first among equals; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """What a step brought one scheduled choice."""

    key: str
    tokens: tuple[int, ...]
    """Newly committed tokens; empty until the last known token has been computed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, if the choice asked for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for: one for each prompt token whose predecessor was computed in this step, in order."""
    error: str | None = None
    """Set if this choice cannot go on (its logits are not finite, say); the others are not affected."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each scheduled choice, in the plan's order."""

    choices: tuple[ChoiceResult, ...]


class Runner(Protocol):
    """Executes plans. Deterministic: a choice's tokens do not depend on what else a plan holds."""

    @property
    def num_blocks(self) -> int:
        """How many KV blocks there are; block ids are 0 to num_blocks - 1."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and commit what it samples."""
        ...

"""Requests, outputs and statistics of the engine. Plain data that can cross a process boundary."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal

from model_runner.contract import Failure, SamplingParams, Speculation, TokenLogprobs
from model_runner.image import Image
from model_runner.runner_interface import ImageStats, LearningStats, SpeculationStats

BACKGROUND = 1 << 20
"""The first tier that is scheduled only when other work leaves room."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram buckets for tokens per step."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """One choice of a request as it enters the engine. A resumed request has output already."""

    index: int
    output: tuple[int, ...] = ()
    sampler_state: float | None = None
    """Sampler state that the last output of this choice reported."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Search for the most probable output instead of sampling (see beam_search.py)."""

    width: int
    """Number of beams, and of finished sequences to keep, over all groups."""
    length_penalty: float = 1.0
    """Scores are divided by length ** length_penalty: 0 compares sums, 1 compares means, larger values favour long
    outputs."""
    early_stopping: bool | Literal["never"] = False
    """When a search with `width` finished sequences stops. True: at once. False: when the best beam, scored at its
    current length, is worse than all of them. "never": when it is worse even at its most favourable length."""
    groups: int = 1
    """Number of beam groups that search separately; divides `width`."""
    diversity_penalty: float = 0.0
    """Penalty on a token for each beam of an earlier group that took it in the same step."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence."""
    skip_special_tokens: bool = True
    """Whether stop strings are searched in text without special tokens."""


class TextWatch(ABC):
    """Searches the text of a growing output for stop strings."""

    @abstractmethod
    def fork(self) -> "TextWatch":
        """An independent copy from here on."""

    @abstractmethod
    def push(self, token: int) -> bool:
        """Add a token; returns whether it completes a stop string."""


WatchText = Callable[["EngineRequest"], TextWatch]
"""Creates the TextWatch for the stop strings of a request's beam search."""


@dataclass(frozen=True, slots=True)
class BeamScore:
    """The score of a sequence that beam search found."""

    score: float
    """The value that ranks sequences."""
    cumulative_logprob: float
    """Sum of its tokens' log-probabilities, after bans and penalties."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and how to continue it. Resubmitting it with the outputs so far continues exactly where it was."""

    request_id: str
    prompt: tuple[int, ...]
    """At least one token id, all in the vocabulary."""
    sampling: SamplingParams
    """Shared by all choices; `choice` is filled in for each."""
    max_tokens: int
    """Tokens to generate per choice, at least 0. len(prompt) + max_tokens must fit the context."""
    choices: tuple[ChoiceState, ...] = (ChoiceState(0),)
    priority: int = 0
    """Lower runs first, if the policy uses priorities."""
    cache_salt: str = ""
    """Prefix-cache entries and outputs learned for speculation are shared only between requests with the same salt."""
    speculation: Speculation | None = None
    """Shared by all choices. None decodes one token at a time."""
    guide: tuple[int, ...] = ()
    """The prompt of each choice's guide, if `sampling` has guidance; otherwise empty."""
    beam_search: BeamSearch | None = None
    """Returns its best sequences as the choices, numbered from 0 and at most `width`. Excludes speculation."""
    client: str = ""
    """Identifies who sent the request; empty if unknown. A fair policy shares service between clients, whatever their
    salts."""
    weight: float = 1.0
    """The client's share relative to other clients, above 0."""
    tier: int = 0
    """Lower tiers are admitted first under every policy. From BACKGROUND on, requests run only when others leave
    room."""
    learn: bool = True
    """Whether draft heads may be trained on it."""
    images: tuple[Image, ...] = ()
    """The images of the prompt, in the order of their places, which must not overlap. Only for a runner that takes
    images. A guide's prompt has none."""

    @property
    def width(self) -> int:
        """How many token sequences run at a time for each choice, including a guide."""
        if self.beam_search is not None:
            return self.beam_search.width
        return 1 if self.sampling.guidance is None else 2

    @property
    def num_input(self) -> int:
        """Tokens of the prompt and of the guide's prompt."""
        return len(self.prompt) + len(self.guide)

    @property
    def num_drawn(self) -> int:
        """How many of all running sequences sample tokens. Guides do not; a search's beams serve all choices."""
        return self.width if self.beam_search is not None else len(self.choices)


@dataclass(frozen=True, slots=True)
class MethodDrafts:
    """Drafts that one speculation method made for a choice."""

    method: str
    accepted: int
    """Draft tokens that became output."""
    rejected: int
    """Draft tokens that were verified and rejected."""


@dataclass(frozen=True, slots=True)
class ChoiceHistory:
    """The timeline of one choice in one engine, up to `as_of`: when it ran, in how many steps, and what delayed it.

    A restarted engine begins a new history. All times are seconds on the clock of time.perf_counter, which all
    processes of one Linux machine share. A step counts for a choice if it computed something for it. A step that ran
    out of memory counts for no choice.

    Members of a group are counted together. A beam search has one history, reported for each of its choices; a choice
    with guidance counts steps of either member. Prompt and output tokens are the choice's own.
    """

    choice: int
    arrived_at: float
    """When the engine received the request. Preparation, such as compiling a grammar, counts as waiting."""
    as_of: float
    """Time of this snapshot, or of the end of the choice."""
    has_ended: bool
    prompt_tokens: int
    admitted_at: float | None = None
    """When it first left the queue."""
    first_token_at: float | None = None
    """When the prompt was computed and this engine's first token came. None for pooling and before that time."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    output_tokens: int = 0
    """Tokens this engine generated. For a running beam search: the tokens that all beams share."""
    steps: int = 0
    prefill_steps: int = 0
    """Steps that computed known tokens, from an admission to the first token after it."""
    preemptions: int = 0
    """How often it was preempted and went back to the queue."""
    waited_again_s: float = 0.0
    """Seconds spent in the queue after preemptions."""
    is_waiting: bool = False
    """Whether it is in the queue now, for the first time or again."""
    drafts: tuple[MethodDrafts, ...] = ()
    """By speculation method. Methods without drafts are omitted."""

    @property
    def queue_s(self) -> float:
        """Seconds until the first admission. `queue_s`, `prefill_s` and `decode_s` add up to the time since arrival."""
        return (self.as_of if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first admission to the first token, or to `as_of` if none came. None before admission."""
        if self.admitted_at is None:
            return None
        return (self.as_of if self.first_token_at is None else self.first_token_at) - self.admitted_at

    @property
    def decode_s(self) -> float | None:
        """Seconds since the first token. None before it."""
        return None if self.first_token_at is None else self.as_of - self.first_token_at

    def until(self, moment: float) -> "ChoiceHistory":
        """A copy whose times end at `moment`. Counts are unchanged."""
        if moment >= self.as_of:
            return self
        admitted_at, first_token_at = (
            None if at is None or at > moment else at for at in (self.admitted_at, self.first_token_at)
        )
        return replace(
            self,
            arrived_at=min(self.arrived_at, moment),
            as_of=moment,
            admitted_at=admitted_at,
            first_token_at=first_token_at,
        )


@dataclass(slots=True)
class RequestOutput:
    """The result of one step for one choice: new tokens, its end, or both. Running searches may report only
    `beam_tokens`.

    Treat it as immutable. It is not frozen because one is made per token, and frozen ones take four times as long to
    make.
    """

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """All prompt logprobs (from the second token on), if requested; sent once, with the first output of choice 0."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache. Valid in a choice's first output."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the choice, if one did. It is also the last of `tokens`."""
    num_accepted: int = 0
    """Draft tokens of this step that became output."""
    num_rejected: int = 0
    """Draft tokens of this step that were rejected."""
    draft_method: str = ""
    """The speculation method of the accepted drafts; empty if none was accepted."""
    error: Failure | None = None
    beam: BeamScore | None = None
    """Set with the final output of a beam search's choice."""
    beam_tokens: int = 0
    """Tokens that all beams of the search have drawn so far; 0 without a search."""
    sampler_state: float | None = None
    """Sampler state after these tokens; send it back to resume the choice."""
    pooled: bytes = b""
    """The pooled numbers as in ChoiceResult, with the choice's final output."""
    history: ChoiceHistory | None = None
    """Set with the choice's final output."""
    num_written_tokens: int = 0
    """Prompt tokens that this choice added to the prefix cache. Valid in its first output."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of an engine. All zero once the engine has stopped."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks that running choices hold, 0 to 1."""
    num_background_running: int = 0
    """Running choices in background tiers."""
    num_background_waiting: int = 0
    """Waiting choices in background tiers."""
    kv_held_blocks: int = 0
    """KV blocks that running choices hold."""
    kv_cached_blocks: int = 0
    """KV blocks that only the prefix cache holds. They are evicted when no block is free."""


@dataclass(frozen=True, slots=True)
class EngineStats(EngineLoad):
    """A snapshot after a step: the load, and counters since the engine's start."""

    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    out_of_memory: int = 0
    """Steps for which memory ran out."""
    steps: int = 0
    scheduled_tokens: int = 0
    """Tokens computed, including recomputation and excluding draft tokens."""
    speculation: tuple[SpeculationStats, ...] = ()
    """By method. Methods that were never used are omitted."""
    learning: LearningStats | None = None
    """None if nothing is being learned."""
    images: ImageStats | None = None
    """None if the runner takes no images."""
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    """Number of steps by tokens computed: one bucket per bound in STEP_TOKENS, and one for larger steps."""
    steps_done: int = 0
    """Completed steps. `steps` also counts a running step and steps that ran out of memory."""
    prefill_tokens: int = 0
    """Tokens that completed steps computed for prompts and after preemptions, up to the next new token."""
    decode_tokens: int = 0
    """Tokens that completed steps computed for decoding choices, one per choice and step."""
    step_s: float = 0.0
    """Seconds from plan to result of all steps. A step launched ahead counts from the preceding result."""

    def ended(self) -> "EngineStats":
        """The final statistics of a stopped engine: its counters, without load."""
        nothing: dict[str, Any] = {one.name: one.default for one in fields(EngineLoad)}
        return replace(self, **nothing)


Policy = Literal["fcfs", "priority", "fair"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that every step respects."""

    block_size: int
    """Tokens per KV block."""
    max_num_seqs: int
    """Maximum number of choices running at the same time."""
    max_num_batched_tokens: int
    """Maximum tokens computed in one step. Decoding choices come first; prompt chunks fill the rest."""
    max_model_len: int
    """Maximum length of prompt and output together."""
    policy: Policy = "fcfs"
    """Order of the waiting queue within each tier. fcfs: arrival. priority: priority, then arrival. fair: fair shares
    between clients, with turns between each client's cache salts."""
    prefix_caching: bool = True
    sees_images: bool = False
    """Whether the rows of an image see each other: a step then computes all of an image's rows or none."""
    snapshot_every: int = 0
    """Tokens of a prompt between states of recurrent layers that are kept in the prefix cache. 0 keeps only those at
    the end of a prompt, and where it met a cached one."""

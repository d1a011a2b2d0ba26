"""What the engine takes and what it gives back. Plain data that can cross a process boundary."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

from model_runner.contract import Failure, SamplingParams, Speculation, TokenLogprobs
from model_runner.runner_interface import LearningStats, SpeculationStats
from scheduler.history import ChoiceHistory

BACKGROUND = 1 << 20
"""The first tier of those that get only the room that others leave."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by how many tokens they compute: up to each of these."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """One choice of a request as it enters the engine; `output` is not empty when a request is resumed."""

    index: int
    output: tuple[int, ...] = ()
    sampler_state: float | None = None
    """What the output with the last of these tokens said."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Search for the most probable output instead of drawing one (see beam_search.py)."""

    width: int
    """Beams, and sequences that are kept when they have ended; of all groups together."""
    length_penalty: float = 1.0
    """Scores are divided by length ** length_penalty: 0 compares sums, 1 means per token, more favours long outputs."""
    early_stopping: bool | Literal["never"] = False
    """When a search whose finished sequences are complete is over. True: at once; False: when the best beam, judged at
    its length, is worse than all of them; "never": when it is so at the length that suits it best."""
    groups: int = 1
    """Parts of the beams that search by themselves; divides `width`."""
    diversity_penalty: float = 0.0
    """What a token costs for each beam of an earlier group that took it in the same step."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence."""
    skip_special_tokens: bool = True
    """Whether special tokens are no part of the text in which these are looked for."""


class TextWatch(Protocol):
    """Follows the text of a growing output."""

    def fork(self) -> "TextWatch":
        """One that goes its own way from here."""
        ...

    def push(self, token: int) -> bool:
        """Whether a stop string is complete with this token."""
        ...


WatchText = Callable[["EngineRequest"], TextWatch]
"""Makes the watch for the stop strings of a request's beam search."""


@dataclass(frozen=True, slots=True)
class BeamScore:
    """How a sequence that beam search found compares with others."""

    score: float
    """What it was chosen by."""
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
    """Tokens to generate for each choice, at least 0; len(prompt) + max_tokens fits the context."""
    choices: tuple[ChoiceState, ...] = (ChoiceState(0),)
    priority: int = 0
    """Lower runs first, where the policy looks at it."""
    cache_salt: str = ""
    """Prefix-cache entries, and what speculation learns from outputs, are shared only within the same salt."""
    speculation: Speculation | None = None
    """Shared by all choices; None decodes one token at a time."""
    guide: tuple[int, ...] = ()
    """The prompt of each choice's guide, where `sampling` has guidance; empty without."""
    beam_search: BeamSearch | None = None
    """Its best sequences are the choices, which must be numbered from 0 and not be more than its width. It has no
    speculation."""
    client: str = ""
    """Who asks; empty where nobody can tell. A fair policy serves clients by what each has got, whatever salts they
    choose."""
    weight: float = 1.0
    """Share of the client beside those of others, above 0."""
    tier: int = 0
    """Of waiting: lower ones first, whatever the policy. From BACKGROUND on, it also runs only beside others."""
    learn: bool = True
    """Whether heads may be trained on it."""

    @property
    def width(self) -> int:
        """How many sequences of tokens run at a time for each choice, a guide's among them."""
        if self.beam_search is not None:
            return self.beam_search.width
        return 1 if self.sampling.guidance is None else 2

    @property
    def num_input(self) -> int:
        """Tokens of the prompt and of the guide's."""
        return len(self.prompt) + len(self.guide)

    @property
    def num_drawn(self) -> int:
        """How many of them draw tokens for all choices, which a search finds together: guides do not."""
        return self.width if self.beam_search is not None else len(self.choices)


@dataclass(slots=True)
class RequestOutput:
    """What one step brought one choice: new tokens, or its end, or both; of a search perhaps only `beam_tokens`.

    Not frozen, though nobody changes it: one is made for every token, and making a frozen one takes four times as long.
    """

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """All of the prompt (but its first token), if asked for: once, with the first output of choice 0."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache; meaningful in a choice's first output."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the choice, when one of `stop_token_ids` did; it is the last of `tokens`."""
    num_accepted: int = 0
    """Draft tokens of this step that became output, and ..."""
    num_rejected: int = 0
    """... those that did not."""
    draft_method: str = ""
    """Of speculation, that made the drafts that were accepted; empty without any."""
    error: Failure | None = None
    beam: BeamScore | None = None
    """With the end of what beam search found."""
    beam_tokens: int = 0
    """Tokens that all beams of the search have drawn so far; 0 without a search."""
    sampler_state: float | None = None
    """What goes with the choice's tokens, these included, when it is resumed."""
    pooled: bytes = b""
    """The numbers that were asked for in place of tokens, with the choice's end: see ChoiceResult."""
    history: ChoiceHistory | None = None
    """With the choice's end."""
    num_written_tokens: int = 0
    """Prompt tokens that this choice added to the prefix cache; meaningful in its first output."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has at a moment. One that has ended has nothing."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks that running choices hold, 0 to 1."""
    num_background_running: int = 0
    """Those of `num_running` that make way for others."""
    num_background_waiting: int = 0
    """Those of `num_waiting` that only get the room that others leave."""
    kv_held_blocks: int = 0
    """KV blocks that running choices hold, and ..."""
    kv_cached_blocks: int = 0
    """... those that only the prefix cache has, which make way when the free ones, all others, are used up."""


@dataclass(frozen=True, slots=True)
class EngineStats(EngineLoad):
    """A snapshot after a step: the load, and counters that grow from the engine's start."""

    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    out_of_memory: int = 0
    """Steps for which the device's memory ran out."""
    steps: int = 0
    scheduled_tokens: int = 0
    """Tokens computed, recomputation included, draft tokens not."""
    speculation: tuple[SpeculationStats, ...] = ()
    """By method; those that were never used are left out."""
    learning: LearningStats | None = None
    """None where nothing is learnt."""
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    """How many of the steps computed at most STEP_TOKENS[0], more but at most STEP_TOKENS[1], ..., more than all."""
    steps_done: int = 0
    """Those of `steps` whose results are in; the last one may still be under way, and others ran out of memory."""
    prefill_tokens: int = 0
    """What these computed of prompts, and of what was preempted, up to the next token, ..."""
    decode_tokens: int = 0
    """... and of all that goes on from there: a token in each step."""
    step_s: float = 0.0
    """Seconds that steps took, from the plan to the result; one that was launched ahead, from the result before it."""

    def ended(self) -> "EngineStats":
        """The last that is known of an engine that has ended: what it counted, and no load."""
        nothing: dict[str, Any] = {one.name: one.default for one in fields(EngineLoad)}
        return replace(self, **nothing)


Policy = Literal["fcfs", "priority", "fair"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits that every step keeps."""

    block_size: int
    """Tokens in a KV block."""
    max_num_seqs: int
    """Choices that run at the same time."""
    max_num_batched_tokens: int
    """Tokens computed in one step: the decoding choices first, prompt chunks fill the rest."""
    max_model_len: int
    """Prompt and output together."""
    policy: Policy = "fcfs"
    """Order of the waiting queue in each tier: arrival; priority, then arrival; or fair shares for clients, and turns
    between the cache salts of each."""
    prefix_caching: bool = True

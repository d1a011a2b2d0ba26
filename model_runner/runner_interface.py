"""What the engine drives: something that executes plans, and what it reports about itself. Plain data and no torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from model_runner.contract import SamplingParams, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner can do."""

    vocab_size: int
    max_model_len: int
    """Prompt and output together, in tokens."""
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    """Of the weights in products."""
    kv_dtype: str
    kernels: str
    """What runs the model: an instruction set, or a compiler."""
    rows: str = ""
    """What the inputs of products are rounded to."""
    hardware: str = ""
    """The processor, as far as answers may depend on it."""
    software: str = ""
    """The libraries that compute, with their versions."""
    speculation_methods: tuple[str, ...] = ()
    """Methods that a request can name."""
    hidden_size: int = 0
    """Numbers in the state of a token."""
    num_early_exits: int = 0
    """Layers before which the model can be asked for the next token; 0 if it cannot."""
    started_in: tuple[tuple[str, float], ...] = ()
    """What took time at the start, with the seconds that it took."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What one method did since the start."""

    method: str
    drafted: int
    """Draft tokens verified."""
    accepted_by_depth: tuple[int, ...]
    """How often the draft token 1, 2, ... after the last known one was accepted."""
    verified_by_depth: tuple[int, ...]
    """How often there was a draft at that depth whose predecessors had all been accepted."""
    steps: int
    """Steps of single choices that verified at least one draft token, ..."""
    tokens: int
    """... and what they committed."""
    draft_s: float
    """Seconds spent on making drafts, and ..."""
    verify_s: float
    """... on the forward passes of steps with drafts, shared by their rows."""


@dataclass(frozen=True, slots=True)
class LearningStats:
    """What came of training heads on what is served, since the engine's start."""

    tokens: int = 0
    """Of output that the learner took in."""
    pieces_dropped: int = 0
    """Parts of answers that it was too slow for."""
    steps: int = 0
    """Of training."""
    publications: int = 0
    """Heads that were found better than those before."""
    rollbacks: int = 0
    """Times that older heads were found better again."""
    tokens_per_step_first: float | None = None
    """What the heads of the engine's start would bring on what is served lately; None until it is known."""
    tokens_per_step_current: float | None = None
    """The same of the heads in use."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is being computed."""

    can_follow: bool
    """Whether the step after it can be launched before its result is taken."""
    result: Callable[[], StepResult]
    """Waits for the step. To be called once, in the order in which steps were launched."""


class Runner(Protocol):
    """Executes plans. Deterministic: a choice's tokens do not depend on what else a plan holds."""

    @property
    def num_blocks(self) -> int:
        """How many KV blocks there are; block ids are 0 to num_blocks - 1."""
        ...

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """Begin what such choices need, so that nobody waits for it when they are admitted; None: they need nothing.

        The result raises ValueError, in words for the client, if they can never run.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and drafts, and commit what is sampled."""
        ...

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        """Begin to execute a plan; a device that works beside the host goes on by itself.

        `is_ahead`: the result of the step before, which `can_follow`, is not taken yet. Every scheduled choice was
        scheduled there as well, and computes the one token that it brings.
        """
        ...

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        """What speculation did since the start, by method."""
        ...

    def learning_stats(self) -> LearningStats | None:
        """What came of learning since the start; None where nothing is learnt."""
        ...


class DoneAtLaunch(ABC):
    """What makes a Runner of one that can only execute."""

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        return None

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """See Runner.execute."""

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        assert not is_ahead, "no step can follow"
        done = self.execute(plan)
        return LaunchedStep(can_follow=False, result=lambda: done)

    def learning_stats(self) -> LearningStats | None:
        return None

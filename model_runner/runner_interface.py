"""Interface of a runner, which the engine drives. Plain data, no torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto

from model_runner.contract import CacheGroup, Failure, SamplingParams, StepPlan, StepResult
from model_runner.image import Image


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Properties of a loaded runner."""

    vocab_size: int
    max_model_len: int
    """Maximum length of prompt and output together, in tokens."""
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    """Type of the weights in matrix products."""
    kv_dtype: str
    kernels: str
    """The instruction set or compiler that runs the model."""
    activation_type: str = ""
    """Type that the inputs of matrix products are rounded to."""
    hardware: str = ""
    """The processor, as far as answers may depend on it."""
    software: str = ""
    """The libraries that compute, with versions."""
    speculation_methods: tuple[str, ...] = ()
    """Speculation methods that a request can name."""
    hidden_size: int = 0
    """Size of a token's hidden state; for an encoder, of what it makes of a text."""
    has_kv_cache: bool = True
    """Whether blocks hold keys and values; for an encoder, a block is the place of one text in a step."""
    num_early_exits: int = 0
    """Layers before which the model can predict the next token; 0 if it does not support early exits."""
    started_in: tuple[tuple[str, float], ...] = ()
    """Phases of the startup, each with its seconds."""
    groups: tuple[CacheGroup, ...] = ()
    """Blocks of layers that need only some positions, in addition to every choice's own."""
    takes_images: bool = False
    """Whether prompts may have images."""
    sees_images: bool = False
    """Whether the rows of an image see each other, so that a step must compute all of them."""
    max_image_rows: int = 0
    """Feature rows of images for which there is memory. A single image may have more."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Statistics of one speculation method since startup."""

    method: str
    drafted: int
    """Draft tokens verified."""
    accepted_by_depth: tuple[int, ...]
    """How often the draft token at depth 1, 2, ... was accepted."""
    verified_by_depth: tuple[int, ...]
    """How often a draft token at depth 1, 2, ... was verified whose predecessors had all been accepted."""
    steps: int
    """Steps that verified at least one draft token, counted per choice."""
    tokens: int
    """Tokens that these steps committed."""
    draft_s: float
    """Seconds spent on making drafts."""
    verify_s: float
    """Seconds of forward passes with drafts, split by rows."""


@dataclass(frozen=True, slots=True)
class LearningStats:
    """Statistics of training heads on served requests, since the engine started."""

    tokens: int = 0
    """Output tokens that the learner received."""
    pieces_dropped: int = 0
    """Parts of outputs that were dropped because the learner was too slow."""
    steps: int = 0
    """Training steps."""
    publications: int = 0
    """How often newly trained heads were better and came into use."""
    rollbacks: int = 0
    """How often earlier heads proved better again and were restored."""
    tokens_per_step_first: float | None = None
    """Tokens per step that the heads of the engine's start would give on recent requests; None until it is known."""
    tokens_per_step_current: float | None = None
    """Tokens per step that the heads in use give on recent requests; None until it is known."""


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Statistics of image features since startup."""

    encoded: int = 0
    """Images whose features were computed, including features that were computed again after they were evicted."""
    encode_s: float = 0.0
    """Seconds spent on decoding images and computing features, next to the steps."""
    hits: int = 0
    """Images whose features were still in memory when a request needed them."""
    waiting: int = 0
    """Requested features that are not computed yet."""
    held_bytes: int = 0
    """Memory of features that requests are waiting for or computing with."""
    cached_bytes: int = 0
    """Memory of all features, including those that may be evicted."""


@dataclass(frozen=True, slots=True)
class FeatureHolder:
    """A choice that needs features, and whose turn their computation uses."""

    key: str
    """Unique among holders."""
    salt: str = ""
    """Features are shared only between holders with the same salt."""
    client: str = ""
    weight: float = 1.0
    """The client's share relative to other clients, above 0."""
    tier: int = 0
    """Features for lower tiers are computed first."""


class Holding(Enum):
    """Whether features are held, or why not."""

    HELD = auto()
    NO_MEMORY = auto()
    """There is no memory for them next to the features that others hold."""
    OVER_SHARE = auto()
    """The client holds features for other choices, and may have no more memory meanwhile."""


class ImageFeatures(ABC):
    """Features of images, computed one image at a time next to the steps, and kept in bounded memory.

    Clients take turns, and so do the choices of a client. Keys name holders. Held features are not evicted. Features
    that are computed again have the same bits.
    """

    @abstractmethod
    def hold(self, holder: FeatureHolder, images: Sequence[Image]) -> Holding:
        """Hold these images' features, in addition to those that are held for it; begin to compute missing ones."""

    @abstractmethod
    def served(self, client: str) -> float:
        """Seconds, divided by its weight, for which features were computed for a client, as far as they count for its
        turn.
        """

    @abstractmethod
    def is_ready(self, key: str) -> bool:
        """Whether all features that `key` holds have been computed, or one of them failed."""

    @abstractmethod
    def failure(self, key: str) -> Failure | None:
        """Why features that `key` holds cannot be computed; None if none failed."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Hold nothing for `key` any more. Features that nobody holds are not computed."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until more features have been computed, but no longer than this."""

    @abstractmethod
    def stats(self) -> ImageStats:
        """Statistics since startup."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight."""

    can_follow: bool
    """Whether the next step can be launched before this one's result is taken."""
    result: Callable[[], StepResult]
    """Waits for the step. Call it once, in the order in which steps were launched."""


class Runner:
    """Executes plans. Deterministic: a choice's tokens do not depend on the rest of the plan.

    A runner implements `launch`, or only `execute` if it has no asynchronous steps.
    """

    num_blocks: int
    """How many KV blocks there are; block ids are 0 to num_blocks - 1."""
    groups: Sequence[CacheGroup] = ()
    """Its cache groups, numbered from 1."""
    images: ImageFeatures | None = None
    """Features of images; None if prompts have none."""

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """Begin to prepare such choices, so that admission does not wait for it; None if there is nothing to prepare.

        The future raises ValueError, with a message for the client, if such choices can never run.
        """
        return None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and drafts, and commit the sampled tokens."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan, *, is_ahead: bool = False) -> LaunchedStep:
        """Begin to execute a plan; an asynchronous device computes while the host continues.

        `is_ahead`: the result of the step before, which `can_follow`, is not taken yet. Every scheduled choice was also
        scheduled there, and computes the one token that it produces.
        """
        assert not is_ahead, "no step can follow"
        done = self.execute(plan)
        return LaunchedStep(can_follow=False, result=lambda: done)

    def speculation_stats(self) -> tuple[SpeculationStats, ...]:
        """Statistics of each speculation method since startup."""
        return ()

    def learning_stats(self) -> LearningStats | None:
        """Statistics of training since startup; None if nothing is trained."""
        return None

"""What a runner tells of itself. Plain data: this module imports no torch."""

from dataclasses import dataclass


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

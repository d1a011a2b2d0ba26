"""Settings of the scheduler."""

from dataclasses import dataclass
from typing import Literal

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

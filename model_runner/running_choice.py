"""A running choice, as the runner keeps it between steps.

The scheduler keeps a `Request` of it, the sampler a slot (sampling/slot.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.batch import IntArray
from model_runner.batch_maker import BatchChoice
from model_runner.contract import SamplingParams, Verification, state_blocks_after
from model_runner.image import Image
from model_runner.shared_list import SharedList


@dataclass(slots=True)
class RunningChoice(BatchChoice):
    """A running choice. `tokens[:num_computed]` have their keys and values in `blocks`."""

    slot: int
    tokens: list[int] | SharedList[int]
    num_prompt: int
    num_computed: int
    sampling: SamplingParams
    num_state_blocks: int = 0
    """Blocks whose effect is in the newest page of recurrent states."""
    verify: Verification = "match"
    guides: str | None = None
    """Key of the choice that this one guides (`AdmittedRequest.guides`)."""
    sampler_state: float | None = None
    """State of the sampler after the last step, as far as it does not follow from the tokens."""
    images: Sequence[Image] = ()
    cache_salt: str = ""
    hidden_sum: IntArray | None = None
    """[hidden] the sum of the computed tokens' hidden states in fixed point, if their mean is requested; None once one
    is not finite."""

    def state_blocks_after(self, known: int, block_size: int) -> int:
        """Blocks that are folded once a step has computed its tokens up to `known`."""
        keeps_last = self.sampling.num_candidates > 0
        return state_blocks_after(self.num_state_blocks, known, block_size, keeps_last=keeps_last)

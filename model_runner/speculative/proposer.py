"""Interface of a speculation method, and the data that it receives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import SamplingParams, Speculation
from model_runner.draft_tree import DraftTree
from model_runner.features import Feature
from model_runner.rotary_positions import RotaryPositions
from model_runner.sampling.noise import Stream, noise_key


@dataclass(frozen=True, slots=True)
class NewChoice:
    """A choice that a proposer will draft for."""

    slot: int
    tokens: Sequence[int]
    """Prompt, and output if the choice is resumed. This list grows with the choice; do not modify it."""
    num_prompt: int
    num_computed: int
    """Leading tokens that the target takes from the prefix cache or a fork."""
    blocks: Sequence[int]
    """The choice's KV blocks; this list grows with the choice."""
    sampling: SamplingParams
    speculation: Speculation
    cache_salt: str
    rotary: RotaryPositions | None = None
    """The target's rotary positions where they are not the places, after images."""


@dataclass(frozen=True, slots=True)
class ChoiceStep:
    """One choice's results of a step."""

    slot: int
    tokens: Sequence[int]
    """All known tokens. Do not modify this list."""
    num_prompt: int
    num_new: int
    """How many of the tokens are new; 0 while the prompt is being computed."""
    num_computed: int
    """Leading tokens whose keys and values are in `blocks`."""
    rows: Sequence[int]
    """Rows of the step's features for the last of the `num_computed` tokens, in order; rejected drafts have none."""
    blocks: Sequence[int]
    max_nodes: int
    """Maximum number of nodes of the tree; 0 if no draft is needed."""
    sampling: SamplingParams
    sample: SampleRows | None = None
    """The drafts that the step verified, and their rows of logits: some of the proposed nodes, possibly in another
    order. None while the prompt is being computed."""
    draws: bool = False
    """Whether drafts are tested by rejection and should be drawn from the proposer's distribution, which maximises
    acceptance. The tree then records it in `drawn_from`."""

    def noise_key(self, depth: int) -> int:
        """The noise key with which the target will draw the token `depth` positions after the last known one.

        A proposer that draws with the same noise is right more often (arXiv:2408.07978). This is also allowed for
        choices that are verified by rejection, because the target uses other noise there.
        """
        position = len(self.tokens) - self.num_prompt + depth - 1
        return noise_key(self.sampling.seed, self.sampling.choice, Stream.TARGET, position)


@dataclass(frozen=True, slots=True)
class TargetStep:
    """Results of a step for all choices of one proposer."""

    choices: Sequence[ChoiceStep]
    features: Mapping[Feature, Tensor]
    """The features that the proposer needs, [T, width] each, for all tokens of the step."""
    logits: Tensor  # [rows, vocab] float32
    """Logits of last prompt tokens, last known tokens and drafts; `ChoiceStep.sample` has their rows."""

    def last(self, feature: Feature) -> Tensor:
        """[choices, width] the feature of each choice's last computed token."""
        return self.features[feature][[choice.rows[-1] for choice in self.choices]].float()


Embed = Callable[[Tensor], Tensor]
"""Token ids [n] -> the target's embeddings [n, hidden]."""


class Proposer(ABC):
    """Drafts continuations. It affects how fast tokens come, but (in match mode) never which.

    A proposer may draft deterministically from known tokens and the target's noise in any way. One that draws at random
    must record the distributions in `DraftTree.drawn_from`; otherwise rejection sampling would not keep the target's
    distribution.
    """

    needs: frozenset[Feature] = frozenset()
    """Features of the target that the proposer needs."""
    reads_step = False
    """Whether it uses features or logits of a step, which are only valid until the next step is launched."""
    sees_all_steps = False
    """Whether it must also see steps after which it does not draft."""

    def begin(self, choice: NewChoice) -> None:  # noqa: B027 - most need nothing
        """A choice begins, or returns after preemption."""

    @abstractmethod
    def propose(self, step: TargetStep) -> list[DraftTree]:
        """A tree for each choice of the step, with at most `max_nodes` nodes."""

    def end(self, slot: int) -> None:  # noqa: B027
        """The choice in the slot has ended or was preempted."""


def share_out(missing: Sequence[int], most: int) -> list[int]:
    """How many of its missing tokens each choice processes now, at most `most` together.

    Choices that miss the fewest come first, so that a choice that is up to date keeps drafting while others catch up.
    """
    if sum(missing) <= most:
        return list(missing)
    shares = [0] * len(missing)
    for index in sorted(range(len(missing)), key=missing.__getitem__):
        shares[index] = min(missing[index], most)
        most -= shares[index]
    return shares

"""What a method of speculation has to do, and what it gets to know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import SamplingParams, Speculation
from model_runner.draft_tree import DraftTree
from model_runner.models.features import Feature
from model_runner.sampling.noise import Stream, noise_key


@dataclass(frozen=True, slots=True)
class NewChoice:
    """A choice whose drafts a proposer is to make from now on."""

    slot: int
    tokens: Sequence[int]
    """Prompt, and output if the choice is resumed. Grows as the choice does; not to be changed."""
    num_prompt: int
    num_computed: int
    """Leading tokens that the target need not compute, as others did."""
    blocks: Sequence[int]
    """Of keys and values; grows as the choice does."""
    sampling: SamplingParams
    speculation: Speculation
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ChoiceStep:
    """What a step brought one choice."""

    slot: int
    tokens: Sequence[int]
    """All that are known now. Not to be changed."""
    num_prompt: int
    num_new: int
    """How many of them are new; 0 while the prompt is being computed."""
    num_computed: int
    """Leading tokens whose keys and values are in `blocks`."""
    rows: Sequence[int]
    """Rows of the step's features for the tokens computed in it that stay, the last of num_computed, in order."""
    blocks: Sequence[int]
    max_nodes: int
    """How many nodes the tree may have; 0 if none is wanted."""
    sampling: SamplingParams
    sample: SampleRows | None = None
    """The drafts that the step verified, which are some of those proposed, in another order, and their rows of logits;
    None while the prompt is being computed."""
    draws: bool = False
    """Whether drafts are tested by rejection, so that they should be drawn from what the proposer believes: that is
    accepted most often. See DraftTree.drawn_from."""

    def noise_key(self, depth: int) -> int:
        """The key of the noise with which the target will draw the token `depth` ahead of the last known one.

        A proposer that draws its guesses with the same noise is right more often (arXiv:2408.07978). It may do so for
        choices that are verified by rejection, too: there the target uses other noise.
        """
        position = len(self.tokens) - self.num_prompt + depth - 1
        return noise_key(self.sampling.seed, self.sampling.choice, Stream.TARGET, position)


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What a step brought all choices of one proposer."""

    choices: Sequence[ChoiceStep]
    features: Mapping[Feature, Tensor]
    """Those that the proposer needs, [T, width] each, for all tokens of the step."""
    logits: Tensor  # [rows, vocab] float32
    """Where the model had to have them: after all prompts' ends, last known tokens and drafts; see `sample`."""

    def last(self, feature: Feature) -> Tensor:
        """[choices, width] of the last token that was computed of each choice."""
        return self.features[feature][[choice.rows[-1] for choice in self.choices]].float()


Embed = Callable[[Tensor], Tensor]
"""The target's embeddings [n, hidden] of token ids [n]."""


class Proposer(Protocol):
    """Suggests continuations. Decides how fast tokens come, never (in match mode) which.

    What is certain given the tokens (and the target's noise) may be guessed in any way. A proposer that draws at random
    says so in the tree (see DraftTree.drawn_from), or rejection sampling would not keep the target's distribution.
    """

    needs: frozenset[Feature]
    """What the target has to tell of the tokens that it computes."""
    reads_step: bool
    """Whether it looks at features or logits of a step, which last until the next one is launched."""
    sees_all_steps: bool
    """Whether it has to be told of steps after which it is not to draft, too."""

    def begin(self, choice: NewChoice) -> None:
        """A choice begins, or begins again after preemption."""
        ...

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """One tree for each choice of the step, of at most its `max_nodes`."""
        ...

    def end(self, slot: int) -> None:
        """The choice in the slot has ended or was preempted."""
        ...


def share_out(missing: Sequence[int], most: int) -> list[int]:
    """How many of the tokens that each choice still misses it takes in now: `most` of all of them together.

    Those that miss the least come first, so that a choice that has caught up goes on drafting while others catch up.
    """
    if sum(missing) <= most:
        return list(missing)
    shares = [0] * len(missing)
    for index in sorted(range(len(missing)), key=missing.__getitem__):
        shares[index] = min(missing[index], most)
        most -= shares[index]
    return shares

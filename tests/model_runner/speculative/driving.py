"""Runs one choice with a proposer and a target of few tokens, and checks every draft."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model_runner.batch import SampleRows
from model_runner.contract import SamplingParams, Speculation
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep

Target = Callable[[Sequence[int]], int]
"""Maps the tokens so far to the next token."""
Cut = Callable[[DraftTree], DraftTree]
"""Selects the part of a draft that is verified."""


def check_tree(tree: DraftTree, max_nodes: int) -> None:
    """Check the properties that every draft must have."""
    assert len(tree) <= max_nodes
    assert len(tree.tokens) == len(tree.parents) == len(tree.confidence)
    assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))
    assert len(tree.children()) == len(tree)
    assert all(0 <= confidence <= 1 for confidence in tree.confidence)


def markov(seed: int, vocab_size: int, order: int = 2) -> Target:
    """A target that repeats itself sooner or later: its next token depends on the last few."""

    def follow(tokens: Sequence[int]) -> int:
        return random.Random(f"{seed} {tuple(tokens[-order:])}").randrange(vocab_size)

    return follow


def all_of(tree: DraftTree) -> DraftTree:
    return tree


def random_cut(seed: int) -> Cut:
    """Some of the nodes, in another order, as the controller and the scheduler may choose them."""
    rng = random.Random(seed)

    def cut(tree: DraftTree) -> DraftTree:
        kept: list[int] = []
        for node, parent in enumerate(tree.parents):
            if (parent == ROOT or parent in kept) and rng.random() < 0.8:
                kept.append(node)
        depths = tree.depths()
        return tree.take(sorted(kept, key=lambda node: (depths[node], rng.random())))

    return cut


def new_choice(
    tokens: Sequence[int],
    num_prompt: int | None = None,
    *,
    slot: int = 0,
    prediction: Sequence[int] = (),
    salt: str = "",
    stops: Sequence[int] = (),
) -> NewChoice:
    return NewChoice(
        slot=slot,
        tokens=tokens,
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        num_computed=0,
        blocks=[],
        sampling=SamplingParams(temperature=0.0, stop_token_ids=tuple(stops)),
        speculation=Speculation("any", prediction=tuple(prediction)),
        cache_salt=salt,
    )


def choice_step(
    choice: NewChoice, num_new: int, max_nodes: int, sample: SampleRows | None = None, num_computed: int | None = None
) -> ChoiceStep:
    return ChoiceStep(
        slot=choice.slot,
        tokens=choice.tokens,
        num_prompt=choice.num_prompt,
        num_new=num_new,
        num_computed=len(choice.tokens) - 1 if num_computed is None else num_computed,
        rows=np.array([], dtype=np.int64),
        blocks=[],
        max_nodes=max_nodes,
        sampling=choice.sampling,
        sample=sample,
    )


def draft(proposer: Proposer, choice: NewChoice, max_nodes: int) -> DraftTree:
    """The proposer's draft after the choice's tokens, of which one is new."""
    step = TargetStep([choice_step(choice, 1, max_nodes)], {}, torch.zeros(0, 1))
    (tree,) = proposer.propose(step)
    check_tree(tree, max_nodes)
    return tree


@dataclass
class Run:
    """A choice that runs step by step."""

    proposer: Proposer
    target: Target
    vocab_size: int
    tokens: list[int]
    max_nodes: int
    cut: Cut = all_of
    num_steps: int = 0
    num_accepted: int = 0
    tree: DraftTree = NO_DRAFT
    choice: NewChoice = field(init=False)

    def begin(self, **more: object) -> "Run":
        self.choice = new_choice(self.tokens, **more)  # type: ignore[arg-type]
        self.proposer.begin(self.choice)
        return self

    def read_prompt(self, chunk: int) -> None:
        """Compute the prompt except its last token."""
        for computed in range(chunk, len(self.tokens) - 1, chunk):
            step = choice_step(self.choice, 0, 0, num_computed=computed)
            assert self.proposer.propose(TargetStep([step], {}, torch.zeros(0, 1))) == [NO_DRAFT]

    def take_step(self) -> None:
        """Verify the last draft and get another."""
        verified = self.cut(self.tree)
        paths = [[], *(verified.path(node) for node in range(len(verified)))]
        rows = [self.target([*self.tokens, *(verified.tokens[place] for place in path)]) for path in paths]
        logits = torch.nn.functional.one_hot(torch.tensor(rows), self.vocab_size).float()
        node, found = ROOT, [rows[0]]
        while (child := verified.children().get((node, found[-1]))) is not None:
            node = child
            found.append(rows[1 + node])
        self.tokens += found
        self.num_steps += 1
        self.num_accepted += len(found) - 1
        step = choice_step(self.choice, len(found), self.max_nodes, SampleRows(0, 0, verified))
        (self.tree,) = self.proposer.propose(TargetStep([step], {}, logits))
        check_tree(self.tree, self.max_nodes)

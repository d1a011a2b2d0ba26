"""A proposer that knows the answers, and mixes them with nonsense: trees of every shape, accepted to every depth."""

import random
from collections.abc import Mapping, Sequence

from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.features import Feature
from model_runner.speculative.proposer import ChoiceStep, NewChoice, TargetStep


class KnowingProposer:
    """Drafts random trees, most of which hold some of the right continuation, found by prompt and choice."""

    needs: frozenset[Feature] = frozenset()
    reads_step = True
    sees_all_steps = True

    def __init__(self, vocab_size: int) -> None:
        self.answers: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}
        self.running: set[int] = set()
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    def learn(self, answers: Mapping[tuple[tuple[int, ...], int], Sequence[int]]) -> None:
        self.answers.update(answers)

    def begin(self, choice: NewChoice) -> None:
        assert choice.slot not in self.running
        self.running.add(choice.slot)

    def end(self, slot: int) -> None:
        self.running.remove(slot)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        return [self._tree(choice) if choice.max_nodes else NO_DRAFT for choice in step.choices]

    def _tree(self, choice: ChoiceStep) -> DraftTree:
        """Some of the answer as a chain, wrong nodes hung on at random; random confidences decide their order."""
        prompt = tuple(choice.tokens[: choice.num_prompt])
        answer = self.answers.get((prompt, choice.sampling.choice), ())
        right = self._random.randint(0, choice.max_nodes)
        tokens = list(answer[len(choice.tokens) - choice.num_prompt :][:right])
        parents = list(range(ROOT, len(tokens) - 1))
        while len(tokens) < choice.max_nodes and self._random.random() < 0.9:
            parent, token = self._random.randint(ROOT, len(tokens) - 1), self._random.randrange(self._vocab_size)
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
        return DraftTree(tuple(tokens), tuple(parents), tuple(self._random.random() for _ in tokens))

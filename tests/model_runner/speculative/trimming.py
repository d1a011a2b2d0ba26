"""Drafts as a Speculator passes them on, after they have competed for rows."""

from collections.abc import Sequence

import torch

from model_runner.contract import AdmittedRequest, ScheduledRequest, Speculation
from model_runner.draft_tree import DraftTree
from model_runner.speculative.controller import DraftOffer, SpeculationController
from model_runner.speculative.proposer import ChoiceStep, Feature, NewChoice, TargetStep
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.step_times import StepLoad

from .worlds import PROMPT, Drafter, Said


class FixedController(SpeculationController):
    """Verifies what has at least this survival."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self._least = least

    def choose(self, load: StepLoad, offers: Sequence[DraftOffer]) -> list[int]:
        return [sum(value >= self._least for value in offer.survival) for offer in offers]

    def num_wanted(self, method: str, load: StepLoad, choices: int, most: int) -> int:
        return most


class Repeating:
    """Proposes what it is given."""

    needs: frozenset[Feature] = frozenset()
    reads_step = True
    sees_all_steps = True

    def __init__(self) -> None:
        self.next = DraftTree()

    def begin(self, choice: NewChoice) -> None:
        pass

    def propose(self, step: TargetStep) -> list[DraftTree]:
        return [self.next for _ in step.choices]

    def end(self, slot: int) -> None:
        pass


class Trimmed:
    """Trees of another drafter, cut as the speculator cuts them."""

    def __init__(self, draft: Drafter, least: float) -> None:
        self._draft = draft
        self._proposer = Repeating()
        self._speculator = Speculator({"method": self._proposer}, FixedController(least), 64)

    def __call__(self, said: Said) -> DraftTree:
        admitted = AdmittedRequest(
            "", PROMPT, len(PROMPT), 0, (), said.params, Speculation("method", None, said.verify)
        )
        self._proposer.next = self._draft(said)
        self._speculator.begin(0, said.tokens, (), admitted)
        load = StepLoad(1, 1, 1)
        self._speculator.begin_cycle(load, [0])
        offered = self._speculator.propose(load, TargetStep([_step(said)], {}, torch.empty(0)))[0]
        (tree,) = self._speculator.drafts(load, [0], [ScheduledRequest("", 1, (), offered)])
        self._speculator.end(0)
        return tree


def _step(said: Said) -> ChoiceStep:
    return ChoiceStep(0, said.tokens, len(PROMPT), 1, len(said.tokens) - 1, (0,), (), 0, said.params, None)

"""Everything about speculation that is not the forward pass: who drafts for whom, how much, and how it went."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import AdmittedRequest, ScheduledRequest, Speculation, SpeculationStats
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.models.features import Feature
from model_runner.speculative.budget import Budget, StepLoad
from model_runner.speculative.calibration import Calibration
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep
from model_runner.speculative.rejection import blind_confidence
from model_runner.speculative.verify import Verdict


@dataclass(slots=True)
class _Speculating:
    """A choice that speculates."""

    speculation: Speculation
    draft: DraftTree = NO_DRAFT
    """For its next step, most probable nodes first."""
    survival: list[float] = field(default_factory=list)
    """Of each node of the draft: the probability to become output."""


@dataclass(slots=True)
class _Tally:
    """Counts of one method; see SpeculationStats."""

    drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    verified_by_depth: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def count(self, depths: Sequence[int], accepted: int) -> None:
        deepest = max(depths)
        for counts in (self.accepted_by_depth, self.verified_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
        for depth in range(min(accepted + 1, deepest)):
            self.verified_by_depth[depth] += 1


class Speculator:
    """Asks each choice's proposer for drafts, lets them compete for the step's budget and keeps the statistics."""

    def __init__(self, proposers: Mapping[str, Proposer], budget: Budget, max_nodes: int) -> None:
        """
        Args:
            proposers: by the names that requests use.
            budget: decides for choices that do not ask for a number of draft tokens themselves.
            max_nodes: of one choice in one step.
        """
        self._proposers: dict[str, Proposer] = {}
        self._budget = budget
        self._max_nodes = max_nodes
        self._choices: dict[int, _Speculating] = {}
        self._calibrations: dict[str, Calibration] = {}
        self._tallies: dict[str, _Tally] = {}
        for method, proposer in proposers.items():
            self.add(method, proposer)

    def add(self, method: str, proposer: Proposer) -> None:
        """Let choices use another method."""
        self._proposers[method] = proposer
        self._calibrations[method] = Calibration()
        self._tallies[method] = _Tally()

    @property
    def methods(self) -> tuple[str, ...]:
        """The names that requests can use."""
        return tuple(sorted(self._proposers))

    def begin(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], admitted: AdmittedRequest) -> None:
        """A choice starts; `tokens` and `blocks` are the lists that grow with it."""
        speculation = admitted.speculation
        if speculation is None:
            return
        self._choices[slot] = _Speculating(speculation)
        self._proposers[speculation.method].begin(
            NewChoice(
                slot=slot,
                tokens=tokens,
                num_prompt=admitted.num_prompt,
                num_computed=admitted.num_computed,
                blocks=blocks,
                sampling=admitted.sampling,
                speculation=speculation,
                cache_salt=admitted.cache_salt,
            )
        )

    def end(self, slot: int) -> None:
        """A choice has ended, or was preempted."""
        choice = self._choices.pop(slot, None)
        if choice is not None:
            self._proposers[choice.speculation.method].end(slot)

    def drafts(self, load: StepLoad, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """What each scheduled choice verifies in this step: what it insists on, and the best that the budget allows."""
        granted = [self._granted(slot, entry) for slot, entry in zip(slots, scheduled, strict=True)]
        fixed = sum(len(draft.tokens) for draft, survival in granted if survival is None)
        offers = [survival for _, survival in granted if survival]
        least = self._least_survival(StepLoad(load.rows + fixed, load.context, load.num_ready), offers)
        trees = []
        for draft, survival in granted:
            count = len(draft) if survival is None else sum(s >= least for s in survival)
            trees.append(draft.first(count))
        self._observe_choice(slots, granted, trees)
        return trees

    def _granted(self, slot: int, entry: ScheduledRequest) -> tuple[DraftTree, list[float] | None]:
        """The draft for which there is room, and the survival of its nodes if they have to compete."""
        choice = self._choices.get(slot)
        if choice is None or entry.num_draft == 0:
            return NO_DRAFT, []
        insists = choice.speculation.num_tokens is not None
        return choice.draft.first(entry.num_draft), None if insists else choice.survival[: entry.num_draft]

    def _least_survival(self, load: StepLoad, offers: Sequence[Sequence[float]]) -> float:
        """Nodes with at least this survival are worth their time."""
        if not offers:
            return 2.0
        candidates = np.sort(np.concatenate([np.asarray(offer) for offer in offers]))[::-1]
        count = self._budget.choose(load, candidates)
        return float(candidates[count - 1]) if count else 2.0

    def _observe_choice(
        self,
        slots: Sequence[int],
        granted: Sequence[tuple[DraftTree, list[float] | None]],
        trees: Sequence[DraftTree],
    ) -> None:
        chosen: dict[str, list[list[float]]] = {}
        for slot, (draft, survival), tree in zip(slots, granted, trees, strict=True):
            if draft and survival is not None:
                chosen.setdefault(self._choices[slot].speculation.method, []).append(survival[: len(tree)])
        for method, survivals in chosen.items():
            self._budget.observe_drafts(method, len(survivals), [s for of_choice in survivals for s in of_choice])

    def observe(
        self, load: StepLoad, batch: Batch, slots: Sequence[int], verdicts: Sequence[Verdict], seconds: float
    ) -> None:
        """Take in how the drafts of a step did.

        Args:
            load: the step without drafts.
            batch: the step.
            slots: of the choices in `batch.samples`.
            verdicts: on them.
            seconds: of the forward pass and of drawing the tokens.
        """
        num_draft = sum(len(sample.tree) for sample in batch.samples)
        self._budget.observe_step(load, num_draft, seconds)
        for sample, slot, verdict in zip(batch.samples, slots, verdicts, strict=True):
            if not sample.tree:
                continue
            method = self._choices[slot].speculation.method
            tally = self._tallies[method]
            tally.drafted += len(sample.tree)
            tally.steps += 1
            tally.tokens += len(verdict.tokens)
            tally.verify_s += seconds * (1 + len(sample.tree)) / (load.rows + num_draft)
            tally.count(sample.tree.depths(), len(verdict.nodes))
            self._calibrate(method, sample.tree, verdict)

    def _calibrate(self, method: str, tree: DraftTree, verdict: Verdict) -> None:
        calibration = self._calibrations[method]
        accepted = {ROOT, *verdict.nodes}
        for node, (parent, confidence) in enumerate(zip(tree.parents, tree.confidence, strict=True)):
            if parent in accepted:
                calibration.observe(confidence, accepted=node in accepted)

    def has(self, slot: int) -> bool:
        """Whether the choice in this slot speculates."""
        return slot in self._choices

    def propose(
        self, load: StepLoad, steps: Sequence[ChoiceStep], features: Mapping[Feature, Tensor]
    ) -> dict[int, int]:
        """Have drafts made for the next step; returns for each slot how many nodes its choice would like to verify.

        Args:
            load: what the next step would be if only these choices ran.
            steps: what this step brought the choices that speculate; `max_nodes` is filled in here.
            features: of all tokens of this step.
        """
        groups: dict[str, list[ChoiceStep]] = {}
        for step in steps:
            groups.setdefault(self._choices[step.slot].speculation.method, []).append(step)
        for method, group in groups.items():
            self._propose_by(method, load, group, features)
        return {step.slot: len(self._choices[step.slot].draft) for step in steps}

    def _propose_by(
        self, method: str, load: StepLoad, group: Sequence[ChoiceStep], features: Mapping[Feature, Tensor]
    ) -> None:
        wanted = self._budget.wants(method, load, sum(step.num_new > 0 for step in group))
        steps = [replace(step, max_nodes=self._max_nodes_of(step, wanted=wanted)) for step in group]
        start = time.perf_counter()
        trees = self._proposers[method].propose(TargetStep(steps, features))
        seconds = time.perf_counter() - start
        self._tallies[method].draft_s += seconds
        if any(step.max_nodes for step in steps):
            self._budget.observe_drafting(method, seconds)
        for step, tree in zip(steps, trees, strict=True):
            self._store(self._choices[step.slot], method, tree.first(step.max_nodes))

    def _max_nodes_of(self, step: ChoiceStep, *, wanted: bool) -> int:
        asked = self._choices[step.slot].speculation.num_tokens
        if step.num_new == 0 or (asked is None and not wanted):
            return 0
        return self._max_nodes if asked is None else min(asked, self._max_nodes)

    def _store(self, choice: _Speculating, method: str, tree: DraftTree) -> None:
        """Keep a draft, most probable nodes first: no node is more probable than its parent, so it stays after it.

        Rejection sampling is exact only if nothing that was drawn decides what is verified. So drawn nodes keep their
        order, and neither their tokens nor their proposer's confidence, but only their places in the tree say what they
        are worth.
        """
        is_blind = choice.speculation.verify == "rejection" and tree.drawn_from is not None
        if is_blind:
            tree = replace(tree, confidence=blind_confidence(tree))
        calibration = self._calibrations[method]
        survival: list[float] = []
        for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
            probability = calibration.probability(confidence)
            survival.append(probability if parent == ROOT else survival[parent] * probability)
        if is_blind:
            survival = list(accumulate(survival, min))
        order = sorted(range(len(tree)), key=lambda node: -survival[node])  # stable
        choice.draft = tree.take(order)
        choice.survival = [survival[node] for node in order]

    def stats(self) -> tuple[SpeculationStats, ...]:
        """Of the methods that made drafts so far."""
        return tuple(
            SpeculationStats(
                method=method,
                drafted=tally.drafted,
                accepted_by_depth=tuple(tally.accepted_by_depth),
                verified_by_depth=tuple(tally.verified_by_depth),
                steps=tally.steps,
                tokens=tally.tokens,
                draft_s=tally.draft_s,
                verify_s=tally.verify_s,
            )
            for method, tally in self._tallies.items()
            if tally.drafted
        )

"""Everything about speculation that is not the forward pass: who drafts for whom, how much, and how it went."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from model_runner.batch import SampleRows
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, Speculation
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.info import SpeculationStats
from model_runner.speculative import auto
from model_runner.speculative.budget import Budget, StepLoad
from model_runner.speculative.calibration import Calibration
from model_runner.speculative.grammar import MatcherOf, prune
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep
from model_runner.speculative.rejection import blind_confidence
from model_runner.speculative.tally import Tally
from model_runner.speculative.verify import Verdict


@dataclass(slots=True)
class _Speculating:
    """A choice that speculates."""

    speculation: Speculation
    methods: tuple[str, ...]
    """Those that draft for it, in the order in which they are asked."""
    asked: list[str] = field(default_factory=list)
    """Those that were asked for the next step's draft."""
    made_by: str = ""
    """The one whose draft it is."""
    draft: DraftTree = NO_DRAFT
    """For its next step, most probable nodes first."""
    survival: list[float] = field(default_factory=list)
    """Of each node of the draft: the probability to become output."""

    @property
    def competes(self) -> bool:
        """Whether the budget decides how many of its drafts are verified."""
        return self.speculation.num_tokens is None

    def start_over(self) -> None:
        """Forget the draft."""
        self.asked, self.made_by, self.draft, self.survival = [], "", NO_DRAFT, []


class Speculator:
    """Asks each choice's proposers for drafts, lets them compete for the step's budget and keeps the statistics.

    Calibration, record and statistics belong to the method that made a draft, also where auto chose it.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        budget: Budget,
        max_nodes: int,
        heads: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        matcher_of: MatcherOf = lambda slot: None,
    ) -> None:
        """
        Args:
            proposers: by the names that requests use.
            budget: decides for choices that do not ask for a number of draft tokens themselves.
            max_nodes: of one choice in one step.
            heads: the method that auto asks where the quick ones find too little.
            clock: seconds, to time proposers with.
            matcher_of: the slots' grammars, which rule out drafts.
        """
        self._proposers: dict[str, Proposer] = {}
        self._budget = budget
        self._max_nodes = max_nodes
        self._heads = heads
        self._clock = clock
        self._matcher_of = matcher_of
        self._choices: dict[int, _Speculating] = {}
        self._calibrations: dict[str, Calibration] = {}
        self._tallies: dict[str, Tally] = {}
        for method, proposer in proposers.items():
            self.add(method, proposer)

    def add(self, method: str, proposer: Proposer) -> None:
        """Let choices use another method."""
        self._proposers[method] = proposer
        self._calibrations[method] = Calibration()
        self._tallies[method] = Tally()

    def warm_up(self, step: TargetStep) -> None:
        """Have trained heads draft after a first step of one choice: to compile kernels takes seconds on a GPU.

        Nothing of it is booked, so their time counts from the first draft of a request on.
        """
        (first,) = step.choices
        asked = replace(step, choices=[replace(first, max_nodes=self._max_nodes)])
        tokens, blocks = tuple(first.tokens), tuple(first.blocks)
        for method, proposer in self._proposers.items():
            if proposer.needs:
                speculation = Speculation(method)
                admitted = AdmittedRequest("", tokens, first.num_prompt, 0, blocks, first.sampling, speculation)
                self.begin(first.slot, first.tokens, first.blocks, admitted)
                proposer.propose(asked)
                self.end(first.slot)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names that requests can use."""
        has_auto = auto.members(Speculation(auto.AUTO), self._proposers, self._heads)
        return tuple(sorted({*self._proposers, *([auto.AUTO] if has_auto else [])}))

    def begin(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], admitted: AdmittedRequest) -> None:
        """A choice starts; `tokens` and `blocks` are the lists that grow with it."""
        speculation = admitted.speculation
        if speculation is None:
            return
        methods = auto.members(speculation, self._proposers, self._heads, is_held=admitted.sampling.grammar is not None)
        choice = self._choices[slot] = _Speculating(speculation, methods)
        new = NewChoice(
            slot=slot,
            tokens=tokens,
            num_prompt=admitted.num_prompt,
            num_computed=admitted.num_computed,
            blocks=blocks,
            sampling=admitted.sampling,
            speculation=speculation,
            cache_salt=admitted.cache_salt,
        )
        for method in choice.methods:
            self._proposers[method].begin(new)

    def end(self, slot: int) -> None:
        """A choice has ended, or was preempted."""
        choice = self._choices.pop(slot, None)
        if choice is not None:
            for method in choice.methods:
                self._proposers[method].end(slot)

    def forget_draft(self, slot: int) -> None:
        """The choice's next step verifies nothing."""
        if slot in self._choices:
            self._choices[slot].start_over()

    # -- before the forward pass ---------------------------------------------------------------------------------------

    def drafts(self, load: StepLoad, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """What each scheduled choice verifies in this step: what it insists on, and the best that the budget allows."""
        granted = [self._granted(slot, entry) for slot, entry in zip(slots, scheduled, strict=True)]
        fixed = sum(len(draft) for draft, survival in granted if survival is None)
        counts = self._share_out(load.plus(fixed), [survival or [] for _, survival in granted])
        trees = []
        for (draft, survival), count in zip(granted, counts, strict=True):
            trees.append(draft if survival is None else draft.first(count))
        return trees

    def _granted(self, slot: int, entry: ScheduledRequest) -> tuple[DraftTree, list[float] | None]:
        """The draft for which there is room, and the survival of its nodes if they have to compete."""
        choice = self._choices.get(slot)
        if choice is None or entry.num_draft == 0:
            return NO_DRAFT, []
        return choice.draft.first(entry.num_draft), choice.survival[: entry.num_draft] if choice.competes else None

    def _share_out(self, load: StepLoad, offers: Sequence[Sequence[float]]) -> list[int]:
        """How many nodes of each offer are worth their time. Offers descend, so the first ones are the best of each."""
        survival = np.array([value for offer in offers for value in offer])
        if not len(survival):
            return [0] * len(offers)
        order = np.argsort(-survival, kind="stable")
        best = order[: self._budget.choose(load, survival[order])]
        owner = np.repeat(np.arange(len(offers)), [len(offer) for offer in offers])
        counts: list[int] = np.bincount(owner[best], minlength=len(offers)).tolist()
        return counts

    # -- after it ------------------------------------------------------------------------------------------------------

    def observe(
        self,
        load: StepLoad,
        samples: Sequence[SampleRows],
        slots: Sequence[int],
        verdicts: Sequence[Verdict],
        seconds: float,
    ) -> None:
        """Take in how the drafts of a step did.

        Args:
            load: the step without drafts.
            samples: the choices that the target's walk decided for, with their drafts.
            slots: of the same choices.
            verdicts: on them.
            seconds: of the forward pass and of drawing the tokens.
        """
        num_draft = sum(len(sample.tree) for sample in samples)
        chosen = [
            (len(sample.tree), len(verdict.nodes))
            for sample, slot, verdict in zip(samples, slots, verdicts, strict=True)
            if sample.tree and self._choices[slot].competes
        ]
        num_chosen = sum(nodes for nodes, _ in chosen)
        num_accepted = sum(accepted for _, accepted in chosen)
        self._budget.observe_step(load.plus(num_draft - num_chosen), num_chosen, num_accepted, seconds)
        for sample, slot, verdict in zip(samples, slots, verdicts, strict=True):
            if sample.tree:
                method = self._choices[slot].made_by
                share = (1 + len(sample.tree)) / (load.rows + num_draft)
                self._tallies[method].count(sample.tree, verdict, seconds * share)
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

    def reads_step(self, slots: Sequence[int]) -> bool:
        """Whether a proposer of these choices looks at features or logits of their steps."""
        choices = [self._choices[slot] for slot in slots if slot in self._choices]
        return any(self._proposers[method].reads_step for choice in choices for method in choice.methods)

    def propose(self, load: StepLoad, step: TargetStep) -> dict[int, int]:
        """Have drafts made for the next step; returns for each slot how many nodes its choice would like to verify.

        Args:
            load: what the next step would be if only these choices ran.
            step: what this step brought the choices that speculate; `max_nodes` is filled in here.
        """
        groups: dict[str, list[ChoiceStep]] = {}
        for of_choice in step.choices:
            choice = self._choices[of_choice.slot]
            choice.start_over()
            for method in choice.methods:
                groups.setdefault(method, []).append(of_choice)
        for method in sorted(groups, key=auto.turn):
            self._propose_by(method, load, replace(step, choices=groups[method]))
        self._observe_offers(step.choices)
        return {of_choice.slot: len(self._choices[of_choice.slot].draft) for of_choice in step.choices}

    def _observe_offers(self, steps: Sequence[ChoiceStep]) -> None:
        """Book what every method that was asked brought: its draft, or nothing where another one was better."""
        offers: dict[str, list[Sequence[float]]] = {}
        for step in steps:
            choice = self._choices[step.slot]
            if choice.competes:
                for method in choice.asked:
                    offers.setdefault(method, []).append(choice.survival if method == choice.made_by else ())
        for method, of_method in offers.items():
            self._budget.observe_offers(method, of_method)

    def _propose_by(self, method: str, load: StepLoad, step: TargetStep) -> None:
        """Let a method see what the step brought all its choices, and draft for those that still look for a draft."""
        choices = self._with_max_nodes(method, load, step.choices)
        start = self._clock()
        trees = self._proposers[method].propose(replace(step, choices=choices))
        seconds = self._clock() - start
        self._tallies[method].draft_s += seconds
        if any(choice.max_nodes for choice in choices):
            self._budget.observe_drafting(method, seconds)
        for choice, tree in zip(choices, trees, strict=True):
            if choice.max_nodes:
                self._store(self._choices[choice.slot], method, self._possible(choice, tree.first(choice.max_nodes)))

    def _possible(self, choice: ChoiceStep, tree: DraftTree) -> DraftTree:
        """The draft without what the choice's grammar rules out, if it has one."""
        matcher = self._matcher_of(choice.slot) if tree else None
        return tree if matcher is None else prune(tree, matcher)

    def _with_max_nodes(self, method: str, load: StepLoad, steps: Sequence[ChoiceStep]) -> list[ChoiceStep]:
        rival = self._budget.expected_gain(method)
        looking = {
            step.slot: self._choices[step.slot]
            for step in steps
            if step.num_new and not auto.is_promising(sum(self._choices[step.slot].survival), rival)
        }
        competing = sum(choice.competes for choice in looking.values())
        wanted = competing > 0 and self._budget.wants(method, load, competing)
        max_nodes = {slot: self._max_nodes_of(choice, wanted=wanted) for slot, choice in looking.items()}
        return [
            replace(step, max_nodes=max_nodes.get(step.slot, 0), draws=self._draws(step.slot, step.sampling))
            for step in steps
        ]

    def _draws(self, slot: int, sampling: SamplingParams) -> bool:
        return self._choices[slot].speculation.verify == "rejection" and sampling.temperature > 0

    def _max_nodes_of(self, choice: _Speculating, *, wanted: bool) -> int:
        asked = choice.speculation.num_tokens
        if asked is None:
            return self._max_nodes if wanted else 0
        return min(asked, self._max_nodes)

    def _store(self, choice: _Speculating, method: str, tree: DraftTree) -> None:
        """Keep the better draft, most probable nodes first. Stable, so parents, never less probable, stay in front.

        Rejection sampling is exact only if nothing that was drawn decides what is verified. So drawn nodes keep their
        order, and neither their tokens nor their proposer's confidence, but only their places in the tree say what they
        are worth.
        """
        choice.asked.append(method)
        is_blind = choice.speculation.verify == "rejection" and tree.drawn_from is not None
        if is_blind:
            tree = replace(tree, confidence=blind_confidence(tree))
        probability = self._calibrations[method].probability
        survival = tree.survival([probability(confidence) for confidence in tree.confidence])
        if is_blind:
            survival = list(accumulate(survival, min))
        if sum(survival) > sum(choice.survival):
            order = sorted(range(len(tree)), key=lambda node: -survival[node])
            choice.made_by = method
            choice.draft = tree.take(order)
            choice.survival = [survival[node] for node in order]

    def stats(self) -> tuple[SpeculationStats, ...]:
        """Of the methods that made drafts so far."""
        stats = (tally.stats(method) for method, tally in self._tallies.items())
        return tuple(of_method for of_method in stats if of_method.drafted)

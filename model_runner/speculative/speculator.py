"""Everything about speculation that is not the forward pass: who drafts for whom, how much, and how it went."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import inf

from model_runner.batch import SampleRows
from model_runner.contract import AdmittedRequest, ScheduledRequest, Speculation
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.runner_interface import SpeculationStats
from model_runner.speculative.controller import DraftOffer, SpeculationController
from model_runner.speculative.grammar import MatcherOf, prune
from model_runner.speculative.methods import AUTO, is_promising, members, turn
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep
from model_runner.speculative.step_times import StepLoad
from model_runner.speculative.verify import Verdict, blind_confidence


@dataclass(slots=True)
class _Speculating:
    """A choice that speculates."""

    speculation: Speculation
    methods: tuple[str, ...]
    """Those that draft for it, in the order in which they are asked."""
    rows_of_node: int
    """In a step: one, and another one if the choice has a guide, which computes the same drafts."""
    patience: float = 0.0
    """See SpeculationController.patience."""
    made_by: str = ""
    """The one whose draft it is."""
    draft: DraftTree = NO_DRAFT
    """For its next step, most probable nodes first."""
    survival: list[float] = field(default_factory=list)
    """Of each node of the draft: the probability to become output."""

    @property
    def competes(self) -> bool:
        """Whether the controller decides how many of its drafts are verified."""
        return self.speculation.num_tokens is None

    def start_over(self) -> None:
        """Forget the draft."""
        if self.draft:
            self.made_by, self.draft, self.survival = "", NO_DRAFT, []


class _Counts:
    """Counts of one method since the start; see SpeculationStats."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted_by_depth: list[int] = []
        self._verified_by_depth: list[int] = []
        self._steps = 0
        self._tokens = 0
        self.draft_s = 0.0
        self._verify_s = 0.0

    def count(self, tree: DraftTree, verdict: Verdict, seconds: float) -> None:
        """A choice's drafts were verified, in its share of the step's time."""
        accepted, deepest = len(verdict.nodes), max(tree.depths())
        self._drafted += len(tree)
        self._steps += 1
        self._tokens += len(verdict.tokens)
        self._verify_s += seconds
        for counts in (self._accepted_by_depth, self._verified_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(accepted):
            self._accepted_by_depth[depth] += 1
        for depth in range(min(accepted + 1, deepest)):
            self._verified_by_depth[depth] += 1

    def stats(self, method: str) -> SpeculationStats:
        """The counts under the method's name."""
        return SpeculationStats(
            method=method,
            drafted=self._drafted,
            accepted_by_depth=tuple(self._accepted_by_depth),
            verified_by_depth=tuple(self._verified_by_depth),
            steps=self._steps,
            tokens=self._tokens,
            draft_s=self.draft_s,
            verify_s=self._verify_s,
        )


class Speculator:
    """Asks each choice's proposers for drafts, lets them compete for the step's controller and keeps the statistics.

    Calibration, record and statistics belong to the method that made a draft, also where auto chose it.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        controller: SpeculationController,
        max_nodes: int,
        heads: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        matcher_of: MatcherOf = lambda slot: None,
    ) -> None:
        """
        Args:
            proposers: by the names that requests use.
            controller: decides for choices that do not ask for a number of draft tokens themselves.
            max_nodes: of one choice in one step.
            heads: the method that auto asks where the quick ones find too little.
            clock: seconds, to time proposers with.
            matcher_of: the slots' grammars, which rule out drafts.
        """
        self._proposers: dict[str, Proposer] = {}
        self._controller = controller
        self._max_nodes = max_nodes
        self._heads = heads
        self._clock = clock
        self._matcher_of = matcher_of
        self._choices: dict[int, _Speculating] = {}
        self._counts: dict[str, _Counts] = {}
        self._cycle_start = 0.0
        """When drafting began last, ..."""
        self._in_cycle: set[int] = set()
        """... and the slots for which that was, but those that ended since."""
        self._rest = 0
        """In so many next cycles nobody drafts if ..."""
        self._resting: tuple[list[int], int] = ([], 0)
        """... they are for these slots and as many choices that get a token."""
        self._num_rested = 0
        """Cycles in which nobody drafted since the last one that the controller knows of."""
        for method, proposer in proposers.items():
            self.add(method, proposer)

    def add(self, method: str, proposer: Proposer) -> None:
        """Let choices use another method."""
        self._proposers[method] = proposer
        self._counts[method] = _Counts()

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
        has_auto = members(Speculation(AUTO), self._proposers, self._heads)
        return tuple(sorted({*self._proposers, *([AUTO] if has_auto else [])}))

    def begin(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], admitted: AdmittedRequest) -> None:
        """A choice starts; `tokens` and `blocks` are the lists that grow with it."""
        self._rest = 0
        speculation = admitted.speculation
        if speculation is None:
            return
        methods = members(speculation, self._proposers, self._heads, is_held=admitted.sampling.grammar is not None)
        rows_of_node = 1 if admitted.sampling.guidance is None else 2
        choice = self._choices[slot] = _Speculating(speculation, methods, rows_of_node)
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
        self._rest = 0
        self._in_cycle.discard(slot)
        choice = self._choices.pop(slot, None)
        if choice is not None:
            for method in choice.methods:
                self._proposers[method].end(slot)

    def give_up(self, slots: Collection[int]) -> None:
        """These choices go on without speculation, and nothing is learnt from the cycle in which that was decided."""
        for slot in slots:
            self.end(slot)
        self._in_cycle.clear()

    def forget_draft(self, slot: int) -> None:
        """The choice's next step verifies nothing."""
        if slot in self._choices:
            self._choices[slot].start_over()

    # -- before the forward pass ---------------------------------------------------------------------------------------

    def drafts(self, load: StepLoad, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """The drafts that each scheduled choice verifies: all that it insists on, or what the controller chooses."""
        trees, offers, fixed = [], [], 0
        for slot, entry in zip(slots, scheduled, strict=True):
            choice = self._choices.get(slot)
            draft = NO_DRAFT if choice is None else choice.draft.first(entry.num_draft)
            trees.append(draft)
            if choice is None:
                offers.append(DraftOffer(patience=inf))
            elif choice.competes:
                is_cut = len(draft) < len(choice.draft)
                patience = choice.patience if load.num_ready > 1 else inf  # nobody waits for the drafts of others
                offers.append(DraftOffer(choice.survival[: len(draft)], choice.rows_of_node, patience, is_cut))
            else:
                offers.append(DraftOffer(patience=choice.patience))
                fixed += len(draft) * choice.rows_of_node
        if load.num_ready > sum(slot in self._choices for slot in slots):
            offers.append(DraftOffer())  # for those that do not speculate, guides and prompts not among them
        counts = self._controller.choose(load.plus(fixed), offers)
        return [
            tree.first(count) if offer.survival else tree
            for tree, offer, count in zip(trees, offers, counts, strict=False)
        ]

    def made_by(self, slots: Sequence[int]) -> list[str]:
        """The methods that made the drafts of these slots for this cycle; empty where there are none."""
        return [self._choices[slot].made_by if slot in self._choices else "" for slot in slots]

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
        fixed = chosen = gained = 0
        parts = list(zip(samples, map(self._choices.get, slots), verdicts, strict=True))
        for sample, choice, verdict in parts:
            if choice is not None and sample.tree:
                num_rows = len(sample.tree) * choice.rows_of_node
                if choice.competes:
                    chosen += num_rows
                    gained += len(verdict.nodes)
                else:
                    fixed += num_rows
        time = self._controller.observe_step(load.plus(fixed), chosen, gained)
        share = seconds / max(1, load.rows + fixed + chosen)  # an empty step only releases choices
        for sample, choice, verdict in parts:
            if choice is None:
                continue
            if load.num_ready > 1:
                choice.patience = self._controller.patience(choice.patience, len(verdict.tokens), time)
            else:
                choice.patience = max(choice.patience, 0.0)
            if sample.tree:
                num_rows = 1 + len(sample.tree)
                self._counts[choice.made_by].count(sample.tree, verdict, share * num_rows * choice.rows_of_node)
                self._calibrate(choice.made_by, sample.tree, verdict)

    def _calibrate(self, method: str, tree: DraftTree, verdict: Verdict) -> None:
        calibration = self._controller.stats[method].calibration
        accepted = {ROOT, *verdict.nodes}
        for node, (parent, confidence) in enumerate(zip(tree.parents, tree.confidence, strict=True)):
            if parent in accepted:
                calibration.observe(confidence, accepted=node in accepted)

    def reads_step(self, slots: Sequence[int]) -> bool:
        """Whether a proposer of these choices looks at features or logits of their steps."""
        choices = [self._choices[slot] for slot in slots if slot in self._choices]
        return any(self._proposers[method].reads_step for choice in choices for method in choice.methods)

    def begin_cycle(self, load: StepLoad, slots: Sequence[int]) -> set[int]:
        """Drafting for the next step begins, and the cycle of the last one ends.

        Args:
            load: what the next step would be if only these choices ran.
            slots: of the choices of the last step.

        Returns:
            The slots of those choices whose proposers have to be told what the last step brought: see `propose`.
        """
        now = self._clock()
        if not self._in_cycle.isdisjoint(slots):  # else the engine may have had nothing to do
            self._controller.end_cycle(now - self._cycle_start)
        self._in_cycle.clear()
        if self._rest and (list(slots), load.num_ready) == self._resting:
            self._rest -= 1
            self._num_rested += 1
            return set()
        choices = {slot: self._choices[slot] for slot in slots if slot in self._choices}
        self._cycle_start = now
        self._in_cycle.update(choices)
        all_bear = all(choice.patience >= 0 for choice in choices.values())
        self._controller.begin_cycle(load, all_bear=all_bear, num_rested=self._num_rested)
        self._num_rested = 0
        told, self._rest = self._told(load, choices)
        self._resting = list(slots), load.num_ready
        for choice in choices.values():
            choice.start_over()
        return told

    def _told(self, load: StepLoad, choices: Mapping[int, _Speculating]) -> tuple[set[int], int]:
        """See `begin_cycle`; and for how many further cycles it is known that nobody drafts."""
        asking = {method for choice in choices.values() if choice.competes for method in choice.methods}
        rests = {
            method: 0 if self._proposers[method].sees_all_steps else self._controller.rest(method) for method in asking
        }
        told = {
            slot
            for slot, choice in choices.items()
            if not (choice.competes and all(rests[method] for method in choice.methods))
        }
        return told, 0 if told else min(rests.values(), default=1) - 1

    def propose(self, load: StepLoad, step: TargetStep) -> dict[int, int]:
        """Have drafts made for the next step; returns for each slot how many nodes its choice would like to verify.

        Args:
            load: as for `begin_cycle`.
            step: what the last step brought the choices that `begin_cycle` named; `max_nodes` is filled in here.
        """
        groups: dict[tuple[str, ...], list[ChoiceStep]] = {}
        for of_choice in step.choices:
            groups.setdefault(self._choices[of_choice.slot].methods, []).append(of_choice)
        for method in sorted({method for methods in groups for method in methods}, key=turn):
            of_method = [steps for methods, steps in groups.items() if method in methods]
            self._propose_by(method, load, replace(step, choices=list(chain.from_iterable(of_method))))
        return {of_choice.slot: len(self._choices[of_choice.slot].draft) for of_choice in step.choices}

    def _propose_by(self, method: str, load: StepLoad, step: TargetStep) -> None:
        """Let a method see what the step brought all its choices, and draft for those that still look for a draft.

        Most methods are left alone where nobody is to get a draft: they find all tokens later.
        """
        start = self._clock()
        max_nodes = self._max_nodes_for(method, load, step.choices)
        proposer = self._proposers[method]
        if not max_nodes and not proposer.sees_all_steps:
            return
        choices = [self._asked(of_choice, max_nodes.get(of_choice.slot, 0)) for of_choice in step.choices]
        trees = proposer.propose(replace(step, choices=choices))
        offers: list[Sequence[float]] = []
        for of_choice, tree in zip(choices, trees, strict=True):
            if of_choice.max_nodes:
                choice = self._choices[of_choice.slot]
                survival = self._store(choice, method, self._possible(of_choice, tree.first(of_choice.max_nodes)))
                if choice.competes:
                    offers.append(survival)
        seconds = self._clock() - start
        self._counts[method].draft_s += seconds
        if max_nodes:
            self._controller.observe_drafting(method, seconds, offers, max(max_nodes.values()))

    def _possible(self, choice: ChoiceStep, tree: DraftTree) -> DraftTree:
        """The draft without what the choice's grammar rules out, if it has one."""
        matcher = self._matcher_of(choice.slot) if tree else None
        return tree if matcher is None else prune(tree, matcher)

    def _max_nodes_for(self, method: str, load: StepLoad, steps: Sequence[ChoiceStep]) -> dict[int, int]:
        """For the slots of choices that still look for a draft, of how many nodes."""
        rival = self._controller.expected_gain(method)
        competing, max_nodes = [], {}
        for step in steps:
            choice = self._choices[step.slot]
            if step.num_new and not (choice.draft and is_promising(sum(choice.survival), rival)):
                if choice.speculation.num_tokens is None:
                    competing.append(step.slot)
                else:
                    max_nodes[step.slot] = min(choice.speculation.num_tokens, self._max_nodes)
        wanted = self._controller.num_wanted(method, load, len(competing), self._max_nodes) if competing else 0
        return max_nodes | dict.fromkeys(competing, wanted) if wanted else max_nodes

    def _asked(self, step: ChoiceStep, max_nodes: int) -> ChoiceStep:
        if not max_nodes:
            return step
        draws = self._choices[step.slot].speculation.verify == "rejection" and step.sampling.temperature > 0
        return replace(step, max_nodes=max_nodes, draws=draws)

    def _store(self, choice: _Speculating, method: str, tree: DraftTree) -> list[float]:
        """Keep the better draft, most probable nodes first. Stable, so parents, never less probable, stay in front.
        Returns what its nodes are worth: their survival in descending order, or nothing if the other one is better.

        Rejection sampling is exact only if nothing that was drawn decides what is verified. So drawn nodes keep their
        order, and neither their tokens nor their proposer's confidence, but only their places in the tree say what they
        are worth.
        """
        is_blind = choice.speculation.verify == "rejection" and tree.drawn_from is not None
        if is_blind:
            tree = replace(tree, confidence=blind_confidence(tree))
        probability = self._controller.stats[method].calibration.probability
        survival = tree.survival([probability(confidence) for confidence in tree.confidence])
        if is_blind:
            survival = list(accumulate(survival, min))
        if sum(survival) <= sum(choice.survival):
            return []
        descending = sorted(survival, reverse=True)
        if survival != descending:
            tree = tree.take(sorted(range(len(tree)), key=lambda node: -survival[node]))
        choice.made_by, choice.draft, choice.survival = method, tree, descending
        return choice.survival

    def stats(self) -> tuple[SpeculationStats, ...]:
        """Of the methods that made drafts so far."""
        stats = (counts.stats(method) for method, counts in self._counts.items())
        return tuple(of_method for of_method in stats if of_method.drafted)

"""Speculation apart from the forward pass: who drafts for which choice, how much is verified, and statistics."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from math import inf

from model_runner.batch import SampleRows
from model_runner.contract import AdmittedRequest, ScheduledRequest, Speculation
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.rotary_positions import rotary_positions
from model_runner.runner_interface import SpeculationStats
from model_runner.speculative.controller import DraftOffer, SpeculationController
from model_runner.speculative.grammar import MatcherOf, prune
from model_runner.speculative.methods import AUTO, cost_rank, is_promising, members
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep
from model_runner.speculative.step_times import StepLoad
from model_runner.speculative.verify import Verdict, blind_confidence


@dataclass(slots=True)
class _Speculating:
    """A choice that speculates."""

    speculation: Speculation
    methods: tuple[str, ...]
    """The methods that draft for it, in the order in which they are asked."""
    rows_of_node: int
    """Rows per node in a step: 2 if the choice has a guide, which computes the same drafts, otherwise 1."""
    patience: float = 0.0
    """How much delay by others' drafts the choice still tolerates (`SpeculationController.patience`)."""
    made_by: str = ""
    """The method that made the draft."""
    draft: DraftTree = NO_DRAFT
    """The draft for the next step, most probable nodes first."""
    survival: list[float] = field(default_factory=list)
    """For each node of the draft, the probability that it is accepted."""

    @property
    def competes(self) -> bool:
        """Whether the controller decides how many of its drafts are verified."""
        return self.speculation.num_tokens is None

    def start_over(self) -> None:
        """Drop the draft."""
        if self.draft:
            self.made_by, self.draft, self.survival = "", NO_DRAFT, []


def counted(stats: SpeculationStats, tree: DraftTree, verdict: Verdict, seconds: float) -> SpeculationStats:
    """Statistics with one more choice's verified drafts, and its share of the step's time."""
    accepted, deepest = len(verdict.nodes), max(tree.depths())
    return replace(
        stats,
        drafted=stats.drafted + len(tree),
        accepted_by_depth=_counted(stats.accepted_by_depth, accepted, deepest),
        verified_by_depth=_counted(stats.verified_by_depth, min(accepted + 1, deepest), deepest),
        steps=stats.steps + 1,
        tokens=stats.tokens + len(verdict.tokens),
        verify_s=stats.verify_s + seconds,
    )


def _counted(by_depth: tuple[int, ...], reached: int, deepest: int) -> tuple[int, ...]:
    """Counts by depth with one more at each of the first `reached` depths, and zeros up to the `deepest`."""
    padded = by_depth + (0,) * (deepest - len(by_depth))
    return tuple(count + (depth < reached) for depth, count in enumerate(padded))


class Speculator:
    """Asks each choice's proposers for drafts, lets the controller choose among them, and keeps statistics.

    Calibration, records and statistics belong to the method that made a draft, even if auto chose it.
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
        """Starts without choices.

        Args:
            proposers: by method name.
            controller: decides for choices that do not request a number of draft tokens.
            max_nodes: maximum number of nodes per choice and step.
            heads: the method that auto asks if the fast ones find too little.
            clock: seconds, to time proposers.
            matcher_of: returns the matcher of a slot with a grammar, which rules out drafts.
        """
        self._proposers: dict[str, Proposer] = {}
        self._controller = controller
        self._max_nodes = max_nodes
        self._heads = heads
        self._clock = clock
        self._matcher_of = matcher_of
        self._choices: dict[int, _Speculating] = {}
        self._stats: dict[str, SpeculationStats] = {}
        """By the method that made the drafts."""
        self._observed_at = 0.0
        """When the last step was observed, which began the current cycle."""
        self._in_cycle: set[int] = set()
        """Slots of the current cycle, without choices that ended since."""
        self._rest = 0
        """Number of coming cycles without drafting, while the batch is the one in `_resting`."""
        self._resting: tuple[list[int], int] = ([], 0)
        """Slots, and number of choices that get a token, for which `_rest` holds."""
        self._num_rested = 0
        """Cycles without drafting that are not yet reported to the controller."""
        for method, proposer in proposers.items():
            self.add(method, proposer)

    def add(self, method: str, proposer: Proposer) -> None:
        """Make another method available."""
        self._proposers[method] = proposer
        self._stats[method] = SpeculationStats(method, 0, (), (), 0, 0, 0.0, 0.0)

    def warm_up(self, step: TargetStep) -> None:
        """Have trained heads draft once for a warm-up step: compiling kernels takes seconds on a GPU.

        Nothing is recorded, so their time only counts from the first request on.
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
        """Names of the methods that requests can use."""
        has_auto = members(Speculation(AUTO), self._proposers, self._heads)
        return tuple(sorted({*self._proposers, *([AUTO] if has_auto else [])}))

    def begin(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], admitted: AdmittedRequest) -> None:
        """A choice begins; `tokens` and `blocks` are the lists that grow with it."""
        self._rest = 0
        speculation = admitted.speculation
        if speculation is None:
            return
        methods = members(speculation, self._proposers, self._heads, has_grammar=admitted.sampling.grammar is not None)
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
            rotary=rotary_positions(admitted.images),
        )
        for method in choice.methods:
            self._proposers[method].begin(new)

    def end(self, slot: int) -> None:
        """A choice has ended or was preempted."""
        self._rest = 0
        self._in_cycle.discard(slot)
        choice = self._choices.pop(slot, None)
        if choice is not None:
            for method in choice.methods:
                self._proposers[method].end(slot)

    def give_up(self, slots: Collection[int]) -> None:
        """Stop speculating for these choices, and ignore the time of the current cycle."""
        for slot in slots:
            self.end(slot)
        self._in_cycle.clear()

    def forget_draft(self, slot: int) -> None:
        """Drop the choice's draft, so that its next step verifies nothing."""
        if slot in self._choices:
            self._choices[slot].start_over()

    # -- before the forward pass ---------------------------------------------------------------------------------------

    def drafts(self, load: StepLoad, slots: Sequence[int], scheduled: Sequence[ScheduledRequest]) -> list[DraftTree]:
        """The drafts that each scheduled choice verifies: requested numbers, or the controller's choice."""
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
            offers.append(DraftOffer())  # choices without speculation, but not guides and prompts
        counts = self._controller.choose(load.plus(fixed), offers)
        return [
            tree.first(count) if offer.survival else tree
            for tree, offer, count in zip(trees, offers, counts, strict=False)
        ]

    def made_by(self, slots: Sequence[int]) -> list[str]:
        """The methods of these slots' drafts in this cycle; empty for slots without drafts."""
        return [self._choices[slot].made_by if slot in self._choices else "" for slot in slots]

    # -- after it ------------------------------------------------------------------------------------------------------

    def observe(
        self,
        load: StepLoad,
        samples: Sequence[SampleRows],
        slots: Sequence[int],
        verdicts: Sequence[Verdict],
        seconds: float,
        of_step: Sequence[int],
    ) -> None:
        """Record the results of a step's drafts, which ends their cycle.

        Args:
            load: the step without drafts.
            samples: the choices with verdicts, with their drafts.
            slots: slots of the same choices.
            verdicts: verdicts of the same choices.
            seconds: time of the forward pass and of drawing tokens.
            of_step: slots of all the step's choices.
        """
        last, self._observed_at = self._observed_at, self._clock()
        cycle_s = None if self._in_cycle.isdisjoint(of_step) else self._observed_at - last
        self._in_cycle.clear()
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
        time = self._controller.observe_step(load.plus(fixed), chosen, gained, cycle_s)
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
                part = share * num_rows * choice.rows_of_node
                self._stats[choice.made_by] = counted(self._stats[choice.made_by], sample.tree, verdict, part)
                self._calibrate(choice.made_by, sample.tree, verdict)

    def _calibrate(self, method: str, tree: DraftTree, verdict: Verdict) -> None:
        calibration = self._controller.stats[method].calibration
        accepted = {ROOT, *verdict.nodes}
        for node, (parent, confidence) in enumerate(zip(tree.parents, tree.confidence, strict=True)):
            if parent in accepted:
                calibration.observe(confidence, accepted=node in accepted)

    def reads_step(self, slots: Sequence[int]) -> bool:
        """Whether a proposer of these choices uses features or logits of their steps."""
        choices = [self._choices[slot] for slot in slots if slot in self._choices]
        return any(self._proposers[method].reads_step for choice in choices for method in choice.methods)

    def begin_cycle(self, load: StepLoad, slots: Sequence[int]) -> set[int]:
        """Begin drafting for the next step.

        Args:
            load: the load of the next step if only these choices run.
            slots: slots of the last step's choices.

        Returns:
            Slots of the choices whose proposers need the last step's results, for `propose`.
        """
        if self._rest and (list(slots), load.num_ready) == self._resting:
            self._rest -= 1
            self._num_rested += 1
            return set()
        choices = {slot: self._choices[slot] for slot in slots if slot in self._choices}
        self._in_cycle = set(choices)
        all_bear = all(choice.patience >= 0 for choice in choices.values())
        self._controller.begin_cycle(load, all_bear=all_bear, num_rested=self._num_rested)
        self._num_rested = 0
        notified, self._rest = self._slots_to_notify(load, choices)
        self._resting = list(slots), load.num_ready
        for choice in choices.values():
            choice.start_over()
        return notified

    def _slots_to_notify(self, load: StepLoad, choices: Mapping[int, _Speculating]) -> tuple[set[int], int]:
        """The result of `begin_cycle`, and the number of further cycles without drafting."""
        asking = {method for choice in choices.values() if choice.competes for method in choice.methods}
        rests = {
            method: 0 if self._proposers[method].sees_all_steps else self._controller.rest(method) for method in asking
        }
        notified = {
            slot
            for slot, choice in choices.items()
            if not (choice.competes and all(rests[method] for method in choice.methods))
        }
        return notified, 0 if notified else min(rests.values(), default=1) - 1

    def propose(self, load: StepLoad, step: TargetStep) -> dict[int, int]:
        """Make drafts for the next step; returns how many nodes each slot's choice wants to verify.

        Args:
            load: as in `begin_cycle`.
            step: the last step's results for the choices from `begin_cycle`; this method sets their `max_nodes`.
        """
        groups: dict[tuple[str, ...], list[ChoiceStep]] = {}
        for of_choice in step.choices:
            groups.setdefault(self._choices[of_choice.slot].methods, []).append(of_choice)
        for method in sorted({method for methods in groups for method in methods}, key=cost_rank):
            of_method = [steps for methods, steps in groups.items() if method in methods]
            self._propose_by(method, load, replace(step, choices=list(chain.from_iterable(of_method))))
        return {of_choice.slot: len(self._choices[of_choice.slot].draft) for of_choice in step.choices}

    def _propose_by(self, method: str, load: StepLoad, step: TargetStep) -> None:
        """Show a method the step's results, and let it draft for choices without a good draft yet.

        Most methods are not called if no choice needs a draft: they can catch up later.
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
        stats = self._stats[method]
        self._stats[method] = replace(stats, draft_s=stats.draft_s + seconds)
        if max_nodes:
            self._controller.observe_drafting(method, seconds, offers, max(max_nodes.values()))

    def _possible(self, choice: ChoiceStep, tree: DraftTree) -> DraftTree:
        """The draft without nodes that the choice's grammar rules out."""
        matcher = self._matcher_of(choice.slot) if tree else None
        return tree if matcher is None else prune(tree, matcher)

    def _max_nodes_for(self, method: str, load: StepLoad, steps: Sequence[ChoiceStep]) -> dict[int, int]:
        """Numbers of nodes for the slots of choices that still need a draft."""
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
        """Keep the better draft, most probable nodes first.

        The sort is stable, and parents are never less probable, so they stay in front. Returns the values of the new
        draft's nodes, their survival in descending order; nothing if the old draft is better.

        Rejection sampling is only exact if the drawn tokens do not influence which nodes are verified. So drawn nodes
        keep their order, and their values depend only on their places in the tree, not on tokens or confidences.
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
        """Statistics of the methods that made drafts so far."""
        return tuple(stats for stats in self._stats.values() if stats.drafted)

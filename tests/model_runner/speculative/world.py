"""A simulated server: choices, a drafter that is right so often, and a machine that takes its time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model_runner.batch import SampleRows
from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, Speculation
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree, chain
from model_runner.features import Feature
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.proposer import NewChoice, TargetStep
from model_runner.speculative.speculator import Speculator
from model_runner.speculative.step_times import StepLoad
from model_runner.speculative.verify import Verdict
from tests.model_runner.speculative.driving import check_tree, choice_step, new_choice

Seconds = Callable[[float], float]
"""Duration of a step by its number of rows."""


def memory_bound(rows: float) -> float:
    """A step that reads the weights for the first rows, and computes for further ones."""
    return max(0.010, 0.004 + 0.001 * rows)


def two_cores(rows: float) -> float:
    """A small model on a small machine: the first rows are cheap, but not free."""
    return float(np.interp(rows, [1, 2, 4, 8, 16, 32, 64, 512], [3.7, 4.3, 5.2, 6.3, 9.6, 15.5, 29, 220])) / 1000


def compute_bound(rows: float) -> float:
    """A step in which each row costs as much as the others."""
    return 0.001 + 0.009 * rows


@dataclass
class Guesser:
    """A proposer that drafts chains, says how sure it is, and is right in truth as often as `accuracy`."""

    accuracy: float
    confidence: float = 0.8
    length: int = 4
    coverage: float = 1.0
    """How often it has something to say."""
    seconds: float = 0.0
    """Time to draft, apart from `per_choice_s`."""
    per_choice_s: float = 0.0
    """Additional time to draft for each choice."""
    accuracy_of: dict[int, float] = field(default_factory=dict)
    """By slot, where it differs."""
    coverage_of: dict[int, float] = field(default_factory=dict)
    needs: frozenset[Feature] = frozenset()
    reads_step = True
    sees_all_steps: bool = False
    running: set[int] = field(default_factory=set)
    seen: int = 0
    """Number of choices' steps that it has seen."""
    asked: int = 0
    """Number of times that it was asked to draft."""
    clock: list[float] = field(default_factory=lambda: [0.0])
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def begin(self, choice: NewChoice) -> None:
        assert choice.slot not in self.running
        self.running.add(choice.slot)

    def end(self, slot: int) -> None:
        self.running.remove(slot)

    def propose(self, step: TargetStep) -> list[DraftTree]:
        trees = [self._draft(choice.slot, choice.max_nodes) for choice in step.choices]
        self.seen += len(trees)
        asked = sum(choice.max_nodes > 0 for choice in step.choices)
        if asked:
            self.asked += 1
            self.clock[0] += self.seconds + asked * self.per_choice_s
        return trees

    def is_right(self, slot: int) -> bool:
        return self.rng.random() < self.accuracy_of.get(slot, self.accuracy)

    def _draft(self, slot: int, max_nodes: int) -> DraftTree:
        if self.rng.random() >= self.coverage_of.get(slot, self.coverage):
            return NO_DRAFT
        length = min(self.length, max_nodes)
        return chain(range(length), [self.confidence] * length)


@dataclass
class World:
    """Steps of a batch of equal choices. Time is simulated, including drafting."""

    guessers: dict[str, Guesser]
    methods: list[str]
    """Draft methods of each choice."""
    true_seconds: Seconds
    num_tokens: int | None = None
    heads: str | None = None
    noise: float = 0.0
    outliers: float = 0.0
    """How often a step takes five times as long."""
    draft_row_s: float = 0.0
    """Python's time per draft row, in addition to the step."""
    choice_s: float = 0.0
    """Python's time per choice, in addition to the step."""
    runs_ahead: bool = False
    """Whether a step is launched before the last one's drafts are made, where there were none before."""
    is_next_ahead: bool = False
    controller: SpeculationController = field(default_factory=SpeculationController)
    clock: list[float] = field(default_factory=lambda: [0.0])
    tokens: int = 0
    verified: list[int] = field(default_factory=list)
    """Draft rows of each step."""
    tokens_of: list[int] = field(default_factory=list)
    """Number of tokens of each choice."""

    def __post_init__(self) -> None:
        self.rng = random.Random(3)
        for guesser in self.guessers.values():
            guesser.clock = self.clock
        self.speculator = Speculator(self.guessers, self.controller, 16, self.heads, lambda: self.clock[0])
        for slot, method in enumerate(self.methods):
            self._begin(slot, method)
        self.offers = [0] * len(self.methods)
        self.tokens_of = [0] * len(self.methods)

    def resize(self, methods: list[str]) -> None:
        """Go on with these choices; those that are new begin, those that are left out have ended."""
        for slot, method in enumerate(methods[len(self.methods) :], len(self.methods)):
            self._begin(slot, method)
        self.methods = methods
        self.offers = (self.offers + [0] * len(methods))[: len(methods)]
        self.tokens_of = (self.tokens_of + [0] * len(methods))[: len(methods)]

    def _begin(self, slot: int, method: str) -> None:
        speculation = Speculation(method, self.num_tokens, prediction=(1,))
        self.speculator.begin(slot, [1], [], AdmittedRequest(f"{slot}", (1,), 1, 0, (), SamplingParams(), speculation))

    def run(self, num_steps: int) -> "World":
        for _ in range(num_steps):
            self.step()
        return self

    def rate(self, num_steps: int) -> float:
        """Tokens per second over the next steps."""
        start, tokens = self.clock[0], self.tokens
        self.run(num_steps)
        return (self.tokens - tokens) / (self.clock[0] - start)

    def step(self) -> None:
        slots = range(len(self.methods))
        load = StepLoad(len(slots), 0, len(slots))
        scheduled = [ScheduledRequest(f"{slot}", 1, (), self.offers[slot]) for slot in slots]
        is_ahead, self.is_next_ahead = self.is_next_ahead, self.runs_ahead and not any(self.offers)
        trees = [NO_DRAFT] * len(slots) if is_ahead else self.speculator.drafts(load, slots, scheduled)
        for tree, offer in zip(trees, self.offers, strict=True):
            check_tree(tree, offer)
        self.verified.append(sum(map(len, trees)))
        makers = [self.speculator._choices[slot].made_by for slot in slots]
        verdicts = [self._walk(slot, tree, maker) for slot, (tree, maker) in enumerate(zip(trees, makers, strict=True))]
        seconds = self.true_seconds(len(slots) + self.verified[-1]) * self.rng.lognormvariate(0, self.noise)
        seconds *= 5 if self.rng.random() < self.outliers else 1
        self.clock[0] += seconds + self.verified[-1] * self.draft_row_s + len(slots) * self.choice_s
        for slot, verdict in enumerate(verdicts):
            self.tokens += len(verdict.tokens)
            self.tokens_of[slot] += len(verdict.tokens)
        samples = [SampleRows(slot, 0, tree) for slot, tree in zip(slots, trees, strict=True)]
        self.speculator.observe(load, samples, slots, verdicts, seconds, slots)
        self._propose(load, verdicts)

    def _propose(self, load: StepLoad, verdicts: Sequence[Verdict]) -> None:
        drafting = self.speculator.begin_cycle(load, range(len(verdicts)))
        steps = [
            choice_step(new_choice([1], slot=slot), len(verdict.tokens), 0)
            for slot, verdict in enumerate(verdicts)
            if slot in drafting
        ]
        offers = self.speculator.propose(load, TargetStep(steps, {}, torch.zeros(0, 1)))
        self.offers = [offers.get(slot, 0) for slot in range(len(self.methods))]

    def _walk(self, slot: int, tree: DraftTree, maker: str) -> Verdict:
        """Follow the chain for as long as the guesser is right."""
        nodes: list[int] = []
        while len(nodes) < len(tree) and self.guessers[maker].is_right(slot):
            nodes.append(tree.children()[nodes[-1] if nodes else ROOT, len(nodes)])
        return Verdict(tokens=[0] * (len(nodes) + 1), nodes=nodes)

"""A target of few tokens whose logits depend on the last two, drafts for it, and steps that verify them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import Failure, SamplingParams, TokenLogprobs, Verification
from model_runner.draft_tree import ROOT, DraftDistribution, DraftTree
from model_runner.sampling.noise import Stream, noise_key
from model_runner.sampling.rows import NO_EARLY_TOKENS, EarlySamplingPlan, EarlyTokens, SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.speculative.verify import Verifier
from tests.model_runner.oracles.draw import TorchDraw, gumbel
from tests.model_runner.sampling import oracle
from tests.model_runner.sampling.harness import CPU

VOCAB = 5
PROMPT = (3, 1)
CHAIN = (ROOT, 0)
TREE = (ROOT, ROOT, ROOT, 0, 0, 1, 2, 3)

Drafter = Callable[["Said"], DraftTree]
Pair = tuple[int, int]
Pick = Callable[[Tensor, EarlySamplingPlan], EarlyTokens]


@dataclass
class Said:
    """A choice: its settings and its tokens."""

    params: SamplingParams
    verify: Verification
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_accepted: int = 0
    error: Failure | None = None

    @property
    def tail(self) -> Pair:
        return self.tokens[-2], self.tokens[-1]

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(PROMPT) :])


@dataclass(frozen=True)
class World:
    """Logits of the target after every two tokens, and of a draft model whose vocabulary lacks token 4."""

    target: Tensor  # [vocab, vocab, vocab]
    draft: Tensor  # [vocab, vocab, vocab - 1]

    def logits(self, tails: Sequence[Pair]) -> Tensor:
        """[n, vocab] logits after each of these tails."""
        return self.target[tuple(torch.tensor(tails).T)]

    def joint(self, params: SamplingParams, length: int) -> np.ndarray:
        """The probability of each output of this length; the last token varies fastest."""
        probs = {(): 1.0}
        for _ in range(length):
            probs = {
                (*output, token): before * p
                for output, before in probs.items()
                for token, p in enumerate(self.next_token(params, output))
            }
        return np.array(list(probs.values()))

    def next_token(self, params: SamplingParams, output: Sequence[int]) -> np.ndarray:
        raw = self.target[(*PROMPT, *output)[-2:]].double().numpy()
        return oracle.softmax(oracle.final(raw, params, PROMPT, output))


def make_world(seed: int) -> World:
    """A world whose draft model is right more often than not."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 1.5
    noise = torch.randn(VOCAB, VOCAB, VOCAB - 1, generator=generator)
    return World(target, 0.7 * target[..., :-1] + 0.8 * noise)


class Drawing:
    """Drafts of one shape, drawn without replacement from the draft model, or its most probable tokens."""

    def __init__(self, world: World, shape: Sequence[int], *, at_random: bool) -> None:
        self._shape = tuple(shape)
        self._depths = DraftTree((0,) * len(shape), self._shape).depths()
        self._at_random = at_random
        self._scores = world.draft.tolist()
        probs = torch.softmax(world.draft.double(), -1)
        self._chances = probs.tolist()
        tokens = torch.arange(probs.shape[-1])
        self._distributions = [[DraftDistribution(tokens, after_two) for after_two in after_one] for after_one in probs]

    def __call__(self, said: Said) -> DraftTree:
        """Draft with the target's own noise, as proposers do. Confidences belong to the drawn tokens."""
        tails = [said.tail]
        noise = [self._noise(said, depth) for depth in range(max(self._depths, default=0))]
        ranked: dict[int, list[int]] = {}
        tokens, confidence = [], []
        for parent, depth in zip(self._shape, self._depths, strict=True):
            before, last = tails[1 + parent]
            if parent not in ranked:
                scores = [score + g for score, g in zip(self._scores[before][last], noise[depth - 1], strict=True)]
                ranked[parent] = sorted(range(len(scores)), key=scores.__getitem__)
            token = ranked[parent].pop()
            tokens.append(token)
            tails.append((last, token))
            confidence.append(self._chances[before][last][token])
        drawn_from = {parent: self._distributions[tails[1 + parent][0]][tails[1 + parent][1]] for parent in ranked}
        return DraftTree(tuple(tokens), self._shape, tuple(confidence), drawn_from if self._at_random else None)

    def _noise(self, said: Said, depth: int) -> list[float]:
        """Noise of each token at a depth: the token with the highest sum of score and noise is drawn first."""
        count = VOCAB - 1
        if not self._at_random:
            return [0.0] * count
        key = noise_key(said.params.seed, said.params.choice, Stream.TARGET, len(said.output) + depth)
        return [gumbel(key, token) for token in range(count)]


class Speakers:
    """Choices that generate in parallel, step by step."""

    def __init__(self, world: World, said: Sequence[Said], pick: Pick | None = None) -> None:
        self._world = world
        self._pick = pick
        self.said = said
        self._sampling = SamplingState(len(said), VOCAB, CPU)
        for slot, one in enumerate(said):
            self._sampling.admit(slot, one.params, PROMPT)
        self._verify = Verifier(self._sampling, Sampler(TorchDraw(VOCAB, CPU)))
        self._states: dict[int, float | None] = {}

    def speak(self, length: int, draft: Drafter) -> None:
        """Continue until every choice has this many tokens, or an error."""
        while going := [i for i, one in enumerate(self.said) if len(one.output) < length and one.error is None]:
            self.step(going, [draft(self.said[index]) for index in going])

    def sampler_state(self, index: int) -> float | None:
        """The state of a sampler, as the verdict of the choice's last step has it."""
        return self._states.get(index)

    def step(self, going: Sequence[int], trees: Sequence[DraftTree]) -> None:
        """Verify a tree for each of these choices."""
        tails: list[Pair] = []
        samples, positions = [], []
        for index, tree in zip(going, trees, strict=True):
            one, first = self.said[index], len(tails)
            samples.append(SampleRows(index, first, tree, one.verify))
            tails.append(one.tail)
            positions += [len(one.tokens) - 1 + depth for depth in (0, *tree.depths())]
            for parent, token in zip(tree.parents, tree.tokens, strict=True):
                tails.append((tails[first + 1 + parent][1], token))
        logits = self._world.logits(tails)
        picks = NO_EARLY_TOKENS
        if self._pick is not None:
            picks = self._pick(logits, self._sampling.plan_early_sampling(samples, going, np.array(positions)))
        verdicts = self._verify(logits, samples, going, early=picks)
        for index, tree, verdict in zip(going, trees, verdicts, strict=True):
            one = self.said[index]
            assert [tree.tokens[node] for node in verdict.nodes] == verdict.tokens[:-1] or verdict.error
            one.tokens += verdict.tokens
            one.logprobs += verdict.logprobs
            one.num_accepted += len(verdict.nodes)
            one.error = verdict.error
            self._states[index] = verdict.sampler_state


def crowd(params: SamplingParams, verify: Verification, count: int) -> list[Said]:
    """The same choice with seeds from 0."""
    return [Said(replace(params, seed=seed), verify) for seed in range(count)]


def outcomes(said: Sequence[Said], length: int) -> list[int]:
    """The index of each choice's output in World.joint."""
    return [int(np.ravel_multi_index(one.output[:length], (VOCAB,) * length)) for one in said]

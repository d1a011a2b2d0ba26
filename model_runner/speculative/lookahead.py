"""Lookahead decoding: the target drafts for itself by Jacobi iteration while it verifies."""

import random
from collections.abc import Mapping, Sequence

from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.speculative.proposer import ChoiceStep, NewChoice, Proposer, TargetStep, share_out

SIZE = 4
"""N: tokens of an n-gram. The window has N - 1 levels."""
MOST_PER_TOKEN = 8
"""G: n-grams that the pool keeps per first token."""
_NEXT, _LATER = 0.3, 0.6
"""Initial confidences: of the newest n-gram's second token, and of each later one."""
_WINDOW = 0.01
"""Initial confidence of window nodes, which are computed for the pool; how often they are right is measured."""
INTAKE = 512
"""Maximum number of known tokens per step whose n-grams are pooled: 2.2 us each, so about a millisecond."""


class LookaheadProposer(Proposer):
    """Drafts n-grams from a pool, and a window in which the target makes new ones.

    Lookahead Decoding (Fu et al., arXiv:2402.02057). Each of the window's W columns holds the guesses of the last N - 1
    Jacobi iterations for consecutive positions. Level 0 is from the first of these, the last level from the last. The
    target's greedy token after the last level completes an n-gram, which is pooled, and becomes the next window's last
    level. The pool's n-grams that start with the last known token are verified.

    As a tree, level 0 is a chain from the last known token, which is level 0 of the first column. Each node of the
    chain carries its column. So a node sees what the paper's mask allows: the prefix, level 0 up to its column, and its
    column. Its position is its depth. Nodes that window and n-grams share are computed once.

    Differences from the paper: n-grams of prompt and output are pooled, too. If several tokens are accepted, the window
    moves by as many positions, so that guesses keep their positions. New columns, and columns that did not fit, are
    filled from known tokens. The window gets half the nodes.
    """

    reads_step = True
    sees_all_steps = True

    def __init__(self) -> None:
        self._choices: dict[int, _Lookahead] = {}

    def begin(self, choice: NewChoice) -> None:
        self._choices[choice.slot] = _Lookahead()

    def propose(self, step: TargetStep) -> list[DraftTree]:
        choices = [self._choices[choice.slot] for choice in step.choices]
        missing = [choice.missing(of_choice.tokens) for choice, of_choice in zip(choices, step.choices, strict=True)]
        trees = []
        for choice, of_choice, count in zip(choices, step.choices, share_out(missing, INTAKE), strict=True):
            choice.pool_known(of_choice.tokens, count)
            trees.append(choice.take_step(of_choice, step.logits))
        return trees

    def end(self, slot: int) -> None:
        del self._choices[slot]


class _Lookahead:
    """The window and pool of one choice."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._window = Window()
        self._num_pooled = SIZE - 1
        """Known tokens whose n-grams are pooled, including the first ones, at which no n-gram can end."""

    def missing(self, tokens: Sequence[int]) -> int:
        """Number of known tokens that are not pooled yet."""
        return max(len(tokens) - self._num_pooled, 0)

    def pool_known(self, tokens: Sequence[int], count: int) -> None:
        """Pool the n-grams that end at the next `count` known tokens."""
        for end in range(self._num_pooled + 1, self._num_pooled + 1 + count):
            self._pool.add(tokens[end - SIZE : end])
        self._num_pooled += count

    def take_step(self, step: ChoiceStep, logits: Tensor) -> DraftTree:
        """Learn from a step, and draft for the next."""
        if step.sample is None or step.num_new == 0:
            return NO_DRAFT
        newest = self._newest(step.sample, logits)
        for ngram in self._window.ngrams(newest):
            self._pool.add(ngram)
        self._window.move_on(step.num_new, newest, step.tokens)
        if step.max_nodes == 0:
            return NO_DRAFT
        self._window.resize((step.max_nodes // 2 + 1) // (SIZE - 1), step.tokens)
        return self._draft(step.tokens[-1], step.max_nodes)

    def _newest(self, sample: SampleRows, logits: Tensor) -> list[int | None]:
        """The target's greedy token after each column's last level; None where it was not computed."""
        children = sample.tree.children()
        nodes = [_walk(children, path) for path in self._window.paths()]
        rows = [sample.row_of(node) for node in nodes if node is not None]
        greedy = iter(logits[rows].argmax(dim=-1).tolist() if rows else [])
        return [None if node is None else next(greedy) for node in nodes]

    def _draft(self, last: int, max_nodes: int) -> DraftTree:
        tree = _TreeBuilder()
        for rank, ngram in enumerate(self._pool.starting_with(last)):
            confidence = [_NEXT / (rank + 1), *([_LATER] * (SIZE - 2))]
            tree.add(ngram, confidence, max_nodes - self._window.num_nodes)
        for path in self._window.paths():
            tree.add(path, [_WINDOW] * len(path), max_nodes)
        return tree.build()


class Pool:
    """The last few n-grams of each first token."""

    def __init__(self) -> None:
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Add the newest n-gram; the oldest with the same first token is dropped if there are too many."""
        known = self._ngrams.setdefault(ngram[0], {})
        following = tuple(ngram[1:])
        known.pop(following, None)
        known[following] = None
        if len(known) > MOST_PER_TOKEN:
            del known[next(iter(known))]

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of the token, newest first."""
        return list(self._ngrams.get(token, ()))[::-1]


class Window:
    """W columns of N - 1 levels; level j of column i guesses the token i + j after the last known one.

    So level 0 of the first column is the last known token itself.
    """

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self._random = random.Random(0)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in a tree, without the known token."""
        return max(len(self.columns) * (SIZE - 1) - 1, 0)

    def paths(self) -> list[list[int]]:
        """For each column, the tokens from the last known one to its last level."""
        heads = [column[0] for column in self.columns[1:]]
        return [heads[:index] + column[1:] for index, column in enumerate(self.columns)]

    def ngrams(self, newest: Sequence[int | None]) -> list[list[int]]:
        """Complete n-grams: each column with the token after its last level, if that is known."""
        return [[*column, token] for column, token in zip(self.columns, newest, strict=True) if token is not None]

    def move_on(self, num_new: int, newest: Sequence[int | None], known: Sequence[int]) -> None:
        """Move up a level and forward to the new last known token; `newest` tokens become the last level."""
        up = [
            [*column[1:], self._guess(known) if token is None else token]
            for column, token in zip(self.columns, newest, strict=True)
        ]
        self.columns = up[num_new - 1 :]
        self.resize(len(up), known)

    def resize(self, num_columns: int, known: Sequence[int]) -> None:
        """Drop columns at the end, or fill new ones with guesses."""
        del self.columns[num_columns:]
        while len(self.columns) < num_columns:
            self.columns.append([self._guess(known) for _ in range(SIZE - 1)])
        if self.columns:
            self.columns[0][0] = known[-1]

    def _guess(self, known: Sequence[int]) -> int:
        return self._random.choice(known)


def _walk(children: Mapping[tuple[int, int], int], path: Sequence[int]) -> int | None:
    """The node at the end of a path of tokens."""
    node: int | None = ROOT
    for token in path:
        if node is not None:
            node = children.get((node, token))
    return node


class _TreeBuilder:
    """Builds a tree from paths that share their beginnings."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        """By parent and token, in topological order."""
        self._confidence: list[float] = []

    def __len__(self) -> int:
        return len(self._confidence)

    def add(self, path: Sequence[int], confidence: Sequence[float], max_nodes: int) -> None:
        """Add a path from the root's child on, within `max_nodes`; existing nodes keep their confidence."""
        parent = ROOT
        for token, value in zip(path, confidence, strict=True):
            edge = parent, token
            if edge not in self._nodes:
                if len(self) == max_nodes:
                    return
                self._nodes[edge] = len(self)
                self._confidence.append(value)
            parent = self._nodes[edge]

    def build(self) -> DraftTree:
        """The tree of all paths."""
        parents, tokens = zip(*self._nodes, strict=True) if self._nodes else ((), ())
        return DraftTree(tokens, parents, tuple(self._confidence))

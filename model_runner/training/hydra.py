"""Hydra heads in training: every head at every place of an answer, given the actual tokens before it."""

import copy
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.models.features import LAST, Feature
from model_runner.models.heads.hydra import HydraHeads, HydraShape
from model_runner.training.objective import AnswerRows, Guess, Judge, ObjectiveByRow
from model_runner.training.teacher import TargetWeights

REACHED = 3
"""Head i + 1 is trained where the actual token was among so many first guesses of head i, as it was of all before it:
elsewhere a draft parts from the output. That spares half of the time, and the heads learn what they will be asked."""


class HydraObjective(ObjectiveByRow):
    """Implements Objective.

    Inputs are divided by their typical size, so that all weights learn at the same rate. The weights that they meet are
    multiplied by it in the meantime; `export` takes that out of them again.
    """

    def __init__(
        self, target: TargetWeights, judge: Judge, heads: HydraHeads, sample: AnswerRows | None = None
    ) -> None:
        """Goes on from `heads`, which it takes over.

        `sample` has the rows by which the size of the inputs is found; heads that are not trained need none.
        """
        super().__init__(tuple(dict.fromkeys((*heads.needs, LAST))), judge)
        self._heads = heads.requires_grad_().to(judge.device)
        self._embedding = target.embedding.to(judge.device)
        self._hidden_size = torch.ones((), device=judge.device)
        self._embedding_size = torch.ones((), device=judge.device)
        if sample is not None:
            sizes = _input_sizes(heads, self._embedding, sample)
            self._hidden_size, self._embedding_size = (size.to(judge.device) for size in sizes)
            _scale_inputs(heads, self._hidden_size, self._embedding_size)
        self.module = heads

    def export(self) -> HydraHeads:
        """See Objective."""
        heads = copy.deepcopy(self._heads)
        _scale_inputs(heads, 1 / self._hidden_size, 1 / self._embedding_size)
        return heads.cpu()

    def guesses(self, rows: AnswerRows) -> Iterator[Guess]:
        """See ObjectiveByRow. In training a head sees only the places that drafts reach: see REACHED."""
        hidden = self._heads.join(rows.features) / self._hidden_size
        embedded = self._embedding(rows.tokens) / self._embedding_size
        at = rows.before(1)
        for index in range(1, self._heads.depth + 1):
            at = at[rows.left[at] >= index]
            path = torch.stack([embedded[at + offset] for offset in range(index)], dim=1)  # [n, index, hidden]
            with self._judge.products():
                logits = self._heads.head(index, hidden[at], path)
            guess = Guess(at, logits, rows.tokens[at + index], rows.features[LAST][at + index])
            yield guess
            if self.module.training:
                at = at[self._judge.guessed(guess, REACHED)]


def fresh_hydra(
    target: TargetWeights,
    draft_ids: Tensor,
    depth: int,
    num_layers: int,
    features: tuple[Feature, ...],
    sample: AnswerRows,
) -> HydraHeads:
    """Heads that begin with random layers for inputs of the sizes that `sample` has, and the target's rows as head."""
    hidden = target.shape.hidden
    shape = HydraShape(hidden, depth, num_layers, len(draft_ids), shared_head=True, features=features)
    heads = HydraHeads(shape, draft_ids)
    head = heads.hydra_lm_head
    assert isinstance(head, nn.Linear)
    hidden_size, embedding_size = _input_sizes(heads, target.embedding.to(sample.tokens.device), sample)
    with torch.no_grad():
        head.weight.copy_(target.head[draft_ids.cpu()])
        for mlp in heads.hydra_mlp:
            first: Any = mlp[0]  # type: ignore[index]
            first.res_connection.weight.mul_(0.1)
        heads.feature_scale.copy_(embedding_size / hidden_size)
    _scale_inputs(heads, 1 / embedding_size, 1 / embedding_size)
    return heads


@torch.no_grad()
def take_over(fresh: HydraHeads, trained: HydraHeads) -> None:
    """Have fresh heads guess as trained ones do, with room to learn from further features, layers and tokens.

    Weights of features that the trained heads do not take, and layers that they do not have, become zero, which changes
    nothing (Net2Net, arXiv:1511.05641). Heads beyond their depth, and tokens that they do not guess, stay fresh.

    Raises:
        ValueError: if the fresh heads have no place for what the trained ones know.
    """
    if set(trained.shape.features) - set(fresh.shape.features) or trained.shape.num_layers > fresh.shape.num_layers:
        features = ", ".join(trained.shape.features)
        raise ValueError(
            f"the heads to begin with take {features}, in {trained.shape.num_layers} layers: more is needed"
        )
    head, its_head = fresh.hydra_lm_head, trained.hydra_lm_head
    if not isinstance(head, nn.Linear) or not isinstance(its_head, nn.Linear):
        raise ValueError(
            "the heads to begin with have each a matrix of their own for the logits; one for all is trained"
        )
    ids, its_ids = (
        torch.arange(one.shape.draft_vocab) if one.draft_ids is None else one.draft_ids for one in (fresh, trained)
    )
    its_row = {token: row for row, token in enumerate(its_ids.tolist())}
    both = [(row, its_row[token]) for row, token in enumerate(ids.tolist()) if token in its_row]
    head.weight[[mine for mine, _ in both]] = its_head.weight[[its for _, its in both]]
    for layers, its_layers in zip(fresh.hydra_mlp, trained.hydra_mlp, strict=False):
        _take_over_first(layers[0], fresh, its_layers[0], trained)  # type: ignore[index]
        for layer, its_layer in zip_longest(list(layers)[1:], list(its_layers)[1:]):  # type: ignore[call-overload]
            for name, parameter in layer.named_parameters():
                parameter.copy_(torch.zeros(()) if its_layer is None else its_layer.get_parameter(name))


def _take_over_first(first: Any, fresh: HydraHeads, its_first: Any, trained: HydraHeads) -> None:
    """The layer that takes features and embeddings."""
    size, shape = fresh.shape.hidden, fresh.shape
    for linear, source in ((first.linear, its_first.linear), (first.res_connection, its_first.res_connection)):
        linear.weight[:, : len(fresh.feature_scale)] = 0.0
        for place, feature in enumerate(trained.shape.features):
            to, at = (slice(index * size, (index + 1) * size) for index in (shape.features.index(feature), place))
            linear.weight[:, to] = source.weight[:, at] * (trained.feature_scale[at] / fresh.feature_scale[to])
        linear.weight[:, len(fresh.feature_scale) :] = source.weight[:, len(trained.feature_scale) :]
        linear.bias.copy_(source.bias)


def _input_sizes(heads: HydraHeads, embedding: nn.Module, sample: AnswerRows) -> tuple[Tensor, Tensor]:
    """Typical sizes of the hidden states' elements [F * hidden], and of all the embeddings' []; on the CPU."""
    hidden = heads.join(sample.features).square().mean(0).sqrt().clamp_min(1e-3)
    return hidden.cpu(), embedding(sample.tokens).std().cpu()


@torch.no_grad()
def _scale_inputs(heads: HydraHeads, hidden: Tensor, embedding: Tensor) -> None:
    """Multiply the weights that meet hidden states by `hidden`, [F * hidden] or [], the others by `embedding` []."""
    num_hidden = len(heads.shape.features) * heads.shape.hidden
    for index, mlp in enumerate(heads.hydra_mlp):
        first: Any = mlp[0]  # type: ignore[index]
        sizes = torch.cat([hidden.expand(num_hidden), embedding.expand((index + 1) * heads.shape.hidden)])
        for linear in (first.linear, first.res_connection):
            linear.weight.mul_(sizes.to(linear.weight.device))

"""Training of Hydra heads: every head at every position of an answer, given the actual tokens before it."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.features import LAST, Feature
from model_runner.heads.base import Example, Heads
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.training.objective import AnswerRows, Guess, Judge, Objective, answer_rows
from model_runner.training.teacher import TargetWeights

REACHED = 3
"""Head i + 1 is trained at positions where the actual tokens were among this many first guesses of head i and of all
before it. Elsewhere no draft follows the output. This halves the time, and matches how heads are used."""


class HydraObjective(Objective):
    """Trains all heads on actual tokens.

    Inputs are divided by their typical magnitude, so that all weights learn at the same rate. Their weights are
    multiplied by it during training; `export` reverts this.
    """

    heads: HydraHeads

    def __init__(self, heads: HydraHeads, judge: Judge, sample: Sequence[Example] = ()) -> None:
        """`sample` gives the magnitude of the inputs; it is empty if the heads are not trained."""
        super().__init__(heads, judge)
        self._embedding = judge.target.embedding.to(judge.device)
        self._hidden_size = torch.ones((), device=judge.device)
        self._embedding_size = torch.ones((), device=judge.device)
        if sample:
            sizes = _input_sizes(heads, self._embedding, answer_rows(sample, heads.needs, judge.device))
            self._hidden_size, self._embedding_size = (size.to(judge.device) for size in sizes)
            _scale_inputs(heads, self._hidden_size, self._embedding_size)

    def export(self) -> Heads:
        heads = super().export()
        assert isinstance(heads, HydraHeads)
        _scale_inputs(heads, 1 / self._hidden_size, 1 / self._embedding_size)
        return heads

    def guesses(self, examples: Sequence[Example]) -> Iterator[Guess]:
        """In training, a head only sees positions that drafts reach (REACHED)."""
        rows = answer_rows(examples, self.needs, self.judge.device)
        hidden = self.heads.join(rows.features) / self._hidden_size
        embedded = self._embedding(rows.tokens) / self._embedding_size
        at = rows.before(1)
        for index in range(1, self.heads.depth + 1):
            at = at[rows.left[at] >= index]
            path = torch.stack([embedded[at + offset] for offset in range(index)], dim=1)  # [n, index, hidden]
            with self.judge.products():
                logits = self.heads.head(index, hidden[at], path)
            guess = Guess(at, logits, rows.tokens[at + index], rows.features[LAST][at + index])
            yield guess
            if self.heads.training:
                at = at[self.judge.guessed(guess, REACHED)]


def fresh_hydra(
    target: TargetWeights,
    draft_ids: Tensor,
    depth: int,
    num_layers: int,
    features: tuple[Feature, ...],
    sample: Sequence[Example],
) -> HydraHeads:
    """Heads with random layers for inputs of the sample's magnitudes, and the target's rows as output matrix."""
    hidden = target.shape.hidden
    shape = HydraShape(hidden, depth, num_layers, len(draft_ids), shared_head=True, features=features)
    heads = HydraHeads(shape, draft_ids)
    head = heads.hydra_lm_head
    assert isinstance(head, nn.Linear)
    rows = answer_rows(sample, features, torch.device("cpu"))
    hidden_size, embedding_size = _input_sizes(heads, target.embedding, rows)
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
    """Copy trained heads into fresh ones that may have more features, layers and tokens; predictions stay the same.

    Weights of additional features and layers become zero, which changes nothing (Net2Net, arXiv:1511.05641). Additional
    heads and tokens stay fresh.

    Raises:
        ValueError: if the fresh heads lack a part that the trained ones have.
    """
    if set(trained.shape.features) - set(fresh.shape.features) or trained.shape.num_layers > fresh.shape.num_layers:
        features = ", ".join(trained.shape.features)
        raise ValueError(
            f"the initial heads use {features} in {trained.shape.num_layers} layers; new heads need at least as many"
        )
    head, its_head = fresh.hydra_lm_head, trained.hydra_lm_head
    if not isinstance(head, nn.Linear) or not isinstance(its_head, nn.Linear):
        raise ValueError(
            "the initial heads have an output matrix each; only heads with one output matrix can be trained"
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
    """Copy the layer that takes features and embeddings."""
    size, shape = fresh.shape.hidden, fresh.shape
    for linear, source in ((first.linear, its_first.linear), (first.res_connection, its_first.res_connection)):
        linear.weight[:, : len(fresh.feature_scale)] = 0.0
        for place, feature in enumerate(trained.shape.features):
            to, at = (slice(index * size, (index + 1) * size) for index in (shape.features.index(feature), place))
            linear.weight[:, to] = source.weight[:, at] * (trained.feature_scale[at] / fresh.feature_scale[to])
        linear.weight[:, len(fresh.feature_scale) :] = source.weight[:, len(trained.feature_scale) :]
        linear.bias.copy_(source.bias)


def _input_sizes(heads: HydraHeads, embedding: nn.Module, sample: AnswerRows) -> tuple[Tensor, Tensor]:
    """Typical magnitudes of the hidden states' elements [F * hidden] and of all embeddings [], on the CPU."""
    hidden = heads.join(sample.features).square().mean(0).sqrt().clamp_min(1e-3)
    return hidden.cpu(), embedding(sample.tokens).std().cpu()


@torch.no_grad()
def _scale_inputs(heads: HydraHeads, hidden: Tensor, embedding: Tensor) -> None:
    """Multiply the weights of hidden states by `hidden`, [F * hidden] or [], and the other weights by `embedding`
    [].
    """
    num_hidden = len(heads.shape.features) * heads.shape.hidden
    for index, mlp in enumerate(heads.hydra_mlp):
        first: Any = mlp[0]  # type: ignore[index]
        sizes = torch.cat([hidden.expand(num_hidden), embedding.expand((index + 1) * heads.shape.hidden)])
        for linear in (first.linear, first.res_connection):
            linear.weight.mul_(sizes.to(linear.weight.device))

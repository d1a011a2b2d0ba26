"""Training of EAGLE-3 heads on whole sequences; each depth uses the states of the depth before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from model_runner.features import LAST, Feature
from model_runner.heads.base import Example
from model_runner.heads.eagle3 import Eagle3Heads, Eagle3Shape
from model_runner.heads.layer import LayerShape
from model_runner.modules.loading import load_config
from model_runner.training.objective import Guess, Judge, Objective
from model_runner.training.teacher import TargetWeights


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's range of rows at step 0, and the first row whose predictions count."""

    start: int
    first: int
    end: int

    def rows(self, step: int) -> slice:
        """The rows at which a step runs."""
        return slice(self.start if step == 0 else min(self.first + step, self.end), self.end)


class UnrolledAttention:
    """Keys and values of all steps so far; called as `Attend`, once per step."""

    def __init__(self, spans: Sequence[Span], scale: float) -> None:
        self._spans = spans
        self._scale = scale
        self._keys: list[list[Tensor]] = []  # by step and span, each [rows, kv_heads, dim]
        self._values: list[list[Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [n, heads, dim], key and value [n, kv_heads, dim] for the rows of all spans -> [n, heads, dim]."""
        step = len(self._keys)
        sizes = [len(range(*span.rows(step).indices(span.end))) for span in self._spans]
        self._keys.append(list(torch.split(key, sizes)))
        self._values.append(list(torch.split(value, sizes)))
        attend = self._attend_at_first if step == 0 else self._attend_later
        return torch.cat([attend(index, part) for index, part in enumerate(torch.split(query, sizes))])

    def _attend_at_first(self, index: int, query: Tensor) -> Tensor:
        """Causal attention within a sequence."""
        rows = (query, self._keys[0][index], self._values[0][index])
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in rows)  # [1, heads, rows, dim]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return output[0].transpose(0, 1)

    def _attend_later(self, index: int, query: Tensor) -> Tensor:
        step = len(self._keys) - 1
        span = self._spans[index]
        rows, heads = query.shape[:2]
        keys, values = (
            [repeated(tensors[index][: None if at == 0 else rows], heads) for at, tensors in enumerate(kept)]
            for kept in (self._keys, self._values)
        )
        root = (
            span.first - span.start + torch.arange(rows, device=query.device)
        )  # the last position with the target's features
        hidden = torch.arange(len(keys[0]), device=query.device) > root.unsqueeze(1)  # [rows, places]
        scores = torch.einsum("rhd,phd->rhp", query, keys[0]).masked_fill(hidden.unsqueeze(1), float("-inf"))
        own = [(query * keys[at]).sum(-1, keepdim=True) for at in range(1, step + 1)]
        weights = (torch.cat([scores, *own], dim=-1).float() * self._scale).softmax(-1).to(query.dtype)
        output = torch.einsum("rhp,phd->rhd", weights[..., : len(keys[0])], values[0])
        for at in range(1, step + 1):
            output = output + weights[..., len(keys[0]) + at - 1].unsqueeze(-1) * values[at]
        return output


def repeated(heads: Tensor, count: int) -> Tensor:
    """Repeat key-value heads: [rows, kv_heads, dim] -> [rows, count, dim], one for each query head of a group."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class _Places:
    """The positions of whole sequences, concatenated, without each sequence's last token."""

    features: dict[Feature, Tensor]  # each [T, hidden]
    following: Tensor  # [T] the token after each position
    positions: Tensor  # [T]
    spans: list[Span]


class Eagle3Objective(Objective):
    """Trains the layer on its own states. The heads' own embedding, if they have one, is not trained."""

    heads: Eagle3Heads

    def __init__(self, heads: Eagle3Heads, judge: Judge, depth: int) -> None:
        """Trains the heads to predict `depth` tokens ahead."""
        super().__init__(heads, judge)
        if heads.embed_tokens is not None:
            heads.embed_tokens.requires_grad_(requires_grad=False)
        self._embedding = heads.embed_tokens or judge.target.embedding.to(judge.device)
        self._depth = depth

    def guesses(self, examples: Sequence[Example]) -> Iterator[Guess]:
        places = _places(examples, self.needs, self.judge.device)
        attention = UnrolledAttention(places.spans, self.heads.scale)
        embedded = self._embedding(places.following)
        before = torch.arange(len(embedded), device=embedded.device)  # of the rows at which the previous step ran
        state = torch.empty(0)
        for step in range(self._depth):
            at = _joined(places.spans, step, places.following.device)
            with self.judge.products():
                if step == 0:
                    state = self.heads.first_state(places.features)
                else:
                    state = state[torch.searchsorted(before, at - 1)]
                state = self.heads.step(embedded[at], state, places.positions[at], attention)
                guess = self._guess(places, state, at, step)
            before = at
            yield guess

    def _guess(self, places: _Places, state: Tensor, at: Tensor, step: int) -> Guess:
        """The prediction at the rows whose next position is also in the sequence."""
        rows, kept, row = [], [], 0
        for span in places.spans:
            count = max(0, span.end - 1 - span.first - step)
            rows.append(torch.arange(row, row + count))
            kept.append(torch.arange(span.first + step, span.first + step + count))
            row += span.end - span.first
        place = torch.cat(kept).to(at.device)
        logits = self.heads.logits(state[torch.searchsorted(at, place)])
        tokens, teacher = places.following[place + 1], places.features[LAST][place + 1]
        return Guess(torch.cat(rows).to(at.device), logits, tokens, teacher)


def fresh_eagle3(
    target: TargetWeights, draft_ids: Tensor, features: tuple[Feature, ...], config: LlamaConfig
) -> Eagle3Heads:
    """Heads with a random layer, and the target's rows as output matrix."""
    layer = LayerShape.of(config, frozenset(), "")
    heads = Eagle3Heads(config, Eagle3Shape(layer, features, target.shape.hidden, len(draft_ids)), draft_ids)
    with torch.no_grad():
        heads.lm_head.weight.copy_(target.head[draft_ids.cpu()])
    return heads


def draft_layer_config(model: Path) -> LlamaConfig:
    """Configuration of a Llama layer with the target's sizes."""
    text: Any = load_config(model).get_text_config()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes = {name: getattr(text, name) for name in (*names, "max_position_embeddings", "rope_parameters")}
    head_dim = getattr(text, "head_dim", None)
    return LlamaConfig(**sizes, head_dim=head_dim, rms_norm_eps=text.rms_norm_eps, num_hidden_layers=1)


def _joined(spans: Sequence[Span], step: int, device: torch.device) -> Tensor:
    """The rows at which a step runs, in ascending order."""
    parts = [span.rows(step) for span in spans]
    return torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(device)


def _places(examples: Sequence[Example], needs: Sequence[Feature], device: torch.device) -> _Places:
    spans, start = [], 0
    for one in examples:
        end = start + len(one.tokens) - 1
        spans.append(Span(start, start + one.num_prompt - 1, end))
        start = end
    features = {need: np.concatenate([one.features[need][:-1] for one in examples]) for need in needs}
    following = np.concatenate([one.tokens[1:] for one in examples])
    positions = np.concatenate([np.arange(one.start, one.start + len(one.tokens) - 1) for one in examples])
    return _Places(
        {need: torch.from_numpy(rows).to(device).float() for need, rows in features.items()},
        torch.from_numpy(following).to(device),
        torch.from_numpy(positions).to(device),
        spans,
    )

"""How good heads are on the held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_runner.training.examples import Example
from model_runner.training.objective import RANKS, Objective

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Accuracy:
    """On answers of one temperature."""

    temperature: float
    ranked: tuple[tuple[float, ...], ...]
    """By depth: the share of places where the actual token was guess 1, 2, ..., given the actual tokens before it."""
    tokens_per_step: float
    """Expected of a chain of first guesses as deep as the heads go, the target's own token included."""

    def within(self, depth: int, guesses: int) -> float:
        """Share of places where the actual token was among the first guesses; depth from 0."""
        return sum(self.ranked[depth][:guesses])


def measure(objective: Objective, examples: Sequence[Example]) -> list[Accuracy]:
    """One entry for each temperature."""
    objective.module.eval()
    results = []
    for temperature in sorted({one.temperature for one in examples}):
        some = [one for one in examples if one.temperature == temperature]
        parts = [objective.ranks(some[start : start + _BATCH]) for start in range(0, len(some), _BATCH)]
        results.append(_accuracy(temperature, torch.cat(parts).cpu()))
    objective.module.train()
    return results


def as_json(results: Sequence[Accuracy]) -> dict[str, Any]:
    """For config.json."""
    return {
        f"temperature {result.temperature:g}": {
            "tokens_per_step": round(result.tokens_per_step, 4),
            "ranked": [[round(share, 4) for share in depth] for depth in result.ranked],
        }
        for result in results
    }


def _accuracy(temperature: float, ranks: Tensor) -> Accuracy:
    """From ranks [rows, depth], see Objective.ranks."""
    depths = [column[column >= 0] for column in ranks.unbind(1)]
    ranked = [torch.bincount(column, minlength=RANKS + 1)[:RANKS] / max(1, len(column)) for column in depths]
    hits = (ranks == 0).long().cumprod(1)  # [rows, depth] whether the chain stands up to each depth
    accepted = hits.sum(1).float()
    return Accuracy(temperature, tuple(tuple(row.tolist()) for row in ranked), 1 + float(accepted.mean()))

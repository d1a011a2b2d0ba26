"""Token sampling on a GPU. Only CUDA servers import this, because triton comes only with CUDA builds of torch."""

# Short: it is imported only where Triton is installed.

import torch
from torch import Tensor

from model_runner.kernels.triton.pick import pick
from model_runner.sampling.rows import EarlySamplingPlan, SamplingRows


class TritonDraw:
    """Draws on CUDA with the kernel that also samples plain tokens in advance, so both give the same token.

    Its logarithm is the GPU's: two scores that differ by rounding may be ranked differently than on CPU.
    """

    def __init__(self, divides: bool) -> None:
        self.divides = divides

    def __call__(self, scores: Tensor, rows: SamplingRows) -> dict[int, int]:
        """Draws each sampled row from its whole vocabulary, because compacting truncated rows would cost more."""
        plan = EarlySamplingPlan.greedy(len(scores))
        drawn = (*rows.whole, *rows.truncated)
        for row in drawn:
            plan.keys[row] = rows.key(row)
            plan.temperatures[row] = 1.0
        if self.divides:
            for row in rows.whole:
                plan.temperatures[row] = rows.sampling[row].temperature
        keys, temperatures = (torch.from_numpy(array).to(scores.device) for array in plan.arrays)
        tokens = pick(scores.contiguous(), keys, temperatures).tolist()
        return {row: tokens[row] for row in drawn}

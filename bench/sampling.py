"""Benchmark of sampling: CPU time per row outside the forward pass, by the request's settings.

Uses one thread, with or without the native kernels. The logits fall with the logarithm of the rank, as language models'
logits do.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from model_runner.contract import AdmittedRequest, SamplingParams, ScheduledRequest, StepPlan
from model_runner.draft_tree import NO_DRAFT
from model_runner.hub.repository import cache_folder
from model_runner.kernels.build import build_kernels
from model_runner.kernels.library import Kernels
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import NativeDraw, Sampler
from model_runner.sampling.truncations import NativeTruncations
from model_runner.scoring.contrastive_search import ContrastiveSearch
from model_runner.speculative.controller import SpeculationController
from model_runner.speculative.draft_kv import BlockGenerations, TargetBlocks
from model_runner.speculative.speculator import Speculator
from model_runner.state import RunnerState

VOCAB_SIZE = 49_152
BLOCK_SIZE = 32
CONTEXT = 256
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "greedy, repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "temperature 1": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "0.8, top-k 50, top-p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "0.8, min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
}


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """CPU microseconds per row of a decoding step."""

    settings: str
    rows: int
    gather_us: float
    """Time to build the batch and the sampler's inputs."""
    sample_us: float


def measure(name: str, num_rows: int, seconds: float, kernels: Kernels) -> SamplingCost:
    """Measure both parts; each result is the minimum of many runs."""
    device = torch.device("cpu")
    sampling = SamplingState(num_rows, VOCAB_SIZE, device)
    sampler = Sampler(NativeDraw(kernels, divides=True), truncations=NativeTruncations(kernels))
    search = ContrastiveSearch(sampling, sampler, 8192)
    generations = BlockGenerations(num_rows * CONTEXT // BLOCK_SIZE)
    blocks = TargetBlocks(len(generations), BLOCK_SIZE, num_rows, generations)
    state = RunnerState(blocks, sampling, Speculator({}, SpeculationController(), 0), search)
    plan = _decoding(SETTINGS[name], num_rows)
    choices = state.apply(plan)
    slots = [choice.slot for choice in choices]

    def gather() -> None:
        state.gather(choices, plan.scheduled, [NO_DRAFT] * num_rows)
        sampling.rows(slots)

    logits, rows = _logits(num_rows), sampling.rows(slots)
    gather_us = _least(gather, seconds / 4) / num_rows
    return SamplingCost(name, num_rows, gather_us, _least(lambda: sampler(logits, rows), seconds) / num_rows)


def table(results: list[SamplingCost]) -> Table:
    """One line for each combination of settings and number of rows."""
    lines = Table("settings", "rows", "gather us/row", "sample us/row", "step ms")
    for column in lines.columns[1:]:
        column.justify = "right"
    for result in results:
        step_ms = (result.gather_us + result.sample_us) * result.rows / 1000
        numbers = f"{result.gather_us:.1f}", f"{result.sample_us:.0f}", f"{step_ms:.2f}"
        lines.add_row(result.settings, str(result.rows), *numbers)
    return lines


def _decoding(sampling: SamplingParams, num_rows: int) -> StepPlan:
    """A step in which `num_rows` choices with computed context each get one token."""
    width = CONTEXT // BLOCK_SIZE
    admitted = tuple(
        AdmittedRequest(
            key=f"request-{row}/0",
            tokens=tuple(range(row, row + CONTEXT)),
            num_prompt=CONTEXT,
            num_computed=CONTEXT - 1,
            blocks=tuple(range(row * width, (row + 1) * width)),
            sampling=sampling,
        )
        for row in range(num_rows)
    )
    return StepPlan((), (), admitted, tuple(ScheduledRequest(choice.key, 1, ()) for choice in admitted))


def _logits(num_rows: int) -> Tensor:
    """Logits [num_rows, VOCAB_SIZE] with the tokens in random order."""
    generator = torch.Generator().manual_seed(0)
    by_rank = -1.6 * torch.arange(1.0, VOCAB_SIZE + 1).log()
    rows = [by_rank[torch.randperm(VOCAB_SIZE, generator=generator)] for _ in range(num_rows)]
    return torch.stack(rows) + torch.randn(num_rows, VOCAB_SIZE, generator=generator)


def _least(action: Callable[[], object], seconds: float) -> float:
    """CPU microseconds of the fastest run within `seconds`."""
    action()
    times: list[float] = []
    while sum(times) < seconds:
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return 1e6 * min(times)


def main() -> None:
    """Measure and print; with --output also write JSON."""
    parser = argparse.ArgumentParser(description="Measure the CPU time of sampling tokens.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each measurement")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels = Kernels(build_kernels(cache_folder()), threads=1)
    results = [measure(name, num, arguments.seconds, kernels) for name in SETTINGS for num in arguments.rows]
    Console().print(table(results))
    if arguments.output:
        arguments.output.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

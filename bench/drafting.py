"""Benchmark of drafting with Hydra heads: one native call, the same in Python, and reading the heads' weights once.

The embedded model reads a text and its shipped heads draft at positions in it. Between two drafts, enough other memory
is read to evict the heads from all caches, as the model's weights do between two steps.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import nn

from bench.engine_environment import use_engine_environment
from bench.steps import Reader
from bench.texts import longest_topics
from model_runner.batch import prompt_batch
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.heads.base import TargetShape
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.loading import load_heads
from model_runner.hub.repository import resolve_model
from model_runner.platforms.choose import choose_platform
from model_runner.processes import available_cores
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.heads import HydraProposer
from model_runner.speculative.proposer import ChoiceStep, Proposer, TargetStep

TEXT_LENGTH = 1000
FIRST_PLACE = 50
OTHER_BYTES = 1 << 26
"""Bytes read between drafts to evict the heads from the caches."""


@dataclass(frozen=True, slots=True)
class DraftTime:
    """Duration of drafting for a number of choices. Times are medians in milliseconds."""

    choices: int
    max_nodes: int
    temperature: float
    num_nodes: float
    """Mean number of nodes of a tree."""
    native_ms: float
    python_ms: float
    read_ms: float
    """Time to read as many bytes as the heads have."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The proposers, and the text after which they draft."""

    native: Proposer
    python: Proposer
    text: Sequence[int]
    step: TargetStep
    """A step with the whole text's features and no choices."""
    heads_bytes: int

    def after(self, num_choices: int, max_nodes: int, temperature: float, turn: int) -> TargetStep:
        """A step with choices at different positions of the text, which vary with `turn`."""
        choices = []
        for slot in range(num_choices):
            place = FIRST_PLACE + (turn * 37 + slot * 29) % (len(self.text) - FIRST_PLACE - 1)
            choices.append(
                ChoiceStep(
                    slot=slot,
                    tokens=self.text[: place + 2],
                    num_prompt=FIRST_PLACE,
                    num_new=1,
                    num_computed=place + 1,
                    rows=(place,),
                    blocks=(),
                    max_nodes=max_nodes,
                    sampling=SamplingParams(temperature=temperature, seed=slot),
                )
            )
        return replace(self.step, choices=choices)


def load(console: Console) -> Drafting:
    """Load the embedded model and its heads, and let the model read a text."""
    embedded = resolve_model(None, console)
    config = RunnerConfig(embedded.path, device="cpu", threads=available_cores())
    platform = choose_platform(config)
    shape = platform.inspect(config.model)
    model = platform.load(config.model, shape)
    heads = load_heads(embedded.heads[0], TargetShape.of(model.config))
    assert isinstance(heads, HydraHeads)
    (text,) = longest_topics(Tokenizer.from_file(str(config.model / "tokenizer.json")), 1, TEXT_LENGTH)
    cache = platform.make_cache(shape.kv, -(-TEXT_LENGTH // config.block_size), config.block_size)
    target = platform.make_target(model, platform.attention(cache), TEXT_LENGTH, heads.needs)
    logits = target.forward(prompt_batch([text], config.block_size))
    platform.prepare_heads(heads)
    without_call = copy.copy(heads)
    without_call.native = None
    embed, limits = model.get_input_embeddings(), GrowthLimits(heads.depth)
    native, python = (HydraProposer(one, embed, limits) for one in (heads, without_call))
    return Drafting(native, python, text, TargetStep((), dict(target.features()), logits), _packed_bytes(heads))


def _packed_bytes(heads: HydraHeads) -> int:
    linears: list[Any] = [module for module in heads.modules() if isinstance(module, nn.Linear)]
    return sum(linear.weight.product.weight.packed.nbytes for linear in linears)


def measure(drafting: Drafting, turns: int) -> Iterator[DraftTime]:
    """Measure all combinations of temperature, choices and nodes."""
    reader = Reader(OTHER_BYTES)
    for temperature in (0.0, 1.0):
        for choices in (1, 8, 32):
            for max_nodes in (1, 2, 4, 8, 16):
                steps = [drafting.after(choices, max_nodes, temperature, turn) for turn in range(turns)]
                yield _measure(drafting, steps, reader)


def _measure(drafting: Drafting, steps: Sequence[TargetStep], reader: Reader) -> DraftTime:
    """Measure the native call and the Python version alternately."""
    reads: list[float] = []
    nodes: list[int] = []
    taken: dict[Proposer, list[float]] = {drafting.native: [], drafting.python: []}
    for step in steps:
        for proposer, seconds in taken.items():
            reads.append(reader.read_s() * drafting.heads_bytes / OTHER_BYTES)
            start = time.perf_counter()
            trees = proposer.propose(step)
            seconds.append(time.perf_counter() - start)
            nodes += map(len, trees)
    choices = steps[0].choices
    native_ms, python_ms, read_ms = (statistics.median(seconds) * 1e3 for seconds in (*taken.values(), reads))
    return DraftTime(
        choices=len(choices),
        max_nodes=choices[0].max_nodes,
        temperature=choices[0].sampling.temperature,
        num_nodes=statistics.mean(nodes),
        native_ms=native_ms,
        python_ms=python_ms,
        read_ms=read_ms,
    )


def table(times: Sequence[DraftTime]) -> Table:
    """One line for each measurement."""
    lines = Table("temperature", "choices", "max nodes", "nodes", "one call ms", "Python ms", "faster", "x reading")
    for column in lines.columns:
        column.justify = "right"
    for one in times:
        lines.add_row(
            f"{one.temperature:g}",
            str(one.choices),
            str(one.max_nodes),
            f"{one.num_nodes:.1f}",
            f"{one.native_ms:.2f}",
            f"{one.python_ms:.2f}",
            f"{one.python_ms / one.native_ms:.1f} x",
            f"{one.native_ms / one.read_ms:.1f}",
        )
    return lines


def main() -> None:
    """Measure and print; with --output also write JSON."""
    use_engine_environment()
    parser = argparse.ArgumentParser(description="Measure drafting with the embedded model's heads on the CPU.")
    parser.add_argument("--turns", type=int, default=25, help="number of drafts for each measurement")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(available_cores())
    console = Console(width=130)
    drafting = load(console)
    times = list(measure(drafting, arguments.turns))
    console.print(f"{drafting.heads_bytes / 1e6:.1f} MB of heads, read in {times[0].read_ms:.2f} ms")
    console.print(table(times))
    if arguments.output:
        content = {"heads_bytes": drafting.heads_bytes, "drafts": [asdict(one) for one in times]}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

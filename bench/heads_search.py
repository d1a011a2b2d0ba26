"""Search for good draft heads: trains variants for a short time and compares the estimated speedups.

Uses the answers in the work folder of `samewise train-heads`. The last files are reserved for the comparison, so that
the held-out prompts stay unseen. A variant is given as `hydra depth=3 layers=2 vocab=6144 features=24,27`. Results are
stored in a file, and variants in it are not trained again.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.draft_worth import NoisyJudge, Worth, worth
from model_runner.config import RunnerConfig
from model_runner.features import LAST, Feature, layer_input
from model_runner.heads.base import Example
from model_runner.hub.repository import resolve_model
from model_runner.training.eagle3 import Eagle3Objective, draft_layer_config, fresh_eagle3
from model_runner.training.examples import AnswerStore, ExampleStore, TargetForTraining, training_questions
from model_runner.training.hydra import HydraObjective, fresh_hydra
from model_runner.training.loop import LoopOptions, Moment, TrainingLoop, product_type
from model_runner.training.objective import Objective
from model_runner.training.pipeline import MAX_SEQUENCE
from model_runner.training.teacher import TargetWeights, choose_draft_ids

_BATCH = 8
_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of heads and its training settings; omitted settings keep their defaults."""

    kind: str = "hydra"
    depth: int = 3
    layers: int = 1
    vocab: int = 6144
    features: str = "27"
    """Comma-separated layers whose input hidden states are used, or `last`."""
    steps: int = 250
    rows: int = 1024
    lr: float = 1e-3

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Parse `kind name=value ...`."""
        kind, *settings = text.split()
        values: dict[str, Any] = dict(setting.split("=") for setting in settings)
        return cls(kind, **{name: type(getattr(cls(), name))(value) for name, value in values.items()})

    @property
    def needs(self) -> tuple[Feature, ...]:
        """The target's features that the heads need."""
        return tuple(one if one == LAST else layer_input(int(one)) for one in self.features.split(","))

    def __str__(self) -> str:
        said = {name: value for name, value in asdict(self).items() if name != "kind"}
        return " ".join([self.kind, *(f"{name}={value}" for name, value in said.items())])


@dataclass(frozen=True, slots=True)
class Result:
    """A variant's results, at temperatures 0 and 1."""

    variant: str
    loss: float
    seconds: float
    mib: float
    """Size of the int8 weights."""
    first: tuple[float, ...]
    """Accuracy of the first guess, at each temperature."""
    worth: tuple[Worth, ...]


class Search:
    """Trains variants on the same answers."""

    def __init__(self, model: Path, work: Path, files: int, compared: int) -> None:
        self._model, self._work, self._files, self._compared = model, work, files, compared
        self._target = TargetWeights.load(model)
        self._type = product_type(torch.device("cpu"))

    def run(self, variant: Variant) -> Result:
        """Train a variant and evaluate it."""
        examples = self._examples(variant, 0, self._files)
        compared = self._examples(variant, self._files, self._files + self._compared)
        draft_ids = choose_draft_ids(examples, variant.vocab, self._target.shape.vocab_size)
        judge = NoisyJudge(self._target, draft_ids, self._type)
        torch.manual_seed(0)
        objective = self._objective(variant, judge, examples)
        options = LoopOptions(steps=variant.steps, batch_rows=variant.rows, learning_rate=variant.lr)
        state = self._work / "search" / (str(variant).replace(" ", "-") + ".state")
        state.parent.mkdir(exist_ok=True)
        start = time.perf_counter()
        loss = TrainingLoop(objective, examples, options, state).run(lambda moment: None, _print)
        seconds = time.perf_counter() - start
        heads = objective.export()
        ranks = [_ranks(objective, judge, compared, temperature) for temperature in (0.0, 1.0)]
        return Result(
            str(variant),
            loss,
            seconds,
            sum(one.numel() for one in heads.parameters()) / 2**20,
            tuple(float((one[:, 0] == 0).sum() / (one[:, 0] >= 0).sum()) for one in ranks),
            tuple(worth(one, heads) for one in ranks),
        )

    def _objective(self, variant: Variant, judge: NoisyJudge, examples: Sequence[Example]) -> Objective:
        if variant.kind == "eagle3":
            eagle3 = fresh_eagle3(self._target, judge.draft_ids, variant.needs, draft_layer_config(self._model))
            return Eagle3Objective(eagle3, judge, variant.depth)
        sample = examples[:_SAMPLE]
        shape = variant.depth, variant.layers, variant.needs
        return HydraObjective(fresh_hydra(self._target, judge.draft_ids, *shape, sample), judge, sample)

    def _examples(self, variant: Variant, first: int, last: int) -> list[Example]:
        needs = tuple(dict.fromkeys((*variant.needs, LAST)))
        answers = AnswerStore(self._work / "training", training_questions)
        store = ExampleStore(self._work / "training", answers, needs)
        config = RunnerConfig(self._model)
        store.compute(last, lambda: TargetForTraining(config, needs, MAX_SEQUENCE), lambda done: None)
        return [one for file in range(first, last) for one in store.read(file)]


def _print(moment: Moment) -> None:
    print(f"    step {moment.step} of {moment.steps}, loss {moment.loss:.4f}", flush=True)


def _ranks(objective: Objective, judge: NoisyJudge, examples: Sequence[Example], temperature: float) -> torch.Tensor:
    judge.temperature = temperature
    some = [one for one in examples if one.temperature == temperature]
    torch.manual_seed(1)
    return torch.cat([objective.ranks(some[start : start + _BATCH]) for start in range(0, len(some), _BATCH)])


def _table(results: Sequence[Result]) -> Table:
    table = Table("variant", "MiB", "loss", "first guess", "nodes", "tokens per step", "speedup")
    for one in results:
        shares = " / ".join(f"{100 * share:.1f} %" for share in one.first)
        trees = [" / ".join(format(getattr(w, name), form) for w in one.worth) for name, form in _COLUMNS]
        table.add_row(one.variant, f"{one.mib:.1f}", f"{one.loss:.3f}", shares, *trees)
    return table


_COLUMNS = (("nodes", "d"), ("tokens_per_step", ".2f"), ("speedup", ".3f"))


def _read(path: Path) -> list[Result]:
    if not path.is_file():
        return []
    return [
        Result(**{**one, "first": tuple(one["first"]), "worth": tuple(Worth(**each) for each in one["worth"])})
        for one in json.loads(path.read_text(encoding="utf-8"))
    ]


def main() -> None:
    """Train the variants that have no results yet, and print all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", help="for example 'hydra layers=2 features=24,27'")
    parser.add_argument("--work", type=Path, required=True, help="the work folder of train-heads")
    parser.add_argument("--files", type=int, default=88, help="number of answer files to train on")
    parser.add_argument("--compared", type=int, default=4, help="number of further files to evaluate on")
    parser.add_argument("--results", type=Path, default=Path("build/heads-search.json"))
    asked = parser.parse_args()
    results = _read(asked.results)
    console = Console()
    search = Search(resolve_model(None, console).path, asked.work, asked.files, asked.compared)
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    for variant in map(Variant.parse, asked.variants):
        if all(one.variant != str(variant) for one in results):
            console.print(f"{variant}", soft_wrap=True)
            results.append(search.run(variant))
            asked.results.write_text(json.dumps([asdict(one) for one in results], indent=1), encoding="utf-8")
            console.print(_table(results[-1:]))
    console.print(_table(results))


if __name__ == "__main__":
    main()

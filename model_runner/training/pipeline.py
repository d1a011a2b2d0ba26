"""Trains draft heads for a model: generate its answers, compute hidden states, train, evaluate, save.

All results are kept in a work folder. A run that was interrupted, or that trains another kind of heads on the same
answers, continues with them.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor

from model_runner.config import RunnerConfig
from model_runner.features import LAST, Feature, require_layers
from model_runner.heads.base import Example, Heads, TargetShape
from model_runner.heads.eagle3 import default_features
from model_runner.heads.hydra import HydraHeads, hydra_features
from model_runner.heads.loading import heads_checkpoint, load_heads, save_heads
from model_runner.modules.loading import load_config
from model_runner.platforms.choose import resolve_device
from model_runner.training.eagle3 import draft_layer_config, fresh_eagle3
from model_runner.training.examples import (
    AnswerQuestions,
    AnswerStore,
    ExampleStore,
    Question,
    TargetForTraining,
    held_out_questions,
    opening_questions,
    own_prompts,
    training_questions,
)
from model_runner.training.hydra import fresh_hydra, take_over
from model_runner.training.loop import LoopOptions, Moment, TrainingLoop, product_type
from model_runner.training.objective import RANKS, Objective
from model_runner.training.objectives import fresh_medusa, objective_of
from model_runner.training.prompts import Prompt
from model_runner.training.teacher import TargetWeights, choose_draft_ids

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy on answers of one temperature."""

    temperature: float
    ranked: tuple[tuple[float, ...], ...]
    """By depth: the fraction of positions where the actual token was guess 1, 2, ..., given the actual tokens before
    it."""
    tokens_per_step: float
    """Expected tokens per step of a chain of first guesses to the heads' full depth, including the target's own
    token."""

    def within(self, depth: int, guesses: int) -> float:
        """Fraction of positions where the actual token was among the first `guesses`; depth from 0."""
        return sum(self.ranked[depth][:guesses])


def measure(objective: Objective, examples: Sequence[Example]) -> list[Accuracy]:
    """Accuracy for each temperature."""
    results = []
    for temperature in sorted({one.temperature for one in examples}):
        some = [one for one in examples if one.temperature == temperature]
        parts = [objective.ranks(some[start : start + _BATCH]) for start in range(0, len(some), _BATCH)]
        results.append(_accuracy(temperature, torch.cat(parts).cpu()))
    return results


def as_json(results: Sequence[Accuracy]) -> dict[str, Any]:
    """The results for config.json."""
    return {
        f"temperature {result.temperature:g}": {
            "tokens_per_step": round(result.tokens_per_step, 4),
            "ranked": [[round(share, 4) for share in depth] for depth in result.ranked],
        }
        for result in results
    }


def _accuracy(temperature: float, ranks: Tensor) -> Accuracy:
    """Accuracy from ranks [rows, depth] as in `Objective.ranks`."""
    depths = [column[column >= 0] for column in ranks.unbind(1)]
    ranked = [torch.bincount(column, minlength=RANKS + 1)[:RANKS] / max(1, len(column)) for column in depths]
    hits = (ranks == 0).long().cumprod(1)  # [rows, depth] whether the chain is accepted up to each depth
    accepted = hits.sum(1).float()
    return Accuracy(temperature, tuple(tuple(row.tolist()) for row in ranked), 1 + float(accepted.mean()))


logger = logging.getLogger("samewise.training")

Kind = Literal["medusa", "hydra", "eagle3"]

_SAMPLE = 64
"""Examples for estimating the magnitude of inputs."""
_TOKENS_PER_OPENING = 600
"""Training tokens per prompt that the model writes: each is answered about three times."""
MAX_SEQUENCE = 1024
"""Maximum number of tokens of a prompt and its answer."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of a training run."""

    model: Path
    kind: Kind
    output: Path
    work: Path
    tokens: int = 300_000
    """Number of training tokens, all from the model's own answers."""
    draft_vocab: int = 8192
    depth: int = 4
    """How many tokens ahead the heads predict."""
    num_layers: int = 1
    """Layers of each Medusa or Hydra head."""
    features: tuple[Feature, ...] | None = None
    """Hidden states for Hydra or EAGLE-3 heads; None uses the default."""
    begin_with: Path | None = None
    """Hydra heads to start from (`training.hydra.take_over`)."""
    int8: bool = True
    """Whether weights are stored in int8; otherwise bfloat16."""
    loop: LoopOptions = field(default_factory=LoopOptions)


def train_heads(
    options: TrainingOptions,
    start: Callable[[], AnswerQuestions],
    decode: Callable[[Sequence[int]], str],
    progress: Progress,
) -> list[Accuracy]:
    """Run all stages that are not complete; returns the heads' accuracy on held-out prompts.

    The heads are in `options.output` at the end, and whenever the training state is saved.

    Args:
        options: what to train.
        start: loads the model that answers; called only if answers are missing.
        decode: the text of tokens, without special tokens.
        progress: shows the progress of each stage.

    Raises:
        ValueError: if the work folder belongs to another model.
    """
    _claim(options.work, options.model)
    run = _Run(options, start, progress)
    own = run.own_prompts(decode)
    training = run.examples("training", lambda: training_questions(own), options.tokens)
    held_out = run.examples("held-out", held_out_questions, None)
    objective = run.objective(training)
    run.train(objective, training)
    run.save(objective, None)
    accuracy = measure(run.stored(), held_out)
    run.save(objective, as_json(accuracy))
    return accuracy


class _Run:
    """The stages of a training run."""

    def __init__(self, options: TrainingOptions, start: Callable[[], AnswerQuestions], progress: Progress) -> None:
        self._options = options
        self._start = start
        self._progress = progress
        self._device = resolve_device("auto")
        self._num_layers = TargetShape.of(load_config(options.model)).num_layers
        usual: dict[Kind, tuple[Feature, ...]] = {
            "medusa": (),
            "hydra": hydra_features(self._num_layers),
            "eagle3": default_features(self._num_layers),
        }
        self._features = options.features or usual[options.kind]
        _check(options, self._features, self._num_layers)
        self._needs = tuple(dict.fromkeys((*self._features, LAST)))

    @cached_property
    def _target(self) -> TargetWeights:
        return TargetWeights.load(self._options.model)

    @cached_property
    def _products(self) -> torch.dtype:
        """The type for products, which is measured."""
        return product_type(self._device)

    def own_prompts(self, decode: Callable[[Sequence[int]], str]) -> list[Prompt]:
        """Prompts that the model writes; none without a chat template."""
        count = self._options.tokens // _TOKENS_PER_OPENING + 1
        answers, num_files = self._answers("own-prompts", lambda: opening_questions(count), None)
        prompts = own_prompts((answer for shard in range(num_files) for answer in answers.read(shard)), decode)
        logger.info("%d prompts written by the model", len(prompts))
        return prompts

    def examples(self, name: str, questions: Callable[[], Iterator[Question]], num_tokens: int | None) -> list[Example]:
        """Answers with hidden states."""
        answers, num_files = self._answers(name, questions, num_tokens)
        task = self._progress.add_task(f"hidden states, {name}", total=num_files)
        store = ExampleStore(self._options.work / name, answers, self._needs)
        config = RunnerConfig(self._options.model)
        store.compute(num_files, lambda: TargetForTraining(config, self._needs, MAX_SEQUENCE), self._advance(task))
        examples = [one for shard in range(num_files) for one in store.read(shard)]
        logger.info("%d %s answers, %d tokens", len(examples), name, sum(one.num_answer for one in examples))
        return examples

    def _answers(
        self, name: str, questions: Callable[[], Iterator[Question]], num_tokens: int | None
    ) -> tuple[AnswerStore, int]:
        """The store, and how many of its files to use."""
        answers = AnswerStore(self._options.work / name, questions)
        task = self._progress.add_task(f"answers, {name}", total=num_tokens)
        return answers, answers.collect(self._start, num_tokens, self._advance(task))

    def objective(self, examples: list[Example]) -> Objective:
        """The objective for fresh heads."""
        options = self._options
        torch.manual_seed(options.loop.seed)
        sample = examples[:_SAMPLE]
        heads = self._fresh(choose_draft_ids(examples, options.draft_vocab, self._target.shape.vocab_size), sample)
        if options.begin_with is not None and isinstance(heads, HydraHeads):
            trained = load_heads(options.begin_with, self._target.shape)
            if not isinstance(trained, HydraHeads):
                raise ValueError(f"{options.begin_with} has {trained.kind} heads; only hydra heads can be started from")
            take_over(heads, trained)
        return self._objective_of(heads, sample)

    def _fresh(self, draft_ids: Tensor, sample: Sequence[Example]) -> Heads:
        options, target = self._options, self._target
        if options.kind == "medusa":
            return fresh_medusa(target, draft_ids, options.depth, options.num_layers)
        if options.kind == "hydra":
            return fresh_hydra(target, draft_ids, options.depth, options.num_layers, self._features, sample)
        return fresh_eagle3(target, draft_ids, self._features, draft_layer_config(options.model))

    def _objective_of(self, heads: Heads, sample: Sequence[Example] = ()) -> Objective:
        return objective_of(heads, self._target, self._products, self._device, sample=sample, depth=self._options.depth)

    def train(self, objective: Objective, examples: list[Example]) -> None:
        """Train to the end, with a usable checkpoint whenever the state is saved."""
        task = self._progress.add_task("training", total=None)

        def advance(moment: Moment) -> None:
            description = f"training, loss {moment.loss:.3f}"
            self._progress.update(task, completed=moment.step, total=moment.steps, description=description)

        def saved(moment: Moment) -> None:
            self.save(objective, None)
            logger.info("step %d of %d, loss %.3f, saved", moment.step, moment.steps, moment.loss)

        state = self._options.work / f"{self._options.kind}-{_settings_hash(self._options)}.state"
        TrainingLoop(objective, examples, self._options.loop, state).run(advance, saved)

    def save(self, objective: Objective, accuracy: dict[str, Any] | None) -> None:
        """Write the current heads."""
        config, tensors = heads_checkpoint(objective.export(), self._num_layers)
        extra = {} if accuracy is None else {"held_out": accuracy}
        dtype = torch.int8 if self._options.int8 else torch.bfloat16
        save_heads(self._options.output, {**config, **extra}, tensors, dtype=dtype)

    def stored(self) -> Objective:
        """The heads as a server reads them, including rounding."""
        return self._objective_of(load_heads(self._options.output, self._target.shape))

    def _advance(self, task: Any) -> Callable[[int], None]:
        return lambda done: self._progress.update(task, completed=done)


def _check(options: TrainingOptions, features: tuple[Feature, ...], num_layers: int) -> None:
    """Raises ValueError for options that do not apply to this kind of heads."""
    if options.kind == "medusa" and options.features is not None:
        raise ValueError("Medusa heads only use the last hidden state; remove the features")
    if options.kind != "hydra" and options.begin_with is not None:
        raise ValueError(f"{options.kind} heads cannot start from other heads, only hydra heads can")
    require_layers(features, num_layers)


def _claim(work: Path, model: Path) -> None:
    """Refuse a work folder of another model: its answers must not train these heads."""
    work.mkdir(parents=True, exist_ok=True)
    owner = work / "model"
    digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    if owner.is_file() and owner.read_text(encoding="utf-8") != digest:
        raise ValueError(f"{work} holds answers of another model; use another work folder")
    owner.write_text(digest, encoding="utf-8")


def _settings_hash(options: TrainingOptions) -> str:
    """Hash of everything that the training state depends on, except its length, which the state stores."""
    loop = {name: value for name, value in asdict(options.loop).items() if name not in ("minutes", "save_every_s")}
    shape = (options.draft_vocab, options.depth, options.num_layers, options.features, str(options.begin_with))
    parts = (options.tokens, *shape, sorted(loop.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]

"""Training on a tiny random model: it learns, it goes on after an interruption, and it writes what can be loaded."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from model_runner.heads.base import Example, TargetShape
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.loading import load_heads
from model_runner.modules.loading import load_config
from model_runner.training import pipeline
from model_runner.training.examples import AnsweredPrompt, AnswerStore, Question, training_questions
from model_runner.training.loop import LoopOptions
from model_runner.training.objective import Objective
from model_runner.training.pipeline import Accuracy, Kind, TrainingOptions, measure, train_heads

DIFFERENT = 12

Train = Callable[[TrainingOptions], list[Accuracy]]


@pytest.fixture(scope="module")
def known(tiny_model: Callable[[str], Path]) -> list[tuple[int, ...]]:
    """Prompts of two tokens with the tiny model's greedy answers of 14."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    prompts = torch.tensor([[3 + n, 100 + n] for n in range(DIFFERENT)])
    tokens = model.generate(prompts, max_new_tokens=14, min_new_tokens=14, do_sample=False, pad_token_id=0)
    return [tuple(row) for row in tokens.tolist()]


class Counting:
    """Answers every question with one of the sequences it knows; ends them out of order."""

    def __init__(self, known: list[tuple[int, ...]]) -> None:
        self.asked = 0
        self.known = known

    def answers(self, questions: Iterator[Question]) -> Generator[tuple[int, AnsweredPrompt]]:
        held: list[tuple[int, AnsweredPrompt]] = []
        for number, question in enumerate(questions):
            self.asked += 1
            tokens = self.known[question.sampling.seed % len(self.known)]
            held.append((number, AnsweredPrompt(tokens, 2, question.sampling.temperature)))
            if len(held) == 5:
                yield from reversed(held)
                held = []
        yield from held


class StopError(Exception):
    """Stands for Ctrl-C."""


def quiet() -> Progress:
    return Progress(console=Console(quiet=True))


def options(folder: Path, model: Path, kind: Kind, **changed: object) -> TrainingOptions:
    loop = LoopOptions(steps=40, batch_rows=200, learning_rate=3e-3, save_every_s=0.0)
    made = TrainingOptions(
        model, kind, folder / "heads", folder / "work", tokens=1500, draft_vocab=64, depth=2, loop=loop
    )
    return replace(made, **changed)  # type: ignore[arg-type]


@pytest.fixture
def train(known: list[tuple[int, ...]]) -> Callable[[TrainingOptions], list[Accuracy]]:
    return lambda chosen: train_heads(chosen, lambda: Counting(known).answers, str, quiet())


@pytest.fixture(autouse=True)
def _float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the product type, which is otherwise chosen by measurement and could differ between two runs."""
    monkeypatch.setattr(pipeline, "product_type", lambda device: torch.float32)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3"])
def test_heads_learn_and_are_written(
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    known: list[tuple[int, ...]],
    train: Train,
    kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    losses: list[float] = []
    judged: list[Objective] = []

    def recorded(objective: Objective, examples: Sequence[Example]) -> list[Accuracy]:
        judged.append(objective)
        return measure(objective, examples)

    monkeypatch.setattr(pipeline, "measure", recorded)
    untrained = train(options(tmp_path, model, kind, loop=LoopOptions(steps=1, batch_rows=200, learning_rate=1e-9)))
    chosen = options(tmp_path, model, kind)

    class Recording(Progress):
        def update(self, task_id: object, **fields: object) -> None:  # type: ignore[override]
            losses.extend([float(str(fields["description"]).split()[-1])] if "description" in fields else [])

    accuracy = train_heads(chosen, lambda: Counting(known).answers, str, Recording(console=Console(quiet=True)))
    assert losses[-1] < 0.9 * losses[0]
    assert [one.temperature for one in accuracy] == [0.0, 1.0]
    assert accuracy[0].tokens_per_step > untrained[0].tokens_per_step + 0.15

    heads = load_heads(chosen.output, TargetShape.of(load_config(model)))
    assert heads.kind == kind
    judged_weights, weights = (dict(one.named_parameters()) for one in (judged[-1].export(), heads))
    assert judged_weights.keys() == weights.keys()
    assert all(torch.equal(judged_weights[name], weight) for name, weight in weights.items())
    assert heads.draft_ids is not None
    assert len(heads.draft_ids) == 64


def test_an_interrupted_run_goes_on_to_the_same_result(
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    known: list[tuple[int, ...]],
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    train(options(tmp_path / "whole", model, "hydra", int8=False))

    broken = options(tmp_path / "broken", model, "hydra", int8=False)
    log = pipeline.logger.info

    def info(text: str, *values: object) -> None:
        log(text, *values)
        if text.startswith("step") and values[0] == 17:
            raise StopError

    monkeypatch.setattr(pipeline.logger, "info", info)
    with pytest.raises(StopError):
        train(broken)
    monkeypatch.undo()
    monkeypatch.setattr(pipeline, "product_type", lambda device: torch.float32)
    asked = Counting(known)
    train_heads(broken, lambda: asked.answers, str, quiet())
    assert asked.asked == 0
    whole, resumed = ((tmp_path / name / "heads" / "model.safetensors").read_bytes() for name in ("whole", "broken"))
    assert whole == resumed


def test_exported_heads_guess_as_those_in_training(
    tmp_path: Path, tiny_model: Callable[[str], Path], train: Train
) -> None:
    """The scales of inputs are in the exported weights: ranks computed by hand equal the report's."""
    model = tiny_model("llama")
    chosen = options(tmp_path, model, "hydra", int8=False)
    accuracy = train(chosen)
    heads = load_heads(chosen.output, TargetShape.of(load_config(model)))
    assert isinstance(heads, HydraHeads)
    assert heads.draft_ids is not None
    weights = pipeline.TargetWeights.load(model)
    store = pipeline.ExampleStore(
        chosen.work / "held-out", AnswerStore(chosen.work / "held-out", pipeline.held_out_questions), heads.needs
    )
    hits = total = 0
    for one in store.read(0) + store.read(1) + store.read(2):
        if one.temperature == 0.0:
            for row in range(one.num_answer - 1):
                place = one.num_prompt - 1 + row
                hidden = heads.join({n: torch.tensor(f[place : place + 1]).float() for n, f in one.features.items()})
                path = weights.embedding(torch.tensor([[one.tokens[place + 1]]]))
                guess = heads.draft_ids[heads.head(1, hidden, path).argmax()]
                hits += int(guess == one.tokens[place + 2])
                total += 1
    assert hits / total == pytest.approx(accuracy[0].ranked[0][0], abs=0.01)


def test_answers_do_not_depend_on_interruptions(tmp_path: Path, known: list[tuple[int, ...]]) -> None:
    whole = AnswerStore(tmp_path / "whole", training_questions)
    number = whole.collect(lambda: Counting(known).answers, 3000, lambda done: None)
    assert number == 4  # files of 64 answers of 14 tokens: 896 each
    broken = AnswerStore(tmp_path / "broken", training_questions)
    assert broken.collect(lambda: Counting(known).answers, 1000, lambda done: None) == 2
    reported: list[int] = []
    assert broken.collect(lambda: Counting(known).answers, 3000, reported.append) == 4
    assert reported[-1] == 4 * 896
    for shard in range(4):
        assert broken.read(shard) == whole.read(shard)


def test_a_work_folder_serves_one_model(tmp_path: Path, tiny_model: Callable[[str], Path], train: Train) -> None:
    train(options(tmp_path, tiny_model("llama"), "medusa"))
    with pytest.raises(ValueError, match="another model"):
        train(options(tmp_path, tiny_model("qwen3"), "medusa"))

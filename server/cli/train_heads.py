"""`samewise train-heads`: train draft heads for a model, on its own answers."""

import logging
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from model_runner.read_numbers import whole_number
from server.cli.console import PlainCommand, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from model_runner.features import Feature
    from model_runner.training.examples import AnswerQuestions
    from model_runner.training.pipeline import Accuracy


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="Folder, GGUF file or hub name. By default the embedded model."
    ),
]
Kind = Annotated[
    Literal["medusa", "hydra", "eagle3"], typer.Option(metavar="medusa|hydra|eagle3", help="Kind of heads.")
]
Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="FOLDER", help="Folder to write the heads to, for `samewise serve --heads`."
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder for data and progress. By default next to --output."),
]
Tokens = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of the model's own answers to train on.")]
Minutes = Annotated[
    float, typer.Option(metavar="MINUTES", min=0.01, help="Time for the training, after the data is ready.")
]
Steps = Annotated[int | None, typer.Option(metavar="INTEGER", min=1, help="Training steps, instead of --minutes.")]
LearningRate = Annotated[
    float, typer.Option(metavar="NUMBER", min=1e-6, help="Highest learning rate. It falls to a fiftieth at the end.")
]
DraftVocab = Annotated[
    int, typer.Option(metavar="TOKENS", min=2, help="Number of tokens that heads can guess: the most frequent ones.")
]
Depth = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Number of tokens that heads guess ahead.")]
Layers = Annotated[int, typer.Option(metavar="INTEGER", min=1, help="Layers of each Medusa or Hydra head.")]
Features = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS",
        help="Layers whose inputs Hydra and EAGLE-3 heads read, such as 15,24,27, or `last` for the last layer's "
        "output.",
    ),
]
BeginWith = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Trained Hydra heads to start from; the new heads may be larger."),
]
Int8 = Annotated[bool, typer.Option("--int8/--bfloat16", help="Type in which the weights are stored.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="train-heads", cls=PlainCommand)(train_heads)


def train_heads(  # noqa: PLR0913  (one parameter for each flag)
    model: Model = None,
    *,
    output: Output,
    kind: Kind = "hydra",
    work: Work = None,
    tokens: Tokens = 300_000,
    minutes: Minutes = 30.0,
    steps: Steps = None,
    learning_rate: LearningRate = 1e-3,
    draft_vocab: DraftVocab = 8192,
    depth: Depth = 4,
    layers: Layers = 1,
    features: Features = None,
    begin_with: BeginWith = None,
    int8: Int8 = True,
) -> None:
    """Train draft heads for a model, on its own answers. After an interruption, the same command continues."""
    from rich.console import Console  # noqa: PLC0415

    from model_runner.hub.access import ModelNotFoundError  # noqa: PLC0415
    from model_runner.hub.repository import resolve_model  # noqa: PLC0415
    from model_runner.training.loop import LoopOptions  # noqa: PLC0415  (brings torch)
    from model_runner.training.pipeline import TrainingOptions, train_heads  # noqa: PLC0415

    console = Console(stderr=True)
    try:
        folder = resolve_model(model, console)
        options = TrainingOptions(
            model=folder.path,
            kind=kind,
            output=output,
            work=work or output.with_name(output.name + "-work"),
            tokens=tokens,
            draft_vocab=draft_vocab,
            depth=depth,
            num_layers=layers,
            features=None if features is None else _features(features),
            begin_with=begin_with,
            int8=int8,
            loop=LoopOptions(minutes=minutes, steps=steps, learning_rate=learning_rate),
        )
        with _progress_lines(console) as progress:
            accuracy = train_heads(options, lambda: _answers(folder.path, folder.name), _decoder(folder.path), progress)
    except (ModelNotFoundError, ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the same command continues from here", code=130)
    Console(soft_wrap=True).print(_table(accuracy))


@contextmanager
def _progress_lines(console: "Console") -> "Iterator[Progress]":
    """Show a line for each stage below the log, or only the log if the output is not a terminal."""
    from rich.logging import RichHandler  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    logger = logging.getLogger("samewise")
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            yield progress
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _features(text: str) -> "tuple[Feature, ...]":
    """Raises ValueError."""
    from model_runner.features import LAST, layer_input  # noqa: PLC0415

    names = text.replace(" ", "").split(",")
    layers = [LAST if name == LAST else whole_number(name) for name in names]
    if None in layers or len(set(layers)) < len(layers):
        raise ValueError(f"--features: expected different layer numbers or `last`, joined by commas, got {text!r}")
    return tuple(layer_input(layer) if isinstance(layer, int) else LAST for layer in layers)


def _answers(model: Path, name: str) -> "AnswerQuestions":
    """The model in an engine in this process, configured as it would be served."""
    from model_runner.config import RunnerConfig  # noqa: PLC0415
    from server.cli.training_answers import OfflineAnswerer  # noqa: PLC0415
    from server.engine import building  # noqa: PLC0415
    from server.engine.messages import EngineConfig  # noqa: PLC0415
    from server.generation.served_model import ServedModel  # noqa: PLC0415
    from server.text.tokenizer import Tokenizer  # noqa: PLC0415

    engine = building.load(EngineConfig(RunnerConfig(model, speculation="off"))).engine
    tokenizer = Tokenizer.from_folder(model)
    return OfflineAnswerer(engine, tokenizer, ServedModel.from_folder(model, tokenizer, name)).answers


def _decoder(model: Path) -> "Callable[[Sequence[int]], str]":
    from server.text.tokenizer import Tokenizer  # noqa: PLC0415

    return partial(Tokenizer.from_folder(model).decode, skip_special_tokens=True)


def _table(results: "list[Accuracy]") -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table("temperature", "tokens a step", "tokens ahead", "first guess", "first 2", "first 4", "first 8")
    for result in results:
        for depth in range(len(result.ranked)):
            head = (f"{result.temperature:g}", f"{result.tokens_per_step:.2f}") if depth == 0 else ("", "")
            shares = (f"{100 * result.within(depth, guesses):.1f} %" for guesses in (1, 2, 4, 8))
            table.add_row(*head, str(depth + 2), *shares)
    return table

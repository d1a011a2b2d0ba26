"""`samewise train-heads` from the command line to a folder of heads, on a tiny model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_runner.config import RunnerConfig
from model_runner.heads.base import TargetShape
from model_runner.heads.loading import load_heads
from model_runner.modules.loading import load_config
from model_runner.training.examples import OPENING, AnsweredPrompt, opening_questions
from model_runner.training.prompts import Prompt
from server.cli.main import app
from server.cli.training_answers import OfflineAnswerer
from server.engine import building
from server.engine.messages import EngineConfig
from server.generation.served_model import ServedModel
from server.text.tokenizer import Tokenizer
from tests.server.tiny_model import write_folder

HELLO = Prompt("hello there")


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A random model with a tokenizer whose ids it knows."""
    model = write_folder(tmp_path / "model")
    for file in tiny_model("llama").iterdir():
        shutil.copy(file, model / file.name)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return model


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train-heads", *arguments])
    return result.exit_code, result.output


def test_heads_from_answers_of_the_engine(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads"
    flags = ("--output", str(output), "--tokens", "200", "--draft-vocab", "50", "--depth", "2")
    code, text = run(str(folder), *flags, "--steps", "2")
    assert code == 0, text
    assert "tokens a step" in text
    heads = load_heads(output, TargetShape.of(load_config(folder)))
    assert (heads.kind, heads.depth) == ("hydra", 2)
    held_out = json.loads((output / "config.json").read_text())["held_out"]
    assert set(held_out) == {"temperature 0", "temperature 1"}
    assert len(held_out["temperature 0"]["ranked"]) == 2
    assert (tmp_path / "heads-work" / "training" / "answers-00000.npz").is_file()


def test_heads_that_begin_with_others_and_take_more(folder: Path, tmp_path: Path) -> None:
    flags = ("--work", str(tmp_path / "work"), "--tokens", "200", "--draft-vocab", "50", "--depth", "2", "--steps", "1")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    code, text = run(str(folder), *flags, "--output", first)
    assert code == 0, text
    wider = (*flags, "--output", second, "--layers", "2", "--features", "last,1")
    code, text = run(str(folder), *wider, "--begin-with", first)
    assert code == 1
    assert "use layers.0" in text
    code, text = run(str(folder), *wider[:-1], "last,0", "--begin-with", first)
    assert code == 0, text
    assert load_heads(tmp_path / "second", TargetShape.of(load_config(folder))).needs == ("last", "layers.0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--features", "2,x"), "joined by commas"),
        (("--features", "1,1"), "joined by commas"),
        (("--features", "99"), "layer 99"),
        (("--kind", "medusa", "--features", "1"), "Medusa heads only use"),
        (("--kind", "eagle3", "--begin-with", "."), "only hydra heads can"),
    ],
)
def test_settings_that_do_not_go_together(folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    code, text = run(str(folder), "--output", str(tmp_path / "heads"), *flags)
    assert code == 1
    assert message in text


def test_a_model_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text("no model")
    code, text = run(str(file), "--output", str(tmp_path / "heads"))
    assert code == 1
    assert "is not a GGUF file; give a folder" in text


def test_an_opening_is_the_template_up_to_the_users_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    model = ServedModel.from_folder(folder, tokenizer, "tiny")
    engine = building.load(EngineConfig(RunnerConfig(folder, speculation="off"))).engine
    answerer = OfflineAnswerer(engine, tokenizer, model)
    opening, asked = (tokenizer.decode(answerer.encode(one), skip_special_tokens=False) for one in (OPENING, HELLO))
    assert asked.startswith(opening + HELLO.text)
    assert 0 < len(opening) < len(asked) - len(HELLO.text)

    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    bare = OfflineAnswerer(engine, Tokenizer.from_folder(folder), model)
    assert bare.encode(OPENING) == ()
    assert list(bare.answers(opening_questions(2))) == [
        (0, AnsweredPrompt((), 0, 1.0)),
        (1, AnsweredPrompt((), 0, 1.0)),
    ]

"""Shell completion: it is quick, and knows commands, options, choices and models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli.completion import complete_model

LIGHT = """
import sys
sys.argv = ["samewise"]
from server.cli.main import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "httpx", "huggingface_hub", "jinja2"} & set(sys.modules)
    assert not heavy, heavy
"""


def complete(words: str, **environment: str) -> list[str]:
    """The completions of the last word."""
    variables = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_SAMEWISE_COMPLETE": "complete_bash",
        **environment,
    }
    result = subprocess.run([sys.executable, "-c", LIGHT], env=variables, capture_output=True, text=True, check=False)
    assert "Error" not in result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "samewise ",
            ["serve", "chat", "list", "pull", "rm", "show", "verify", "bench", "page", "train-heads", "cache"],
        ),
        ("samewise serve --quantization ", ["auto", "int8", "fp8", "int4", "none"]),
        ("samewise serve --block-size 1", ["16"]),
        ("samewise serve --speculation d", ["draft_model"]),
        ("samewise serve --ssl-k", ["--ssl-keyfile", "--ssl-keyfile-password"]),
        ("samewise serve --enforce-eager --log-format ", ["text", "json"]),
        ("samewise train-heads --kind e", ["eagle3"]),
    ],
)
def test_completions(words: str, expected: list[str]) -> None:
    assert complete(words) == expected


def test_models_of_the_hubs_cache_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models--Qwen--Qwen3-0.6B", "models--org--other", "datasets--a--b"):
        (tmp_path / "home" / "hub" / name).mkdir(parents=True)
    (tmp_path / "Qwen-folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "small.gguf").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert complete_model("Q") == ["Qwen/Qwen3-0.6B", "Qwen-folder/"]
    assert complete_model("") == ["Qwen/Qwen3-0.6B", "org/other", "Qwen-folder/", "home/", "small.gguf"]
    assert complete_model(f"{tmp_path}/s") == [f"{tmp_path}/small.gguf"]
    assert complete_model("/no/such/folder/x") == []
    assert complete("samewise serve org", HF_HOME=str(tmp_path / "home")) == ["org/other"]


def test_it_installs_itself(tmp_path: Path) -> None:
    variables = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "server.cli.main", "--install-completion", "bash"]
    subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "complete_bash" in (tmp_path / ".bash_completions" / "samewise.sh").read_text()

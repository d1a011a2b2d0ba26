"""The clients for Node.js."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree

import pytest

from tests.clients.scripted_model import Serve

LIMIT_S = 120
CALL = json.dumps({"name": "read_file", "arguments": {"path": "secret.txt"}})


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("openai", ()),
        ("anthropic", ()),
        ("ollama", ()),
        ("ai_sdk", ("chat", "openai chat")),
        ("ai_sdk", ("responses",)),
        ("ai_sdk", ("messages",)),
    ],
)
def test_a_conversation(
    serve: Serve, node_modules: Path, node_env: dict[str, str], tmp_path: Path, script: str, arguments: Sequence[str]
) -> None:
    address = serve(f"<tool_call>\n{CALL}\n</tool_call>")
    copytree(Path(__file__).parent / "node", tmp_path, dirs_exist_ok=True)
    (tmp_path / "node_modules").symlink_to(node_modules)  # where imports are looked for
    ended = subprocess.run(
        ["node", f"{script}.mjs", address, *arguments],
        cwd=tmp_path, env=node_env, timeout=LIMIT_S, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr

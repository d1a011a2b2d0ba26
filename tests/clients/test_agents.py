"""Coding agents, as their makers publish them: a tool is called, its result is read, the next turn remembers it."""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.scripted_model import FIRST, SECOND, Serve

LIMIT_S = 120


@dataclass(frozen=True)
class Agent:
    """How one is started."""

    program: str
    """Below the folder of npm's packages."""
    first: Sequence[str]
    """Arguments of the first turn, before the prompt."""
    again: Sequence[str]
    """Arguments of later turns, before the prompt."""
    tool: str
    arguments: Mapping[str, Any]
    """Arguments of the call that reads the file."""
    env: Callable[[str], Mapping[str, str]] = lambda address: {}
    files: Callable[[str], Mapping[str, str]] = field(default=lambda address: {})
    """Files that the agent reads from its working folder and from its home (`~/`), given the server's address."""
    num_websockets: int = 0
    """How many it opens in both turns."""


def _opencode(kind: str, path: str = "/v1") -> Callable[[str], Mapping[str, str]]:
    def files(address: str) -> Mapping[str, str]:
        limits = {"context": 262144, "output": 8192}
        provider = {
            "npm": kind,
            "options": {"baseURL": address + path, "apiKey": "none"},
            "models": {"tiny": {"limit": limits}},
        }
        return {"opencode.json": json.dumps({"model": "samewise/tiny", "provider": {"samewise": provider}})}

    return files


def _codex(*, websockets: bool) -> Callable[[str], Mapping[str, str]]:
    def files(address: str) -> Mapping[str, str]:
        return {
            "~/.codex/config.toml": f"""
model = "tiny"
model_provider = "samewise"

[model_providers.samewise]
name = "Samewise"
base_url = "{address}/v1"
wire_api = "responses"
supports_websockets = {json.dumps(websockets)}
"""
        }

    return files


READS = {"command": "cat secret.txt", "description": "Read it"}
OPENCODE = {
    "program": "opencode-linux-x64/bin/opencode", "first": ["run"], "again": ["run", "--continue"],
    "tool": "bash", "arguments": {"command": "cat secret.txt"},
}  # fmt: skip
UNTOUCHED = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CODEX = {
    "program": ".bin/codex", "first": ["exec", *UNTOUCHED], "again": ["exec", "resume", "--last", *UNTOUCHED],
    "tool": "exec_command", "arguments": {"cmd": "cat secret.txt"},
}  # fmt: skip
AGENTS = {
    "codex": Agent(**CODEX, files=_codex(websockets=False)),
    "codex, websocket": Agent(**CODEX, files=_codex(websockets=True), num_websockets=2),
    "claude-code": Agent(
        "@anthropic-ai/claude-code-linux-x64/claude",
        ["--allowedTools", "Bash", "-p"], ["--allowedTools", "Bash", "--continue", "-p"], "Bash", READS,
        env=lambda address: {
            "ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "tiny",
            "ANTHROPIC_SMALL_FAST_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode, chat completions": Agent(**OPENCODE, files=_opencode("@ai-sdk/openai-compatible")),
    "opencode, responses": Agent(**OPENCODE, files=_opencode("@ai-sdk/openai")),
    "opencode, messages": Agent(**OPENCODE, files=_opencode("@ai-sdk/anthropic")),
    "qwen-code": Agent(
        ".bin/qwen", ["--auth-type", "openai", "-y", "-p"], ["--auth-type", "openai", "-y", "--continue", "-p"],
        "run_shell_command", {**READS, "is_background": False},
        env=lambda address: {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "tiny"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
def test_a_round_trip_and_a_second_turn(
    serve: Serve, node_modules: Path, node_env: dict[str, str], tmp_path: Path, name: str
) -> None:
    agent = AGENTS[name]
    (tmp_path / "secret.txt").write_text("word-heliotrope\n")
    call = {"name": agent.tool, "arguments": agent.arguments}
    address = serve(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    for file, text in agent.files(address).items():
        path = tmp_path / file if not file.startswith("~/") else Path(node_env["HOME"]) / file[2:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def said(*words: str) -> str:
        ended = subprocess.run(
            [node_modules / agent.program, *words],
            cwd=tmp_path, env={**node_env, **agent.env(address)}, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    assert "It says word-heliotrope." in said(*agent.first, FIRST)
    assert "Again: word-heliotrope." in said(*agent.again, SECOND)
    metrics = httpx.get(f"{address}/metrics").text
    opened = re.findall(r'http_requests_total\{handler="/v1/responses",method="GET",status="101"\} (\S+)', metrics)
    assert sum(map(float, opened)) == agent.num_websockets

"""Comparisons of two recordings, and the requests of one."""

import copy
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recording.__main__ import main
from tests.recording.instruction_sets import variables_of
from tests.recording.models import MODELS
from tests.recording.recording import Recording, content_of, header_of
from tests.recording.requests import requests_of

LOGPROB = -1.2345678806304932
"""A float32."""


def recording() -> Recording:
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"token_logprobs": [LOGPROB, -2.5]}}
    body = {"id": "random", "created": 1, "choices": [choice]}
    answers = {"greedy": content_of(200, body), "sampled": content_of(200, body)}
    return Recording(header_of("avx512"), {"llama": "digest"}, {"llama": answers})


def change_token(content: Any) -> None:
    content["answers"]["llama"]["sampled"]["choices"][0]["token_ids"][1] = 7


def change_bit(content: Any) -> None:
    logprobs = content["answers"]["llama"]["sampled"]["choices"][0]["logprobs"]["token_logprobs"]
    logprobs[0] = math.nextafter(logprobs[0], 0)


def drop_request(content: Any) -> None:
    del content["answers"]["llama"]["sampled"]


def change_weights(content: Any) -> None:
    content["models"]["llama"] = "another digest"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_token, "llama / sampled: choices[0].token_ids[1]: 6 -> 7"),
        (
            change_bit,
            "llama / sampled: choices[0].logprobs.token_logprobs[0]: -1.2345678806304932 -> -1.234567880630493\n",
        ),
        (drop_request, "llama / sampled: answer: "),
        (change_weights, 'llama / its files: digest: "digest" -> "another digest"'),
    ],
)
def test_one_change_fails(
    change: Callable[[Any], None], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    recording().write(before)
    content = json.loads(before.read_text())
    after.write_text(json.dumps(content))
    assert main(["compare", str(before), str(after)]) == 0
    assert "all equal" in capsys.readouterr().out
    changed = copy.deepcopy(content)
    change(changed)
    after.write_text(json.dumps(changed))
    assert main(["compare", str(before), str(after)]) == 1
    report = capsys.readouterr().out
    assert line in report
    assert "1 differ" in report


def test_failed_requests_are_told(tmp_path: Path) -> None:
    refused = content_of(400, {"error": {"message": "too long"}})
    (line,) = Recording({}, {}, {"llama": {"one": refused, "two": refused}}).failures()
    assert line == "llama: 2 of 2 failed, the first is 'one': 400 too long"


def test_a_recording_asks_400_requests_of_30_models() -> None:
    assert len(MODELS) >= 30
    assert sum(len(requests_of(model)) for model in MODELS.values()) >= 400
    for model in MODELS.values():
        names = [request.name for request in requests_of(model)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(("isa", "refused"), [("avx2", "-mavx512f"), ("portable", "-mavx2")])
def test_a_compiler_without_the_better_instruction_sets(isa: str, refused: str, tmp_path: Path) -> None:
    try:
        compiler = variables_of(isa, tmp_path)["CXX"]
    except ValueError as error:
        pytest.skip(str(error))
    source = tmp_path / "empty.cpp"
    source.write_text("")
    compiled = [compiler, "-c", str(source), "-o", str(tmp_path / "empty.o")]
    assert subprocess.run(compiled, check=False).returncode == 0
    refusal = subprocess.run([*compiled, refused], check=False, capture_output=True, text=True)
    assert refusal.returncode == 1
    assert "lacks the instruction set" in refusal.stderr

"""The benchmark against llama.cpp: its requests, its checks of answers, and its table."""

import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.against_llama_cpp import Comparison, Load, arguments_of, llama_command, make_loads, table
from bench.local_server import LocalServer, paused, started
from server.cli.loadtest.load import Failure, LoadResult, Outcome, summarize
from tests.waiting import until

PROGRAMS = ["--llama-server", "llama-server", "--convert", "convert.py"]
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import signal
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
HTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()
"""


def _answered(count: int, prompt_tokens: int, output_tokens: int) -> LoadResult:
    one = Outcome(0.0, 2.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    return LoadResult((one,) * count, duration_s=2.0)


def test_prompts_count_where_one_token_comes_out_and_else_answers() -> None:
    assert Load("decode", 2, 4, 128, 64).tokens_per_s(summarize(_answered(4, 128, 64))) == 128
    assert Load("prefill", 1, 4, 512, 1).tokens_per_s(summarize(_answered(4, 512, 1))) == 1024


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (_answered(4, 128, 63), "252 output tokens instead of 256"),
        (_answered(4, 129, 64), "the prompts had 516 tokens"),
        (LoadResult((Outcome(0.0, failure=Failure("timeout", "too slow")),), 1.0), "1 failed: too slow"),
    ],
)
def test_answers_of_other_lengths_are_no_measurement(result: LoadResult, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        Load("decode", 2, 4, 128, 64).tokens_per_s(summarize(result))


def test_the_ratio_is_the_median_of_the_rounds_own(capsys: pytest.CaptureFixture[str]) -> None:
    compared = Comparison("embedded", "decode, 8 clients", (100.0, 40.0, 900.0), (50.0, 10.0, 300.0))
    assert compared.ratio == 3.0  # not 100 / 50, the ratio of the medians
    assert compared.cells() == ["embedded", "decode, 8 clients", "100", "50", "3.00 x", "3.3 x", "llama.cpp"]
    assert Comparison("llama-1b", "decode, 8 clients", (1.0,), (1.0,)).goal is None
    Console(width=150).print(table([compared]))
    assert "3.00 x" in capsys.readouterr().out


def test_loads_have_forms_only_with_the_embedded_model() -> None:
    parts = ["decode", "prefill", "forms"]
    names = [load.name for load in make_loads(parts, "experts", [1, 32], (128, 128))]
    assert names == ["decode, 1 client", "decode, 32 clients", "prefill of 512"]
    forms = make_loads(["forms"], "embedded", [8], (64, 96))
    assert [load.name for load in forms] == ["free, 8 clients", "any strings, 8 clients", "maxLength 16, 8 clients"]
    kinds = [load.fields.keys() - {"temperature"} for load in forms]  # our server refuses both at once
    assert kinds == [{"ignore_eos"}, {"response_format"}, {"response_format"}]
    assert all(load.num_requests >= load.clients for load in make_loads(parts, "embedded", [1, 8, 32], (128, 128)))


def test_each_client_has_a_slot_that_holds_its_tokens() -> None:
    command = llama_command("llama-server", Path("model.gguf"), clients=32, context=1024)
    assert command[command.index("--parallel") + 1] == "32"
    assert command[command.index("--ctx-size") + 1] == str(32 * 1024)


def test_what_is_not_ours_goes_to_the_server() -> None:
    arguments, rest = arguments_of([*PROGRAMS, "--models", "experts", "--quantization", "int4"])
    assert arguments.models == ["experts"]
    assert rest == ["--quantization", "int4"]


def test_transformers_need_answers_to_be_put_beside(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of([*PROGRAMS, "--parts", "transformers"])
    assert "needs decode" in capsys.readouterr().err


async def test_another_server_is_started_paused_and_ended() -> None:
    async with started([sys.executable, "-c", SERVER], "/health") as server:
        assert _state(server) in "SR"
        with paused(server):
            await until(lambda: _state(server) == "T")
        await until(lambda: _state(server) != "T")
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def _state(server: LocalServer) -> str:
    """As /proc has it; T is stopped."""
    return Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

"""The terminal chat against a small server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from server.cli.console import printable
from server.cli.main import app
from server.cli.terminal_chat import ChatServer, Conversation, Terminal
from tests.cli.fake_openai import FakeOpenAI


def chat(base_url: str, lines: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--base-url", base_url, *arguments], input=lines)


def test_the_conversation_is_kept_and_sent(base_url: str, fake: FakeOpenAI) -> None:
    result = chat(base_url, "What is it?\n\nSure?\n", "--system", "Be brief.", "--temperature", "0", "--seed", "7")
    assert result.exit_code == 0
    assert result.output.count("Paris is it.") == 2
    assert [message["role"] for message in fake.bodies[0]["messages"]] == ["system", "user"]
    assert fake.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Paris is it."},
        {"role": "user", "content": "Sure?"},
    ]
    sent = {key: value for key, value in fake.bodies[1].items() if key != "messages"}
    assert sent == {"model": "fake-1", "stream": True, "temperature": 0.0, "seed": 7}


def test_reset_keeps_the_system_message(base_url: str, fake: FakeOpenAI) -> None:
    chat(base_url, "one\n/reset\ntwo\n", "--system", "S", "--model", "m")
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["S", "two"]
    assert fake.bodies[1]["model"] == "m"


def test_save_and_what_it_says_when_it_cannot(base_url: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    result = chat(base_url, f"one\n/save {file}\n/save\n/save {tmp_path}/none/x\n/what\n/quit\nnever sent\n")
    content = json.loads(file.read_text())
    assert [message["content"] for message in content["messages"]] == ["one", "Paris is it."]
    for text in ("Saved to", "Name a file", "No such file", "Unknown command /what"):
        assert text in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (503, "The server is starting.", "The server is starting. Try again in 7 s."),
        (429, "Too many requests.", "Too many requests. Try again in 7 s."),
        (400, "Invalid 'temperature'.", "HTTP 400: Invalid 'temperature'."),
    ],
)
def test_an_error_is_shown_and_the_conversation_goes_on(
    status: int, message: str, shown: str, base_url: str, fake: FakeOpenAI
) -> None:
    fake.fails_with = (status, {"message": message})
    result = chat(base_url, "one\ntwo\n")
    assert result.exit_code == 0
    assert result.output.count(shown) == 2
    assert len(fake.bodies[1]["messages"]) == 1


def test_an_error_mid_stream_keeps_what_came(base_url: str, fake: FakeOpenAI) -> None:
    fake.error_after = 2
    result = chat(base_url, "one\ntwo\n")
    assert "Paris is\nThe engine is gone." in result.output
    assert fake.bodies[1]["messages"][1] == {"role": "assistant", "content": "Paris is"}


def test_a_stream_that_just_ends_is_told(base_url: str, fake: FakeOpenAI) -> None:
    fake.breaks_after = 1
    assert "closed the connection before the answer was complete" in chat(base_url, "one\n").output


def test_keys(base_url: str, fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.api_key = "sk-right"
    refused = chat(base_url, "", "--api-key", "sk-wrong")
    assert refused.exit_code == 1
    assert refused.stderr == ("error: Incorrect API key. Set --api-key or SAMEWISE_API_KEY to a key of this server.\n")
    assert chat(base_url, "", "--api-key", "sk-right").exit_code == 0
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    assert chat(base_url, "").exit_code == 0
    monkeypatch.setenv("SAMEWISE_API_KEY", "sk-wrong")
    assert chat(base_url, "").exit_code == 1


def test_no_server() -> None:
    result = chat("127.0.0.1:9/v1", "one\n")
    assert result.exit_code == 1
    advice = "start one with `samewise serve`, or name it with --base-url"
    assert result.stderr == f"error: no server answers at http://127.0.0.1:9/v1; {advice}\n"


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    base_url: str, fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions: Iterator[str] = iter(["one", "two"])
    fake.delay_s = 0.02

    class InterruptedServer(ChatServer):
        def answer(self, body):  # type: ignore[no-untyped-def]
            for number, text in enumerate(super().answer(body)):
                if number == 2 and len(body["messages"]) == 1:
                    raise KeyboardInterrupt
                yield text

    def read(prompt: str) -> str:
        for question in questions:
            return question
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    with InterruptedServer(base_url, None) as server:
        Terminal(server, Conversation("m", None, {})).run()
    assert "Paris [stopped]" in capsys.readouterr().out
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["one", "Paris", "two"]
    assert fake.left == 1


def test_a_model_cannot_steer_the_terminal(base_url: str, fake: FakeOpenAI) -> None:
    fake.words = ["\x1b]0;owned\x07", "[bold]a\tb\n", "日本 🙂"]
    output = chat(base_url, "one\n").output
    assert "\x1b" not in output
    assert "[bold]a\tb\n日本 🙂" in output
    assert printable("a\x1b[2Jb\u202ec\r\n\x9b") == "a[2Jbc\n"

"""The parts of `samewise chat`: the conversation, the server that answers, and the terminal."""

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import typer
from rich.console import Console

from model_runner.read_numbers import whole_number
from server.cli.console import printable
from server.client.certificates import UNTRUSTED, trusted_certificates, untrusted
from server.client.openai_answers import AnswerError, ChunkParser, error_message, first_model, headers, listed_models


class Conversation:
    """Messages, and the options of every request of the conversation."""

    def __init__(self, model: str, system: str | None, options: Mapping[str, Any]) -> None:
        self.model = model
        self._options = dict(options)
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._start)

    @property
    def messages(self) -> list[dict[str, str]]:
        return list(self._messages)

    def request(self, question: str) -> dict[str, Any]:
        """The body of the request that asks this question."""
        asked = [*self._messages, {"role": "user", "content": question}]
        return {"model": self.model, "messages": asked, "stream": True, **self._options}

    def add(self, question: str, answer: str) -> None:
        """Add a question with its answer."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._start)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: model, options, messages. Raises OSError."""
        content = {"model": self.model, **self._options, "messages": self._messages}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server gave no answer. The message is for the user."""


class ChatServer:
    """An OpenAI-compatible server. A context manager."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._base_url = base_url
        self._client = httpx.Client(
            headers=headers(api_key), timeout=timeout, trust_env=False, verify=trusted_certificates()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The first model that the server lists. Raises ServerError."""
        return self._read_models(first_model)

    def models(self) -> list[dict[str, Any]]:
        """The models that the server lists. Raises ServerError."""
        return self._read_models(listed_models)

    def _read_models(self, read: Callable[[bytes], T]) -> T:
        try:
            response = self._client.get(f"{self._base_url}/models")
            self._check(response)
            return read(response.content)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except AnswerError as error:
            raise ServerError(f"{self._base_url}/models: {error}") from None

    def answer(self, body: Mapping[str, Any]) -> Generator[str]:
        """Yield the answer as it comes. Closing the generator ends the request. Raises ServerError."""
        parser = ChunkParser()
        try:
            with self._client.stream("POST", f"{self._base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                self._check(response)
                for data in response.iter_bytes():
                    for chunk in parser.feed(data):
                        yield chunk.text
                    if parser.is_done:
                        return
            parser.close()
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except AnswerError as error:
            raise ServerError(str(error)) from None

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        message = error_message(response.content)
        match response.status_code:
            case 401 | 403:
                raise ServerError(f"{message} Set --api-key or SAMEWISE_API_KEY to a key of this server.")
            case 429 | 503:
                wait = whole_number(response.headers.get("retry-after", ""))
                raise ServerError(message if wait is None else f"{message} Try again in {wait} s.")
            case status:
                raise ServerError(f"HTTP {status}: {message}")

    def _unreachable(self, error: Exception) -> ServerError:
        if untrusted(error):
            return ServerError(f"{self._base_url}: {UNTRUSTED}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(
                f"no server answers at {self._base_url}; start one with `samewise serve`, or name it with --base-url"
            )
        return ServerError(f"the connection to {self._base_url} broke: {str(error) or type(error).__name__}")


HELP = """\
/reset        forget the conversation, keep the system message
/save FILE    write the conversation to a JSON file
/quit         leave, like Ctrl-D
Ctrl-C        stop the answer, and keep what has been written of it"""


class Terminal:
    """Reads questions and prints answers until the user leaves."""

    def __init__(self, server: ChatServer, conversation: Conversation) -> None:
        self._server = server
        self._conversation = conversation
        self._console = Console(highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Talk until the user leaves. Errors of the server are shown and do not end the conversation."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415  (its import gives input() a history and line editing)
        self._console.print(f"Talking to {printable(self._conversation.model)}. /help lists the commands.", style="dim")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._ask(line)

    def _read(self) -> str | None:
        """The next line, stripped. None at the end of the input, empty after Ctrl-C."""
        try:
            return input("> ").strip()
        except EOFError:
            self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print("\nCtrl-D leaves.", style="dim")
            return ""

    def _command(self, line: str) -> bool:
        """Run a command. Returns False if it ends the conversation."""
        name, _, argument = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._conversation.reset()
                self._console.print("A new conversation.", style="dim")
            case "/save":
                self._save(argument.strip())
            case "/help":
                self._console.print(HELP, style="dim", markup=False)
            case _:
                self._console.print(f"Unknown command {name}. /help lists all.", style="red", markup=False)
        return True

    def _save(self, name: str) -> None:
        if not name:
            self._console.print("Name a file: /save FILE", style="red")
            return
        try:
            self._conversation.save(Path(name).expanduser())
        except OSError as error:
            self._console.print(f"{name}: {error.strerror}", style="red", markup=False)
        else:
            self._console.print(f"Saved to {name}.", style="dim", markup=False)

    def _ask(self, question: str) -> None:
        """Print the answer as it comes, and add what has come to the conversation even if it was stopped."""
        pieces: list[str] = []
        try:
            with contextlib.closing(self._server.answer(self._conversation.request(question))) as answer:
                for text in answer:
                    pieces.append(text)
                    typer.echo(printable(text), nl=False)  # rich would turn tabs into spaces
        except KeyboardInterrupt:
            self._console.print(" [stopped]", style="dim", end="", markup=False)
        except ServerError as error:
            gap = "\n" if pieces else ""
            self._console.print(f"{gap}{printable(str(error))}", style="red", end="", markup=False)
        self._console.print()
        if pieces:
            self._conversation.add(question, "".join(pieces))

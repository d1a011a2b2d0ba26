"""The person in front of the terminal."""

import contextlib
import sys
from pathlib import Path

import typer
from rich.console import Console

from server.cli.console import printable
from server.cli.terminal_chat.answering_server import ChatServer, ServerError
from server.cli.terminal_chat.conversation import Conversation

HELP = """\
/reset        forget the conversation, keep the system message
/save FILE    write the conversation to a JSON file
/quit         leave, as Ctrl-D does
Ctrl-C        stop the answer that is being written; it is kept as far as it came"""


class Terminal:
    """Reads questions and prints answers until the user has enough."""

    def __init__(self, server: ChatServer, conversation: Conversation) -> None:
        self._server = server
        self._conversation = conversation
        self._console = Console(highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Returns when the user leaves. An error of the server is shown; the conversation goes on."""
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
        """The next line without the space around it; None at the end of the input, empty after Ctrl-C."""
        try:
            return input("> ").strip()
        except EOFError:
            self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print("\nCtrl-D leaves.", style="dim")
            return ""

    def _command(self, line: str) -> bool:
        """Returns whether the conversation goes on."""
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
                self._console.print(f"There is no command {name}; /help lists them.", style="red", markup=False)
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
        """Print the answer as it comes; keep what came, also if it was stopped."""
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

"""Gives a benchmark the engine process's environment variables."""

# Short: it must run before heavy imports.
import os
import sys

from server.engine.environment import engine_environment


def use_engine_environment() -> None:
    """Restart this program with the engine process's environment, which libraries read when they are loaded."""
    environment = engine_environment()
    environment.pop("PYTHONSAFEPATH", None)  # this program is imported from the working folder
    if environment.keys() - os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

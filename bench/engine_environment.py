"""Benchmarks of the runner run as the engine process does."""

# Short: it runs before anything heavy is imported.
import os
import sys

from server.engine.environment import engine_environment


def use_engine_environment() -> None:
    """Start this program over with the engine process's environment, which libraries read as they are loaded."""
    environment = engine_environment()
    environment.pop("PYTHONSAFEPATH", None)  # this program itself is found in the working folder
    if environment.keys() - os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)

"""Records the answers of all kinds of models, and compares them with another commit's: see CONTRIBUTING.md.

python -m tests.recording record before.json               # on the commit before
python -m tests.recording compare before.json              # on the commit after, with the same instruction set
python -m tests.recording compare before.json after.json   # two files
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as hf_logging

from tests.recording.asking import record
from tests.recording.instruction_sets import ISAS
from tests.recording.recording import Recording, differences, report

CACHE = Path("build/recording")


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare. Returns 1 if answers differ, or requests failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.recording", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="write a recording of this commit")
    recorder.add_argument("file", type=Path)
    recorder.add_argument("--isa", choices=ISAS, default=ISAS[0])
    comparer = commands.add_parser("compare", help="compare a recording with another one, or with this commit")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path, nargs="?", help="by default, this commit is recorded")
    for one in (recorder, comparer):
        one.add_argument("--models", nargs="+", default=[], help="names of models; by default all")
        one.add_argument("--cache", type=Path, default=CACHE, help="folder for kernels of each instruction set")
    asked = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    try:
        return _record(asked, console) if asked.command == "record" else _compare(asked, console)
    except ValueError as error:
        parser.error(str(error))


def _record(asked: argparse.Namespace, console: Console) -> int:
    made = _recorded(asked.isa, asked, console)
    made.write(asked.file)
    for line in made.failures():
        console.print(line, markup=False)
    console.print(f"{asked.file}: {made.num_answers} answers of {len(made.models)} models, {made.num_failed} failed")
    return int(made.num_failed > 0)


def _compare(asked: argparse.Namespace, console: Console) -> int:
    before = Recording.read(asked.before)
    if asked.models:
        before = before.only(asked.models)
    after = _recorded(before.header["isa"], asked, console) if asked.after is None else Recording.read(asked.after)
    found = differences(before, after)
    for line in report(before, after, found):
        console.print(line, markup=False)
    return int(bool(found))


def _recorded(isa: str, asked: argparse.Namespace, console: Console) -> Recording:
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        made = record(isa, asked.models, asked.cache, Path(scratch), console)
    console.print(f"recorded in {time.perf_counter() - start:.0f} s")
    return made


if __name__ == "__main__":
    sys.exit(main())

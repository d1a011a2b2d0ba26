"""Download the suites of other servers and run them against Samewise: `python -m foreign_suites [vllm] [llama.cpp]`."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from pip._internal.models.index import PyPI

INDEX = os.environ.get("PIP_INDEX_URL", PyPI.simple_url)
"""pip's index; pip's configuration file is not read."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Where a suite comes from, and what pytest is to run of it."""

    package: str
    version: str
    folder: str
    """Where pytest runs, in the package."""
    parts: tuple[str, ...]
    """Paths in the package that are unpacked."""
    arguments: tuple[str, ...]


SUITES = {
    "vllm": Suite(
        "vllm",
        "0.33.0",
        "",
        ("tests",),
        ("-p", "foreign_suites.vllm_suite", "--confcutdir", "tests/entrypoints", "tests/entrypoints/openai"),
    ),
    "llama.cpp": Suite(
        "llama_cpp_python",
        "0.3.36",
        "vendor/llama.cpp/tools/server/tests",
        ("vendor/llama.cpp/tools/server/tests", "vendor/llama.cpp/models/templates"),
        ("-p", "foreign_suites.llama_cpp_suite", "-m", "not slow"),
    ),
}


def main(names: list[str], place: Path) -> int:
    """Run the named suites, or all; return how many could not be run to their end."""
    place.mkdir(parents=True, exist_ok=True)
    return sum(_run(name, SUITES[name], place.resolve()) for name in names or SUITES)


def _run(name: str, suite: Suite, place: Path) -> bool:
    """Failures of tests are the result; only an interrupted run or a wrong use of pytest is an error."""
    root = place / f"{suite.package}-{suite.version}"
    if not root.is_dir():
        _unpack(suite, _download(suite, place), place)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    options = ["-W", "ignore", "--tb", "short", "--continue-on-collection-errors", *suite.arguments]
    outputs = {
        "SAMEWISE_SUITE_REPORT": str(place / f"{name}.json"),
        "SAMEWISE_SUITE_LOG": str(place / f"{name}-server.log"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([*command, *options], cwd=root / suite.folder, env=os.environ | outputs, check=False)
    return done.returncode > 1


def _download(suite: Suite, place: Path) -> Path:
    """The source package as it is: pip would build its metadata first, for which vLLM wants PyTorch."""
    file = f"{suite.package}-{suite.version}.tar.gz"
    with urllib.request.urlopen(f"{INDEX}/{suite.package.replace('_', '-')}/") as page:
        listed = page.read().decode()
    link = re.search(rf'href="([^"#]*/{re.escape(file)})#sha256=([0-9a-f]+)"', listed)
    if link is None:
        raise SystemExit(f"{INDEX} has no {file}: name another version in {__file__}")
    with urllib.request.urlopen(link[1]) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != link[2]:
        raise SystemExit(f"{link[1]} is not what {INDEX} says: download it again")
    (place / file).write_bytes(content)
    return place / file


def _unpack(suite: Suite, archive: Path, place: Path) -> None:
    wanted = tuple(f"{suite.package}-{suite.version}/{part}/" for part in suite.parts)
    with tarfile.open(archive) as content:
        members = [member for member in content if member.name.startswith(wanted)]
        content.extractall(place, members, filter="data")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(os.environ.get("SAMEWISE_SUITES", "build/suites"))))

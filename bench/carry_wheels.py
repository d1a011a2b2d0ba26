"""Wheels for a machine that reaches no package index: download here what it lacks, and carry the folder there.

    python -m bench.carry_wheels freeze.txt build/wheels --python 3.12

`freeze.txt` has what `python3 -m pip freeze` prints there. What the server needs and that machine has not is downloaded
in the versions that are installed here, as they were tested together.
"""

import argparse
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.on_gpu.tests import NEEDED

_PROJECT = "samewise"
_OLDEST_GLIBC = 5
"""The first minor version of glibc 2 that wheels are made for."""


def read_freeze(text: str) -> dict[str, str]:
    """Versions by name, without their local part, such as +cu130, which an index does not know."""
    lines = (line.partition("==") for line in text.splitlines())
    return {canonicalize_name(name): version.partition("+")[0] for name, equals, version in lines if equals}


def packages_to_carry(there: Mapping[str, str], python: str) -> dict[str, str]:
    """Versions by name of what the project requires, and these packages in turn, and the machine has not.

    Where its version is none that they work with, it gets another one.

    Args:
        there: versions of what it has, by name.
        python: the version of Python there.

    Raises:
        ValueError: if it lacks what belongs to the machine, such as torch.
    """
    markers = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    carried: dict[str, str] = {}
    left = [Requirement(_PROJECT)]
    while left:
        asking = left.pop()
        for requirement in map(Requirement, distribution(asking.name).requires or ()):
            name = canonicalize_name(requirement.name)
            has_it = name in there and requirement.specifier.contains(there[name], prereleases=True)
            if has_it or name in carried or not _applies(requirement, asking.extras, markers):
                continue
            if name in NEEDED:
                raise ValueError(
                    f"{requirement} is needed there, and it has {there.get(name, 'none')}: install it first"
                )
            carried[name] = distribution(name).version
            left.append(requirement)
    return carried


def _applies(requirement: Requirement, extras: Collection[str], markers: Mapping[str, str]) -> bool:
    """Whether a package asks for this one where it is installed with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**markers, "extra": extra}) for extra in ("", *extras))


def target_options(python: str, glibc: str, machine: str) -> list[str]:
    """Pip's options for the other machine. Pip takes wheels of exactly these platforms."""
    minors = range(int(glibc.removeprefix("2.")), _OLDEST_GLIBC - 1, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in minors] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    return [*options, *(f"--platform={one}" for one in platforms)]


def download(packages: Mapping[str, str], folder: Path, options: Sequence[str]) -> None:
    """Their wheels. Raises CalledProcessError after pip has said what is wrong."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    subprocess.run([*command, f"--dest={folder}", *options, *wanted], check=True)


def main() -> int:
    """Download them, and say how they are installed there."""
    parser = argparse.ArgumentParser(description="Download the wheels that a machine without a network lacks.")
    parser.add_argument("freeze", type=Path, help="file with what `python3 -m pip freeze` prints there")
    parser.add_argument("folder", type=Path, help="takes the wheels")
    parser.add_argument("--python", default="3.12", help="version of Python there; %(default)s if left out")
    parser.add_argument("--glibc", default="2.35", help="version of the C library there; %(default)s if left out")
    parser.add_argument("--machine", default="x86_64", help="architecture; %(default)s if left out")
    arguments = parser.parse_args()
    there = read_freeze(arguments.freeze.read_text(encoding="utf-8"))
    options = target_options(arguments.python, arguments.glibc, arguments.machine)
    try:
        packages = packages_to_carry(there, arguments.python)
        download(packages, arguments.folder, options)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, version in sorted(packages.items()):
        print(f"{name} {version}" + (f", in place of {there[name]}" if name in there else ""))
    print(f"Install them there: python3 -m pip install --no-index --no-deps {arguments.folder}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())

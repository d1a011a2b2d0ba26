"""Downloads the wheels that a machine without a network lacks, to be copied there.

    python -m bench.carry_wheels freeze.txt build/wheels --python 3.12

`freeze.txt` has the output of `python3 -m pip freeze` on that machine. Packages that it lacks are downloaded in the
versions that are installed here, because these were tested together.
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
"""The oldest minor version of glibc 2 that wheels exist for."""


def read_freeze(text: str) -> dict[str, str]:
    """Versions by package name, without local parts such as +cu130, which package indexes do not have."""
    lines = (line.partition("==") for line in text.splitlines())
    return {canonicalize_name(name): version.partition("+")[0] for name, equals, version in lines if equals}


def packages_to_carry(there: Mapping[str, str], python: str) -> dict[str, str]:
    """Versions by name of direct and indirect requirements that the machine lacks or has in an incompatible version.

    Args:
        there: versions of the machine's packages, by name.
        python: the machine's Python version.

    Raises:
        ValueError: if the machine lacks a package that depends on its hardware, such as torch.
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
                    f"the machine needs {requirement} and has {there.get(name, 'none')}; install it there first"
                )
            carried[name] = distribution(name).version
            left.append(requirement)
    return carried


def _applies(requirement: Requirement, extras: Collection[str], markers: Mapping[str, str]) -> bool:
    """Whether this requirement applies to a package that is installed with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**markers, "extra": extra}) for extra in ("", *extras))


def target_options(python: str, glibc: str, machine: str) -> list[str]:
    """Pip's options for the other machine. pip accepts only wheels for exactly these platforms."""
    minors = range(int(glibc.removeprefix("2.")), _OLDEST_GLIBC - 1, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in minors] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    return [*options, *(f"--platform={one}" for one in platforms)]


def download(packages: Mapping[str, str], folder: Path, options: Sequence[str]) -> None:
    """Download the packages' wheels. Raises CalledProcessError after pip has printed its error."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    subprocess.run([*command, f"--dest={folder}", *options, *wanted], check=True)


def main() -> int:
    """Download the wheels and print how to install them."""
    parser = argparse.ArgumentParser(description="Download the wheels that a machine without a network lacks.")
    parser.add_argument("freeze", type=Path, help="file with the machine's output of `python3 -m pip freeze`")
    parser.add_argument("folder", type=Path, help="folder for the wheels")
    parser.add_argument("--python", default="3.12", help="the machine's Python version; default %(default)s")
    parser.add_argument("--glibc", default="2.35", help="the machine's glibc version; default %(default)s")
    parser.add_argument("--machine", default="x86_64", help="the machine's architecture; default %(default)s")
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
        print(f"{name} {version}" + (f", replaces {there[name]}" if name in there else ""))
    print(f"Install them there: python3 -m pip install --no-index --no-deps {arguments.folder}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())

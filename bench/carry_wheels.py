"""Wheels for a machine that reaches no package index: download here what it lacks, and carry the folder there.

    python -m bench.carry_wheels freeze.txt build/wheels --python 3.12

`freeze.txt` has what `python3 -m pip freeze` prints there. The packages of that list stay as they are, and only others
are downloaded, in versions that go with them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_OLDEST_GLIBC = 5
"""The first minor version of glibc 2 that wheels are made for."""


def read_freeze(text: str) -> dict[str, str]:
    """Versions by name, without their local part, such as +cu130, which an index does not know."""
    lines = (line.partition("==") for line in text.splitlines())
    return {canonicalize_name(name): version.partition("+")[0] for name, equals, version in lines if equals}


def lacking(requirements: Sequence[str], there: Mapping[str, str]) -> list[str]:
    """Those of the requirements that a machine with these versions has nothing of.

    Raises:
        ValueError: if it has a version that does not satisfy one of them.
    """
    wanted = []
    for requirement in map(Requirement, requirements):
        version = there.get(canonicalize_name(requirement.name))
        if version is None:
            wanted.append(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            raise ValueError(f"{requirement.name} is {version} there, and {requirement} is needed: install that first")
    return wanted


def target_options(python: str, glibc: str, machine: str) -> list[str]:
    """What pip is told of the other machine; of platforms it takes exactly those that are named."""
    minors = range(int(glibc.removeprefix("2.")), _OLDEST_GLIBC - 1, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in minors] + [f"manylinux2014_{machine}"]
    options = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    return [*options, *(f"--platform={one}" for one in platforms)]


def resolve(wanted: Sequence[str], there: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """As `name==version`, all that the wanted packages need and the machine does not have."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in there.items()), encoding="utf-8")
        where = [f"--report={report}", f"--target={folder}", f"--constraint={constraints}"]
        pip("install", "--dry-run", "--ignore-installed", *where, *options, *wanted)
        found = [one["metadata"] for one in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return sorted(f"{one['name']}=={one['version']}" for one in found if canonicalize_name(one["name"]) not in there)


def pip(command: str, *options: str) -> None:
    """Run it; it says itself what goes wrong. Raises CalledProcessError then."""
    program = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    subprocess.run([*program, *options], check=True)


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
    requirements = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    options = target_options(arguments.python, arguments.glibc, arguments.machine)
    try:
        packages = resolve(lacking(requirements, there), there, options)
        pip("download", "--no-deps", f"--dest={arguments.folder}", *options, *packages)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(packages)} wheels: {', '.join(packages)}")
    print(f"Install them there: python3 -m pip install --no-index --no-deps {arguments.folder}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())

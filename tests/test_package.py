"""The installed package: the launcher, and wheels with and without compiled libraries."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import samewise
from model_runner.kernels.build import _KERNELS, _packaged_recipe
from server import __version__
from tests.served.conftest import Server

ROOT = Path(__file__).parents[1]
_MAIN = """
import subprocess, sys
import server

def main():
    print(server.__file__, sys.argv[1:], flush=True)
    subprocess.run([sys.executable, "-P", "-m", "server.child"], check=True)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A site-packages with the launcher, our `server` in its folder, and somebody else's `server`."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "samewise", site / "samewise", ignore=shutil.ignore_patterns("__pycache__"))
    ours = site / "samewise" / "_packages" / "server"
    (ours / "cli").mkdir(parents=True)
    for package in (ours, ours / "cli"):
        (package / "__init__.py").touch()
    (ours / "cli" / "main.py").write_text(_MAIN)
    (ours / "child.py").write_text("print(__file__)\n")
    (site / "server.py").write_text("raise SystemExit('this is another server')\n")
    return site


def run(*command: str, site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=site).stdout


@pytest.mark.parametrize("start", [["-m", "samewise"], ["-c", "import samewise; samewise.main()"]])
def test_the_launcher_finds_the_packages_and_so_do_child_processes(start: list[str], installed: Path) -> None:
    ours = installed / "samewise" / "_packages" / "server"
    lines = run(sys.executable, *start, "serve", site=installed).splitlines()
    assert lines == [f"{ours / '__init__.py'} ['serve']", str(ours / "child.py")]


def test_importing_the_launcher_changes_nothing(installed: Path) -> None:
    code = "import sys; before = list(sys.path); import samewise; print(sys.path == before, 'server' in sys.modules)"
    assert run(sys.executable, "-c", code, site=installed) == "True False\n"


def test_a_clone_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    before = list(sys.path)
    samewise.find_packages()
    assert sys.path == before
    assert os.environ["PYTHONPATH"] == "mine"


def wheel(tmp_path: Path, compiler: str) -> tuple[str, set[str]]:
    """Name and files of a wheel that this compiler has made."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("samewise", "server", "scheduler", "model_runner"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "embedded_heads"))
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path / "dist")]
    environment = {**os.environ, "CXX": compiler, "SAMEWISE_CACHE": str(tmp_path / "cache")}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(made) as archive:
        return made.name, set(archive.namelist())


def test_a_wheel_has_libraries_and_takes_one_name(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n')
    compiler.chmod(0o755)
    name, files = wheel(tmp_path, str(compiler))
    assert name.startswith(f"samewise-{__version__}-py3-none-linux_")
    tops = {file.partition("/")[0] for file in files}
    assert tops == {"samewise", f"samewise-{__version__}.dist-info"}
    title = _packaged_recipe(_KERNELS).title(())
    assert f"samewise/_packages/model_runner/kernels/built/{title}.so" in files
    assert "samewise/_packages/model_runner/kernels/cpu/samewise.h" in files
    assert any(file.startswith("samewise/_packages/server/page/static/") for file in files)
    assert {"samewise/__main__.py", "samewise/_packages/scheduler/engine.py"} <= files


def test_without_a_compiler_a_wheel_fits_all_machines(tmp_path: Path) -> None:
    name, files = wheel(tmp_path, "/nowhere/c++")
    assert name == f"samewise-{__version__}-py3-none-any.whl"
    assert not any("/built/" in file for file in files)
    assert "samewise/_packages/model_runner/kernels/cpu/samewise.cpp" in files


def imported(*packages: str) -> set[str]:
    """First names of what the packages import, except the standard library and each other."""
    names: set[str] = set()
    for file in (file for package in packages for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"samewise", "server", "scheduler", "model_runner", "bench"}


def dependencies() -> list[Requirement]:
    """The requirements in pyproject.toml, with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*map(Requirement, [*project["dependencies"], *chain(*project["optional-dependencies"].values())])]


def test_what_is_imported_is_declared() -> None:
    """By its own name, since a dependency of a dependency may go with its next version."""
    declared = {canonicalize_name(one.name) for one in dependencies()}
    providers = packages_distributions()
    undeclared = {
        name
        for name in imported("samewise", "server", "scheduler", "model_runner", "bench")
        if declared.isdisjoint(map(canonicalize_name, providers.get(name, [name])))
    }
    assert undeclared == set()


def with_their_own(wanted: Iterable[Requirement]) -> Iterator[Requirement]:
    """Requirements and all that these need on this machine, as far as it is installed."""
    left, seen = list(wanted), set()
    while left:
        one = left.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        yield one
        try:
            own = [*map(Requirement, requires(one.name) or ())]
        except PackageNotFoundError:
            continue
        extras = ("", *one.extras)
        left += [of for of in own if of.marker is None or any(of.marker.evaluate({"extra": name}) for name in extras)]


def test_constraints_have_one_version_of_every_dependency() -> None:
    """Except for packages that each build of PyTorch chooses, and the embedded model."""
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert [str(line) for line in lines if not re.fullmatch(r"==[\w.]+", str(line.specifier))] == []
    versions = {canonicalize_name(line.name): line.specifier for line in lines}
    assert len(versions) == len(lines)
    left_out = re.compile("triton|nvidia-|cuda-|samewise-smollm2")
    needed = {canonicalize_name(one.name) for one in with_their_own(dependencies())}
    assert {name for name in needed - versions.keys() if not left_out.match(name)} == set()
    allowed = [one for one in dependencies() if not left_out.match(one.name)]
    tested = {one.name: str(versions[canonicalize_name(one.name)]).removeprefix("==") for one in allowed}
    assert [str(one) for one in allowed if not one.specifier.contains(tested[one.name])] == []


def test_installations_are_constrained() -> None:
    """Except the one that tries the newest versions."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    free = [one for one in re.findall(r"pip install .*-e '.*", text) if " -c constraints.txt " not in one]
    assert ["--upgrade-strategy eager" in one for one in free] == [True]
    assert "pip install -c constraints.txt -r requirements.txt\n" in (ROOT / "Dockerfile").read_text()


@pytest.mark.wheel
def test_an_installed_wheel_answers_without_a_compiler(tmp_path: Path) -> None:
    """Its environment has only the interpreter; other packages are the ones of this environment."""
    (made,) = (ROOT / "dist").glob(f"samewise-{__version__}-*manylinux*.whl")
    venv.create(tmp_path / "environment")
    programs = tmp_path / "environment" / "bin"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(str(programs / "python"), "-c", code, site=tmp_path).strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-index", "--no-deps")
    run(*pip, "--force-reinstall", str(made), site=tmp_path)
    alone = ("env", "-i", f"PATH={programs}", f"HOME={tmp_path}", f"SAMEWISE_CACHE={tmp_path / 'cache'}")
    server = Server(begins=alone, program=[str(programs / "samewise")])
    try:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = server.client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=question, temperature=0)
        libraries = Path(f"/proc/{server.engine_pid}/maps").read_text()
    finally:
        server.terminate()
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert (
        f"{site}/samewise/_packages/model_runner/kernels/built/{_packaged_recipe(_KERNELS).title(())}.so" in libraries
    )

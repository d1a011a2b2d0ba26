"""Building the kernels: once, and with a message for people where it cannot be done."""

import shutil
import threading
from pathlib import Path

import pytest

from model_runner.kernels.build import NoKernelsError, build_kernels

NO_COMPILER = {"PATH": "/nowhere"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources that compile at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "samewise.cpp").write_text('#include "answer.h"\nint answer() { return kAnswer; }\n')
    (folder / "kernels.cpp").write_text("namespace SW_ISA { int answer() { return 1; } }\n")
    return folder


def fake_compiler(tmp_path: Path, body: str) -> dict[str, str]:
    script = tmp_path / "compiler"
    script.write_text(body)
    script.chmod(0o755)
    return {"CXX": str(script)}


def test_a_library_is_built_once_and_then_needs_no_compiler(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    library = build_kernels(folder, sources=sources)
    written = library.stat().st_mtime_ns
    assert build_kernels(folder, environment=NO_COMPILER, sources=sources) == library
    assert library.stat().st_mtime_ns == written
    assert list(folder.iterdir()) == [library]


def test_what_changes_the_library_changes_its_name(sources: Path, tmp_path: Path) -> None:
    libraries = [build_kernels(tmp_path, sources=sources), build_kernels(tmp_path, ["-g"], sources=sources)]
    (sources / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    libraries.append(build_kernels(tmp_path, sources=sources))
    assert len(set(libraries)) == 3
    assert all(library.is_file() for library in libraries)


def test_other_files_beside_the_sources_do_not_matter(sources: Path, tmp_path: Path) -> None:
    library = build_kernels(tmp_path, sources=sources)
    (sources / "__pycache__").mkdir()
    (sources / "notes.txt").write_text("to do")
    assert build_kernels(tmp_path, environment=NO_COMPILER, sources=sources) == library


def test_of_builds_at_the_same_time_one_compiles(sources: Path, tmp_path: Path) -> None:
    libraries: list[Path] = []
    start = threading.Barrier(2)
    calls = tmp_path / "calls"
    counting = fake_compiler(tmp_path, f'#!/bin/sh\necho >> {calls}\nexec {shutil.which("c++")} "$@"\n')
    build_kernels(tmp_path / "alone", environment=counting, sources=sources)
    alone = calls.read_text()

    def build() -> None:
        start.wait()
        libraries.append(build_kernels(tmp_path / "cache", environment=counting, sources=sources))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert libraries[0] == libraries[1]
    assert list((tmp_path / "cache").iterdir()) == [libraries[0]]
    assert calls.read_text() == 2 * alone


def test_no_compiler(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler was found \(looked for c\+\+, g\+\+, clang\+\+\)"):
        build_kernels(tmp_path, environment=NO_COMPILER, sources=sources)
    with pytest.raises(NoKernelsError, match=r"that CXX names was not found: /usr/bin/c\+\+26"):
        build_kernels(tmp_path, environment={"CXX": "/usr/bin/c++26"}, sources=sources)


def test_cxx_comes_before_the_usual_names(sources: Path, tmp_path: Path) -> None:
    note = tmp_path / "called"
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    environment = fake_compiler(tmp_path, f'#!/bin/sh\ntouch {note}\nexec {real} "$@"\n')
    assert build_kernels(tmp_path / "cache", environment=environment, sources=sources).is_file()
    assert note.exists()


def test_a_compiler_that_fails(sources: Path, tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, "#!/bin/sh\necho no room for templates >&2\nexit 3\n")
    with pytest.raises(NoKernelsError, match=r"(?s)failed with exit code 3: .*samewise\.cpp.*no room for templates"):
        build_kernels(tmp_path / "cache", environment=environment, sources=sources)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_linker_that_fails(sources: Path, tmp_path: Path) -> None:
    body = '#!/bin/sh\ncase "$*" in *-shared*) echo no room for symbols >&2; exit 4;; esac\n'
    with pytest.raises(NoKernelsError, match=r"(?s)failed with exit code 4: .*no room for symbols"):
        build_kernels(tmp_path, environment=fake_compiler(tmp_path, body), sources=sources)


def test_a_source_that_does_not_compile(sources: Path, tmp_path: Path) -> None:
    (sources / "kernels.cpp").write_text("int answer() { return unknown; }\n")
    with pytest.raises(NoKernelsError, match=r"(?s)kernels\.cpp.*unknown"):
        build_kernels(tmp_path, sources=sources)


def test_a_compiler_that_cannot_be_started(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(NoKernelsError, match=r"cannot be built in .*Exec format error"):
        build_kernels(tmp_path, environment=fake_compiler(tmp_path, "no program"), sources=sources)


def test_a_folder_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NoKernelsError, match=r"cannot be built in .*file"):
        build_kernels(tmp_path / "file" / "cache", sources=sources)

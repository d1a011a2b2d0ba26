"""Building the kernels: once, and with a message for people where it cannot be done."""

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from model_runner.kernels import build, library_folder
from model_runner.kernels.build import NoKernelsError, build_kernels, build_packaged, detect_isas
from model_runner.kernels.library_folder import private_folder, store

NO_COMPILER = {"PATH": "/nowhere"}
REAL = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
AVX2 = "sse sse2 avx avx2 fma f16c"
VNNI = f"{AVX2} avx512f avx512bw avx512vl avx512dq avx512_vnni"


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder that is used where the cache cannot be."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return private_folder()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources that compile at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "samewise.cpp").write_text('#include "answer.h"\nint answer() { return kAnswer; }\n')
    (folder / "kernels.cpp").write_text("namespace SW_ISA { int answer() { return 1; } }\n")
    (folder / "layers.cpp").write_text("namespace SW_ISA { int layers() { return 2; } }\n")
    return folder


def damage(library: Path) -> None:
    """Replace the file by a shorter one. The file itself is loaded, so it must not change."""
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:-1])


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
    assert list((folder / "native").iterdir()) == [library]
    assert (folder / "native").stat().st_mode & 0o777 == 0o700


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
    counting = fake_compiler(tmp_path, f'#!/bin/sh\n[ "$1" = --version ] || echo >> {calls}\nexec {REAL} "$@"\n')
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
    assert list((tmp_path / "cache" / "native").iterdir()) == [libraries[0]]
    assert calls.read_text() == 2 * alone


def test_no_compiler(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler was found \(looked for c\+\+, g\+\+, clang\+\+\)"):
        build_kernels(tmp_path, environment=NO_COMPILER, sources=sources)
    with pytest.raises(NoKernelsError, match=r"that CXX names was not found: /usr/bin/c\+\+26"):
        build_kernels(tmp_path, environment={"CXX": "/usr/bin/c++26"}, sources=sources)


def test_cxx_comes_before_the_usual_names(sources: Path, tmp_path: Path) -> None:
    note = tmp_path / "called"
    environment = fake_compiler(tmp_path, f'#!/bin/sh\ntouch {note}\nexec {REAL} "$@"\n')
    assert build_kernels(tmp_path / "cache", environment=environment, sources=sources).is_file()
    assert note.exists()


def test_a_compiler_that_fails(sources: Path, tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, "#!/bin/sh\necho no room for templates >&2\nexit 3\n")
    with pytest.raises(NoKernelsError, match=r"(?s)failed with exit code 3: .*samewise\.cpp.*no room for templates"):
        build_kernels(tmp_path / "cache", environment=environment, sources=sources)
    assert list((tmp_path / "cache" / "native").iterdir()) == []


def test_a_linker_that_fails(sources: Path, tmp_path: Path) -> None:
    body = '#!/bin/sh\ncase "$*" in *-shared*) echo no room for symbols >&2; exit 4;; esac\n'
    with pytest.raises(NoKernelsError, match=r"(?s)failed with exit code 4: .*no room for symbols"):
        build_kernels(tmp_path, environment=fake_compiler(tmp_path, body), sources=sources)


def test_a_source_that_does_not_compile(sources: Path, tmp_path: Path) -> None:
    (sources / "kernels.cpp").write_text("int answer() { return unknown; }\n")
    with pytest.raises(NoKernelsError, match=r"(?s)kernels\.cpp.*unknown"):
        build_kernels(tmp_path, sources=sources)


def test_a_compiler_that_cannot_be_started(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(NoKernelsError, match=r"compiler cannot be started: .*Exec format error"):
        build_kernels(tmp_path, environment=fake_compiler(tmp_path, "no program"), sources=sources)


BUILD = """
import sys
from pathlib import Path
from model_runner.kernels.build import build_kernels

folder, sources, compiler, pipe = map(Path, sys.argv[1:])
try:
    build_kernels(folder, environment={"CXX": str(compiler)}, sources=sources)
finally:
    pipe.write_text("ended")
"""


def test_compilers_end_with_the_process_that_builds(sources: Path, tmp_path: Path) -> None:
    """A pipe ends when the last process is gone that the compiler of a killed build has started."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    compiles = f"exec 3> {pipe}; echo begun >&3; (sleep 20; echo survived >&3) & wait"
    compiler = fake_compiler(tmp_path, f'#!/bin/sh\n[ "$1" = --version ] || {{ {compiles}; }}\n')["CXX"]
    command = [sys.executable, "-c", BUILD, tmp_path, sources, compiler, pipe]
    with subprocess.Popen(command) as process, pipe.open() as lines:
        assert lines.readline() == "begun\n"
        process.kill()
        assert set(lines) <= {"begun\n"}


def test_cxx_may_have_options(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.h").write_text("#ifdef WANTED\nconstexpr int kAnswer = 42;\n#endif\n")
    build_kernels(tmp_path, environment={"CXX": f"{REAL} -DWANTED"}, sources=sources)
    with pytest.raises(NoKernelsError, match="kAnswer"):
        build_kernels(tmp_path, environment={"CXX": f"{REAL}"}, sources=sources)


def test_another_compiler_builds_its_own_library(sources: Path, tmp_path: Path) -> None:
    """An update of the compiler, too, since the name has its version; without a compiler any of them serves."""
    version = tmp_path / "version"
    compiler = fake_compiler(tmp_path, f'#!/bin/sh\n[ "$1" = --version ] && exec cat {version}\nexec {REAL} "$@"\n')
    libraries = []
    for number in ("12.1", "12.2", "12.1"):
        version.write_text(number)
        libraries.append(build_kernels(tmp_path / "cache", environment=compiler, sources=sources))
    assert len(set(libraries)) == 2
    assert libraries[0] == libraries[2]
    assert build_kernels(tmp_path / "cache", environment=NO_COMPILER, sources=sources) in libraries


# -- instruction sets --------------------------------------------------------------------------------------------------


def cpu_info(tmp_path: Path, features: str) -> Path:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: any\nflags\t\t: {features}\nvmx flags\t: none\n\n")
    return file


@pytest.mark.parametrize(
    ("features", "isas"),
    [
        ("sse sse2", ["portable"]),
        ("avx2", ["portable"]),
        (AVX2, ["avx2", "portable"]),
        (f"{AVX2} avx512f avx512_bf16", ["avx2", "portable"]),
        (VNNI, ["avx512vnni", "avx2", "portable"]),
        (f"{VNNI} avx512_bf16", ["avx512bf16", "avx512vnni", "avx2", "portable"]),
    ],
)
def test_the_processor_is_asked_first(features: str, isas: list[str], tmp_path: Path) -> None:
    assert detect_isas(cpu_info(tmp_path, features)) == isas


def test_this_processor_is_known(kernels_library: Path) -> None:
    """The compiled library finds the same as was detected before it was compiled."""
    from model_runner.kernels.library import Kernels  # noqa: PLC0415

    assert detect_isas()[:1] == [Kernels(kernels_library, threads=1).isa]  # type: ignore[index]


def compiled(tmp_path: Path, text: str) -> dict[str, str]:
    """A compiler that notes the instruction sets it compiles and fails for those that `text` matches."""
    note = tmp_path / "compiled"
    body = f"""#!/bin/sh
for word in "$@"; do case $word in -DSW_ISA=*) echo ${{word#*=}} >> {note}; esac; done
case "$*" in {text}) echo "unknown option" >&2; exit 1; esac
exec {REAL} "$@"
"""
    return fake_compiler(tmp_path, body)


def isas_of(tmp_path: Path) -> list[str]:
    """The instruction sets that were compiled, in this order."""
    return list(dict.fromkeys((tmp_path / "compiled").read_text().split()))


def test_only_the_best_instruction_set_is_compiled(sources: Path, tmp_path: Path) -> None:
    info = cpu_info(tmp_path, AVX2)
    library = build_kernels(tmp_path, (), compiled(tmp_path, "none"), sources, info)
    assert isas_of(tmp_path) == ["avx2"]
    assert build_kernels(tmp_path, (), compiled(tmp_path, "none"), sources, cpu_info(tmp_path, VNNI)) != library


def test_all_instruction_sets_for_a_library_that_moves(sources: Path, tmp_path: Path) -> None:
    everything = compiled(tmp_path, "none") | {"SAMEWISE_KERNELS": "all"}
    library = build_kernels(tmp_path, (), everything, sources, cpu_info(tmp_path, AVX2))
    assert sorted(isas_of(tmp_path)) == ["avx2", "avx512bf16", "avx512vnni", "portable"]
    for features in ("sse", AVX2, VNNI):  # and nothing else is built where there is this one
        assert build_kernels(tmp_path, (), NO_COMPILER, sources, cpu_info(tmp_path, features)) == library
    with pytest.raises(ValueError, match="SAMEWISE_KERNELS is 'avx2'; set it to all"):
        build_kernels(tmp_path, environment={"SAMEWISE_KERNELS": "avx2"}, sources=sources)


def test_without_a_description_of_the_processor_all_are_compiled(sources: Path, tmp_path: Path) -> None:
    build_kernels(tmp_path, (), compiled(tmp_path, "none"), sources, tmp_path / "missing")
    assert len(isas_of(tmp_path)) == 4


def test_a_unit_that_does_not_compile_loses_only_itself(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = cpu_info(tmp_path, VNNI)
    library = build_kernels(tmp_path / "best", (), compiled(tmp_path, "*=avx512*"), sources, info)
    assert isas_of(tmp_path) == ["avx512vnni", "avx2"]
    assert "The kernels for avx512vnni do not compile and are left out: " in caplog.text
    assert "unknown option" in caplog.text
    assert build_kernels(tmp_path / "best", (), NO_COMPILER, sources, info) == library
    caplog.clear()
    everything = compiled(tmp_path, "*=avx512*") | {"SAMEWISE_KERNELS": "all"}
    build_kernels(tmp_path / "all", (), everything, sources, info)
    assert [record.args[0] for record in caplog.records if record.args and "left out" in record.msg] == [  # type: ignore[index]
        "avx512bf16",
        "avx512vnni",
    ]
    with pytest.raises(NoKernelsError, match="unknown option"):
        build_kernels(tmp_path / "none", (), compiled(tmp_path, "*SW_ISA*"), sources, info)


def test_sources_of_a_unit_are_lost_together(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half an instruction set could not be linked."""
    (sources / "layers.cpp").write_text("#ifdef __AVX2__\n#error too new\n#endif\n")
    build_kernels(tmp_path, sources=sources, cpu_info=cpu_info(tmp_path, AVX2))
    assert "The kernels for avx2 do not compile and are left out: " in caplog.text


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_damaged_library_is_built_again(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = build_kernels(tmp_path, sources=sources)
    whole = library.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:4096] + b"\1" + whole[4097:]):
        caplog.clear()
        library.unlink()
        library.write_bytes(damaged)
        assert build_kernels(tmp_path, sources=sources) == library
        assert "is damaged: its content does not fit its checksum" in caplog.text
        assert library.read_bytes() == whole


def test_a_library_that_the_loader_refuses_is_built_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one from a machine with a newer C library."""
    (sources / "answer.h").write_text("constexpr int kAnswer = 44;\n")
    with monkeypatch.context() as patch:
        patch.setattr(build, "try_loading", lambda _: None)  # or the loader would know the library by its name
        library = build_kernels(tmp_path, sources=sources)
    (tmp_path / "other.so").write_bytes(b"\x7fELF of another machine")
    store(tmp_path / "other.so", library)
    build_kernels(tmp_path, sources=sources)
    assert "is not used, and built again if possible" in caplog.text
    ctypes.CDLL(str(library))


def test_without_a_compiler_a_damaged_library_is_not_used(sources: Path, tmp_path: Path) -> None:
    library = build_kernels(tmp_path, sources=sources)
    damage(library)
    with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler was found"):
        build_kernels(tmp_path, environment=NO_COMPILER, sources=sources)


def test_a_folder_that_cannot_be_written_is_replaced(
    sources: Path, tmp_path: Path, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    library = build_kernels(tmp_path / "file" / "cache", sources=sources)
    assert library.parent == private
    assert "the native library kernels cannot be built in " in caplog.text
    caplog.clear()
    assert build_kernels(tmp_path / "file" / "cache", environment=NO_COMPILER, sources=sources) == library


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(
    mode: int, sources: Path, tmp_path: Path, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = build_kernels(tmp_path, sources=sources)
    built.parent.chmod(mode)
    assert build_kernels(tmp_path, sources=sources).parent == private
    assert (
        f"other users can write to {built.parent} (its mode is {mode:04o}); remove it, or set SAMEWISE_C" in caplog.text
    )


def test_a_file_that_others_can_write_to_is_built_again(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = build_kernels(tmp_path, sources=sources)
    library.chmod(0o666)
    assert build_kernels(tmp_path, sources=sources) == library
    assert f"other users can write to {library} (its mode is 0666)" in caplog.text
    assert library.stat().st_mode & 0o777 == 0o600


def test_another_users_folder_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_kernels(tmp_path, sources=sources)
    owner = tmp_path.stat().st_uid
    status = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        return os.stat_result([*status(descriptor)[:4], 4321, *status(descriptor)[5:10]])

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(NoKernelsError, match=f"belongs to user 4321, but the server runs as user {owner}"):
        build_kernels(tmp_path, sources=sources)


def test_a_link_is_no_library(sources: Path, tmp_path: Path) -> None:
    library = build_kernels(tmp_path, sources=sources)
    elsewhere = library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(elsewhere)
    assert build_kernels(tmp_path, sources=sources) == library
    assert not library.is_symlink()


@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP", "EBADF"])
def test_a_file_system_without_locks(code: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS may be."""
    number = getattr(errno, code)

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert build_kernels(tmp_path, sources=sources).parent == tmp_path / "native"


def test_a_library_is_on_the_disk_before_it_has_its_name(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    replace = Path.replace

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())

    def check(file: Path, target: Path) -> Path:
        assert synced == [file.read_bytes()]
        return replace(file, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "replace", check)
    assert synced == [build_kernels(tmp_path, sources=sources).read_bytes()]


# -- packages ----------------------------------------------------------------------------------------------------------


def test_the_packages_library_comes_first(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was built from these sources; and it is trusted as the code next to it is."""
    cached = build_kernels(tmp_path, environment={**os.environ, "SAMEWISE_KERNELS": "all"}, sources=sources)
    packaged = tmp_path / "built"
    packaged.mkdir()
    library = packaged / f"{cached.name.rpartition('-')[0]}.so"
    shutil.copy(cached, library)
    library.chmod(0o666)
    for module in (build, library_folder):
        monkeypatch.setattr(module, "PACKAGED", packaged)
    assert build_kernels(tmp_path, sources=sources) == library
    damage(library)
    assert build_kernels(tmp_path, sources=sources) == cached
    (sources / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    shutil.copy(cached, library)
    assert build_kernels(tmp_path, sources=sources) not in (cached, library)


def test_a_package_is_built_once_with_the_cache(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And servers use what was built for it."""
    (sources / "suffix.cpp").write_text("int suffix() { return 3; }\n")
    monkeypatch.setattr(build, "_KERNELS", sources)
    monkeypatch.setattr(build, "_SUFFIX", sources)
    environment = compiled(tmp_path, "none") | {"SAMEWISE_CACHE": str(tmp_path / "cache")}
    first = build_packaged(tmp_path / "first", environment, platform.machine())
    library = build_kernels(tmp_path / "cache", (), environment, sources)
    assert first[0].read_bytes() == library.read_bytes()
    (tmp_path / "compiled").unlink()
    again = build_packaged(tmp_path / "again", environment, platform.machine())
    assert [made.read_bytes() for made in again] == [made.read_bytes() for made in first]
    assert not (tmp_path / "compiled").exists()
    damage(library)
    assert build_packaged(tmp_path / "third", environment, platform.machine())[0].read_bytes() == first[0].read_bytes()
    assert len(isas_of(tmp_path)) == 4


def test_a_package_lacks_no_instruction_set(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cache has a library without it."""
    monkeypatch.setattr(build, "_KERNELS", sources)
    environment = compiled(tmp_path, "*=avx512bf16*") | {"SAMEWISE_CACHE": str(tmp_path), "SAMEWISE_KERNELS": "all"}
    build_kernels(tmp_path, (), environment, sources)
    with pytest.raises(NoKernelsError, match="unknown option"):
        build_packaged(tmp_path / "built", environment, platform.machine())

"""The cache of packed weights: what it saves, and that it never changes a model."""

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from model_runner.config import Quantization, RunnerConfig
from model_runner.hub.own_cache import list_cache
from model_runner.hub.repository import cache_folder
from model_runner.kernels.library import Kernels
from model_runner.native import packed_cache
from model_runner.native.model import NativeModel
from model_runner.native.packed_cache import Listing, cached
from model_runner.native.packer import NativePacker
from model_runner.platforms.cpu import CpuPlatform
from model_runner.spec.model_spec import ModelSpec
from tests.model_runner.batches import Chunk, make_batch

TOKENS = torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(1)).tolist()
GIB = 1 << 30


class Disk(NamedTuple):
    total: int
    free: int


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "tiny llama")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, in an empty cache that has the kernels."""
    native = cache_folder() / "native"
    native.mkdir(mode=0o700, parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(native)
    monkeypatch.setenv("SAMEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "SMALLEST", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows that are packed, in order."""
    numbers: list[int] = []
    original = Kernels.pack_rows

    def pack_rows(kernels: Kernels, weight: object, first: int, rows: Tensor) -> None:
        numbers.append(len(rows))
        original(kernels, weight, first, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(Kernels, "pack_rows", pack_rows)
    return numbers


def settle() -> None:
    """Wait until everything is written."""
    for thread in threading.enumerate():
        if thread.name == "packed-cache":
            thread.join()


def logits_of(model: Path, quantization: Quantization = "auto") -> Tensor:
    """Start, compute a step, and wait until the weights are written."""
    platform = CpuPlatform(RunnerConfig(model=model, quantization=quantization))
    shape = platform.inspect(model)
    loaded = platform.load(model, shape)
    assert isinstance(loaded, NativeModel)
    settle()
    cache = platform.make_cache(shape.kv, 16, 16)
    target = platform.make_target(loaded, platform.attention(cache), 256)
    return target.forward(make_batch([Chunk(TOKENS, 0, [3, 1, 2])], 16)).clone()


def parts_of(model: Path) -> tuple[NativePacker, ModelSpec, Listing]:
    """The arguments of `cached`, without the folder."""
    platform = CpuPlatform(RunnerConfig(model=model))
    spec = platform.inspect(model).spec
    assert spec is not None
    assert platform._packer is not None
    return platform._packer, spec, Listing.of(model)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen2_moe"])
def test_the_second_start_packs_nothing_and_computes_the_same(
    family: str,
    quantization: Quantization,
    tiny_model: Callable[..., Path],
    folder: Path,
    packed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = logits_of(tiny_model(family), quantization)
    assert len(packed) > 4
    (name,) = files(folder)
    assert name.endswith(".packed")
    assert (folder.stat().st_mode & 0o777, (folder / name).stat().st_mode & 0o777) == (0o700, 0o600)
    packed.clear()
    second = logits_of(tiny_model(family), quantization)
    assert packed == []
    monkeypatch.setattr(packed_cache, "SMALLEST", GIB)
    without = logits_of(tiny_model(family), quantization)
    assert len(packed) > 4
    assert torch.equal(first, second)
    assert torch.equal(first, without)
    assert files(folder) == [name]


def test_the_file_is_listed_and_logged(model: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "samewise.runner")
    logits_of(model)
    assert f"0.0 GiB of packed weights written to {folder}/tiny_llama-" in caplog.text
    (name,) = files(folder)
    (entry,) = [entry for entry in list_cache(folder.parent) if entry.kind == "packed"]
    assert (entry.source, entry.path) == ("tiny_llama", folder / name)
    logits_of(model)
    assert f"0.0 GiB of packed weights read from {name} in " in caplog.text


def test_the_file_is_safetensors(model: Path, folder: Path) -> None:
    _, spec, _ = parts_of(model)
    logits_of(model)
    (name,) = files(folder)
    with safe_open(folder / name, framework="pt") as file:
        assert file.metadata().keys() == {"checkpoint", "code", "layout", "weights"}
        assert len(file.keys()) == 2 * len(spec.linears)
        attention = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
        assert file.get_tensor(f"{'+'.join(attention)}.packed").dtype == torch.int8
        for linear in spec.linears:
            assert file.get_tensor(f"{'+'.join(linear.paths)}.scales").shape == (linear.outputs,)


def test_a_file_is_read_in_pieces(
    model: Path, folder: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits_of(model)
    monkeypatch.setattr(packed_cache, "_PIECE", 1 << 10)
    packed.clear()
    assert torch.equal(logits_of(model), first)
    assert not packed


@pytest.mark.parametrize("failing", [0, 1, 7])
def test_a_file_that_cannot_be_read_to_its_end_only_costs_time(
    failing: int, model: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits_of(model)
    calls = itertools.count()
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: 0 if next(calls) == failing else read(*given))
    packed.clear()
    assert torch.equal(logits_of(model), first)
    assert packed
    assert "packed again: [Errno 5] the file ends early" in caplog.text


def test_small_models_are_not_cached(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "SMALLEST", GIB)
    logits_of(model)
    assert not folder.exists()


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _change(place: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return change


def _open_to_all(file: Path) -> None:
    file.chmod(0o666)


def _link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / "elsewhere"))


@pytest.mark.parametrize("damage", [_truncate, _change(7), _change(12), _change(200), _open_to_all, _link])
def test_a_file_that_is_not_as_written_is_written_again(
    damage: Callable[[Path], None], model: Path, folder: Path, packed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first = logits_of(model)
    (name,) = files(folder)
    original = (folder / name).read_bytes()
    damage(folder / name)
    packed.clear()
    assert torch.equal(logits_of(model), first)
    assert packed
    assert "packed again" in caplog.text
    assert files(folder) == [name]
    assert (folder / name).read_bytes() == original
    assert not (folder / name).is_symlink()
    packed.clear()
    logits_of(model)
    assert not packed


def test_a_foreign_file_is_not_read(
    model: Path, folder: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits_of(model)
    packed.clear()
    status = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        is_packed = Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".packed"
        owner = 4321 if is_packed else status(descriptor).st_uid
        return os.stat_result([*status(descriptor)[:4], owner, *status(descriptor)[5:10]])

    monkeypatch.setattr(os, "fstat", foreign)
    assert torch.equal(logits_of(model), first)
    assert packed
    assert "belongs to user 4321" in caplog.text


def test_a_folder_that_others_can_write_to_is_not_used(
    model: Path, folder: Path, packed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first = logits_of(model)
    folder.chmod(0o770)
    packed.clear()
    assert torch.equal(logits_of(model), first)
    assert packed
    assert f"other users can write to {folder} (its mode is 0770)" in caplog.text


@pytest.mark.parametrize("failing", ["creating", "writing"])
def test_a_disk_that_cannot_be_written_only_costs_time(
    failing: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.NamedTemporaryFile" if failing == "creating" else "os.fsync", refuse)
    logits_of(model)
    assert files(folder) == []
    assert "Packed weights are not cached, so the next start packs them again: [Errno 30]" in caplog.text


def test_a_full_disk_is_left_alone(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logits_of(model)
    (name,) = files(folder)
    size = (folder / name).stat().st_size
    (folder / name).unlink()
    for disk in (Disk(100 * size, 2 * size - 1), Disk(4 * size - 1, 3 * size)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, disk=disk: disk)
        logits_of(model)
        assert files(folder) == []
    assert caplog.text.count("they take 0.0 GiB, but 0.0 GiB of 0.0 GiB are free") == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(4 * size, 2 * size))
    logits_of(model)
    assert files(folder) == [name]


def test_the_files_that_were_used_last_stay(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of(model)
    (name,) = files(folder)
    size = (folder / name).stat().st_size
    for number, other in enumerate(["old.packed", "new.packed", "newest.packed"]):
        shutil.copy(folder / name, folder / other)
        os.utime(folder / other, (1000 + number, 1000 + number))
    os.utime(folder / name, (1, 1))
    logits_of(model)  # a use
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(12 * size, 12 * size))
    logits_of(model, "int4")  # a smaller file
    (other,) = set(files(folder)) - {name, "newest.packed", "new.packed", "old.packed"}
    assert files(folder) == sorted([name, "newest.packed", other])
    smaller = (folder / other).stat().st_size
    (folder / other).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(100 * size, 2 * smaller - 1))
    logits_of(model, "int4")  # there is too little room by a byte
    assert files(folder) == sorted([name, other])


def test_one_of_two_writers_writes(model: Path, folder: Path) -> None:
    packer, spec, listing = parts_of(model)
    with cached(packer, spec, listing, folder.parent) as first:
        assert first is not packer
        with cached(packer, spec, listing, folder.parent) as second:
            assert second is packer
            NativeModel(second, spec)
        (name,) = files(folder)
        assert name.endswith(".writing")
        NativeModel(first, spec)
    settle()
    (name,) = files(folder)
    assert name.endswith(".packed")


def test_what_a_killed_process_left_is_removed(model: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "model-1.packedabc.writing").write_bytes(b"half")
    logits_of(model)
    (name,) = files(folder)
    assert name.endswith(".packed")


def test_a_model_that_is_not_loaded_leaves_no_file(model: Path, folder: Path) -> None:
    packer, spec, listing = parts_of(model)
    with pytest.raises(MemoryError), cached(packer, spec, listing, folder.parent) as caching:  # noqa: PT012
        caching.pack(spec.layers[0].mixer_input)
        raise MemoryError
    settle()
    assert files(folder) == []


def test_another_checkpoint_has_another_file(model: Path, folder: Path, packed: list[int]) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    first = logits_of(model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 2
    save_file(weights, model / "model.safetensors")
    assert not torch.equal(logits_of(model), first)
    assert len(files(folder)) == 2


def test_a_checkpoint_that_changes_meanwhile_is_not_cached(model: Path, folder: Path) -> None:
    packer, spec, listing = parts_of(model)
    with cached(packer, spec, listing, folder.parent) as caching:
        NativeModel(caching, spec)
        os.utime(model / "model.safetensors", (1, 1))
    settle()
    assert files(folder) == []


def test_other_kernels_have_another_file(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_of(model)
    monkeypatch.setattr(Kernels, "layout", "kernels-other portable")
    logits_of(model)
    assert len(files(folder)) == 2

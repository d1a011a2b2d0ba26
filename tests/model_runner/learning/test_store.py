"""Files of learnt heads: whatever is wrong with them, heads that can be used come back, or none."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_runner.heads.base import Heads, HeadsError, TargetShape
from model_runner.heads.hydra import HydraHeads, HydraShape
from model_runner.learning import store as module
from model_runner.learning.store import HeadsStore, fingerprint, load_learnt, pack_learnt, read_learnt

TARGET = TargetShape(hidden=8, vocab_size=40, num_layers=5)


def heads(number: int) -> HydraHeads:
    torch.manual_seed(number)
    return HydraHeads(HydraShape(8, 2, 1, 6, shared_head=True, features=("layers.2",)), torch.arange(6) + number)


def packed(number: int, identity: str = "ours") -> bytes:
    return pack_learnt(heads(number), number, identity, TARGET.num_layers)


def load(checkpoint: bytes) -> Heads:
    return load_learnt(checkpoint, TARGET)


def open_store(folder: Path, identity: str = "ours") -> HeadsStore:
    return HeadsStore(folder, identity, TARGET, heads(0))


def close(store: HeadsStore) -> None:
    """As the end of its process does."""
    assert store._lock is not None
    os.close(store._lock)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the generations 4 and 5."""
    store = open_store(tmp_path)
    for number in (3, 4, 5):
        assert store.write(number, packed(number))
    close(store)
    return tmp_path / "learnt" / "ours"


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "lock")


def test_heads_come_back_in_bfloat16() -> None:
    mine = heads(3)
    back = load(packed(3))
    assert isinstance(back, HydraHeads)
    assert back.needs == mine.needs
    assert back.draft_ids is not None
    assert torch.equal(back.draft_ids, mine.draft_ids)
    for name, tensor in mine.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.dim() == 2 else tensor
        assert torch.equal(back.state_dict()[name], expected)
    assert read_learnt(packed(3)).version == 3


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    content = packed(3)
    whole = read_learnt(content)
    step = 7
    for place in range(0, len(content), step):
        broken = bytearray(content)
        broken[place] ^= 1 << (place % 8)
        try:
            found = read_learnt(bytes(broken))
        except HeadsError:
            continue
        assert found.config == whole.config  # in a space of the header, which says nothing
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in whole.tensors.items())
        assert bytes(broken)[place : place + 1].isspace() or content[place : place + 1].isspace()
    for length in range(0, len(content), 97):
        with pytest.raises(HeadsError):
            read_learnt(content[:length])


def test_the_newest_of_two_generations_is_read(kept: Path) -> None:
    assert files(kept) == ["heads-00000004.safetensors", "heads-00000005.safetensors"]
    stored = open_store(kept.parents[1]).read()
    assert stored is not None
    assert stored.version == 5
    assert stored.checkpoint == packed(5)


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "misfit", "empty"])
def test_a_file_that_cannot_be_used_is_named_and_passed_over(
    kept: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    newest = kept / "heads-00000005.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 4
    other = TargetShape(hidden=12, vocab_size=40, num_layers=5)
    misfit = HydraHeads(HydraShape(12, 2, 1, 6, shared_head=True, features=("layers.2",)), torch.arange(6))
    newest.write_bytes(
        {
            "torn": packed(5)[:-100],
            "flipped": bytes(content),
            "foreign": packed(5, "theirs"),
            "misfit": pack_learnt(misfit, 5, "ours", other.num_layers),
            "empty": b"",
        }[damage]
    )
    store = open_store(kept.parents[1])
    stored = store.read()
    assert stored is not None
    assert stored.version == 4
    assert str(newest) in caplog.text
    assert "Skipping" in caplog.text
    assert store.last_version == 5
    store.write(6, packed(6))
    assert files(kept) == ["heads-00000004.safetensors", "heads-00000006.safetensors"]


def test_nothing_comes_back_from_nothing(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in kept.glob("heads-*"):
        file.write_bytes(b"nothing")
    assert open_store(kept.parents[1]).read() is None
    assert caplog.text.count("Skipping") == 2
    assert open_store(kept.parents[1], "another").read() is None


def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    assert store.write(1, packed(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    assert not store.write(2, packed(2))
    assert not store.write(3, packed(3))
    assert caplog.text.count("No space left on device") == 1
    monkeypatch.undo()
    assert files(tmp_path / "learnt" / "ours") == ["heads-00000001.safetensors"]
    assert store.write(4, packed(4))
    close(store)
    stored = open_store(tmp_path).read()
    assert stored is not None
    assert stored.version == 4


_KILLED = """
import os, sys
from pathlib import Path
from model_runner.learning.store import HeadsStore
store = HeadsStore(Path(sys.argv[1]), "ours", None, None)
def stop(partial, file):
    print("written", flush=True)
    sys.stdin.read()
Path.replace = stop
store.write(6, b"x" * 100000)
"""


def test_a_writer_that_is_killed_before_it_renames_leaves_what_was_there(kept: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(kept.parents[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        assert len([name for name in files(kept) if name.endswith(".partial")]) == 1
        process.send_signal(signal.SIGKILL)
    store = open_store(kept.parents[1])
    assert store._lock is not None
    stored = store.read()
    assert stored is not None
    assert stored.version == 5
    assert files(kept) == ["heads-00000004.safetensors", "heads-00000005.safetensors"]


def test_the_second_server_on_a_folder_only_reads(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = open_store(kept.parents[1]), open_store(kept.parents[1])
    assert first._lock is not None
    assert second._lock is None
    assert "does not store any" in caplog.text
    assert not second.write(9, packed(9))
    stored = second.read()
    assert stored is not None
    assert stored.version == 5
    assert first.write(6, packed(6))


def test_the_fingerprint_is_of_all_that_is_learnt_from(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    cache = tmp_path / "cache"
    model, other = tiny_model("llama"), tiny_model("qwen3")
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    prints = [
        fingerprint(model, "hydra", None, cache),
        fingerprint(other, "hydra", None, cache),
        fingerprint(model, "medusa", None, cache),
        fingerprint(model, "hydra", folder, cache),
    ]
    (folder / "config.json").write_text('{"a": 1}')
    prints.append(fingerprint(model, "hydra", folder, cache))
    assert len(set(prints)) == len(prints)
    assert fingerprint(model, "hydra", None, cache) == prints[0]

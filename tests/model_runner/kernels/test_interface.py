"""The headers as Python reads them, and calls with numbers that do not suit the library."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.attention.backend import AttentionOptions
from model_runner.attention.cpu import NativeAttention
from model_runner.hub.repository import cache_folder
from model_runner.kernels import build, interface
from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.interface import CPU, SUFFIX, Header, pointer
from model_runner.kernels.library import Kernels, ModelPass, embedding_struct
from model_runner.kv_cache import KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch

SHAPE = KVShape(2, 24, 32)
FORBIDDEN = (ValueError, TypeError, IndexError)


@pytest.fixture
def one(kernels_library: Path) -> Kernels:
    return Kernels(kernels_library, threads=1)


def test_a_library_of_another_header_is_refused(tmp_path: Path) -> None:
    sources = tmp_path / "suffix"
    shutil.copytree(Path(build.__file__).parent / "suffix", sources)
    header = sources / "suffix.h"
    header.write_text(header.read_text().replace("  int32_t end_length;\n", "  int32_t end_length;\n  int32_t more;\n"))
    library = build.build_suffix(tmp_path, ["-O0"], sources=sources)
    with pytest.raises(NoKernelsError, match=r"built with another suffix\.h, whose SwWriter have other sizes"):
        SUFFIX.load(library)
    Header(header).load(library)


def test_a_library_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "suffix.cpp").write_text("int nothing() { return 0; }")
    library = build.build_suffix(tmp_path, ["-O0"], sources=tmp_path)
    with pytest.raises(NoKernelsError, match="cannot be loaded"):
        SUFFIX.load(library)


def test_each_library_knows_all_structs_of_its_header(kernels_library: Path) -> None:
    for header, library in ((CPU, kernels_library), (SUFFIX, build.build_suffix(cache_folder()))):
        loaded = header.load(library)
        structs = header._structs()
        assert structs
        assert all(loaded.sw_size_of(name.encode()) > 0 for name in structs)
        assert loaded.sw_size_of(b"SwNothing") == -1


def test_a_header_is_parsed_once_for_a_folder_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(shutil.copy(build.build_suffix(cache_folder()), tmp_path))
    parsed = []
    parse = interface._parsed
    monkeypatch.setattr(interface, "_parsed", lambda text: parsed.append(text) or parse(text))
    for _ in range(2):
        header = Header(SUFFIX._path)
        assert header.load(library) is not None
        assert header._structs() == SUFFIX._structs()
    assert len(parsed) == 1
    (kept,) = tmp_path.glob("interface-*.py")
    kept.write_bytes(kept.read_bytes().replace(b"ffi", b"fii"))
    Header(SUFFIX._path).load(library)
    assert len(parsed) == 2, "what is damaged is not used"
    Header(SUFFIX._path).load(library)
    assert len(parsed) == 2, "and it is written again"


def test_arrays_have_the_structs_layout() -> None:
    choices = np.array([(1, 2, 3, 0.5, 2**64 - 1, -6, 7)] * 2, dtype=CPU.array_type("SwDraftChoice"))
    read = CPU.structs_of("SwDraftChoice", choices)[1]
    assert (read.row, read.token, read.max_nodes, read.temperature) == (1, 2, 3, 0.5)
    assert (read.seed, read.choice, read.position) == (2**64 - 1, -6, 7)
    with pytest.raises(ValueError, match="no items of SwPick"):
        CPU.structs_of("SwPick", choices)


@pytest.mark.parametrize(
    "numbers",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 5).t(),
        torch.zeros(3, 10)[:, ::2],
        torch.zeros(3, 5, dtype=torch.float16),
        torch.zeros(3, 5, device="meta"),
        np.zeros((5, 3), np.int32).T,
        np.zeros((3, 5), np.int16),
    ],
)
def test_addresses_of_other_numbers_are_refused(numbers: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"take contiguous numbers \[3, 5\] on the CPU, but these are"):
        pointer(numbers, 3, 5)


def test_the_header_says_what_type_numbers_have() -> None:
    step = CPU.new("SwStep", positions=pointer(np.zeros(2, np.int32), 2))
    with pytest.raises(TypeError, match="int32_t"):
        step.positions = pointer(torch.zeros(2), 2)


def attend(kernels: Kernels, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> object:
    attention = NativeAttention(kernels, KVCache([SHAPE], 2, 16, torch.float32, torch.device("cpu")))
    step = attention.prepare(make_batch([Chunk([1, 2, 3], 0, [0])], 16))
    return attention.forward(0, *(torch.zeros(size) for size in (query, key, value)), AttentionOptions(0.5), step)


def logits_pass(kernels: Kernels, **changes: object) -> None:
    """A pass over two tokens of a model without layers."""
    weight = kernels.pack("int8", torch.zeros(16, 8))
    embedding, norm = torch.zeros(2, 8), torch.zeros(8)
    numbers = {"embedding": embedding_struct(embedding)[0], "norm": pointer(norm, 8), "head": weight.struct[0]}
    model = CPU.new("SwModel", hidden=8, embedding_scale=1.0, **numbers)
    tokens, index = np.zeros(2, np.int32), np.ones(1, np.int32)
    wanted = {
        "tokens": tokens,
        "logits_index": index,
        "logits": torch.zeros(1, 16),
        "last": torch.zeros(2, 8),
    } | changes
    kernels.forward(model, CPU.new("SwStep", num_tokens=2), ModelPass(**wanted))


Case = Callable[[Kernels], object]
FINE: dict[str, Case] = {
    "linear": lambda kernels: kernels.linear(kernels.pack("int8", torch.zeros(16, 64)), torch.zeros(3, 64)),
    "attention": lambda kernels: attend(kernels, (3, 4, 24), (3, 2, 24), (3, 2, 32)),
    "forward": logits_pass,
    "pick": lambda kernels: kernels.pick(torch.zeros(2, 40), np.zeros(1, np.uint64), np.zeros(1), [1]),
    "truncate": lambda kernels: kernels.truncate(torch.zeros(2, 40), [[], [(5, 3.0)]]),
}
WRONG: dict[str, Case] = {
    "rows that are too narrow": lambda k: k.linear(k.pack("int8", torch.zeros(16, 64)), torch.zeros(3, 63)),
    "rows of another type": lambda k: k.linear(k.pack("int8", torch.zeros(16, 64)), torch.zeros(3, 64).int()),
    "rows that are not contiguous": lambda k: k.linear(k.pack("int8", torch.zeros(16, 64)), torch.zeros(64, 3).t()),
    "weights of another type": lambda k: k.pack("int8", torch.zeros(16, 64, dtype=torch.bfloat16)),
    "weights that are not contiguous": lambda k: k.pack("int8", torch.zeros(64, 16).t()),
    "queries of fewer tokens": lambda k: attend(k, (2, 4, 24), (3, 2, 24), (3, 2, 32)),
    "keys of fewer heads": lambda k: attend(k, (3, 4, 24), (3, 1, 24), (3, 2, 32)),
    "values that are too narrow": lambda k: attend(k, (3, 4, 24), (3, 2, 24), (3, 2, 31)),
    "fewer tokens than the step's": lambda k: logits_pass(k, tokens=np.zeros(1, np.int32)),
    "tokens of 64 bits": lambda k: logits_pass(k, tokens=np.zeros(2, np.int64)),
    "logits of a token beyond the step": lambda k: logits_pass(k, logits_index=np.full(1, 2, np.int32)),
    "logits of a negative token": lambda k: logits_pass(k, logits_index=np.full(1, -1, np.int32)),
    "memory for fewer logits": lambda k: logits_pass(k, logits=torch.zeros(1, 15)),
    "memory for fewer states": lambda k: logits_pass(k, last=torch.zeros(1, 8)),
    "inputs of a layer that is not there": lambda k: logits_pass(k, layer_inputs={0: torch.zeros(2, 8)}),
    "a row beyond the logits": lambda k: k.pick(torch.zeros(2, 40), np.zeros(1, np.uint64), np.zeros(1), [2]),
    "masks that are too short": lambda k: k.pick(
        torch.zeros(1, 40), np.zeros(1, np.uint64), np.zeros(1), None, np.zeros((1, 1), np.int32)
    ),
    "masks of fewer rows": lambda k: k.pick(
        torch.zeros(2, 40), np.zeros(2, np.uint64), np.zeros(2), None, np.zeros((1, 2), np.int32)
    ),
    "keys of fewer rows": lambda k: k.pick(torch.zeros(3, 40), np.zeros(2, np.uint64), np.zeros(2)),
    "truncations of fewer rows": lambda k: k.truncate(torch.zeros(2, 40), [[]]),
    "logits of another type": lambda k: k.truncate(torch.zeros(1, 40).double(), [[]]),
}


@pytest.mark.parametrize("call", FINE.values(), ids=FINE)
def test_what_fits_is_computed(one: Kernels, call: Case) -> None:
    call(one)


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error(one: Kernels, call: Case) -> None:
    with pytest.raises(FORBIDDEN):
        call(one)


def test_experts_of_another_shape_are_an_error(one: Kernels) -> None:
    gate_up, down = one.pack("int8", torch.zeros(32, 64)), one.pack("int8", torch.zeros(64, 16))
    arrays = [CPU.array("SwWeight", [weight.struct[0]] * 2) for weight in (gate_up, down)]
    experts = CPU.new("SwExperts", num_experts=2, top_k=1, gate_up=arrays[0], down=arrays[1])
    rows, chosen, weights = torch.zeros(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    one.experts(experts, rows, chosen, weights)
    for wrong in (
        (rows[:, :63].contiguous(), chosen, weights),
        (rows, chosen[:2], weights),
        (rows, chosen.long(), weights),
        (rows, chosen, weights.repeat(1, 2)),
    ):
        with pytest.raises(FORBIDDEN):
            one.experts(experts, *wrong)


def test_other_threads_go_on_during_a_call(one: Kernels) -> None:
    """The interpreter's lock is released: while one call lasts, this thread runs."""
    logits = torch.randn(400, 50_000)
    steps = [[(6, 0.9)]] * len(logits)
    begun = threading.Event()

    def call() -> None:
        begun.set()
        one.truncate(logits, steps)

    caller = threading.Thread(target=call)
    caller.start()
    begun.wait()
    turns = 0
    while caller.is_alive():
        turns += 1
        caller.join(0.001)
    assert turns > 5

"""Loading the library."""

from pathlib import Path

import pytest

from model_runner.kernels.build import NoKernelsError
from model_runner.kernels.library import Kernels
from tests.model_runner.kernels.conftest import ISAS


def test_an_unknown_instruction_set_is_refused(kernels_library: Path) -> None:
    with pytest.raises(NoKernelsError, match="cannot run with 1 threads and instruction set avx1024"):
        Kernels(kernels_library, threads=1, isa="avx1024")


def test_auto_takes_the_best_of_those_at_hand(kernels_library: Path) -> None:
    at_hand = []
    for isa in ISAS:
        try:
            at_hand.append(Kernels(kernels_library, threads=1, isa=isa).isa)
        except NoKernelsError:
            continue
    assert at_hand[0] == "portable"
    assert Kernels(kernels_library, threads=1).isa == at_hand[-1]


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_text("no library")
    for name in ("kernels.so", "missing.so"):
        with pytest.raises(NoKernelsError, match="cannot be loaded"):
            Kernels(tmp_path / name, threads=1)

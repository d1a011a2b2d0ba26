"""The table of kernels is measured as the engine runs them."""

import sys

import pytest

from bench import kernels


def test_it_starts_over_in_the_engine_s_environment_before_it_measures(monkeypatch: pytest.MonkeyPatch):
    """Without it torch's threads spin between operators, and take the cores from our own."""

    def start_over() -> None:
        raise SystemExit("started over")

    monkeypatch.setattr(sys, "argv", ["bench.kernels"])
    monkeypatch.setattr(kernels, "use_engine_environment", start_over)
    monkeypatch.setattr(kernels, "compare_linears", lambda *_: pytest.fail("measured without it"))
    with pytest.raises(SystemExit, match="started over"):
        kernels.main()

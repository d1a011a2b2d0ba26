"""The stand-in for CUDA graphs: it must do again what a graph does, and refuse what a capture refuses."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from tests.model_runner.triton.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")


@triton.jit
def _add(x, y, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@torch.inference_mode()
def test_it_repeats_the_work_on_the_same_tensors_and_not_the_decisions() -> None:
    x, y, factor = torch.ones(4), torch.ones(4), [2.0]

    def run() -> torch.Tensor:
        out = torch.empty(4)
        _add[(1,)](x * factor[0], y, out, 4)
        return out.view(2, 2) + 1

    replay, result = RecordedGraphs().capture(run)
    assert result.flatten().tolist() == [4.0] * 4
    x.fill_(5)
    factor[0] = 100.0
    replay()
    assert result.flatten().tolist() == [12.0] * 4


@pytest.mark.parametrize("wait", [torch.Tensor.item, lambda x: x.tolist(), torch.Tensor.nonzero, lambda x: x[x > 0]])
@torch.inference_mode()
def test_it_refuses_to_wait(wait: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        RecordedGraphs().capture(lambda: wait(torch.ones(1)))


@torch.inference_mode()
def test_what_a_graph_returned_may_be_gone_when_an_earlier_one_ran() -> None:
    graphs, x = RecordedGraphs(), torch.ones(2)
    (first, one), (second, two) = (graphs.capture(lambda factor=factor: x * factor) for factor in (1.0, 2.0))
    first()
    assert two.isnan().all()
    second()
    assert (one.tolist(), two.tolist()) == ([1.0, 1.0], [2.0, 2.0])

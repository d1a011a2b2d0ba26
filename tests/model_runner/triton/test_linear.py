"""Dense products: the sums of the stored numbers, in rows that do not meet, whatever the tiles."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model_runner.cuda import linear as cuda_linear
from model_runner.cuda.linear import (
    CublasProduct,
    TritonProduct,
    make_product,
    tile_shapes_agree,
)
from model_runner.kernels.triton.linear import Addends, linear, shapes
from model_runner.kernels.triton.tiles import Operands, all_shapes, choose_shape, row_tiles
from model_runner.modules.linears import pack_weights
from model_runner.weights.packed_weight import PackedWeight
from tests.model_runner.triton.linear_oracle import check_product, random

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = [(1, 64, 128), (3, 100, 72), (17, 33, 100), (70, 40, 37), (2, 96, 256), (1, 1, 1)]  # rows, out, in


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "out", "width"), SIZES)
def test_product_with_bias_and_residual(
    count: int, out: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, weight = random(count, width, seed=0, device=device, dtype=dtype), random(out, width, seed=1, device=device)
    bias, residual = (random(*size, seed=2, device=device, dtype=dtype) for size in ((out,), (count, out)))
    product = TritonProduct(weight.to(dtype))
    check_product(product(rows), rows, weight.to(dtype))
    check_product(product(rows, bias), rows, weight.to(dtype), (bias,))
    check_product(product(rows, bias, residual), rows, weight.to(dtype), (bias, residual))
    check_product(product(rows, residual=residual), rows, weight.to(dtype), (residual,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_shape_of_tiles(dtype: torch.dtype, device: torch.device) -> None:
    count, out, width = 150, 300, 136
    rows, weight = (random(n, width, seed=n, device=device, dtype=dtype) for n in (count, out))
    tried = shapes(dtype, width)
    assert len(tried) == 6
    for shape in tried:
        check_product(linear(rows, weight, rows.new_empty(count, out), shape=shape), rows, weight)


def test_rows_may_be_apart_or_transposed(device: torch.device) -> None:
    wide, weight = (random(n, 160, seed=n, device=device, dtype=torch.bfloat16) for n in (7, 48))
    rows, weight = wide[:, 32:96], weight[:, :64]
    product = TritonProduct(weight)
    expected = product(rows.contiguous())
    residual = random(7, 96, seed=3, device=device, dtype=torch.bfloat16)[:, 16:64]
    assert torch.equal(product(rows), expected)
    assert torch.equal(product(rows.t().contiguous().t()), expected)
    assert torch.equal(product(rows, residual=residual), product(rows, residual=residual.contiguous()))


def test_residual_may_be_overwritten(device: torch.device) -> None:
    rows, weight = (random(n, 64, seed=n, device=device, dtype=torch.bfloat16) for n in (70, 48))
    residual = random(70, 48, seed=3, device=device, dtype=torch.bfloat16)
    expected = TritonProduct(weight)(rows, residual=residual)
    assert torch.equal(linear(rows, weight, residual, addends=Addends(residual=residual)), expected)


@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
def test_no_rows(kind: str | None, device: torch.device) -> None:
    product = make_product(random(48, 64, seed=0, device=device, dtype=torch.bfloat16), kind, exact=True)
    assert product(torch.empty(0, 64, dtype=torch.bfloat16, device=device)).shape == (0, 48)


@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(kind: str | None, dtype: torch.dtype, device: torch.device) -> None:
    # In the interpreter numpy multiplies, which rounds by the shape: there, these numbers of rows have the same tiles.
    # That hardware does not is for test_shapes_of_tiles_agree.
    width, out = 160, 72
    product = make_product(random(out, width, seed=0, device=device, dtype=dtype), kind, exact=True)
    rows = random(100, width, seed=1, device=device, dtype=dtype)
    rows[5] *= 100
    residual = random(100, out, seed=2, device=device, dtype=dtype)
    whole = product(rows, None, residual)
    for count in (1, 2, 7, 33, 99) if device.type == "cuda" else (17, 33, 99):
        for start in {0, 1, 100 - count}:
            part = slice(start, start + count)
            assert torch.equal(product(rows[part], None, residual[part]), whole[part])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="in the interpreter numpy rounds by the shape")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_shapes_of_tiles_agree(dtype: torch.dtype, device: torch.device) -> None:
    assert tile_shapes_agree(device, dtype)


def test_the_check_of_shapes_runs_all_and_can_fail(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    met = []

    def rounding(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, shape, scales) -> torch.Tensor:
        met.append(shape)
        return out.fill_(1.0 if (shape.rows, shape.outputs) != odd else 1.0 + 2**-23)

    monkeypatch.setattr(cuda_linear, "linear", rounding)
    odd = (0, 0)
    assert tile_shapes_agree(device, torch.bfloat16)
    assert len(met) == 2 * len({(shape.rows, shape.outputs) for shape in met}) == 12
    assert {shape.inputs for shape in met} == {64, 128}
    odd = (128, 256)
    assert not tile_shapes_agree(device, torch.bfloat16)


@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
def test_one_shape_serves_all_numbers_of_rows(
    kind: str | None, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    met = []
    name = "linear_int4" if kind == "int4" else "linear"
    monkeypatch.setattr(cuda_linear, name, lambda *_, shape, **__: met.append(shape))
    monkeypatch.setattr(cuda_linear, "quantize_rows", lambda *_: None)
    weight = torch.zeros(4096, 64, dtype=torch.bfloat16, device=device)
    for one_shape in (True, False):
        product = make_product(weight, kind, exact=True, one_shape=one_shape)
        for count in (1, 8192):
            product(torch.zeros(count, 64, dtype=torch.bfloat16, device=device))
    assert met[0] == met[1] is not None
    assert met[2:] == [None, None]  # left to the number of rows


def test_shapes_make_programs_enough() -> None:
    halves = Operands(row_bytes=2, weight_bytes=2)

    def tile(rows: int, outputs: int, inputs: int = 4096, experts: int = 1) -> tuple[int, int]:
        shape = choose_shape(halves, rows, outputs, inputs, experts)
        assert shape in all_shapes(halves, inputs) or shape.stages < 16
        assert shape.stages * shape.inputs * 2 * (shape.rows + shape.outputs) <= 200 << 10
        return shape.rows, shape.outputs

    assert [tile(1, outputs) for outputs in (1024, 4096, 6144, 8192, 28672)] == [
        (16, 64), (16, 64), (16, 64), (16, 64), (16, 64)
    ]  # fmt: skip
    assert [tile(17, outputs) for outputs in (1024, 4096, 6144, 8192, 28672)] == [
        (64, 32), (64, 32), (64, 32), (64, 64), (64, 128)
    ]  # fmt: skip
    assert tile(64, 128256) == (64, 128)  # no rows of zeros beyond 64
    assert tile(512, 4096) == (128, 128)
    assert tile(8192, 4096) == (128, 256)
    assert tile(8, 1536, experts=128) == (16, 64)
    assert tile(8 * 1024, 1536, experts=128) == (64, 128)
    assert tile(65536, 1536, experts=128) == (128, 256)
    assert choose_shape(halves, 1, 4096, 100).inputs == choose_shape(halves, 8192, 4096, 100).inputs == 64


@pytest.mark.parametrize(("rows", "experts", "high", "expected"), [(1, 1, 64, 1), (65, 1, 64, 2), (8, 128, 64, 8)])
def test_row_tiles(rows: int, experts: int, high: int, expected: int) -> None:
    assert row_tiles(rows, experts, high) == expected


def test_row_tiles_suffice_for_every_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        experts, rows = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        counts = torch.bincount(torch.randint(0, experts, (rows * 5,), generator=generator), minlength=experts)
        assert (counts + 3).div(4, rounding_mode="floor").sum() <= row_tiles(rows * 5, experts, 4)


def test_float32_rows_of_a_router(device: torch.device) -> None:
    """DeepSeek-V3 multiplies in float32 with a weight that is stored in bfloat16."""
    weight = random(16, 72, seed=0, device=device, dtype=torch.bfloat16)
    rows = random(5, 72, seed=1, device=device)
    packed = PackedWeight(weight, TritonProduct)
    for cast in (packed.to(torch.float32), packed.type(torch.float32), packed.float()):
        assert cast.dtype == torch.float32
        check_product(F.linear(rows, cast), rows, weight, sum_error=1e-6)
    assert packed.to(torch.bfloat16) is packed
    check_product(F.linear(rows.bfloat16(), packed), rows.bfloat16(), weight)
    check_product(CublasProduct(weight)(rows), rows, weight, sum_error=1e-6)


def test_packed_modules_share_the_embedding(device: torch.device) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(40, 64), "head": nn.Linear(64, 40, bias=False)})
    model.to(device, torch.bfloat16).requires_grad_(requires_grad=False)
    embedding = model["embed"].weight
    model["head"].weight = embedding
    rows = random(2, 3, 64, seed=0, device=device, dtype=torch.bfloat16)
    pack_weights(model, TritonProduct, TritonProduct)
    assert model["head"].weight._product._weight.data_ptr() == embedding.data_ptr()
    check_product(model["head"](rows).view(6, 40), rows.view(6, 64), embedding)


def test_fast_mode_is_the_same_product(device: torch.device) -> None:
    rows, weight = (random(n, 64, seed=n, device=device, dtype=torch.float32) for n in (7, 48))
    bias, residual = (random(*size, seed=2, device=device) for size in ((48,), (7, 48)))
    product = make_product(weight, None, exact=False)
    assert isinstance(product, CublasProduct)
    for addends in ((None, None), (bias, None), (None, residual), (bias, residual)):
        check_product(product(rows, *addends), rows, weight, tuple(one for one in addends if one is not None))


@pytest.mark.parametrize(
    ("kind", "width", "expected"),
    [
        (None, 256, 48 * 256 * 2),
        ("fp8", 256, 48 * 256 + 48 * 4),
        ("int4", 256, 48 * 256 // 2 + 48 * 4 * 2),
        ("int4", 96, 48 * 96 // 2 + 48 * 4 * 3),
        ("int4", 40, 48 * 40 * 2),  # no whole groups
    ],
)
def test_stored_bytes(kind: str | None, width: int, expected: int, device: torch.device) -> None:
    product = make_product(random(48, width, seed=0, device=device, dtype=torch.bfloat16), kind, exact=True)
    stored = [value for value in vars(product).values() if isinstance(value, torch.Tensor)]
    if hasattr(product, "weight"):
        stored = [product.weight.nibbles, product.weight.lines]
    assert sum(tensor.nbytes for tensor in stored) == expected

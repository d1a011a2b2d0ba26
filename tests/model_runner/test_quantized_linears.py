"""Linears of GPTQ, AWQ and compressed-tensors against the definition of their formats, in float64."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.refusal import UnsupportedModelError
from model_runner.weights.matrix import Blocks
from model_runner.weights.quantized_linears import Q4_ZERO, Q8_0, linear_reader
from tests.model_runner.quantized_linears import AWQ, GPTQ, Weight, awq, compressed, compressed_config, gptq, packed

NAME = "model.layers.0.mlp.down_proj"


def values(linear: Blocks) -> NDArray[np.float64]:
    """The weights that blocks stand for, in the order of the checkpoint's inputs."""
    size = 19 if linear.block_format == Q4_ZERO else 34
    blocks = linear.rows.numpy().reshape(len(linear.rows), -1, size)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    if linear.block_format == Q4_ZERO:
        levels = np.concatenate([blocks[..., 3:] & 15, blocks[..., 3:] >> 4], -1) - blocks[..., 2:3].astype(np.int64)
    else:
        levels = blocks[..., 2:].copy().view(np.int8).astype(np.int64)
    result = (scales * levels).reshape(len(blocks), -1) * linear.output_scales.double().numpy()[:, None]
    if linear.input_order is not None:
        result[:, linear.input_order.numpy()] = result.copy()
    return result


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> Blocks:
    """Also as rows in float32."""
    reader = linear_reader(config)
    linear = reader.read(NAME, tensors)
    shapes = {part: tuple(tensor.shape) for part, tensor in tensors.items()}
    assert reader.shape(NAME, shapes) == values(linear).shape
    assert set(tensors) <= reader.parts
    dense = linear.dense(3, 40)
    assert torch.equal(dense, torch.from_numpy(values(linear)[3:40]).float())
    assert torch.equal(linear.dense()[3:40], dense)
    return linear


def test_other_linears_are_not_quantised() -> None:
    for config in (GPTQ, AWQ, compressed_config()):
        assert linear_reader(config).shape(NAME, {"weight": (48, 64), "bias": (48,)}) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernels_multiply_with_the_same_weights(bits: int, kernels_library: Path) -> None:
    """Rows of small integers are not rounded, so that only sums in float32 differ."""
    if bits == 4:
        linear = read(GPTQ | {"sym": False}, gptq(Weight.random(), 1))
    else:
        weight = torch.randint(-128, 128, (48, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        scales = torch.rand(48, 1, generator=torch.Generator().manual_seed(1))
        config = compressed_config("int-quantized", num_bits=8, strategy="channel")
        linear = read(config, {"weight": weight, "weight_scale": scales})
    kernels = Kernels(kernels_library, threads=1)
    unpacked = kernels.unpack(linear.block_format, linear.rows, 256)
    assert torch.equal(unpacked * linear.output_scales[:, None], linear.dense())
    packed = kernels.repack(linear.block_format, linear.rows, 256)
    packed.scales.mul_(linear.output_scales)
    rows = torch.randint(-2047, 2048, (5, 256), generator=torch.Generator().manual_seed(2)).float()
    rows[:, 0] = 2047
    expected = rows.double().numpy() @ values(linear).T
    np.testing.assert_allclose(
        kernels.linear(packed, rows).numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize(("layout", "minus"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(size: int, layout: str, minus: int, shuffled: bool) -> None:
    """Zeros are any from 0 to 15, which in the first version borrow from their neighbours."""
    weight = Weight.random(size=size, shuffled=shuffled)
    config = GPTQ | {"group_size": size, "checkpoint_format": layout, "sym": False, "desc_act": shuffled}
    linear = read(config, gptq(weight, minus))
    assert (linear.input_order is None) == (not shuffled or size == -1)
    assert np.array_equal(values(linear), weight.values())


@pytest.mark.parametrize("minus", [0, 1])
def test_zeros_of_symmetric_gptq_are_8_in_either_version(minus: int) -> None:
    weight = Weight.random(zero=8)
    tensors = gptq(weight, minus)
    del tensors["g_idx"]
    assert np.array_equal(values(read(GPTQ, tensors)), weight.values())
    asymmetric = Weight.random(zero=8 + 1 - minus)
    assert np.array_equal(values(read(GPTQ | {"sym": False}, tensors)), asymmetric.values())


@pytest.mark.parametrize("size", [32, 128, -1])
def test_awq(size: int) -> None:
    weight = Weight.random(size=size)
    assert np.array_equal(values(read(AWQ | {"group_size": size}, awq(weight))), weight.values())


@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_compressed_tensors(size: int, dtype: torch.dtype, is_symmetric: bool) -> None:
    """With outputs that are no multiple of 8, whose zeros fill no word."""
    weight = Weight.random(outputs=43, size=size, zero=8 if is_symmetric else None, dtype=dtype)
    tensors = compressed(weight)
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    linear = read(compressed_config(symmetric=is_symmetric, **strategy), tensors)
    assert np.array_equal(values(linear), weight.values())
    assert torch.equal(linear.output_scales.log2(), linear.output_scales.log2().round())
    if not is_symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((weight.zeros - 8).astype(np.int8))
        assert np.array_equal(values(read(compressed_config(symmetric=False, **strategy), tensors)), weight.values())


def test_compressed_tensors_in_the_order_of_activations() -> None:
    weight = Weight.random(zero=8, shuffled=True)
    tensors = compressed(weight) | {"weight_g_idx": torch.from_numpy(weight.group_of)}
    assert np.array_equal(values(read(compressed_config(actorder="group"), tensors)), weight.values())
    in_order = Weight.random(zero=8)
    tensors["weight_g_idx"] = torch.full((256,), -1)
    assert np.array_equal(values(read(compressed_config(actorder="weight"), tensors)), in_order.values())


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_tensors_of_8_bits(strategy: str) -> None:
    weight = torch.randint(-128, 128, (43, 96), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(43 if strategy == "channel" else 1, 1, generator=torch.Generator().manual_seed(1))
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = compressed_config("int-quantized", num_bits=8, strategy=strategy, input_activations=activations)
    linear = read(config, {"weight": weight, "weight_scale": scales})
    expected = weight.double().numpy() * scales.double().numpy()
    assert linear.block_format == Q8_0
    assert np.array_equal(values(linear), expected)
    if strategy == "channel":
        words = packed(weight.long().numpy() + 128, 1, bits=8)
        tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([43, 96])}
        assert np.array_equal(values(read(compressed_config(num_bits=8, strategy=strategy), tensors)), expected)


def test_the_scheme_with_the_closest_target_counts() -> None:
    config = compressed_config(group_size=32)
    groups = config["config_groups"]
    for name, target, size in (("a", r"re:.*mlp\..*", 64), ("b", NAME, 128), ("c", "re:.*attn", 32)):
        groups[name] = copy.deepcopy(groups["group_0"])
        groups[name]["targets"] = [target]
        groups[name]["weights"]["group_size"] = size
    reader = linear_reader(config)
    for name, size in ((NAME, 128), ("model.layers.1.mlp.down_proj", 64), ("lm_head", 32)):
        weight = Weight.random(size=size, zero=8)
        assert np.array_equal(values(reader.read(name, compressed(weight))), weight.values())
    del groups["group_0"]
    with pytest.raises(UnsupportedModelError, match="lm_head is quantised, and no group"):
        linear_reader(config).read("lm_head", compressed(Weight.random(size=32)))


def test_weights_are_those_of_the_compressed_tensors_package() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415

    weight = Weight.random(dtype=torch.bfloat16)
    tensors = compressed(weight) | {"weight_scale": weight.scales.float()}  # in float32 its products are exact
    config = compressed_config(symmetric=False)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert np.array_equal(values(read(config, tensors)), theirs.double().numpy())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq, and gptq, awq, compressed-tensors are supported"),
        (GPTQ | {"bits": 3}, "GPTQ weights with 3 bits .* \\(4 are\\)"),
        (GPTQ | {"group_size": 48}, "groups of 48 inputs .* \\(multiples of 32 are\\)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "layout marlin"),
        (GPTQ | {"pack_dtype": "int8"}, "packed in int8"),
        (GPTQ | {"dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 8}}}, r"of their own \(\+:\.\*down"),
        (GPTQ | {"rotation": "hadamard"}, "with rotation hadamard"),
        (AWQ | {"bits": 8}, "AWQ weights with 8 bits"),
        (AWQ | {"version": "gemv"}, "layout gemv"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (compressed_config(num_bits=3), "with 3 bits of type int"),
        (compressed_config(type="float"), "with 4 bits of type float"),
        (compressed_config("int-quantized"), "with 4 bits of type int in the layout int-quantized"),
        (compressed_config("marlin-24"), "layout marlin-24"),
        (compressed_config(group_size=16), "groups of 16 inputs"),
        (compressed_config(strategy="block"), "scales per block"),
        (compressed_config(num_bits=8), "with 8 bits of type int and scales per group"),
        (compressed_config(num_bits=8, strategy="channel", symmetric=False), "and zero points"),
        (compressed_config(input_activations={"num_bits": 8, "dynamic": False}), "inputs .* with stored scales"),
        (compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (compressed_config() | {"transform_config": {"config_groups": {"u": {}}}}, "transforms"),
    ],
)
def test_checkpoints_that_mean_something_else_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        linear_reader(config)


def test_tensors_that_do_not_fit_are_refused() -> None:
    plain, grouped = Weight.random(), Weight.random(shuffled=True)
    stored, asymmetric = compressed(plain), compressed_config(symmetric=False)
    uneven = torch.from_numpy(np.minimum(grouped.group_of + 1, 3))
    wide = plain.scales.float()
    for config, tensors, reason in (
        (GPTQ, {"qweight": gptq(plain, 1)["qweight"]}, "down_proj has no tensor scales"),
        (GPTQ, gptq(Weight.random(size=128), 1), r"scales has the shape \[2, 48\], and \[4, 48\] was expected"),
        (GPTQ, gptq(Weight.random(inputs=288, size=32), 1), "288 inputs, which are no multiple of 64"),
        (GPTQ, gptq(grouped, 1) | {"g_idx": uneven}, "groups of different sizes"),
        (GPTQ, gptq(plain, 1) | {"g_idx": uneven[1:]}, r"groups of .* \[255\], and \[256\]"),
        (GPTQ, gptq(plain, 1) | {"qweight": torch.zeros(32, 48)}, "float32, and int32 was expected"),
        (GPTQ | {"desc_act": True}, {**gptq(plain, 1), "g_idx": None}, r"\(desc_act\) and no g_idx"),
        (AWQ, awq(Weight.random(size=32)), r"\[8, 48\], and \[4, 48\]"),
        (compressed_config(actorder="group"), stored, r"\(actorder\) and no weight_g_idx"),
        (asymmetric, stored | {"weight_zero_point": stored["weight_zero_point"][1:]}, r"\[40, 4\], and \[48, 4\]"),
        (
            compressed_config(),
            stored | {"weight_scale": wide + 1e-9},
            "in torch.float32 that half precision cannot hold",
        ),
        (compressed_config(), stored | {"weight_scale": wide / 0}, "no finite numbers"),
        (
            compressed_config("int-quantized", num_bits=8, strategy="channel"),
            {"weight": torch.zeros(48, 64, dtype=torch.int8), "weight_scale": torch.ones(47, 1)},
            "47 scales for 48 outputs",
        ),
    ):
        kept: Any = {part: tensor for part, tensor in tensors.items() if tensor is not None}
        with pytest.raises(UnsupportedModelError, match=reason):
            read(config, kept)


def test_a_wrong_order_of_nibbles_would_be_found_out() -> None:
    weight = Weight.random()
    tensors = awq(weight) | {"qweight": packed(weight.levels.T, 1)}
    assert not np.array_equal(values(read(AWQ, tensors)), weight.values())

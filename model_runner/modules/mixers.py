"""Recurrent mixers of transformers' models, computed by the server's recurrences, without a copy of their code.

Without a cache, the forward of a mixer calls a causal convolution and a recurrence as global functions of its module.
`call_recurrences` gives the forward of a mixer a copy of these globals, in which the two functions are ours. Everything
around them works row by row. Nothing outside the model changes.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from model_runner.modules.activations import silu, softplus
from model_runner.modules.step import CurrentStep, Function

_L2_EPS = 1e-6
"""As in flash-linear-attention: x / sqrt(sum(x²) + eps)."""


def call_recurrences(needed: Sequence[str], mixer: Any, current: CurrentStep) -> None:
    """Have a mixer's forward call our functions instead of transformers' functions of the names `needed`.

    Raises:
        ValueError: if it does not call these functions.
    """
    forward = inspect.unwrap(type(mixer).forward)
    if missing := set(needed) - set(forward.__code__.co_names):
        raise ValueError(
            f"{type(mixer).__name__} does not call {', '.join(sorted(missing))}; this version of transformers is not "
            "supported for it"
        )
    own = {name: current.choose(forward.__globals__[name], partial(_FUNCTIONS[name], current)) for name in needed}
    hooked = FunctionType(
        forward.__code__,
        {**forward.__globals__, **own},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    hooked.__kwdefaults__ = forward.__kwdefaults__
    mixer.forward = MethodType(hooked, mixer)


def _convolve(
    current: CurrentStep,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: x [1, channels, T] and weight [channels, kernel] -> [1, channels, T]."""
    return current.states.convolve(x[0].transpose(0, 1), weight, bias, activation).transpose(0, 1).unsqueeze(0)


def _delta_rule(
    current: CurrentStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`.

    Query and key [1, T, key_heads, key_dim], value [1, T, heads, value_dim], g [1, T, heads] or with key_dim, and beta
    [1, T, heads] -> [1, T, heads, value_dim], and no state.
    """
    rows = [part[0].float() for part in (query, key, value, g, beta)]
    q, k, v, log_decay, gain = rows
    if use_qk_l2norm_in_kernel:
        q, k = _l2_norm(q), _l2_norm(k)
    output = current.states.recur(q * q.shape[-1] ** -0.5, k, v, log_decay, gain)
    return output.unsqueeze(0).to(query.dtype), None


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _mamba2(  # noqa: PLR0913 - the signature is transformers'
    current: CurrentStep,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *_chunk: Any,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """`mamba2_chunk_scan`: hidden_states [1, T, heads, P], dt [1, T, heads], A [heads], B and C [1, T, groups, N].

    Steps are clamped for single tokens, too, as they are in transformers for prompts.
    """
    step, x = dt[0], hidden_states[0].float()
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if dt_softplus:
        step = softplus(step)
    step = step.clamp(*dt_limit).float()
    output = current.states.recur(C[0].float(), B[0].float(), x * step.unsqueeze(-1), step * A.float(), None)
    if D is not None:
        output = output + D.float().unsqueeze(-1) * x
    result = output.unsqueeze(0).to(hidden_states.dtype)
    return (result, None) if return_final_states else result


def _selective_scan(  # noqa: PLR0913 - the signature is transformers'
    current: CurrentStep,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """`mamba_selective_scan`: hidden_states, dt and z [1, channels, T], A [channels, N], B and C [1, N, T]."""
    x, step, b, c = (rows[0].T.float() for rows in (hidden_states, dt, B, C))
    if delta_bias is not None:
        step = step + delta_bias.float()
    if delta_softplus:
        step = softplus(step)
    output = current.states.scan(step, step * x, A.float(), b, c)
    if D is not None:
        output = output + D.float() * x
    if z is not None:
        output = output * silu(z[0].T.float())
    result = output.T.unsqueeze(0).to(hidden_states.dtype)
    return (result, None) if return_last_state else result


def lightning(current: CurrentStep, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """MiniMax's linear attention, which is no function of its own: [1, T, hidden] -> the same shape, and no state."""
    heads = module.num_attention_heads
    projected = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(-1, (heads, -1))  # [T, heads, 3 * head_dim]
    q, k, v = projected.float().chunk(3, dim=-1)
    log_decay = -module.slope_rate.float().view(1, heads).expand(len(q), heads)
    mixed = current.states.recur(q, k, v, log_decay, None).flatten(1).unsqueeze(0).to(hidden_states.dtype)
    gate = torch.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed)), None


_FUNCTIONS: dict[str, Function] = {
    "causal_conv1d_fn": _convolve,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Our functions, by the names of transformers' own."""

"""Recurrent mixers of transformers' models, computed by the server's recurrences, without a copy of their code.

Without a cache, the forward of a mixer calls a causal convolution and a recurrence as global functions of its module.
`hook_mixers` gives the forward of each known mixer a copy of these globals, in which the two functions are ours.
Everything around them works row by row. Nothing outside the model changes.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from model_runner.modules.activations import silu, softplus
from model_runner.recurrence.backend import (
    ConvShape,
    RecurrenceBackend,
    RecurrentShape,
    ScanShape,
)

_L2_EPS = 1e-6
"""As in flash-linear-attention: x / sqrt(sum(x²) + eps)."""


class States(Protocol):
    """The recurrences, scans and convolutions of one forward pass, each numbered in the order of the calls."""

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.recur`."""
        ...

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.scan`."""
        ...

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The arguments and the result of `RecurrenceBackend.convolve`."""
        ...


class StepStates:
    """A recurrence backend and its metadata for one forward pass."""

    def __init__(self, backend: RecurrenceBackend[Any], metadata: Any) -> None:
        self._backend = backend
        self._metadata = metadata
        self._num_recurrences = self._num_scans = self._num_convolutions = 0

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        index, self._num_recurrences = self._num_recurrences, self._num_recurrences + 1
        return self._backend.recur(index, query, key, value, log_decay, beta, self._metadata)

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        index, self._num_scans = self._num_scans, self._num_scans + 1
        return self._backend.scan(index, step, value, a, b, c, self._metadata)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        index, self._num_convolutions = self._num_convolutions, self._num_convolutions + 1
        return self._backend.convolve(index, x, weight, bias, activation, self._metadata)


class RecordedStates:
    """Records the shapes of the recurrences, scans and convolutions of a pass on the meta device."""

    def __init__(self) -> None:
        self.recurrences: list[RecurrentShape] = []
        self.scans: list[ScanShape] = []
        self.convolutions: list[ConvShape] = []

    def recur(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None) -> Tensor:
        (_, key_heads, key_dim), (_, heads, value_dim) = key.shape, value.shape
        shape = RecurrentShape(
            heads, key_heads, key_dim, value_dim, delta=beta is not None, per_channel=log_decay.dim() == value.dim()
        )
        self.recurrences.append(shape)
        return torch.empty_like(value)

    def scan(self, step: Tensor, value: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        self.scans.append(ScanShape(*a.shape))
        return torch.empty_like(value)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        self.convolutions.append(ConvShape(*weight.shape))
        return torch.empty_like(x)


FindStates = Callable[[], States | None]
"""Finds the states of the pass that a model is in; None outside of the engine."""
Function = Callable[..., Any]


def hook_mixers(model: nn.Module, find: FindStates) -> int:
    """Have every known mixer of a model compute its recurrences by the states that `find` returns.

    While it returns None, they compute as before.

    Returns:
        How many mixers there are.

    Raises:
        ValueError: if a mixer does not call the functions that it is known for.
    """
    whole: list[Any] = [module for module in model.modules() if type(module).__name__ in _WHOLE]
    for mixer in whole:
        mixer.forward = partial(_WHOLE[type(mixer).__name__], find, MethodType(type(mixer).forward, mixer), mixer)
    mixers: list[Any] = [module for module in model.modules() if type(module).__name__ in MIXERS]
    for mixer in mixers:
        forward = inspect.unwrap(type(mixer).forward)
        needed = MIXERS[type(mixer).__name__]
        if missing := set(needed) - set(forward.__code__.co_names):
            raise ValueError(
                f"{type(mixer).__name__} does not call {', '.join(sorted(missing))}; this version of transformers is "
                "not supported for it"
            )
        own = {name: partial(_HOOKS[name], find, forward.__globals__[name]) for name in needed}
        hooked = FunctionType(
            forward.__code__,
            {**forward.__globals__, **own},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        hooked.__kwdefaults__ = forward.__kwdefaults__
        mixer.forward = MethodType(hooked, mixer)
    return len(mixers) + len(whole)


def _convolve(
    find: FindStates,
    original: Function,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> Tensor:
    """`causal_conv1d_fn`: x [1, channels, T] and weight [channels, kernel] -> [1, channels, T]."""
    states = find()
    if states is None:
        result: Tensor = original(x, weight, bias, activation=activation, **keywords)
        return result
    return states.convolve(x[0].transpose(0, 1), weight, bias, activation).transpose(0, 1).unsqueeze(0)


def _delta_rule(  # noqa: PLR0913 - the signature is transformers'
    find: FindStates,
    original: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **keywords: Any,
) -> Any:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`.

    Query and key [1, T, key_heads, key_dim], value [1, T, heads, value_dim], g [1, T, heads] or with key_dim, and beta
    [1, T, heads] -> [1, T, heads, value_dim], and no state.
    """
    states = find()
    if states is None:
        return original(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **keywords)
    rows = [part[0].float() for part in (query, key, value, g, beta)]
    q, k, v, log_decay, gain = rows
    if use_qk_l2norm_in_kernel:
        q, k = _l2_norm(q), _l2_norm(k)
    output = states.recur(q * q.shape[-1] ** -0.5, k, v, log_decay, gain)
    return output.unsqueeze(0).to(query.dtype), None


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _mamba2(  # noqa: PLR0913 - the signature is transformers'
    find: FindStates,
    original: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *arguments: Any,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **keywords: Any,
) -> Any:
    """`mamba2_chunk_scan`: hidden_states [1, T, heads, P], dt [1, T, heads], A [heads], B and C [1, T, groups, N].

    Steps are clamped for single tokens, too, as they are in transformers for prompts.
    """
    states = find()
    if states is None:
        keywords |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return original(hidden_states, dt, A, B, C, *arguments, return_final_states=return_final_states, **keywords)
    step, x = dt[0], hidden_states[0].float()
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if dt_softplus:
        step = softplus(step)
    step = step.clamp(*dt_limit).float()
    output = states.recur(C[0].float(), B[0].float(), x * step.unsqueeze(-1), step * A.float(), None)
    if D is not None:
        output = output + D.float().unsqueeze(-1) * x
    result = output.unsqueeze(0).to(hidden_states.dtype)
    return (result, None) if return_final_states else result


def _selective_scan(  # noqa: PLR0913 - the signature is transformers'
    find: FindStates,
    original: Function,
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
    **keywords: Any,
) -> Any:
    """`mamba_selective_scan`: hidden_states, dt and z [1, channels, T], A [channels, N], B and C [1, N, T]."""
    states = find()
    if states is None:
        keywords |= {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        return original(hidden_states, dt, A, B, C, return_last_state=return_last_state, **keywords)
    x, step, b, c = (rows[0].T.float() for rows in (hidden_states, dt, B, C))
    if delta_bias is not None:
        step = step + delta_bias.float()
    if delta_softplus:
        step = softplus(step)
    output = states.scan(step, step * x, A.float(), b, c)
    if D is not None:
        output = output + D.float() * x
    if z is not None:
        output = output * silu(z[0].T.float())
    result = output.T.unsqueeze(0).to(hidden_states.dtype)
    return (result, None) if return_last_state else result


def _lightning(
    find: FindStates, original: Function, module: Any, hidden_states: Tensor, *arguments: Any, **keywords: Any
) -> Any:
    """MiniMax's linear attention, which is no function of its own: [1, T, hidden] -> the same shape, and no state."""
    states = find()
    if states is None:
        return original(hidden_states, *arguments, **keywords)
    heads = module.num_attention_heads
    projected = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(-1, (heads, -1))  # [T, heads, 3 * head_dim]
    q, k, v = projected.float().chunk(3, dim=-1)
    log_decay = -module.slope_rate.float().view(1, heads).expand(len(q), heads)
    mixed = states.recur(q, k, v, log_decay, None).flatten(1).unsqueeze(0).to(hidden_states.dtype)
    gate = torch.sigmoid(module.output_gate(hidden_states))
    return module.out_proj(gate * module.norm(mixed)), None


_WHOLE: dict[str, Function] = {"MiniMaxLightningAttention": _lightning}
"""Mixers whose whole forward is ours, by class."""
_HOOKS: dict[str, Function] = {
    "causal_conv1d_fn": _convolve,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Our functions, by the names of transformers' own."""

_CONV = ("causal_conv1d_fn",)
_DELTA = (*_CONV, "torch_chunk_gated_delta_rule")
_KIMI = (*_CONV, "chunk_kimi_delta_attention")
_MAMBA = (*_CONV, "mamba_selective_scan")
_MAMBA2 = (*_CONV, "mamba2_chunk_scan")
MIXERS: dict[str, tuple[str, ...]] = {
    "BailingHybridDeltaAttention": _KIMI,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "FalconMambaMixer": _MAMBA,
    "Glm5NextTextLinearAttention": _KIMI,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "JambaMambaMixer": _MAMBA,
    "KimiLinearDeltaAttention": _KIMI,
    "LaraMiniGatedDeltaNet": _DELTA,
    "Lfm2MoeShortConv": _CONV,
    "Lfm2ShortConv": _CONV,
    "Lfm3ShortConv": _CONV,
    "Mamba2Mixer": _MAMBA2,
    "MambaMixer": _MAMBA,
    "NemotronHMamba2Mixer": _MAMBA2,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "Qwen4ExpTextGatedDeltaNet": _DELTA,
    "Zamba2MambaMixer": _MAMBA2,
    "ZambaMambaMixer": _MAMBA,
}
"""Mixers that are right with these hooks, by class, and the functions that each calls."""

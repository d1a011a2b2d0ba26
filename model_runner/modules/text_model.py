"""Builds models of transformers with our attention, and without the parts that text does not use.

A model for images and text is served for its text. Its towers would take memory and never run, so they are left out
before any weight is read.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from model_runner.modules.attention import ATTENTION_NAME
from model_runner.modules.classes import ACCEPTANCES, change_modules
from model_runner.modules.transformers_private import from_config
from model_runner.refusal import SEE_MODELS, UnsupportedModelError, describe_model, few

logger = logging.getLogger("samewise.runner")

ATTENTION = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME}
"""Transformers' `attn_implementation`: ours for the text; towers keep the default."""
_CLASSES: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
_ENTRIES = ("head_dim", "layer_types", "moe_intermediate_size", "num_experts_per_tok", "num_key_value_heads")
"""Entries of configurations that transformers leaves empty for some families, and that their models need."""


def generates_text(config: PretrainedConfig) -> bool:
    """Whether transformers has a class that generates text for this configuration."""
    return any(type(config) in mapping for mapping in _CLASSES)


def model_class(config: PretrainedConfig) -> Any:
    """The class of the checkpoint if it generates text, otherwise the one that does."""
    classes = [mapping[type(config)] for mapping in _CLASSES if type(config) in mapping]
    own = next(iter(config.architectures or ()), None)
    return next((one for one in classes if one.__name__ == own), classes[-1])


def class_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration that the model's class takes: the whole one, or the text's."""
    text = config.get_text_config()
    if text is config or model_class(config).config_class is not type(text):
        return config
    text.name_or_path = config.name_or_path
    text.architectures = config.architectures
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def make_model(config: PretrainedConfig) -> Any:
    """An uninitialised model on torch's current device, in evaluation mode, for a configuration of `class_config`."""
    if (accept := ACCEPTANCES.get(config.model_type)) is not None:
        accept(ATTENTION_NAME)
    with without_missing_towers():
        model = from_config(
            model_class(config), config, attn_implementation=ATTENTION, experts_implementation="batched_mm"
        )
    adapt(model)
    return model.eval()


@contextmanager
def explaining(config: PretrainedConfig) -> Iterator[None]:
    """Turn errors of a family's code, as it is built and run on the meta device, into reasons that a reader can use.

    Raises:
        UnsupportedModelError: with the reason; other errors pass.
    """
    try:
        yield
    except Exception as error:
        if (reason := _reason(error, config)) is None:
            raise
        logger.debug("%s", describe_model(config), exc_info=True)
        raise UnsupportedModelError(f"{describe_model(config)} {reason}; {SEE_MODELS}") from error


def _reason(error: Exception, config: PretrainedConfig) -> str | None:
    text: Any = config.get_text_config()
    empty = [name for name in _ENTRIES if getattr(text, name, 0) is None]
    if isinstance(error, (TypeError, AttributeError, AssertionError)) and empty:
        return f"has no {few(empty)} in config.json, which its model needs"
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "computes attention in classes of its own, so its keys and values cannot be stored in pages"
    if isinstance(error, TypeError) and (missing := _MISSING.search(str(error))):
        return f"needs more than tokens: {missing[1]}"
    if isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error):
        return "reads values of tensors to decide what it computes, so it cannot be inspected without weights"
    return None


_MISSING = re.compile(r"missing \d+ required positional arguments?: (.*)")


def adapt(model: PreTrainedModel) -> None:
    """Change what does not work here: Conv1D, modules of some classes, and a search for padding."""
    make_linear(model)
    change_modules(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _search_nothing  # type: ignore[method-assign]


def _search_nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Replaces transformers' search for padding."""


def make_linear(model: nn.Module) -> None:
    """Replace every Conv1D of GPT-2, whose weight is [in, out], by an equal linear layer."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = nn.Parameter(child.weight.data.t().contiguous(), requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)


def text_only(own: Any, unused: Collection[str]) -> Any:
    """A class of models without the modules of these names, so that their weights are never read."""

    def initialise(model: Any, *arguments: Any, **keywords: Any) -> None:
        with without_missing_towers():
            own.__init__(model, *arguments, **keywords)
        leave_out(model, unused)

    if not unused:
        return own
    names = {"__init__": initialise, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own,), names)


def leave_out(model: nn.Module, names: Collection[str]) -> None:
    """Replace modules by empty ones."""
    for name in names:
        model.set_submodule(name, nn.Identity())


@contextmanager
def watch_calls(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Yields a function that names the parts of the model that were not called since.

    Parts are modules with parameters directly below the model or its base. Parts that share a parameter with others
    count as called.
    """
    called: set[nn.Module] = set()
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in model.modules()]

    def uncalled() -> list[str]:
        base = getattr(model, "base_model", model)
        parts = {name: child for name, child in model.named_children() if child is not base}
        if base is not model:
            prefix = next(name for name, module in model.named_modules() if module is base)
            parts |= {f"{prefix}.{name}": child for name, child in base.named_children()}
        idle = {name: part for name, part in parts.items() if called.isdisjoint(part.modules())}
        used = {id(weight) for name, part in parts.items() if name not in idle for weight in part.parameters()}
        return [
            name
            for name, part in idle.items()
            if any(True for _ in part.parameters()) and used.isdisjoint(map(id, part.parameters()))
        ]

    try:
        yield uncalled
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_missing_towers() -> Iterator[None]:
    """Have transformers make empty modules instead of towers that need packages which are not installed (timm)."""
    auto: Any = AutoModel
    original = auto.from_config

    def from_config(config: PretrainedConfig, **keywords: Any) -> Any:
        try:
            return original(config, **keywords)
        except ImportError:
            return nn.Identity()

    auto.from_config = from_config
    try:
        yield
    finally:
        auto.from_config = original


@contextmanager
def without_validation() -> Iterator[None]:
    """Let torch's distributions accept tensors of the meta device (Gemma 3n)."""
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(__debug__)  # torch's default

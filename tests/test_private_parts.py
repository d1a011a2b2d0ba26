"""Private parts of libraries, which may go with any version: each is named here, tried, and used in one place only."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutput

ROOT = Path(__file__).parents[1]
OURS = ("samewise", "server", "scheduler", "model_runner", "bench")
PLACES = {
    "torch": "model_runner/torch_private.py",
    "transformers": "model_runner/modules/transformers_private.py",
    "nicegui": "server/page/nicegui_hardening.py",
}
ELSEWHERE = {
    "server/http/body.py": {"_current_part"},  # python-multipart's parser is subclassed
    "server/http/connection.py": {"uvicorn._types", "_unset_keepalive_if_required", "_get_upgrade"},
    "server/http/websocket.py": {"uvicorn._types"},
    "server/page/markdown.py": {"pygments.token._TokenType"},  # a type
    "model_runner/kernels/interface.py": {"_cffi_backend"},  # cffi's module of that name is what it documents
}
"""Private parts of other libraries."""
DOCUMENTED = {"_exit", "_replace"}
"""Names of the standard library, which are public in spite of their form."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def file_of(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)


@cache
def defined(file: Path) -> frozenset[str]:
    """Names that the file defines, or that its classes give to their instances."""
    return frozenset(definitions(parsed(file)))


def definitions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] * (node.value.id in {"self", "cls"})


def private_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names that the source imports or reads of objects, each with the name to look for among its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if any(map(is_private, module.split("."))):
                yield module, module
            yield from ((f"{module}.{one.name}", one.name) for one in node.names if is_private(one.name))
        elif isinstance(node, ast.Import):
            yield from ((one.name, one.name) for one in node.names if any(map(is_private, one.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            by_name = node.func.id in {"getattr", "setattr", "hasattr", "delattr"} and isinstance(name, ast.Constant)
            if by_name and is_private(str(name.value)):  # type: ignore[attr-defined]
                yield str(name.value), str(name.value)  # type: ignore[attr-defined]


def foreign_names(file: Path) -> set[str]:
    """Private names that neither the file nor what it imports of ours defines."""
    tree = parsed(file)
    found = dict(private_names(tree))
    own = set(defined(file))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for module in modules if not own >= set(found.values()) else ():
        if module.partition(".")[0] in OURS and (imported := file_of(module)) is not None:
            own |= defined(imported)
    return {name for name, last in found.items() if last not in own} - DOCUMENTED


def test_private_parts_are_used_in_one_place() -> None:
    allowed = {*PLACES.values()}
    found = {
        str(file.relative_to(ROOT)): names
        for package in OURS
        for file in (ROOT / package).rglob("*.py")
        if (names := foreign_names(file)) and str(file.relative_to(ROOT)) not in allowed
    }
    assert found == ELSEWHERE


def test_the_search_finds_all_forms(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "import torch._dynamo\n"
        "from torch.utils._pytree import tree_map\n"
        "from transformers.integrations.moe import _gate\n"
        "class Own:\n"
        "    def __init__(self, model):\n"
        "        self._own = model._base\n"
        "        model.config._attention = getattr(model, '_flags', None)\n"
        "        torch.ops.mkldnn._linear(other._own)\n"
    )
    imports = {"torch._dynamo", "torch.utils._pytree", "transformers.integrations.moe._gate"}
    assert foreign_names(file) == imports | {"_base", "_attention", "_flags", "_linear"}


def flattened() -> bool:
    from model_runner.torch_private import flatten, unflatten  # noqa: PLC0415

    output = BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1), torch.ones(1)))
    leaves, structure = flatten(output)
    again = unflatten(leaves, structure)
    return len(leaves) == 3 and type(again) is BaseModelOutput and again.hidden_states is not None


def hollow() -> bool:
    from model_runner.torch_private import hollow_tensor  # noqa: PLC0415

    class Own(Tensor):
        __torch_dispatch__ = None  # type: ignore[assignment]

    tensor = hollow_tensor(Own, torch.Size([3, 1 << 40]), torch.bfloat16, torch.device("cpu"))
    return type(tensor) is Own and tensor.shape == (3, 1 << 40) and tensor.dtype == torch.bfloat16


def multiplied() -> bool:
    from model_runner.torch_private import multiply_by_onednn, reorder_for_onednn  # noqa: PLC0415

    rows, weight, bias = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
    product = multiply_by_onednn(rows, reorder_for_onednn(weight), bias)
    return torch.allclose(product, F.linear(rows, weight, bias), atol=1e-4)


def children() -> bool:
    from model_runner.torch_private import children_of  # noqa: PLC0415

    shared, parent = nn.Linear(2, 3), nn.Module()
    parent.first = parent.second = shared
    is_complete = children_of(parent) == {"first": shared, "second": shared}
    children_of(parent).update({"first": nn.Identity()})
    return is_complete and isinstance(parent.first, nn.Identity)


def tiny(model_type: str, **entries: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    return CONFIG_MAPPING[model_type](**sizes, **entries)


def built() -> bool:
    from model_runner.modules.transformers_private import experts_name, from_config, set_attention  # noqa: PLC0415

    config = tiny("llama")
    own = type(AutoModelForCausalLM.from_config(config))
    with torch.device("meta"):
        model = from_config(own, config, attn_implementation="eager", experts_implementation="batched_mm")
    names = [config._attn_implementation, experts_name(model.config)]
    set_attention(config, "another")
    return type(model) is own and [*names, config._attn_implementation] == ["eager", "batched_mm", "another"]


def untied() -> bool:
    from model_runner.modules.transformers_private import ignore_tied_weights  # noqa: PLC0415

    config = tiny("llama", tie_word_embeddings=True)
    own = type(AutoModelForCausalLM.from_config(config))
    changed: Any = type(own.__name__, (own,), {"__module__": own.__module__})
    ignore_tied_weights(changed)
    model = changed(config)
    return bool(own._tied_weights_keys) and model.lm_head.weight is not model.model.embed_tokens.weight


def gated() -> bool:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: PLC0415

    from model_runner.modules.transformers_private import gate_of, has_default_gate  # noqa: PLC0415

    experts = MixtralExperts(tiny("mixtral", intermediate_size=8, num_local_experts=2))
    rows = torch.randn(3, 16)
    gate, up = rows.chunk(2, -1)
    return has_default_gate(experts) and torch.equal(gate_of(experts)(rows), F.silu(gate) * up)


def marked() -> bool:
    """All entries that transformers gives to experts."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: PLC0415

    from model_runner.modules.transformers_private import mark_as_common  # noqa: PLC0415

    theirs = MixtralExperts(tiny("mixtral", intermediate_size=8, num_local_experts=2))
    ours: Any = nn.Module()
    ours.act_fn = nn.SiLU()
    mark_as_common(ours)
    given = {name: value for name, value in vars(theirs).items() if name.startswith(("is_", "has_", "_is_expert"))}
    return len(given) >= 5 and {name: getattr(ours, name) for name in given} == given


def replaced() -> bool:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen  # noqa: PLC0415

    return hasattr(qwen.Qwen4ExpTextNGramEmbedding, "_shift_right_ignore_eos") and hasattr(
        qwen.Qwen4ExpTextPLELayer, "_short_conv"
    )


def accepted() -> bool:
    from model_runner.modules.classes import ACCEPTANCES  # noqa: PLC0415

    for accept in ACCEPTANCES.values():
        accept("eager")
    return True


def scripts_awaited() -> bool:
    from nicegui.javascript_request import JavaScriptRequest  # noqa: PLC0415

    request = JavaScriptRequest("an id", timeout=1.0)
    return JavaScriptRequest._instances.pop("an id") is request


def sockets() -> bool:
    """`harden` replaces these."""
    from nicegui import Client, core  # noqa: PLC0415

    sio = core.sio
    parts = (sio.eio.transports, sio.packet_class, sio.async_handlers, sio.environ, Client.instances)
    handlers = sio.handlers["/"].keys() >= {"handshake", "event", "javascript_response", "ack"}
    return None not in parts and handlers and "message" in sio.eio.handlers


PARTS: dict[str, Callable[[], bool]] = {
    "torch.utils._pytree": flattened,
    "torch: Tensor._make_wrapper_subclass": hollow,
    "torch.ops.mkldnn: _reorder_linear_weight, _linear_pointwise": multiplied,
    "torch.nn: Module._modules": children,
    "transformers: PreTrainedModel._from_config, config._attn_implementation, _experts_implementation": built,
    "transformers: PreTrainedModel._tied_weights_keys": untied,
    "transformers.integrations.moe._default_apply_gate, experts' _apply_gate": gated,
    "transformers.integrations.moe: entries of experts, _is_expert_parallel": marked,
    "transformers: Qwen4's _shift_right_ignore_eos, _short_conv": replaced,
    "transformers: FALCON_ATTENTION_CLASSES, GPT_NEO_ATTENTION_CLASSES, MoeCausalLMOutputWithPast": accepted,
    "nicegui: JavaScriptRequest._instances": scripts_awaited,
    "nicegui.core.sio: handlers, environ, packet_class, async_handlers": sockets,
}


@pytest.mark.parametrize("part", PARTS)
def test_the_part_is_as_it_was(part: str) -> None:
    library = part.replace(":", ".").partition(".")[0]
    gone = f"{library} {version(library)} has changed or removed {part}, which {PLACES[library]} uses"
    try:
        is_there = PARTS[part]()
    except Exception as error:
        raise AssertionError(gone) from error
    assert is_there, gone


def test_each_part_is_named() -> None:
    named = " ".join(PARTS)
    unnamed = {name for place in PLACES.values() for name in foreign_names(ROOT / place) if name not in named}
    assert unnamed == set()

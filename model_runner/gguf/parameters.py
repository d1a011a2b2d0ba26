"""Which parameters of transformers the tensors of a GGUF file become."""

from collections.abc import Sequence

from model_runner.gguf.base_config import IN_CONFIG
from model_runner.gguf.header import GgufFile
from model_runner.gguf.layout import AROUND, LAYER, MINUS_ONE, Architecture, Change, Shape
from model_runner.gguf.metadata import Config, is_layer
from model_runner.gguf.weights import Parameter, Source
from model_runner.refusal import UnsupportedModelError, few

_SUFFIXES = ("weight", "bias")


def read_parameters(file: GgufFile, architecture: Architecture, config: Config) -> dict[str, Parameter]:
    """The parameters that the tensors become, by their names in transformers.

    Args:
        file: the file.
        architecture: how its architecture stores tensors.
        config: its configuration.

    Raises:
        UnsupportedModelError: if there is a tensor that nothing is made of.
    """
    found: dict[str, list[tuple[Source, Shape]]] = {}
    unused = []
    for name in sorted(file.tensors, key=_gate_first):
        path = _path(name, architecture, config)
        if path is None:
            unused += [] if name in IN_CONFIG else [name]
        elif "{}" in path:
            shape = file.tensors[name].shape
            parts = {path.format(part): (Source(name, part=part), shape[1:]) for part in range(shape[0])}
            found |= {one: [part] for one, part in parts.items()}
        else:
            found.setdefault(path, []).append(_source(file, name, path, architecture, config))
    if unused:
        raise UnsupportedModelError(f"it has tensors that nothing is loaded from: {few(unused)}")
    return {path: _parameter(path, parts, architecture) for path, parts in found.items()}


def _gate_first(name: str) -> tuple[str, str]:
    """Sorts the gate before the up projection: its rows come first where both make one parameter."""
    layer, _, stem = name.rpartition(".ffn_")
    return layer, stem


def _stem(name: str) -> str:
    """A tensor's name in a layer, or around the layers, without `.weight` or `.bias`."""
    own = _in_layer(name)[1]
    stem, _, suffix = own.rpartition(".")
    return stem if suffix in _SUFFIXES else own


def _in_layer(name: str) -> tuple[int | None, str]:
    """The number of a tensor's layer, and the name that it has there; no number for a tensor around the layers."""
    block, _, rest = name.partition(".")
    layer, _, own = rest.partition(".")
    return (int(layer), own) if block == "blk" and is_layer(layer) else (None, name)


def _path(name: str, architecture: Architecture, config: Config) -> str | None:
    """The name of the parameter that a tensor belongs to; None if there is none."""
    layer, own = _in_layer(name)
    if layer is None:
        return _find({**AROUND, **architecture.around}, own)
    path = _find({**LAYER, **architecture.names}, own)
    if path is None or layer < config["num_hidden_layers"]:
        return None if path is None else f"model.layers.{layer}.{path}"
    return architecture.extra_layers(path, layer)


def _find(names: dict[str, str], own: str) -> str | None:
    if own in names:
        return names[own]
    stem, _, suffix = own.rpartition(".")
    return f"{names[stem]}.{suffix}" if suffix in _SUFFIXES and stem in names else None


def _source(file: GgufFile, name: str, path: str, architecture: Architecture, config: Config) -> tuple[Source, Shape]:
    """A tensor as a part of a parameter, and the part's shape."""
    change = architecture.changes.get(_stem(name))
    if change is None:
        change = MINUS_ONE if architecture.norm_adds_one and path.endswith("norm.weight") else Change()
    shape = file.tensors[name].shape
    rows, columns = (shape[0], shape[-1]) if shape else (1, 1)
    source = Source(
        name,
        order=None if change.order is None else change.order(config, rows),
        input_order=None if change.input_order is None else change.input_order(config, columns),
        values=change.values,
    )
    return source, shape if change.shape is None else change.shape(config, shape)


def _parameter(path: str, parts: Sequence[tuple[Source, Shape]], architecture: Architecture) -> Parameter:
    sources, shapes = tuple(source for source, _ in parts), [shape for _, shape in parts]
    made = next((one for end, one in architecture.combinations.items() if path.endswith(end)), None)
    if made is None or len(parts) == 1:
        return Parameter(sources, _shape(path, shapes))
    return Parameter(sources, made.shape(shapes), made.values)


def _shape(path: str, shapes: Sequence[Shape]) -> Shape:
    """The shape of a parameter: rows of all its tensors together."""
    first = shapes[0]
    if path.endswith("_proj_bias") and all(len(shape) == 2 and shape[0] == first[0] for shape in shapes):
        return first[0], sum(shape[1] for shape in shapes)
    if any(len(shape) < 2 or shape[:-2] + shape[-1:] != first[:-2] + first[-1:] for shape in shapes[1:]):
        raise UnsupportedModelError(f"its tensors for {path} have shapes that do not fit: {shapes}")
    return (*first[:-2], sum(shape[-2] for shape in shapes), first[-1]) if len(shapes) > 1 else first

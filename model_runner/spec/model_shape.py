"""Sizes of a model, known before its weights are read: they decide how much memory it needs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model_runner.kernels.library import INT4_BITS, ROTATED_BLOCK, WeightKind
from model_runner.kv_cache import KVShape
from model_runner.recurrence.states import ConvShape, RecurrentShape, ScanShape, StateShape

if TYPE_CHECKING:
    from model_runner.spec.model_folder import Listing
    from model_runner.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that decide how much memory the model needs."""

    kv: tuple[KVShape, ...]
    """Shape of the KV of each call of the attention in a pass: of each layer, in most models."""
    num_layers: int
    """Decoder layers."""
    num_parameters: int
    """Distinct weights; a head shared with the embedding counts once."""
    num_shared: int
    """Parameters of the head if it is shared with the embedding, otherwise 0."""
    num_multiplied: int
    """Weights that every token is multiplied with: linears, experts and the head, even if it is shared."""
    num_rotated: int
    """`num_multiplied` with inputs padded for the rotation."""
    num_inner: int
    """`num_multiplied` without the head."""
    num_groupable: int
    """Weights that int4 can hold: those in `num_inner` with whole groups of inputs."""
    hidden: int
    vocab_size: int
    max_model_len: int
    recurrences: tuple[RecurrentShape, ...] = ()
    """Shape of each recurrence, in the order of a pass."""
    scans: tuple[ScanShape, ...] = ()
    """Shape of each selective scan, in the order of a pass."""
    convolutions: tuple[ConvShape, ...] = ()
    """Shape of each causal convolution, in the order of a pass."""
    spec: "ModelSpec | None" = field(default=None, compare=False, repr=False)
    """The model as plain data, if its weights are packed as they are read."""
    listing: "Listing | None" = field(default=None, compare=False, repr=False)
    """The model's files, from before `spec` was read."""
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Names of the parts of transformers' modules that text does not use, which need not be loaded."""

    @property
    def states(self) -> list[StateShape]:
        """Shapes of all that recurrent layers keep; empty without such layers."""
        return [*self.recurrences, *self.convolutions, *self.scans]

    def packed_bytes(self, kind: WeightKind) -> int:
        """Memory of the multiplied weights when packed; weights that int4 cannot hold are int8."""
        if kind == "int8_rotated":
            return self.num_rotated
        num_int4 = self.num_groupable if kind == "int4" else 0
        return self.num_multiplied - num_int4 + num_int4 * INT4_BITS // 8


def rotated(weights: int, inputs: int) -> int:
    """Size of a matrix, which has so many weights, after its inputs are padded for the rotation."""
    return weights // inputs * -(-inputs // ROTATED_BLOCK) * ROTATED_BLOCK

"""Lower bounds of a model's work: bytes of weights and multiply-adds."""

from dataclasses import dataclass
from pathlib import Path

from bench.roofline import Roofline
from model_runner.modules.loading import inspect_model, load_config


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Numbers of weights that every token is multiplied with."""

    layers: int
    head: int
    int4_bytes: int
    """Bytes of all weights when packed with int4."""

    @classmethod
    def of(cls, folder: Path) -> "ModelWork":
        """Compute the numbers from a model's configuration."""
        shape = inspect_model(load_config(folder))
        head = shape.vocab_size * shape.hidden
        return cls(shape.num_multiplied - head, head, shape.packed_bytes("int4"))

    @property
    def all(self) -> int:
        """Weights of layers and head."""
        return self.layers + self.head

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights as int8, int4 or float32."""
        return {"int8": self.all, "int4": self.int4_bytes, "float32": 4 * self.all}[dtype]

    def read_s(self, machine: Roofline) -> float:
        """Seconds to read all weights once in the default type."""
        return self.weight_bytes("int8" if machine.int8_gmac_per_s else "float32") / machine.read_gb_per_s / 1e9

    def bound_tokens_per_s(self, machine: Roofline, concurrency: int, prompt_per_output: float) -> float:
        """Upper bound of output tokens per second, by the kernel's best rate and by reading the weights.

        Args:
            machine: the machine's limits.
            concurrency: requests that decode together and share one reading of the weights.
            prompt_per_output: prompt tokens per output token.
        """
        macs_per_s = (machine.int8_gmac_per_s or machine.fp32_gflop_per_s / 2) * 1e9
        decode_s = max(self.read_s(machine) / concurrency, self.all / macs_per_s)
        return 1 / (decode_s + prompt_per_output * self.layers / macs_per_s)

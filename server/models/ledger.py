"""Memory of one device, reserved in bytes by name before anything is allocated.

An engine's cache fills long after its start, so what a device has free says little about what is spoken for.
"""

from collections.abc import Mapping
from types import MappingProxyType

from model_runner.model_needs import ModelNeeds
from model_runner.processes import free_memory

_MARGIN = 0.05
"""Share of the memory that is free at the start that is left to other programs and to the server itself."""
_GPU_SHARE = 0.92
"""Share of a GPU's free memory that models take; the rest is for graphs and fragmentation."""
_SPARE_BYTES = 180 << 20
"""For the process that waits for the next load: 165 MiB measured."""


class Ledger:
    """Who has reserved how many bytes of a budget. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._reserved: dict[str, int] = {}

    @property
    def reserved(self) -> Mapping[str, int]:
        """Bytes by name."""
        return MappingProxyType(self._reserved)

    @property
    def used(self) -> int:
        """All reserved bytes."""
        return sum(self._reserved.values())

    @property
    def free(self) -> int:
        """Bytes that nobody has reserved."""
        return self.budget - self.used

    def reserve(self, name: str, num_bytes: int) -> bool:
        """Reserve bytes. Returns False, and changes nothing, if fewer are free.

        Raises:
            ValueError: if the name already has some, or the number is negative.
        """
        if name in self._reserved:
            raise ValueError(f"{name} has reserved {self._reserved[name]:,} bytes already")
        if num_bytes < 0:
            raise ValueError(f"{name} wants {num_bytes:,} bytes")
        if num_bytes > self.free:
            return False
        self._reserved[name] = num_bytes
        return True

    def release(self, name: str) -> None:
        """Give back a name's bytes, if it has any: call it once its process is gone."""
        self._reserved.pop(name, None)


class Ledgers:
    """The ledgers of all devices. A GPU gets its own with the first plan that finds one: only engines touch it."""

    def __init__(self, budget: int | None) -> None:
        """`budget` holds for each device; None: most of its free memory."""
        self._budget = budget
        self._of = {"cpu": Ledger(host_budget() if budget is None else budget)}

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes by device, as in a `Plan`; without devices that are not known yet, and take their free memory."""
        known = {device: ledger.budget for device, ledger in self._of.items()}
        return known if self._budget is None else {"cuda": self._budget} | known

    @property
    def host(self) -> Ledger:
        """The ledger of the host's memory."""
        return self._of["cpu"]

    @property
    def total(self) -> int:
        """Budgets of all devices that are known."""
        return sum(ledger.budget for ledger in self._of.values())

    def of(self, needs: ModelNeeds) -> Ledger:
        """The ledger of the device that an engine was planned for."""
        device = needs.device.partition(":")[0]
        if device not in self._of:
            budget = int(needs.free_bytes * _GPU_SHARE) if self._budget is None else self._budget
            self._of[device] = Ledger(budget)
        return self._of[device]


def host_budget() -> int:
    """The default budget of a host: its free memory, within the limit of its control group, less what others take."""
    return max(int(free_memory() * (1 - _MARGIN)) - _SPARE_BYTES, 0)

"""Whoever has a key."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one may use; None is not limited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    tokens_per_day: int | None = None
    """The same, in a day of UTC."""
    max_choices: int | None = None
    """Answers that are made at the same time."""

    def in_background(self) -> "TenantLimits":
        """Those that count for work that only gets the room that others leave."""
        return TenantLimits(tokens_per_day=self.tokens_per_day)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One who has a key, or all who need none."""

    name: str = ""
    """By which it is known everywhere but where its key is checked: no secret. Empty where there are no keys."""
    weight: float = 1.0
    """Its share beside those of others."""
    priority: int = 0
    """Lower ones are served first."""
    limits: TenantLimits = field(default_factory=TenantLimits)

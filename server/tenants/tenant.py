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
    """Answers that are made at the same time, where each beam of a search counts as one."""

    def in_background(self) -> "TenantLimits":
        """Those that count for work that only gets the room that others leave."""
        return TenantLimits(tokens_per_day=self.tokens_per_day)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One who has a key, or all who need none."""

    name: str = ""
    """By which what it stores and uses is found. Empty where there are no keys. Without a name given by the operator,
    part of the key's hash, by which weak keys can be guessed: it stays in this server and its databases."""
    weight: float = 1.0
    """Its share beside those of others."""
    priority: int = 0
    """Lower ones are served first."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    label: str = ""
    """Its name in metrics and traces: the one that the operator gave, otherwise empty."""
    sees_all_usage: bool = False
    """Whether its key reads in /metrics what each of the others has used."""

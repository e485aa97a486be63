"""The constants of the decisions, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from saga_core.errors import SettingsError


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """Constants of retention, as in the SAGA paper (arXiv 2605.00528) where it names them.

    Attributes:
        alpha: weight of recency in WA-LRU, 0 to 1.
        beta: weight of 1 - P_reuse in WA-LRU, 0 to 1.
        gamma: weight of size in WA-LRU, 0 to 1; 0 ranks without regard to size.
        tau_max_s: idle seconds at which WA-LRU's recency term reaches 1, above 0.
        ttl_max_s: upper bound of every TTL, seconds; 0 switches protection by TTL off.
        protect_min_p_reuse: P_reuse from which a paused session is protected by its TTL, 0 to 1;
            0 protects every paused session. Ours: the paper protects all, also a finished one.
        fixed_ttl_s: TTL of the policy ``fixed-ttl``, seconds; 0 is plain LRU.
        hazard_half_life_s: age at which what ``saga`` learned counts half, seconds, from 60;
            1e12 forgets nothing.
        pressure_low, pressure_high: share of the KV pool held where the TTL begins to shrink and
            where it has shrunk to half, 0 to 1, low below high.
        max_overtaken_s: seconds after which a waiting request is not overtaken any more by requests
            whose KV is there; 0 admits in order of arrival.
        max_sessions: sessions that a worker keeps facts about, at least 1.
        max_ghost_blocks: evicted block hashes remembered to count regret, about 200 bytes each; 0
            counts none.
    """

    alpha: float = 0.3
    beta: float = 0.5
    gamma: float = 0.2
    tau_max_s: float = 300.0
    ttl_max_s: float = 300.0
    protect_min_p_reuse: float = 0.5
    fixed_ttl_s: float = 30.0
    hazard_half_life_s: float = 86_400.0
    pressure_low: float = 0.7
    pressure_high: float = 0.9
    max_overtaken_s: float = 60.0
    max_sessions: int = 100_000
    max_ghost_blocks: int = 250_000

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "alpha": (0.0, 1.0),
            "beta": (0.0, 1.0),
            "gamma": (0.0, 1.0),
            "tau_max_s": (1e-3, 1e9),
            "ttl_max_s": (0.0, 1e9),
            "protect_min_p_reuse": (0.0, 1.0),
            "fixed_ttl_s": (0.0, 1e9),
            "hazard_half_life_s": (60.0, 1e12),
            "pressure_low": (0.0, 1.0),
            "pressure_high": (0.0, 1.0),
            "max_overtaken_s": (0.0, 1e9),
            "max_sessions": (1, 1e9),
            "max_ghost_blocks": (0, 1e9),
        }
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = ranges[field.name]
            if not low <= value <= high:
                raise SettingsError(f"{field.name}={value} must be from {low:g} to {high:g}")
        if not self.pressure_low < self.pressure_high:
            raise SettingsError(
                f"pressure_low={self.pressure_low} must be below pressure_high={self.pressure_high}"
            )

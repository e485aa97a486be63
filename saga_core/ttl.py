"""How long a paused session's KV is protected."""

from __future__ import annotations

from saga_core.settings import RetentionSettings


def ttl_s(pause_p95_s: float, pressure: float, settings: RetentionSettings) -> float:
    """Seconds for which a paused session's KV is evicted only after everything unprotected.

    TTL = min(P95(H_tool) · (1 - 0.5·m), TTL_max), m = (pressure - low) / (high - low) clamped to
    [0, 1] (SAGA paper; it leaves out the upper clamp).

    Args:
        pause_p95_s: 95th percentile of the pause's length, seconds.
        pressure: KV that sessions hold, paused or running ÷ KV capacity.
        settings: bounds of the TTL and of the pressure.
    """
    span = settings.pressure_high - settings.pressure_low
    m = min(1.0, max(0.0, (pressure - settings.pressure_low) / span))
    return min(pause_p95_s * (1.0 - 0.5 * m), settings.ttl_max_s)

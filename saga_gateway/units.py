"""Amounts as people read them."""

from __future__ import annotations

import math

NONE = "-"


def seconds(value: float | None) -> str:
    """A duration: 85 ms, 3.2 s, 4.5 min, 2.1 h."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 1.0:
        return f"{value * 1000:.0f} ms"
    for limit, unit, name in ((60.0, 1.0, "s"), (3600.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 86_400:.3g} days"


def amount(value: float | None) -> str:
    """A count, to three digits: 950, 12.3 k, 4.56 M, 7.8 G."""
    if value is None or not math.isfinite(value):
        return NONE
    for limit, unit, name in ((999.5, 1.0, ""), (999.5e3, 1e3, " k"), (999.5e6, 1e6, " M")):
        if abs(value) < limit:
            return f"{value / unit:.3g}{name}"
    return f"{value / 1e9:.3g} G"


def percent(value: float | None) -> str:
    """A share: 37 %; below one percent with a digit more."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.1%}".replace("%", " %") if 0.0 < value < 0.00995 else f"{value * 100:.0f} %"


def ratio(part: float | None, whole: float | None) -> float | None:
    """The part's share of the whole; None where there is no whole."""
    return None if part is None or not whole else part / whole

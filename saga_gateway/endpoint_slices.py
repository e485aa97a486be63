"""What Kubernetes' EndpointSlices say of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any, TypeAlias

from saga_gateway.settings import worker_address

Slice: TypeAlias = Mapping[str, Any]
"""An EndpointSlice as the API server writes it."""


def workers_of(slices: Iterable[Slice], port: str) -> tuple[dict[str, str], set[str]]:
    """The workers in EndpointSlices, and the names of slices with endpoints but no port for them.

    An endpoint is taken when it is ready (which it is, too, when nothing says that it is not) and
    not terminating. It may stand in two slices while they are rearranged, and is one worker. A pod
    with addresses of both families has a slice for each, and is one worker, at its IPv4 address.
    """
    found: dict[str, str] = {}
    families: dict[str, str] = {}
    unclear = set()
    for each in sorted(slices, key=_order):
        family, number = each.get("addressType"), _port(each, port)
        ready = [one for one in each.get("endpoints") or () if _is_ready(one)]
        if family not in ("IPv4", "IPv6") or not ready:
            continue
        if number is None:
            unclear.add(each["metadata"]["name"])
            continue
        for endpoint in ready:
            pod = (endpoint.get("targetRef") or {}).get("uid")
            if pod is not None and families.setdefault(pod, family) != family:
                continue
            address = ip_address(endpoint["addresses"][0])  # Any of them would do.
            host = f"[{address}]" if address.version == 6 else str(address)
            worker_id, base_url = worker_address(f"http://{host}:{number}")
            found[worker_id] = base_url
    return found, unclear


def _order(each: Slice) -> tuple[str, str]:
    return each.get("addressType", ""), each["metadata"]["name"]


def _is_ready(endpoint: Mapping[str, Any]) -> bool:
    conditions = endpoint.get("conditions") or {}
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _port(each: Slice, wanted: str) -> int | None:
    """The port that is wanted; a slice that names none leaves every number to the caller."""
    ports = [one for one in each.get("ports") or () if one.get("protocol") in (None, "TCP")]
    if wanted.isdigit():
        number = int(wanted)
        is_there = not ports or any(one.get("port") in (None, number) for one in ports)
        return number if is_there else None
    named = [one for one in ports if not wanted or one.get("name") == wanted]
    return named[0].get("port") if len(named) == 1 else None

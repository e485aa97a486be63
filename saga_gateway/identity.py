"""Who a request comes from: API keys, their tenants, and what those may do."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saga_core.errors import SettingsError
from saga_core.fairness import check_weight
from saga_core.hints import clean
from saga_gateway.asgi import Scope, Send, send_error
from saga_gateway.headers import PRIORITY_HEADER, Headers
from saga_gateway.routes import Dialect

logger = logging.getLogger(__name__)

TENANT_HEADER = "x-saga-tenant-id"
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_KEY_PREFIX = "saga-"
_SCOPED_BYTES = 16
_FIELDS = {
    "name": str,
    "tenant": str,
    "sha256": str,
    "max_in_flight": int,
    "priority": int,
    "weight": float,
    "admin": bool,
}
_MAX_PRIORITY = 2**30

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Identity:
    """What is known of a caller.

    Attributes:
        tenant: whose request it is; None where nobody is told apart.
        max_in_flight: it is refused while so many requests of its tenant are served; 0: never.
        priority: added to that of its requests where an engine serves by priority; lower goes
            first.
        weight: its tenant's share of the fleet beside others that need as much.
        admin: it may see how the gateway and its workers are.
    """

    tenant: str | None = None
    max_in_flight: int = 0
    priority: int = 0
    admin: bool = False
    weight: float = 1.0


ANYBODY = Identity(admin=True)
"""The caller of a gateway without keys, which listens to its own host alone unless told else."""


class KeyFile:
    """API keys, by the SHA-256 of each, from a TOML file that may change at any time.

    ::

        [[key]]
        name = "ci"                 # for people
        tenant = "team-a"
        sha256 = "9f86d081884c..."  # `saga key` makes a key, and this entry
        max_in_flight = 50          # optional: refused while the tenant has so many requests
        priority = 10               # optional: lower goes first, 0 is what it is without this
        weight = 2.0                # optional: the tenant's share beside others, 1 without this
        admin = false               # optional: may see how the gateway and its workers are

    Raises:
        SettingsError: the file cannot be read, or an entry is wrong; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._identities = _read_keys(path)

    def __len__(self) -> int:
        return len(self._identities)

    def find(self, key: str) -> Identity | None:
        """Whose key it is."""
        # The time of the look-up tells at most of a hash, never of a key.
        return self._identities.get(hashlib.sha256(key.encode(errors="replace")).hexdigest())

    def reload(self) -> bool:
        """Read the file again if it has changed; returns whether it has.

        What cannot be read, or is wrong, leaves the keys as they are, and is logged.
        """
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            self._identities = _read_keys(self._path)
        except SettingsError as error:
            logger.error("the API keys stay as they were: %s", error)
            return False
        logger.warning("%d API keys read from %s", len(self), self._path)
        return True

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            stat = os.stat(self._path)
        except OSError as error:
            raise SettingsError(f"cannot read {self._path}: {error.strerror}") from None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read_keys(path: Path) -> dict[str, Identity]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    entries = content.get("key", [])
    if not isinstance(entries, list) or set(content) - {"key"}:
        raise SettingsError(f"{path} must have nothing but [[key]] tables")
    found: dict[str, Identity] = {}
    for number, entry in enumerate(entries, 1):
        digest, identity = _read_entry(entry, f"{path}, key {number}")
        if digest in found:
            raise SettingsError(f"{path}, key {number}: the same key stands twice")
        found[digest] = identity
    return found


def _read_entry(entry: Any, where: str) -> tuple[str, Identity]:
    if not isinstance(entry, Mapping):
        raise SettingsError(f"{where} must be a table")
    for name, value in entry.items():
        if name not in _FIELDS:
            raise SettingsError(f"{where}: {name!r} is not known; there are {', '.join(_FIELDS)}")
        # In Python a bool is an int.
        if type(value) is not _FIELDS[name] and (_FIELDS[name], type(value)) != (float, int):
            raise SettingsError(f"{where}: {name} must be of type {_FIELDS[name].__name__}")
    tenant, digest = entry.get("tenant"), str(entry.get("sha256", "")).lower()
    if not tenant or clean(tenant) != tenant:
        raise SettingsError(f"{where}: tenant must be 1 to 256 characters of A-Z a-z 0-9 . _ ~ : -")
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise SettingsError(f"{where}: sha256 must be 64 hexadecimal digits; `saga key` makes them")
    if entry.get("max_in_flight", 0) < 0:
        raise SettingsError(f"{where}: max_in_flight must not be negative; 0: no limit")
    priority = entry.get("priority", 0)
    if abs(priority) > _MAX_PRIORITY:
        raise SettingsError(f"{where}: priority must be from -{_MAX_PRIORITY} to {_MAX_PRIORITY}")
    weight = float(entry.get("weight", 1.0))
    try:
        check_weight(weight)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
    return digest, Identity(
        tenant, entry.get("max_in_flight", 0), priority, entry.get("admin", False), weight
    )


def new_key(tenant: str) -> tuple[str, str]:
    """A new API key, and its entry for a key file, which does not tell the key."""
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return key, f'[[key]]\ntenant = "{tenant}"\nsha256 = "{digest}"\n'


@dataclass(slots=True)
class Gatekeeper:
    """Tells callers apart and scopes what they say.

    Args:
        keys: None: everybody may call, and nobody is told apart.
        trusted: networks of proxies that may name the tenant in ``X-SAGA-Tenant-ID``.
        secret: key of the hash that makes a tenant's session ids; equal in all replicas.
    """

    keys: KeyFile | None = None
    trusted: tuple[Network, ...] = ()
    secret: bytes = b""
    _in_flight: dict[str, int] = field(default_factory=dict)

    def identify(self, headers: Headers, client: str | None) -> Identity | None:
        """Who sends these headers from that address; None: nobody who may."""
        identity: Identity | None = ANYBODY
        if self.keys is not None:
            key = _key_in(headers)
            identity = None if key is None else self.keys.find(key)
        named = next((value for name, value in headers if name == TENANT_HEADER), None)
        if named is None or not self._is_trusted(client):
            return identity
        tenant = clean(named)
        if tenant is None or identity is None:
            return identity
        return replace(identity, tenant=tenant)

    def session_id(self, identity: Identity, said: str) -> str:
        """The session's id in tables and on workers: those of tenants never meet."""
        if identity.tenant is None:
            return said
        text = f"{len(identity.tenant)}:{identity.tenant}{said}".encode()
        return hashlib.blake2b(text, digest_size=_SCOPED_BYTES, key=self.secret).hexdigest()

    @staticmethod
    def priority(identity: Identity, headers: Headers, body: bytes) -> int | None:
        """What is added to the priority of a request; None: that is left to its body.

        With a key it is the key's, also where that is 0: the header wins over what the body says.
        Without keys the caller's own word counts, in the header or else in the body.
        """
        if identity.tenant is not None:
            return identity.priority
        said = next((value for name, value in headers if name == PRIORITY_HEADER), "")
        try:
            return max(-_MAX_PRIORITY, min(_MAX_PRIORITY, int(said)))
        except ValueError:
            return None if b'"priority"' in body else 0

    def strip(self, headers: Headers) -> Headers:
        """What a worker may see: no key of ours, no tenant that a client has named."""
        hidden = {TENANT_HEADER, *(_KEY_HEADERS if self.keys is not None else ())}
        return [(name, value) for name, value in headers if name not in hidden]

    def enter(self, identity: Identity) -> bool:
        """Count a request of the tenant; False, and nothing counted: it has too many."""
        if identity.tenant is None:
            return True
        count = self._in_flight.get(identity.tenant, 0)
        if identity.max_in_flight and count >= identity.max_in_flight:
            return False
        self._in_flight[identity.tenant] = count + 1
        return True

    def leave(self, identity: Identity) -> None:
        """A request that was counted is over."""
        if identity.tenant is None:
            return
        count = self._in_flight[identity.tenant] - 1
        if count:
            self._in_flight[identity.tenant] = count
        else:
            del self._in_flight[identity.tenant]

    def _is_trusted(self, client: str | None) -> bool:
        if not self.trusted or client is None:
            return False
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return False
        return any(address in network for network in self.trusted)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks such as ``10.0.0.0/8``; a single address is one too.

    Raises:
        SettingsError: a text is neither.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise SettingsError(f"trusted_proxies: {error}; write 10.0.0.0/8, or an address") from None


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_of(scope: Scope) -> str | None:
    """Address of the peer of a connection; None when it has none."""
    client = scope.get("client")
    return None if client is None else str(client[0])


async def admit(
    gatekeeper: Gatekeeper,
    scope: Scope,
    headers: Headers,
    send: Send,
    dialect: Dialect = Dialect.OPENAI,
) -> Identity | None:
    """Who the caller is; None: nobody who may, and it has been told so."""
    identity = gatekeeper.identify(headers, client_of(scope))
    if identity is None:
        await send_error(
            send,
            401,
            "the API key is missing or not known: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers=[(b"www-authenticate", b"Bearer")],
            dialect=dialect,
        )
    return identity


def _key_in(headers: Headers) -> str | None:
    for wanted in _KEY_HEADERS:
        for name, value in headers:
            if name == wanted:
                scheme, _, rest = value.partition(" ")
                return rest.strip() if scheme.lower() == "bearer" else value.strip()
    return None

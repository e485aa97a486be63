"""Who may call, whose sessions are whose, and what of that reaches a worker."""

import asyncio
import ipaddress

import pytest

from saga_core.errors import SettingsError
from saga_gateway.app import GatewaySettings, serve
from saga_gateway.identity import (
    ANYBODY,
    Gatekeeper,
    Identity,
    KeyFile,
    is_loopback,
    networks,
    new_key,
)

CHAT = "/v1/chat/completions"


@pytest.fixture
def key_file(tmp_path):
    """Writes keys, by tenant and further lines, and remembers them in clear."""

    class Keys(dict):
        path = tmp_path / "keys.toml"

        def write(self, **tenants):
            entries = []
            for tenant, more in tenants.items():
                self[tenant], entry = new_key(tenant)
                entries.append(entry + more)
            self.path.write_text("\n".join(entries))
            return self

    return Keys()


@pytest.fixture
async def guarded(start_gateway, workers, key_file):
    """A gateway with keys of two tenants and of an operator."""
    key_file.write(red="", blue="max_in_flight = 2", ops="admin = true")
    return await start_gateway(*workers, keys_file=str(key_file.path), reload_s=0.01)


async def ask(gateway, key, session="s", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers |= {"Authorization": f"Bearer {key}", "X-SAGA-Session-ID": session}
    return await gateway.client.post(CHAT, json={}, headers=headers)


# Keys


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/saga/v1/events"),
    ],
)
async def test_without_a_known_key_nothing_is_served(guarded, workers, method, path):
    for headers in ({}, {"Authorization": "Bearer saga-guess"}, {"X-API-Key": ""}):
        answer = await guarded.client.request(method, path, content=b"[]", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert not any(worker.chats for worker in workers)
    anthropic = await guarded.client.post("/v1/messages", content=b"{}")
    assert anthropic.json()["type"] == "error"


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key", "api-key"])
async def test_a_key_may_come_as_every_client_sends_it_and_reaches_no_worker(
    guarded, workers, key_file, name
):
    value = f"Bearer {key_file['red']}" if name == "Authorization" else key_file["red"]
    answer = await guarded.client.post(CHAT, json={}, headers={name: value})
    assert answer.status_code == 200
    (exchange,) = [exchange for worker in workers for exchange in worker.chats]
    assert not any(key_file["red"] in sent for _, sent in exchange.headers)


async def test_the_workers_own_key_is_put_in(start_gateway, worker, key_file, eventually):
    key_file.write(red="")
    gateway = await start_gateway(
        worker, keys_file=str(key_file.path), worker_api_key="w-1", health_interval_s=0.01
    )
    seen = []
    answer = worker._answer

    async def watch(exchange):
        seen.append((exchange.target, exchange.header("authorization")))
        await answer(exchange)

    worker._answer = watch
    await ask(gateway, key_file["red"])
    await gateway.client.get("/v1/models", headers={"X-API-Key": key_file["red"]})
    await eventually(lambda: {target for target, _ in seen} >= {"/health", "/v1/models", CHAT})
    await eventually(lambda: worker.notices)
    assert {key for _, key in seen} == {"Bearer w-1"}


async def test_without_keys_the_clients_own_authorization_passes(gateway, worker):
    await gateway.client.post(CHAT, json={}, headers={"Authorization": "Bearer theirs"})
    assert worker.chats[0].header("authorization") == "Bearer theirs"


async def test_keys_change_without_a_restart_and_a_broken_file_changes_nothing(
    guarded, key_file, eventually, caplog
):
    old = key_file["red"]
    key_file.write(red="")
    await eventually(lambda: len(guarded.app.gatekeeper.keys) == 1)
    assert (await ask(guarded, old)).status_code == 401
    assert (await ask(guarded, key_file["red"])).status_code == 200
    key_file.path.write_text("[[key]]\ntenant = 'x'\n")
    await eventually(lambda: "stay as they were" in caplog.text)
    assert "sha256" in caplog.text
    assert (await ask(guarded, key_file["red"])).status_code == 200
    assert key_file["red"] not in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("what", "not TOML"),
        ("key = 3", r"nothing but \[\[key\]\]"),
        ("other = 3", r"nothing but \[\[key\]\]"),
        ("key = [3]", "key 1 must be a table"),
        ("[[key]]\ntenant = 'a b'\nsha256 = '" + "0" * 64 + "'", "tenant must be"),
        ("[[key]]\ntenant = 'a'\nsha256 = 'xyz'", "64 hexadecimal digits"),
        ("[[key]]\ntenant = 'a'\nadmin = 1", "admin must be of type bool"),
        ("[[key]]\ntenant = 'a'\nmax_in_flight = true", "max_in_flight must be of type int"),
        ("[[key]]\ncolour = 'a'", "'colour' is not known"),
        (
            "[[key]]\ntenant = 'a'\nmax_in_flight = -1\nsha256 = '" + "0" * 64 + "'",
            "not be negative",
        ),
        (2 * ("[[key]]\ntenant = 'a'\nsha256 = '" + "0" * 64 + "'\n"), "stands twice"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_with_the_place(tmp_path, text, says):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=says):
        KeyFile(path)
    with pytest.raises(SettingsError, match="cannot read"):
        KeyFile(tmp_path / "none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "gateway.example", "10.0.0.1"])
def test_without_keys_other_hosts_are_not_served_unless_told(host):
    assert not is_loopback(host)
    with pytest.raises(SettingsError, match="keys_file"):
        serve(GatewaySettings(("http://127.0.0.1:1",), host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_the_own_host_may_call_without_keys(host):
    assert is_loopback(host)


def test_secrets_are_not_shown():
    settings = GatewaySettings(("http://x:1",), session_secret="s3cret", worker_api_key="w0rker")
    assert "s3cret" not in repr(settings)
    assert "w0rker" not in repr(settings)


# Tenants


async def test_sessions_of_tenants_never_meet(guarded, workers, key_file, eventually):
    answers = [await ask(guarded, key_file[tenant]) for tenant in ("red", "blue", "red")]
    assert [answer.headers["x-saga-session-id"] for answer in answers] == ["s"] * 3
    assert [answer.headers["x-saga-route"] for answer in answers] == ["new", "new", "affinity"]
    ids = [e.header("x-session-id") for worker in workers for e in worker.chats]
    assert len(ids) == 3
    assert len(set(ids)) == 2
    assert "s" not in ids
    end = [{"event": "session_end", "session_id": "s"}]
    blue = {"Authorization": f"Bearer {key_file['blue']}"}
    assert (await guarded.client.post("/saga/v1/events", json=end, headers=blue)).status_code == 202
    await eventually(lambda: any(n["kind"] == "end" for w in workers for n in w.notices))
    (ended,) = [n["session_id"] for w in workers for n in w.notices if n["kind"] == "end"]
    assert ids.count(ended) == 1
    assert len(guarded.app.sessions) == 1


def test_the_session_of_a_tenant_is_the_same_in_every_replica_with_the_secret():
    one, other = Gatekeeper(secret=b"x"), Gatekeeper(secret=b"x")
    red, blue = Identity("red"), Identity("blue")
    assert one.session_id(red, "s") == other.session_id(red, "s")
    assert len({one.session_id(tenant, s) for tenant in (red, blue) for s in ("s", "t")}) == 4
    assert one.session_id(Identity("a"), "bc") != one.session_id(Identity("ab"), "c")
    assert Gatekeeper(secret=b"y").session_id(red, "s") != one.session_id(red, "s")
    assert one.session_id(ANYBODY, "s") == "s"


async def test_a_response_is_its_tenants_alone(guarded, workers, key_file):
    async def respond(exchange):
        await exchange.answer({"id": "resp_1", "object": "response", "output": []})

    for worker in workers:
        worker.script = respond
    red, blue = ({"X-API-Key": key_file[tenant]} for tenant in ("red", "blue"))
    made = await guarded.client.post("/v1/responses", json={"input": "x"}, headers=red)
    assert made.status_code == 200
    on = {"input": "y", "previous_response_id": "resp_1"}
    for headers, status in ((red, 200), (blue, 404)):
        answers = [
            await guarded.client.get("/v1/responses/resp_1", headers=headers),
            await guarded.client.post("/v1/responses/resp_1/cancel", headers=headers),
            await guarded.client.post("/v1/responses", json=on, headers=headers),
        ]
        assert [answer.status_code for answer in answers] == [status] * 3
    assert sum(len(worker.chats) for worker in workers) == 4


async def test_a_tenant_has_no_more_requests_than_its_limit(guarded, workers, key_file, eventually):
    release = asyncio.Event()

    async def wait(exchange):
        await release.wait()
        await exchange.answer({})

    for worker in workers:
        worker.script = wait
    blue = [asyncio.create_task(ask(guarded, key_file["blue"], f"s{n}")) for n in range(2)]
    await eventually(lambda: sum(len(worker.chats) for worker in workers) == 2)
    refused = await ask(guarded, key_file["blue"], "s3")
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "tenant_limit"
    red = asyncio.create_task(ask(guarded, key_file["red"]))
    await eventually(lambda: sum(len(worker.chats) for worker in workers) == 3)
    blue.pop().cancel()
    await eventually(lambda: guarded.app.gatekeeper._in_flight["blue"] == 1)
    release.set()
    assert (await ask(guarded, key_file["blue"], "s4")).status_code == 200
    assert {(await task).status_code for task in (*blue, red)} == {200}
    assert guarded.app.gatekeeper._in_flight == {}


@pytest.mark.parametrize("trusted", [("127.0.0.0/8",), ("10.0.0.0/8",), ()])
async def test_a_tenants_name_is_believed_from_trusted_proxies_alone(
    start_gateway, worker, trusted
):
    gateway = await start_gateway(worker, trusted_proxies=trusted)
    headers = {"X-SAGA-Session-ID": "s", "X-SAGA-Tenant-ID": "green"}
    assert (await gateway.client.post(CHAT, json={}, headers=headers)).status_code == 200
    (exchange,) = worker.chats
    is_believed = trusted == ("127.0.0.0/8",)
    assert (exchange.header("x-session-id") == "s") == (not is_believed)
    assert exchange.header("x-saga-tenant-id") is None


def test_a_client_without_an_address_is_trusted_by_nobody():
    gatekeeper = Gatekeeper(trusted=(ipaddress.ip_network("0.0.0.0/0"),))
    named = [("x-saga-tenant-id", "green")]
    assert gatekeeper.identify(named, "10.1.2.3").tenant == "green"
    for client in (None, "unix", "::1"):
        assert gatekeeper.identify(named, client) is ANYBODY
    with pytest.raises(SettingsError, match="trusted_proxies"):
        networks(["10.0.0.1/8"])


async def test_how_the_gateway_is_is_for_operators(guarded, key_file):
    for key in (None, key_file["red"]):
        headers = {} if key is None else {"X-API-Key": key}
        answer = await guarded.client.get("/health", headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    answer = await guarded.client.get("/health", headers={"X-API-Key": key_file["ops"]})
    assert len(answer.json()["workers"]) == 2

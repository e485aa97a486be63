"""A gateway that Kubernetes tells its workers, and how it finds the API server."""

import asyncio
import datetime
import ipaddress
import ssl
import sys
from asyncio.subprocess import PIPE

import pytest

from saga_core.errors import SettingsError
from saga_gateway import discovery_kubernetes
from saga_gateway.discovery import sources_of
from saga_gateway.discovery_kubernetes import Endpoints, KubernetesDiscovery
from saga_gateway.settings import GatewaySettings
from tests.gateway.kubernetes_api import (
    SERVICE,
    Following,
    StandInAPIServer,
    endpoint,
    endpoint_slice,
    found,
    serving,
)


@pytest.fixture
async def api(tmp_path, monkeypatch):
    """A stand-in API server, which the kubeconfig names."""
    async with serving(tmp_path, monkeypatch) as server:
        yield server


# Settings, and where the API server is


def test_the_settings_say_which_slices_are_meant():
    def of_settings(**settings):
        return Endpoints.of(GatewaySettings(**settings))

    assert of_settings(kubernetes_service="ns/w") == Endpoints(
        "ns", "kubernetes.io/service-name=w", ""
    )
    both = of_settings(
        kubernetes_service="w", kubernetes_selector="a.b/c=d", kubernetes_port="http"
    )
    assert both == Endpoints("", "kubernetes.io/service-name=w,a.b/c=d", "http")
    assert of_settings(kubernetes_selector="tier=gpu") == Endpoints("", "tier=gpu", "")


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    (source,) = sources_of(GatewaySettings(kubernetes_service="ns/w"))
    with pytest.raises(SettingsError, match=r"pip install 'saga-sdk\[kubernetes\]'"):
        source.now()


def test_without_an_api_server_the_start_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="run in a pod, or let KUBECONFIG name a file"):
        KubernetesDiscovery(SERVICE).now()


async def test_in_a_pod_the_service_account_is_used(tmp_path, monkeypatch, eventually):
    from kubernetes_asyncio.config import incluster_config

    certificate, key = self_signed(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    api = StandInAPIServer()
    await api.start(ssl=context)
    try:
        token, namespace = tmp_path / "token", tmp_path / "namespace"
        token.write_text("sa-token")
        namespace.write_text("saga\n")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
        monkeypatch.setattr(discovery_kubernetes, "_NAMESPACE_FILE", namespace)
        api.token = "sa-token"
        api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
        following = Following(Endpoints("", "kubernetes.io/service-name=workers", ""))
        try:
            await eventually(lambda: following.last == found("10.0.0.1"))
        finally:
            await following.stop()
    finally:
        await api.stop()


def self_signed(folder):
    """A certificate for 127.0.0.1 and its key, as files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stand-in")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    public = key.public_key()
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        x509.CertificateBuilder(
            name, name, public, x509.random_serial_number(), now - day, now + day
        )
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "ca.crt", folder / "tls.key"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return paths


# A gateway


async def test_a_gateway_serves_as_soon_as_a_worker_is_found(
    api, start_gateway, workers, eventually
):
    gateway = await start_gateway(
        kubernetes_service="saga/workers", health_interval_s=0.01, slow_start_s=0.0
    )
    assert (await gateway.client.get("/ready")).status_code == 503
    assert (await gateway.client.get("/version")).status_code == 200
    refused = await gateway.chat("s")
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "worker_unavailable"
    await eventually(lambda: api.open_watches)
    for name, worker in zip("ab", workers, strict=True):
        ports = (("http", worker.port),)
        api.put(endpoint_slice(name, [endpoint("127.0.0.1", pod=name, ready=True)], ports=ports))
    await eventually(lambda: len(gateway.app.workers) == 2)
    await eventually(lambda: all(worker.health_checks for worker in workers))
    assert (await gateway.client.get("/ready")).status_code == 200
    home = (await gateway.chat("s")).headers["x-saga-worker"]
    api.delete("a" if home == workers[0].worker_id else "b")
    await eventually(lambda: len(gateway.app.workers) == 1)
    moved = await gateway.chat("s")
    assert moved.status_code == 200
    assert moved.headers["x-saga-worker"] != home


async def test_found_workers_stand_beside_those_of_the_settings(
    api, start_gateway, workers, eventually
):
    gateway = await start_gateway(workers[0], kubernetes_selector="tier=gpu")
    ports = (("http", workers[1].port),)
    api.put(endpoint_slice("a", [endpoint("127.0.0.1")], ports=ports, tier="gpu"))
    ids = {worker.worker_id for worker in workers}
    await eventually(lambda: {worker.worker_id for worker in gateway.app.workers} == ids)


async def test_the_process_starts_without_workers_and_ends_while_it_watches(api, eventually):
    program = (
        "from saga_gateway.app import GatewaySettings, serve\n"
        "serve(GatewaySettings(kubernetes_service='saga/workers', port=0))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-X", "dev", "-c", program, stdout=PIPE, stderr=PIPE
    )
    try:
        line = await process.stdout.readline()
        assert line.endswith(b", workers: none yet\n")
        await eventually(lambda: api.open_watches)
        process.terminate()
        out, err = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out, err) == (0, b"", b"")

"""The Kustomize base and overlays: valid for Kubernetes, consistent, and least privilege."""

import re
import tomllib

import kubernetes_validate
import pytest

from gpu_backend.config import WorkerConfig
from saga_core.errors import SettingsError
from saga_gateway.app import Gateway
from saga_gateway.config import PREFIX, SECRETS, read_settings
from saga_gateway.discovery_kubernetes import Endpoints
from saga_gateway.settings import GatewaySettings
from tests.deploy import rendered
from tests.deploy.rendered import DEPLOY, OVERLAYS, container, gib, named, of_kind

ROOT = DEPLOY.parent
VERSIONS = ("1.30", "1.33", kubernetes_validate.latest_version())
"""The oldest that has preStop's sleep, one between, and the newest whose schemas there are."""
CLOSE_S = 10
CUSTOM = ("ServiceMonitor", "PrometheusRule")

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture
def gateway(overlay):
    return rendered.gateway(overlay)


@pytest.fixture
def worker(overlay):
    return rendered.worker(overlay)


@pytest.fixture
def settings(overlay, gateway, tmp_path):
    """The gateway's settings, read as its container reads them."""
    path = tmp_path / "gateway.toml"
    path.write_text(named(overlay, "ConfigMap", "saga-gateway-config")["data"]["gateway.toml"])
    flag, given = container(gateway)["args"]
    mounts = {mount["mountPath"] for mount in container(gateway)["volumeMounts"]}
    assert (flag, given in mounts) == ("--config", True)
    environment = {each["name"]: "secret" for each in container(gateway)["env"]}
    return read_settings(str(path), environment, {})


@pytest.fixture
def worker_config(overlay, worker, tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text(named(overlay, "ConfigMap", "saga-worker-config")["data"]["worker.toml"])
    return WorkerConfig.from_environment({"SAGA_CONFIG": str(path)})


# Kubernetes


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_valid(overlay, version):
    validated = []
    for document in rendered.documents(overlay):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
            validated.append(document["kind"])
    assert {"Deployment", "StatefulSet", "HorizontalPodAutoscaler", "NetworkPolicy"} <= {*validated}


def test_what_is_not_valid_is_refused(overlay):
    document = {**named(overlay, "Deployment", "saga-gateway"), "replicas": 2}
    with pytest.raises(kubernetes_validate.ValidationError, match="replicas"):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_custom_resources_have_the_fields_that_the_operator_reads(overlay):
    services = of_kind(overlay, "Service")
    monitors = of_kind(overlay, "ServiceMonitor")
    assert bool(monitors) == (overlay == "four-gpu")
    for monitor in monitors:
        assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
        assert set(monitor["spec"]) == {"selector", "endpoints"}
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [each for each in services if labels <= each["metadata"]["labels"].items()]
        # The job that the alerts name is the name of the Service.
        assert service["metadata"]["name"] == monitor["metadata"]["name"]
        for scraped in monitor["spec"]["endpoints"]:
            assert set(scraped) == {"port", "path", "interval"}
            assert scraped["port"] in {port["name"] for port in service["spec"]["ports"]}
    for rule in of_kind(overlay, "PrometheusRule"):
        assert set(rule["spec"]) == {"groups"}  # Its content: test_monitoring.py.


def test_everything_is_in_the_namespace(overlay):
    for document in rendered.documents(overlay):
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "saga", document["metadata"]["name"]
    (binding,) = of_kind(overlay, "RoleBinding")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "saga-gateway", "namespace": "saga"}
    ]


# Consistent


def test_selectors_find_their_pods(overlay, gateway, worker):
    pods = [gateway["metadata"]["labels"], worker["metadata"]["labels"]]
    selectors = [each["spec"]["selector"] for each in of_kind(overlay, "Service")]
    for kind in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
        selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(overlay, kind)]
    for policy in of_kind(overlay, "NetworkPolicy"):
        blocks = [policy["spec"]["podSelector"]]
        for rule in policy["spec"].get("ingress", []) + policy["spec"].get("egress", []):
            blocks += [peer["podSelector"] for peer in _peers(rule) if "podSelector" in peer]
        for block in blocks:
            if "matchExpressions" in block:
                (one,) = block["matchExpressions"]
                assert sorted(one["values"]) == sorted(labels[one["key"]] for labels in pods)
            else:
                selectors.append(block["matchLabels"])
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, selector


def _peers(rule):
    return rule.get("from", []) + rule.get("to", [])


def test_references_are_to_what_there_is(overlay, gateway, worker):
    (scaler,) = of_kind(overlay, "HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    assert "replicas" not in named(overlay, target["kind"], target["name"])["spec"]
    assert scaler["spec"]["minReplicas"] == 2
    assert container(gateway)["resources"]["requests"]["cpu"]  # Utilization is a share of it.
    (budget,) = [
        each for each in of_kind(overlay, "PodDisruptionBudget") if "minAvailable" in each["spec"]
    ]
    assert budget["spec"]["minAvailable"] < scaler["spec"]["minReplicas"]
    (role,) = of_kind(overlay, "Role")
    (binding,) = of_kind(overlay, "RoleBinding")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (
        "Role",
        role["metadata"]["name"],
    )
    maps = {each["metadata"]["name"] for each in of_kind(overlay, "ConfigMap")}
    accounts = {each["metadata"]["name"] for each in of_kind(overlay, "ServiceAccount")}
    for pod in (gateway, worker):
        assert pod["spec"]["serviceAccountName"] in accounts
        claims = {"models"} if pod is worker else set()
        volumes = {each["name"] for each in pod["spec"]["volumes"]} | claims
        assert {each["name"] for each in container(pod)["volumeMounts"]} == volumes
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
    stateful = named(overlay, "StatefulSet", "saga-worker")["spec"]
    headless = named(overlay, "Service", stateful["serviceName"])["spec"]
    assert headless["clusterIP"] == "None"
    assert not headless.get("publishNotReadyAddresses")
    assert [each["metadata"]["name"] for each in stateful["volumeClaimTemplates"]] == ["models"]


def test_ports_and_probes_are_those_of_the_programs(overlay, gateway, worker, settings):
    for name, pod, number in (
        ("saga-gateway", gateway, settings.port),
        ("saga-workers", worker, 8000),
    ):
        assert container(pod)["ports"] == [{"name": "http", "containerPort": number}]
        (port,) = named(overlay, "Service", name)["spec"]["ports"]
        assert port["targetPort"] == "http"
        probes = [value for key, value in container(pod).items() if key.endswith("Probe")]
        assert len(probes) == 3
        assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
    assert "--port=8000" in container(worker)["args"]
    assert settings.host == "0.0.0.0"


async def test_the_gateways_probes_are_routes_that_say_what_is_meant(overlay, gateway):
    app = Gateway(GatewaySettings(("http://127.0.0.1:9",), health_interval_s=0.0))
    await app.startup()
    try:
        for name, expected in (("startup", 200), ("liveness", 200), ("readiness", 503)):
            for worker in app.workers:
                worker.healthy = False
            statuses = []

            async def send(message, statuses=statuses):
                statuses.append(message.get("status"))

            path = container(gateway)[f"{name}Probe"]["httpGet"]["path"]
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            await app(scope, None, send)
            assert statuses[0] == expected, name
    finally:
        await app.shutdown()


def test_the_gateways_configuration_is_taken(overlay, gateway, settings):
    assert not settings.workers
    endpoints = Endpoints.of(settings)
    assert endpoints.namespace == ""  # Its own: so any namespace will do.
    service = settings.kubernetes_service
    (port,) = named(overlay, "Service", service)["spec"]["ports"]
    assert port["name"] == settings.kubernetes_port
    mounts = {each["mountPath"] for each in container(gateway)["volumeMounts"]}
    for path in (settings.keys_file, settings.state_file):
        assert path.rpartition("/")[0] in mounts


def test_variables_that_kubernetes_sets_for_services_are_left_out(overlay, gateway, worker):
    with pytest.raises(SettingsError, match="SAGA_GATEWAY_PORT"):
        read_settings(None, {"SAGA_GATEWAY_PORT": "tcp://10.96.0.7:80"}, {"workers": ("http://a",)})
    for pod in (gateway, worker):
        assert pod["spec"]["enableServiceLinks"] is False


def test_the_workers_configuration_is_taken(overlay, worker, worker_config):
    variables = {each["name"]: each.get("value") for each in container(worker)["env"]}
    path = variables["SAGA_CONFIG"]
    mounts = {each["mountPath"] for each in container(worker)["volumeMounts"]}
    assert path.rpartition("/")[0] in mounts
    assert worker_config.policy == "saga"


def test_every_variable_is_one_that_is_read(overlay, gateway, worker):
    for each in container(gateway)["env"]:
        setting = each["name"].removeprefix(PREFIX).lower()
        assert setting in SECRETS, "what is no secret belongs into gateway.toml"
        assert "secretKeyRef" in each["valueFrom"]
    from vllm import envs

    known = {"SAGA_CONFIG", "HF_TOKEN"} | set(envs.environment_variables)
    assert {each["name"] for each in container(worker)["env"]} <= known


def test_every_flag_of_a_worker_is_one_of_vllms(overlay, worker):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model, *options = container(worker)["args"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *options])
    assert parsed.scheduling_policy == "priority"
    gpus = container(worker)["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.tensor_parallel_size == int(gpus)


# Memory, and stopping


def test_a_workers_memory_holds_host_tier_and_shared_memory(overlay, worker, worker_config):
    (shm,) = [each for each in worker["spec"]["volumes"] if each["name"] == "shm"]
    resources = container(worker)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    shared_gib = gib(shm["emptyDir"]["sizeLimit"])
    engine_gib = gib(resources["requests"]["memory"]) - worker_config.host_gib - shared_gib
    assert engine_gib >= 24 * int(resources["limits"]["nvidia.com/gpu"])


def test_a_gateway_may_finish_what_is_open(overlay, gateway, settings):
    waits_s = container(gateway)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert waits_s >= 10
    grace_s = gateway["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= waits_s + settings.drain_s + CLOSE_S


def test_a_worker_may_finish_what_is_open(overlay, worker):
    command = container(worker)["lifecycle"]["preStop"]["exec"]["command"]
    python, script, least_s, longest_s = command
    assert (python, script) == ("python3", "/etc/saga/drain.py")
    assert named(overlay, "ConfigMap", "saga-worker-config")["data"]["drain.py"]
    assert 0 < float(least_s) < float(longest_s)
    assert worker["spec"]["terminationGracePeriodSeconds"] >= float(longest_s) + CLOSE_S


# Least privilege


def test_the_gateway_may_read_endpointslices_and_nothing_else(overlay):
    (role,) = of_kind(overlay, "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert not of_kind(overlay, "ClusterRole")
    assert named(overlay, "ServiceAccount", "saga-worker")["automountServiceAccountToken"] is False


def test_pods_are_restricted(overlay, gateway, worker):
    for pod in (gateway, worker):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container(pod)["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
        kinds = {kind for each in pod["spec"]["volumes"] for kind in each if kind != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir"}
    assert container(gateway)["securityContext"]["readOnlyRootFilesystem"] is True
    (namespace,) = of_kind(overlay, "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "restricted"


def test_network_policies_cover_both_and_let_in_what_is_needed(overlay):
    gateway = named(overlay, "NetworkPolicy", "saga-gateway")["spec"]
    worker = named(overlay, "NetworkPolicy", "saga-worker")["spec"]
    for policy in (gateway, worker):
        assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    (into_worker,) = worker["ingress"]
    (peer,) = into_worker["from"]
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "saga-gateway"}
    out = [port["port"] for rule in gateway["egress"] for port in rule["ports"]]
    assert {"http", 53, 443, 6443} == set(out)


# Documented


def test_images_have_the_version_of_the_package(overlay, gateway, worker):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert container(gateway)["image"] == f"saga-gateway:{version}"
    assert container(worker)["image"] == f"saga-worker:{version}"


def test_every_secret_is_described(overlay, gateway, worker):
    page = (ROOT / "docs/kubernetes.md").read_text()
    wanted = set()
    for pod in (gateway, worker):
        for each in container(pod)["env"]:
            if reference := each.get("valueFrom", {}).get("secretKeyRef"):
                wanted.add((reference["name"], reference["key"]))
        for volume in pod["spec"]["volumes"]:
            for item in volume.get("secret", {}).get("items", []):
                wanted.add((volume["secret"]["secretName"], item["key"]))
    assert len(wanted) == 4
    for name, key in wanted:
        described = re.findall(rf"create secret generic {name} .*?(?=\nkubectl|```)", page, re.S)
        assert any(f"{key}=" in text for text in described), (name, key)

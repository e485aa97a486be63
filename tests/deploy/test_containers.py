"""The Dockerfiles and the Compose file, as far as they can be told without an engine."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from gpu_backend.config import WorkerConfig
from saga_gateway.config import PREFIX, read_settings
from tests.deploy.rendered import DEPLOY

ROOT = DEPLOY.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = sorted((DEPLOY / "containers").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PORTS = {"gateway": "8800", "worker": "8000"}


def instructions(path):
    """Instructions of a Dockerfile, with their words, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(path, name):
    return [words for instruction, words in instructions(path) if instruction == name]


each_file = pytest.mark.parametrize("path", DOCKERFILES, ids=[path.stem for path in DOCKERFILES])


def test_there_are_two():
    assert [path.stem for path in DOCKERFILES] == ["gateway", "worker"]


@each_file
def test_hadolint_finds_nothing(path):
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@each_file
def test_the_base_is_pinned_and_a_digest_can_be_given(path):
    (argument,) = of(path, "ARG")
    name, _, image = argument.partition("=")
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*", image)
    assert {base.partition(" AS ")[0] for base in of(path, "FROM")} == {f"${{{name}}}"}
    assert f"--build-arg {name}={image}@sha256:" in path.read_text()


@each_file
def test_it_does_not_run_as_root_and_says_how_it_is(path):
    names = [instruction for instruction, _ in instructions(path)]
    last = len(names) - 1 - names[::-1].index("USER")
    assert instructions(path)[last][1] == "10001:10001"
    assert not {"RUN", "COPY", "ADD"} & set(names[last:])
    (check,) = of(path, "HEALTHCHECK")
    port = PORTS[path.stem]
    assert of(path, "EXPOSE") == [port]
    python, option, code = json.loads(check.partition("CMD ")[2])
    assert (python.startswith("python"), option) == (True, "-c")
    compile(code, "HEALTHCHECK", "exec")
    health = {"gateway": "/version", "worker": "/health"}[path.stem]
    assert f"http://127.0.0.1:{port}{health}" in code
    assert json.loads(of(path, "ENTRYPOINT")[0]) == ["saga", path.stem]


@each_file
def test_what_it_installs_is_an_extra_that_there_is(path):
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', path.read_text())
    known = PROJECT["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    assert path.stem == "worker" or {"gateway", "kubernetes"} <= set(extras.split(","))
    image = of(path, "ARG")[0].partition(":")[2]
    if path.stem == "worker":
        low, high = re.findall(r"\d+\.(\d+)", known["vllm"][0])
        assert int(low) <= int(image.split(".")[1]) < int(high)
    else:
        minor = ".".join(image.split(".")[:2])
        listed = f"Programming Language :: Python :: {minor}"
        assert listed in PROJECT["project"]["classifiers"]


@each_file
def test_what_it_is_built_from_is_not_ignored(path):
    ignore = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert "*" in ignore
    kept = {line[1:] for line in ignore if line.startswith("!")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {*packages, "pyproject.toml", PROJECT["project"]["readme"]}
    needed |= {*PROJECT["project"]["license-files"], "requirements/dev.lock"}
    assert kept == needed
    assert all((ROOT / name).exists() for name in kept)


# Compose


def test_the_compose_file_is_one():
    schema = json.loads(
        files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    )
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.validate(COMPOSE)
    wrong = {"services": {"gateway": {**COMPOSE["services"]["gateway"], "portz": []}}}
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(wrong)


def test_compose_builds_the_images_that_there_are():
    for name in ("gateway", "worker-0", "worker-1"):
        service = COMPOSE["services"][name]
        folder = (DEPLOY / service["build"]["context"]).resolve()
        assert folder == ROOT
        assert folder / service["build"]["dockerfile"] in DOCKERFILES
        kind = name.partition("-")[0]
        assert service["image"] == f"saga-{kind}:{PROJECT['project']['version']}"
        assert service["cap_drop"] == ["ALL"]
    for name in ("prometheus", "grafana"):
        service = COMPOSE["services"][name]
        assert service["profiles"] == ["monitoring"]
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_gateways_variables_are_settings():
    gateway = COMPOSE["services"]["gateway"]
    environment = {name: _default(text) for name, text in gateway["environment"].items()}
    assert all(name.startswith(PREFIX) for name in environment)
    settings = read_settings(None, environment, {"host": "0.0.0.0"})
    used = {name.removeprefix(PREFIX).lower() for name in environment}
    unused = {name for name in used if not getattr(settings, name)}
    assert not unused  # A name that is no setting would be passed over in silence.
    for url in settings.workers:
        assert re.fullmatch(r"http://([a-z0-9-]+):8000", url)[1] in COMPOSE["services"]
    assert settings.keys_file == f"/run/secrets/{gateway['secrets'][0]}"
    grace_s = int(gateway["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.drain_s + 10
    assert any(
        settings.state_file.startswith(volume.partition(":")[2]) for volume in gateway["volumes"]
    )


def _default(text):
    """What Compose puts in for a variable that is not set; a word where one has to be."""
    return re.sub(r"\$\{\w+:[?-]([^}]*)\}", lambda found: found[1] or "", text)


def test_workers_have_a_gpu_each_and_settings_that_are_taken():
    taken = []
    for name in ("worker-0", "worker-1"):
        service = COMPOSE["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        taken += device["device_ids"]
        environment = {key: _default(text) for key, text in service["environment"].items()}
        config = WorkerConfig.from_environment(environment)
        assert (config.policy, config.host_gib) == ("saga", 0.0)
        assert set(environment) == {"SAGA_POLICY", "SAGA_HOST_GIB", "VLLM_API_KEY", "HF_TOKEN"}
        assert "--port=8000" in service["command"]
    assert len(set(taken)) == 2


def test_every_variable_and_file_that_has_to_be_there_is_described():
    page = (ROOT / "docs/containers.md").read_text()
    text = (DEPLOY / "compose.yaml").read_text()
    names = set(re.findall(r"\$\{(\w+)", text))
    assert {name for name in names if f"`{name}`" not in page} == set()
    for secret in COMPOSE["secrets"].values():
        assert f"`deploy/{secret['file'].removeprefix('./')}`" in page

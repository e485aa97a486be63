"""What the tests say where there is no kubectl."""

import shutil

import pytest

from tests.deploy import rendered


@pytest.fixture(autouse=True)
def _without_kubectl(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)


def test_without_kubectl_they_are_not_run(monkeypatch):
    monkeypatch.delenv("SAGA_REQUIRE_SYSTEM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not run"):
        rendered.documents("one-gpu")


def test_where_it_is_required_they_fail(monkeypatch):
    monkeypatch.setenv("SAGA_REQUIRE_SYSTEM", "1")
    with pytest.raises(pytest.fail.Exception, match="there is no kubectl"):
        rendered.documents("one-gpu")

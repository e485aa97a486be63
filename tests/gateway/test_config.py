"""A gateway's settings from a file, the environment and flags."""

import pytest

from saga_core.errors import SettingsError
from saga_gateway.config import KINDS, help_of, read_settings

WORKERS = ("http://10.0.0.1:8000",)


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path):
    path = tmp_path / "saga.toml"
    path.write_text(
        "[gateway]\nworkers = ['http://a:1', 'http://b:1']\nport = 1\ndrain_s = 5\n"
        "health_interval_s = 3\nopen = true\n[other]\nx = 1\n"
    )
    environment = {
        "SAGA_GATEWAY_PORT": "2",
        "SAGA_GATEWAY_DRAIN_S": "6",
        "SAGA_GATEWAY_PASS_PATHS": "/a, /b,",
        "SAGA_GATEWAY_WORKER_API_KEY": "w",
        "SAGA_GATEWAY_HOST": "",
    }
    settings = read_settings(str(path), environment, {"port": 3, "host": None})
    assert settings.workers == ("http://a:1", "http://b:1")
    assert (settings.port, settings.drain_s, settings.host) == (3, 6, "127.0.0.1")
    assert settings.pass_paths == ("/a", "/b")
    assert (settings.worker_api_key, settings.open, settings.health_interval_s) == ("w", True, 3.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gateway", "cannot be read as TOML"),
        ("gateway = 3", "must be a table"),
        ("[gateway]\ncolour = 1", "colour is not known; there are workers, workers_file"),
        ("[gateway]\nport = 1.5", "port must be a whole number"),
        ("[gateway]\nport = true", "port must be a whole number"),
        ("[gateway]\nopen = 1", "open must be true or false"),
        ("[gateway]\nworkers = 'x'", "workers must be a list of texts"),
        ("[gateway]\nworkers = [1]", "workers must be a list of texts"),
        ("[gateway]\nkeys_file = 1", "keys_file must be a text"),
        ("[gateway]\nport = 1", "no worker is named"),
        ("[gateway]\nkubernetes_port = 'http'", "no worker is named"),
        ("[gateway]\nkubernetes_service = 'a/b/c'", "'a/b/c' must be like namespace/name"),
        ("[gateway]\nkubernetes_selector = 'app'", "must be like app=worker,tier=gpu"),
        (
            "[gateway]\nkubernetes_service = 'b'\nkubernetes_port = 'ö'",
            "kubernetes_port='ö' must be like http or 8000",
        ),
        ("[gateway]\nworkers = ['http://a:1']\nport = 99999", "port=99999 must be from 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, says):
    path = tmp_path / "saga.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_settings(str(path), {}, {})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("PORT", "many", "SAGA_GATEWAY_PORT='many' must be a whole number"),
        ("OPEN", "maybe", "SAGA_GATEWAY_OPEN='maybe' must be true or false"),
        ("SLOW_START_S", "x", "SAGA_GATEWAY_SLOW_START_S='x' must be a number"),
        ("SESSION_SECRET", "x" * 65, "session_secret must be at most 64 bytes"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(name, text, says):
    with pytest.raises(SettingsError, match=says) as caught:
        read_settings(None, {f"SAGA_GATEWAY_{name}": text}, {"workers": WORKERS})
    assert "x" * 65 not in str(caught.value)


def test_kubernetes_may_say_which_workers_there_are(tmp_path):
    path = tmp_path / "saga.toml"
    path.write_text("[gateway]\nkubernetes_service = 'ns/workers'\nkubernetes_port = '8000'\n")
    settings = read_settings(str(path), {}, {})
    assert (settings.workers, settings.kubernetes_service) == ((), "ns/workers")
    assert settings.uses_kubernetes
    assert read_settings(None, {"SAGA_GATEWAY_KUBERNETES_SELECTOR": "a=b,c.d/e=f"}, {})


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_is_described(name):
    assert len(help_of(name)) > 10

"""The URL schemes are known in whatever way a program comes to need them. Each check has its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

SCHEMES = {"fairlanes", "fairlaness", "fairlanes-sentinel", "fairlanes-socket"}

pytestmark = pytest.mark.skipif(
    "fairlanes" not in entry_points(group="kombu.serializers").names,
    reason="the package is not installed, so it has no entry points",
)


def run(code: str, tmp_path: Path) -> str:
    """Run *code* in a new process outside the source tree and return what it prints."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


PRINT_SCHEMES = (
    "; import json; from kombu.transport import TRANSPORT_ALIASES as t"
    "; print(json.dumps([n for n in t if n.startswith('fairlane')]))"
)


@pytest.mark.parametrize(
    "first",
    [
        "from celery import Celery; Celery(broker='fairlanes://')",
        "import kombu.serialization",
        "import kombu.transport.redis",
        "import kombu.transport; import kombu.serialization",
        "import fairlanes_transport",
        "import celery.bin.celery",
    ],
)
def test_the_schemes_are_registered(first: str, tmp_path: Path) -> None:
    assert set(json.loads(run(first + PRINT_SCHEMES, tmp_path))) == SCHEMES


def test_kombu_without_celery_needs_the_import(tmp_path: Path) -> None:
    """As the settings page says; kombu has no hook that runs before it looks a transport up."""
    plain = "from kombu import Connection; print(Connection('fairlanes://').transport_cls)"
    assert run(f"import fairlanes_transport; {plain}", tmp_path) == "fairlanes\n"
    failing = f"""
try:
    {plain}
except KeyError as exc:
    print(exc)
"""
    assert "No such transport: fairlanes" in run(failing.replace("; ", "\n    "), tmp_path)


def test_registration_is_light(tmp_path: Path) -> None:
    code = (
        "import kombu.serialization, sys, json; "
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules} & {'redis', 'celery', 'click'})))"
    )
    assert json.loads(run(code, tmp_path)) == []


def test_kombus_serializers_are_not_disturbed(tmp_path: Path) -> None:
    code = """
import json
from kombu import serialization as s
r = s.registry
print(json.dumps([
    'fairlanes' in r._encoders,
    'application/x-fairlanes-transport' in r._decoders,
    s.dumps({'a': 1})[0],
    'application/x-python-serialize' in r._disabled_content_types,
    s.loads('[1]', 'application/json', 'utf-8'),
]))
try:
    s.loads('x', 'application/x-fairlanes-transport', 'utf-8', accept={'application/json'})
except s.ContentDisallowed:
    print('refused')
"""
    registry, refused = run(code, tmp_path).splitlines()
    assert json.loads(registry) == [False, False, "application/json", True, [1]]
    assert refused == "refused"


def test_a_broken_kombu_does_not_break_the_import(tmp_path: Path) -> None:
    code = "import sys; sys.modules['kombu.transport'] = None; import fairlanes_transport; print('fine')"
    assert run(code, tmp_path) == "fine\n"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (
            "fairlanes://u:p%40ss@h:1/2",
            {"host": "h", "port": 1, "db": 2, "username": "u", "password": "p@ss"},
        ),
        ("fairlaness://h:1/2", {"host": "h", "db": 2, "ssl_cert_reqs": 2}),
        ("fairlaness://h?ssl_cert_reqs=none", {"host": "h", "ssl_cert_reqs": 0}),
        ("fairlanes-sentinel://a:1;fairlanes-sentinel://:p@b:2/3", {"db": 3, "password": "p"}),
        ("fairlanes-socket://:p%2F@/run/x.sock/4", {"path": "/run/x.sock", "db": 4, "password": "p/"}),
        ("fairlanes-socket:///run/x.sock", {"path": "/run/x.sock", "db": 0}),
    ],
)
def test_the_schemes_name_result_backends_too(url: str, expected: dict[str, object], tmp_path: Path) -> None:
    code = f"""
import json
from celery import Celery
backend = Celery(broker='memory://', backend={url!r}).backend
found = {{name: backend.connparams.get(name) for name in {list(expected)!r}}}
print(json.dumps([backend.as_uri(), found], default=repr))
"""
    shown, found = json.loads(run(code, tmp_path))
    assert found == expected
    assert shown.startswith(url.partition("://")[0])
    assert "p%40ss" not in shown


def test_a_result_is_kept_through_our_scheme(server: object, tmp_path: Path) -> None:
    code = f"""
from celery import Celery
app = Celery(broker='memory://', backend={server.url(db=1)!r})
app.backend.store_result('id-1', 42, 'SUCCESS')
print(app.AsyncResult('id-1').result)
"""
    assert run(code, tmp_path) == "42\n"


def test_public_names_are_loaded_when_used(tmp_path: Path) -> None:
    code = """
import sys, fairlanes_transport as f
assert 'redis' not in sys.modules
assert issubclass(f.LaneFull, f.FairlanesError) and 'LaneFull' in dir(f)
try:
    f.no_such_name
except AttributeError as exc:
    print(exc)
"""
    assert "no_such_name" in run(code, tmp_path)

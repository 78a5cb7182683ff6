"""The recipes of the manual, run with the real frameworks against a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery, _state

from fairlanes_transport import current_tenant
from tests.harness import SCHEME, Server

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(SCHEME == "redis", reason="kombu's transport has no lanes"),
]


@pytest.fixture(scope="module")
def broker() -> Iterator[Server]:
    with Server("redis") as server:
        yield server


def example(name: str, broker: Server) -> Iterator[ModuleType]:
    """Import an example app, with its broker."""
    pytest.importorskip(name.removesuffix("_app"))
    broker.client().flushall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROKER_URL", broker.url("fairlanes"))
        # Celery shares an app's tasks with all apps that the process makes later.
        patch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
        spec = importlib.util.spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module
        module.celery.close()
        module.celery.pool.force_close_all()


def lanes_of(app: Celery) -> list[tuple[str, Any]]:
    """Take the messages that were sent: the lane that each was in, and the tenant in its header, sorted."""
    found = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        while (message := channel.basic_get("celery")) is not None:
            message.ack()
            found.append((message.properties["fairlanes"]["lane"], message.headers.get("tenant", "absent")))
    return sorted(found, key=str)


IN_ORDER = [("acme", "acme"), ("beta", "beta"), ("default", None)]


# ---------------------------------------------------------------------------------------------- Django


@pytest.fixture(scope="module")
def django_app(broker: Server) -> Iterator[ModuleType]:
    for module in example("django_app", broker):
        import django

        django.setup()
        yield module


@pytest.mark.parametrize("path", ["/reports", "/async-reports"])
def test_django_wsgi(django_app: ModuleType, path: str) -> None:
    from django.test import Client

    client = Client()
    for host in ("acme.example.com", "beta.example.com", "localhost"):
        response = client.post(path, headers={"host": host})
        assert response.json()["tenant"] == (host.split(".")[0] if "." in host else None)
    assert lanes_of(django_app.celery) == IN_ORDER


@pytest.mark.parametrize("path", ["/reports", "/async-reports"])
def test_django_asgi(django_app: ModuleType, path: str) -> None:
    import httpx
    from django.core.asgi import get_asgi_application

    async def main() -> None:
        transport = httpx.ASGITransport(get_asgi_application())
        async with httpx.AsyncClient(transport=transport) as client:
            hosts = ("acme.example.com", "beta.example.com", "localhost")
            await asyncio.gather(*(client.post(f"http://{host}{path}") for host in hosts))

    asyncio.run(main())
    assert lanes_of(django_app.celery) == IN_ORDER


def test_django_leaves_the_lane_after_an_error(django_app: ModuleType) -> None:
    from django.test import Client

    with pytest.raises(RuntimeError):
        Client().post("/fail", headers={"host": "acme.example.com"})
    assert current_tenant() is None
    assert lanes_of(django_app.celery) == [("acme", "acme")]


# ---------------------------------------------------------------------------------------------- FastAPI


@pytest.fixture(scope="module")
def fastapi_app(broker: Server) -> Iterator[ModuleType]:
    yield from example("fastapi_app", broker)


def post_all(app: Any, *paths: str) -> None:
    """Post to an ASGI app for two customers and for nobody, at once."""
    import httpx

    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            customers = ({"X-Customer": "acme"}, {"X-Customer": "beta"}, {})
            posts = [client.post(path, headers=headers) for path in paths for headers in customers]
            await asyncio.gather(*posts)
        assert current_tenant() is None

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/reports", "/async-reports", "/background-reports", "/fail"])
def test_fastapi(fastapi_app: ModuleType, path: str) -> None:
    post_all(fastapi_app.app, path)
    assert lanes_of(fastapi_app.celery) == IN_ORDER


def test_fastapi_requests_at_once_do_not_mix(fastapi_app: ModuleType) -> None:
    post_all(fastapi_app.app, *["/reports", "/async-reports", "/background-reports"] * 3)
    assert lanes_of(fastapi_app.celery) == sorted(IN_ORDER * 9, key=str)


# ---------------------------------------------------------------------------------------------- Flask


@pytest.fixture(scope="module")
def flask_app(broker: Server) -> Iterator[ModuleType]:
    yield from example("flask_app", broker)


def test_flask(flask_app: ModuleType) -> None:
    client = flask_app.app.test_client()
    for headers in ({"X-Customer": "acme"}, {"X-Customer": "beta"}, {}):
        assert client.post("/reports", headers=headers).json["tenant"] == headers.get("X-Customer")
        assert current_tenant() is None
    assert lanes_of(flask_app.celery) == IN_ORDER


def test_flask_leaves_the_lane_after_an_error(flask_app: ModuleType) -> None:
    flask_app.app.test_client().post("/fail", headers={"X-Customer": "acme"})
    assert current_tenant() is None
    assert lanes_of(flask_app.celery) == [("acme", "acme")]


# ---------------------------------------------------------------------------------------------- the pages


def test_what_the_manual_shows_is_in_the_examples() -> None:
    sources = "\n".join(path.read_text() for path in (DOCS / "examples").glob("*.py"))
    page = (DOCS / "how-to" / "tag-in-a-web-app.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert block in sources, f"not in any example:\n{block}"

"""The API beside its description: every endpoint is in it, and what it says of requests and answers holds for generated ones."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from services.router.api import Api
from services.router.keys import Keyring
from services.router.openapi import document
from tests.broker import Broker
from tests.fake_mesh import saying
from tests.front import HI, Front, front, ids
from tests.tiny_model import served_model

EXAMPLES = 30
CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
BOUNDED = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.decoder(saying(*ids("the quick brown fox")))
        await made.mesh.prefiller()
        await made.until_ready(2)
        yield made


OPERATIONS = [
    (path, method)
    for path, item in document(served_model())["paths"].items()
    for method in item
    if method != "parameters"
]


async def test_every_endpoint_is_in_it(router: Front) -> None:
    async with router.session.get(router.url + "/openapi.json") as response:
        assert (response.status, response.content_type) == (200, "application/json")
        described = await response.json()
    assert described["openapi"] == "3.1.0"
    said = {(path, method.upper()) for path, method in OPERATIONS}
    async with router.session.get(router.url + "/v1/nope") as response:
        assert response.status == 404
    app = Api(router.service, Keyring({}, lambda: 0.0)).application()
    routes = {(route.resource.canonical, route.method) for route in app.router.routes() if route.resource is not None}
    assert {(path, method) for path, method in routes if method != "HEAD"} == said


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
async def test_generated_requests_are_answered_as_described(
    router: Front, path: str, method: str, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(document(served_model()), config=SchemathesisConfig())
    operation = schema[path][method.upper()]
    if mode is schemathesis.GenerationMode.NEGATIVE and method == "get":
        return  # nothing in it can be wrong

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE:
            case.body = plain(case.body)
        statuses.add(case.call_and_validate(base_url=router.url, checks=CHECKS).status_code)

    statuses: set[int] = set()
    await asyncio.to_thread(functools.partial(run))
    if mode is schemathesis.GenerationMode.POSITIVE and path != "/v1/models/{id}":
        assert 200 in statuses, "nothing that was generated got an answer"
    elif mode is schemathesis.GenerationMode.NEGATIVE:
        assert statuses <= {400, 404}


def plain(value: Any) -> Any:
    """As clients write it: 1.0 is a whole number to JSON Schema, and none here. Messages are sound, so that what is beside them
    comes to be used."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [plain(inner) for inner in value]
        case dict():
            messages = {"messages": HI["messages"]} if "messages" in value else {}
            return {name: plain(inner) for name, inner in value.items()} | messages
    return value

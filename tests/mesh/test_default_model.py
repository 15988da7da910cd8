"""The default model through the whole mesh, as the README's first screen promises it."""

from __future__ import annotations

from typing import Literal

import openai
import pydantic
import pytest

from shared.config import InstanceSettings
from tests.mesh.processes import Up, up

DEFAULT = InstanceSettings().model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


class Capital(pydantic.BaseModel):
    country: Literal["France", "Italy"]
    city: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, lt=10**8)


async def says_what_matches(mesh: Up) -> None:
    """As JSON of a schema, which the client parses."""
    asked = {"model": DEFAULT, "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    answer = await mesh.openai.chat.completions.parse(**asked, response_format=Capital)
    assert answer.choices[0].message.parsed.country == "France"
    assert answer.choices[0].message.parsed.city == "Paris"
    tools = [{"type": "function", "function": {"name": "now"}}]
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        await mesh.openai.chat.completions.create(**asked, tools=tools)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_it_says_what_the_model_says():
    async with up(DEFAULT, KVMESH_PAGE_SIZE="64", KVMESH_KV_TOKENS="8192") as mesh:
        asked = {"model": DEFAULT, "messages": QUESTION, "temperature": 0}
        answer = await mesh.openai.chat.completions.create(**asked)
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        stream = await mesh.openai.chat.completions.create(**asked, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
        await says_what_matches(mesh)
        with openai.OpenAI(base_url=mesh.url + "/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == [DEFAULT]
        await mesh.until_idle()

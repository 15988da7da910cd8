"""Tools through the whole mesh, with a model of random weights: what is forced comes, and is read as what it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from tests import random_models
from tests.chat_templates import DEEPSEEK_V3, LLAMA, QWEN
from tests.mesh.processes import Up, up

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "deepseek": DEEPSEEK_V3}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TEMPLATES)
async def mesh(tmp_path_factory: Any, request: Any) -> AsyncIterator[Up]:
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    directory = random_models.save_served(folder, max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(TEMPLATES[request.param])
    async with up(directory, "--decoders", "1") as made:
        yield made


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["any", "named"]
)
async def test_a_forced_call(mesh: Up, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": mesh.name,
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 250,
        "seed": 5,
    }
    whole = await mesh.openai.chat.completions.create(**asked)
    async with mesh.openai.chat.completions.stream(**asked) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        (made_choice,) = answer.choices
        assert made_choice.finish_reason == "tool_calls"
        assert made_choice.message.content is None
        (call,) = made_choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    await mesh.until_idle()


async def test_a_second_turn_with_the_tools_answer(mesh: Up) -> None:
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 1}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    answer = await mesh.openai.chat.completions.create(
        model=mesh.name, messages=messages, tools=[WEATHER], max_tokens=8
    )
    assert answer.choices[0].finish_reason in ("length", "stop")

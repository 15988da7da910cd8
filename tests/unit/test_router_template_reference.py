"""The same prompts as `transformers` makes from the same templates."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.template import ChatTemplate
from tests.tiny_model import TEMPLATE, byte_level

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

BLOCKS = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% set ns.count = ns.count + 1 %}
    {{ ns.count }}: {{ message | tojson }}
    {{ message.content | trim | upper }}
{% endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{{ eos_token }}"""

CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be brief. <b>\"quoted\"</b> & 'so'"},
        {"role": "user", "content": "  café\n\nПривет 🙂  "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "{{ bos_token }}"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [TEMPLATE, CHATML, BLOCKS])
def test_prompts_are_equal(source: str, messages: list[dict[str, Any]]) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|bos|>", eos_token="<|end|>", chat_template=source
    )
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    assert ours.render(messages) == expected

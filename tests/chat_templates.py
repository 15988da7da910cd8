"""Chat templates in the manner of families of models: where tools stand, how calls and thoughts are written."""

from __future__ import annotations

import msgspec

from services.router.dialects import manner_of
from services.router.model import ServedModel
from services.router.template import ChatTemplate
from tests.tiny_model import served_model

QWEN = """{%- if tools %}<|system|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer as <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|end|>
{% endif %}{%- for m in messages %}
{%- if m.role == 'tool' %}<|user|><tool_response>
{{ m.content }}
</tool_response><|end|>
{% elif m.tool_calls %}<|assistant|>{{ m.content or '' }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

THINKING = QWEN + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if reasoning_effort is defined %}<|system|>{{ reasoning_effort }}{% endif %}"
)

ALWAYS_THINKING = QWEN + "<think>\n{# ends with </think> #}"

LLAMA = """{%- for m in messages %}
{%- if m.role == 'tool' %}<|ipython|>{{ m.content | tojson }}<|end|>
{% elif m.tool_calls %}<|assistant|>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {# #}
{{- m.tool_calls[0].function.arguments | tojson }}}<|end|>
{% else %}{% if tools and loop.first %}Answer as {"name": ..., "parameters": ...}: {{ tools | tojson }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}<|end|>
{% endif %}{% endfor %}<|assistant|>"""

DEEPSEEK_V3 = """{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name + '\n```json\n'
+ call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|assistant|>"""

DEEPSEEK_V31 = (
    DEEPSEEK_V3.replace("{{ call.type }}<｜tool▁sep｜>", "")
    .replace("\n```json\n", "<｜tool▁sep｜>")
    .replace("\n```", "")
)

TEMPLATES = {
    "hermes": QWEN,
    "llama3_json": LLAMA,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}


def speaking(source: str) -> ServedModel:
    """The tiny model with another template."""
    template = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    return msgspec.structs.replace(served_model(), template=template, manner=manner_of(source))

"""Chat templates: where they are found, the names they may use, what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.router.template import ChatTemplate, Ending
from shared.errors import ModelError, RequestError

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] = USER, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, kwargs or None)


def test_messages_tokens_and_the_generation_prompt_are_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user]hi</s>[assistant]"


@pytest.mark.parametrize(
    ("content", "ending", "expected"),
    [
        ("hi", "generation", "<s>[hi]</s>[assistant]"),
        ("hi", "messages", "<s>[hi]</s>"),
        ("hi", "within", "<s>[hi"),
        (" hi ", "within", "<s>[hi"),
    ],
)
def test_a_prompt_ends_where_it_is_told(content: str, ending: Ending, expected: str) -> None:
    source = (
        "<s>{% for m in messages %}[{{ m.content | trim }}]</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    made = ChatTemplate(source, {}).render([{"role": "assistant", "content": content}], None, None, ending)
    assert made == expected


def test_a_message_that_is_not_there_as_it_is_cannot_be_gone_on_with() -> None:
    with pytest.raises(RequestError) as raised:
        ChatTemplate("{{ messages[0].content | upper }}", {}).render(USER, None, None, "within")
    assert raised.value.param == "continue_final_message"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_loop_controls_and_generation_blocks_parse() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source, [*USER, *USER]) == "hi"


def test_tojson_is_plain_json() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_strftime_now_gives_a_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_template_can_reject_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as raised:
        render("{{ raise_exception('roles must alternate') }}")
    assert raised.value.param == "messages"
    assert raised.value.status == 400


def test_a_template_that_trips_over_messages_is_the_clients_error() -> None:
    with pytest.raises(RequestError):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.clear() }}", "{{ cycler.__init__ }}"],
)
def test_the_sandbox_gives_no_way_out(source: str) -> None:
    try:
        assert "class" not in render(source)
    except RequestError:
        return


def test_kwargs_reach_the_template() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}"
    assert render(source, enable_thinking=False) == "no"
    assert render(source) == "yes"


def test_bad_jinja_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="does not parse"):
        ChatTemplate("{% for %}", {})


def config(directory: Path, **fields: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_the_file_beside_wins_over_the_configuration(tmp_path: Path) -> None:
    config(tmp_path, chat_template="inside")
    (tmp_path / "chat_template.jinja").write_text("beside")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(USER) == "beside"


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    config(
        tmp_path,
        chat_template=[{"name": "tool_use", "template": "t{{ tools[0] }}"}, {"name": "default", "template": "d"}],
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(USER) == "d"


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    config(
        tmp_path,
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        bos_token={"content": "<b>"},
        eos_token="<e>",
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(USER) == "<b><e>"


def test_a_directory_may_have_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)

"""The requests whose answers are compared, mesh beside whole model, by what they are about; and README's table of them.
`python -m tests.differential` prints it."""

from __future__ import annotations

from typing import Any

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "na\u00efve "}, {"type": "text", "text": "\U0001f642"}]},
    {"role": "assistant", "content": "hello, world"},
]
PROMPT = "The capital of France is"
IDS = [0, 300, 41, 42, 350, 9, 77]
LOW = {"temperature": 0, "max_tokens": 12}
DRAWN = {"seed": 11, "max_tokens": 12}
EF = {"41": 40, "42": 40}
"""Tokens E and F, and no other."""
LONG = {"temperature": 2, "seed": 5, "max_tokens": 30}
HOT: dict[str, Any] = {**DRAWN, "temperature": 1.5, "ignore_eos": True}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": PROMPT, **fields}


def _enum(values: list[Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": values}, "strict": True}}


REQUESTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "prompts: text, ids, lists; templates, endings": [
        chat(**LOW),
        chat(messages=TALK[:2], **LOW),
        chat(messages=TALK, continue_final_message=True, **LOW),
        chat(messages=TALK, add_generation_prompt=False, **LOW),
        chat(add_special_tokens=True, **LOW),
        chat(truncate_prompt_tokens=5, return_token_ids=True, **LOW),
        text(**LOW),
        text(temperature=0),
        text(prompt=IDS, return_token_ids=True, **LOW),
        text(prompt=[7], **LOW),
        text(prompt=["one", "two three"], **LOW),
        text(prompt=[IDS, [5], IDS[:3]], **LOW),
        text(add_special_tokens=False, **LOW),
        text(prompt="fox " * 90, **LOW),
    ],
    "draws: temperature, top_p, top_k, min_p, seed": [
        chat(**DRAWN),
        chat(**HOT),
        chat(top_p=0.7, **DRAWN),
        chat(top_k=5, **HOT),
        chat(min_p=0.2, **HOT),
        text(top_p=0.9, top_k=40, min_p=0.01, **HOT),
        text(seed=-3, temperature=0.7, max_tokens=12),
        text(seed=2**62, max_tokens=12),
    ],
    "several choices: n, best_of": [
        chat(n=3, **HOT),
        chat(n=2, logprobs=True, top_logprobs=1, **HOT),
        text(n=2, best_of=2, prompt=["one", "two"], **HOT),
        text(n=2, echo=True, logprobs=1, return_token_ids=True, **HOT),
    ],
    "penalties and biases": [
        chat(repetition_penalty=1.4, **LOW),
        chat(frequency_penalty=1.5, presence_penalty=-0.5, **HOT),
        text(presence_penalty=2, frequency_penalty=-2, **LOW),
        text(logit_bias={"5": 100, "6": -100}, **LOW),
        text(logit_bias={"260": 12, "261": 11.5}, repetition_penalty=0.7, frequency_penalty=2, **HOT),
    ],
    "log-probabilities": [
        chat(logprobs=True, **LOW),
        chat(logprobs=True, top_logprobs=5, repetition_penalty=1.3, **HOT),
        text(logprobs=0, **LOW),
        text(logprobs=4, **HOT),
        text(logprobs=2, skip_special_tokens=False, logit_bias={"3": 9}, **HOT),
    ],
    "echo, alone and scored": [
        text(echo=True, **LOW),
        text(echo=True, logprobs=3, **LOW),
        text(echo=True, logprobs=0, max_tokens=0),
        text(echo=True, max_tokens=0),
        text(prompt=IDS, echo=True, logprobs=2, **HOT),
        text(prompt=["one <|user|>", [9]], echo=True, logprobs=1, skip_special_tokens=False, **LOW),
        text(prompt="na\u00efve \U0001f642 " * 40, echo=True, logprobs=1, **LOW),
    ],
    "structured output: regex, choice, a schema": [
        text(structured_outputs={"regex": "[EF]{3,9}G?"}, **LONG),
        text(structured_outputs={"regex": "(ab|ba){2,5}"}, logprobs=2, n=2, **HOT),
        chat(structured_outputs={"choice": ["EF", "EFEF", "GE"]}, logit_bias=EF, logprobs=True, **LOW),
        chat(structured_outputs={"choice": ["one", "two", "three"]}, n=3, **HOT),
        chat(response_format=_enum(["E", "EF", "EFE", 17]), **HOT),
        text(response_format=_enum(["E", "FE"]), min_tokens=3, **LOW),
    ],
    "ends: stop strings and ids, lengths, end of sequence": [
        text(max_tokens=1, temperature=0),
        chat(max_completion_tokens=1, max_tokens=9, temperature=0),
        text(logit_bias={"1": 100}, **LOW),
        text(logit_bias={"1": 100}, ignore_eos=True, **LOW),
        text(logit_bias={"1": 100}, min_tokens=4, **LOW),
        text(stop=["zzzz", "never"], min_tokens=3, **HOT),
        text(logit_bias=EF, stop="EFF", **LONG),
        text(logit_bias=EF, stop=["FEE", "FFE", "FEFE"], include_stop_str_in_output=True, **LONG),
        chat(logit_bias=EF, stop=["EE", "FF"], min_tokens=9, **LONG),
        chat(logit_bias=EF, stop="FE", include_stop_str_in_output=True, logprobs=True, n=2, **LONG),
        text(logit_bias={"227": 100}, stop="\ufffd\ufffd", **LOW),
        text(stop_token_ids=list(range(60, 190, 3)), **HOT),
        text(stop_token_ids=list(range(260, 320)), min_tokens=6, **HOT),
        text(logit_bias={"3": 100}, skip_special_tokens=False, stop="nt|><|ass", **LOW),
    ],
}


def table() -> str:
    """README's."""
    rows = [f"| {about} | {len(asked)} | equal |" for about, asked in REQUESTS.items()]
    total = sum(map(len, REQUESTS.values()))
    head = ["| requests about | each whole and streamed | answers |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, f"| together | {total} | equal |"])


if __name__ == "__main__":
    print(table())

"""What the API must answer, from the whole model in one process: every token out of a forward over all tokens before it, no KV
cache, no batch, no part of the services. Byte-level tokenizers only."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import regex
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.engine.protocol import Row
from shared.engine.whole import Whole, WholeConfig
from shared.messages import Sampling
from shared.models import _kernels
from shared.models.sampling import sample
from tests.tiny_model import END, TEMPLATE

POSITIONS = 512
CHOICE_STEP = 0x9E3779B97F4A7C15

Floats = npt.NDArray[np.float32]


class Reference:
    """Gives what comes back for a request's JSON, but `id`, `created` and `system_fingerprint`."""

    def __init__(self, directory: Path) -> None:
        self._whole = Whole(directory, WholeConfig(page_size=4, kv_tokens=POSITIONS))
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._context = _kernels.Context(1, "auto")
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._all = set(range(self._tokenizer.get_vocab_size()))
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def answer(self, asked: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        texts = self._prompts(asked, chat)
        prompts = [tokens[-asked.get("truncate_prompt_tokens", 0) :] for tokens, _, _ in texts]
        choices, made = [], 0
        for at, prompt in enumerate(prompts):
            for number in range(asked.get("n", 1)):
                choice, count = self._choice(asked, prompt, texts[at][1:], number, chat)
                choices.append({"index": len(choices), **choice})
                made += count
        spent = sum(map(len, prompts))
        body: dict[str, Any] = {
            "object": "chat.completion" if chat else "text_completion",
            "model": asked["model"],
            "choices": choices,
            "usage": {
                "prompt_tokens": spent,
                "completion_tokens": made,
                "total_tokens": spent + made,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        }
        if asked.get("return_token_ids") and chat:
            body["prompt_token_ids"] = prompts[0]
        return body

    def _prompts(self, asked: dict[str, Any], chat: bool) -> list[tuple[list[int], str, list[int]]]:
        """Of each the tokens, the text, and where in it they begin."""
        if chat:
            text = self._rendered(asked)
            return [self._encode(text, asked.get("add_special_tokens", False))]
        given = asked["prompt"]
        several = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
        special = asked.get("add_special_tokens", True)
        return [
            self._encode(one, special)
            if isinstance(one, str)
            else (one, self._text(one, asked), self._ends(one, asked, 0))
            for one in several
        ]

    def _rendered(self, asked: dict[str, Any]) -> str:
        messages = [
            {
                **m,
                "content": m["content"] if isinstance(m["content"], str) else "".join(p["text"] for p in m["content"]),
            }
            for m in asked["messages"]
        ]
        within = asked.get("continue_final_message", False)
        template = jinja2.Template(TEMPLATE, trim_blocks=True, lstrip_blocks=True)
        text = template.render(
            bos_token="<|bos|>",
            messages=messages,
            add_generation_prompt=asked.get("add_generation_prompt", not within),
        )
        return text[: text.rindex(messages[-1]["content"]) + len(messages[-1]["content"])] if within else text

    def _encode(self, text: str, special: bool) -> tuple[list[int], str, list[int]]:
        made = self._tokenizer.encode(text, add_special_tokens=special)
        return made.ids, text, [start for start, _ in made.offsets]

    def _text(self, tokens: list[int], asked: dict[str, Any]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=asked.get("skip_special_tokens", True))

    def _choice(
        self, asked: dict[str, Any], prompt: list[int], echoed: tuple[str, list[int]], number: int, chat: bool
    ) -> tuple[dict[str, Any], int]:
        """One choice, and how many tokens it has."""
        output, cut, reason = self._generated(asked, prompt, number, chat)
        text = self._text(output, asked)[:cut]
        front, starts = echoed if asked.get("echo") else ("", [])
        starts = starts + self._ends(output, asked, len(front))
        choice: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": front + text}
        )
        choice |= {"logprobs": self._logprobs(asked, prompt, output, starts, chat), "finish_reason": reason}
        if asked.get("return_token_ids"):
            choice["token_ids"] = output
            if not chat:
                choice["prompt_token_ids"] = prompt
        return choice, len(output)

    def _generated(
        self, asked: dict[str, Any], prompt: list[int], number: int, chat: bool
    ) -> tuple[list[int], int | None, str]:
        """Tokens, where their text is cut, and why they end."""
        sampling, output = self._sampling(asked, number), list[int]()
        most = asked.get("max_completion_tokens", asked.get("max_tokens", POSITIONS - len(prompt) if chat else 16))
        ends = {*([] if asked.get("ignore_eos") else [END]), *asked.get("stop_token_ids", [])}
        while len(output) < most:
            never = ends if len(output) < sampling.min_tokens else set[int]()
            allowed = self._allowed(asked, output)
            token = self._drawn(prompt, output, sampling, never if allowed is None else never | (self._all - allowed))
            if token in ends:
                return output, None, "stop"
            output.append(token)
            if allowed is not None and not (self._allowed(asked, output) or set()) - {END}:
                return output, None, "stop"
            if (cut := self._stop(asked, output)) is not None:
                return output, cut, "stop"
        return output, None, "length"

    def _allowed(self, asked: dict[str, Any], output: list[int]) -> set[int] | None:
        """After which the text can still become one that is wanted; `END` where it is one already. None: all."""
        pattern = _pattern(asked)
        if pattern is None:
            return None
        said = b"".join(self._spelled(token)[1] for token in output)
        more = {
            token
            for token in self._all - self._special
            if regex.fullmatch(pattern, said + self._spelled(token)[1], partial=True)
        }
        return more | {END} if regex.fullmatch(pattern, said) and not asked.get("ignore_eos") else more

    def _sampling(self, asked: dict[str, Any], number: int) -> Sampling:
        same = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
        return Sampling(
            temperature=asked.get("temperature", 1.0),
            top_k=asked["top_k"] if asked.get("top_k", 0) > 0 else None,
            seed=(asked.get("seed", 0) % 2**63 + number * CHOICE_STEP) % 2**63,
            logit_bias={int(token): bias for token, bias in asked.get("logit_bias", {}).items()},
            **{name: asked[name] for name in same if name in asked},
        )

    def _drawn(self, prompt: list[int], output: list[int], sampling: Sampling, never: set[int]) -> int:
        logits = self._logits(prompt + output)[-1]
        for token, bias in sampling.logit_bias.items():
            logits[token] += np.float32(bias)
        for token in {*prompt, *output}:
            penalty = np.float32(sampling.repetition_penalty)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(output):
            logits[token] -= np.float32(output.count(token)) * np.float32(sampling.frequency_penalty)
            logits[token] -= np.float32(sampling.presence_penalty)
        for token in never:
            logits[token] = -1e30
        return sample(self._context, logits[None], [sampling], [len(prompt) + len(output)])[0]

    def _logits(self, tokens: list[int]) -> Floats:
        (pages,) = self._whole.page_tables([len(tokens)])
        return self._whole.model.all_logits([Row(tokens=tokens, start=0, pages=pages)])

    def _stop(self, asked: dict[str, Any], output: list[int]) -> int | None:
        """Where the text ends, if a stop string is complete now."""
        given = asked.get("stop", [])
        text, free = self._text(output, asked), len(self._text(output[: asked.get("min_tokens", 0)], asked))
        found = [
            (at + len(stop), at)
            for stop in ([given] if isinstance(given, str) else given)
            if (at := text.find(stop, free)) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return end if asked.get("include_stop_str_in_output") else start

    def _logprobs(
        self, asked: dict[str, Any], prompt: list[int], output: list[int], starts: list[int], chat: bool
    ) -> dict[str, Any] | None:
        top = (asked.get("top_logprobs", 0) if asked.get("logprobs") else None) if chat else asked.get("logprobs")
        if top is None:
            return None
        logits = self._logits(prompt + output).astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        known = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
        if chat:
            content = [self._named(known[len(prompt) - 1 + i], token, top) for i, token in enumerate(output)]
            return {"content": content, "refusal": None}
        first = 0 if asked.get("echo") else len(prompt)
        tokens = (prompt + output)[first:]
        rows = [None if not at else known[at - 1] for at in range(first, first + len(tokens))]
        return {
            "tokens": [self._spelled(token)[0] for token in tokens],
            "token_logprobs": [
                None if row is None else float(row[token]) for row, token in zip(rows, tokens, strict=True)
            ],
            "top_logprobs": [self._tops(row, token, top) for row, token in zip(rows, tokens, strict=True)]
            if top
            else None,
            "text_offset": starts,
        }

    def _ends(self, tokens: list[int], asked: dict[str, Any], base: int) -> list[int]:
        """A token begins where the text ends that is certain before it."""
        dropped = self._special if asked.get("skip_special_tokens", True) else set()
        raw = [b"" if token in dropped else self._spelled(token)[1] for token in tokens]
        return [base + len(_certain(b"".join(raw[:i]))) for i in range(len(tokens))]

    def _named(self, row: npt.NDArray[np.float64], token: int, top: int) -> dict[str, Any]:
        def one(which: int) -> dict[str, Any]:
            text, raw = self._spelled(which)
            return {"token": text, "logprob": float(row[which]), "bytes": list(raw)}

        return {**one(token), "top_logprobs": [one(which) for which in _likeliest(row, top)]}

    def _tops(self, row: npt.NDArray[np.float64] | None, token: int, top: int) -> dict[str, float] | None:
        if row is None:
            return None
        return {self._spelled(which)[0]: float(row[which]) for which in (*_likeliest(row, top), token)}

    def _spelled(self, token: int) -> tuple[str, bytes]:
        name = self._tokenizer.id_to_token(token)
        if token in self._special:
            return name, name.encode()
        try:
            raw = bytes(self._byte_of[character] for character in name)
        except KeyError:
            raw = name.encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _pattern(asked: dict[str, Any]) -> bytes | None:
    """Of a regex, of choices, or of the values of an enum in JSON."""
    wanted, shape = asked.get("structured_outputs", {}), asked.get("response_format")
    if shape is not None:
        texts = [json.dumps(value) for value in shape["json_schema"]["schema"]["enum"]]
    elif "regex" in wanted:
        return str(wanted["regex"]).encode()
    elif "choice" in wanted:
        texts = wanted["choice"]
    else:
        return None
    return "|".join(f"(?:{regex.escape(text)})" for text in texts).encode()


def _certain(raw: bytes) -> str:
    """Its text, without what may only be the beginning of a character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def _likeliest(row: npt.NDArray[np.float64], count: int) -> list[int]:
    return sorted(range(row.size), key=lambda token: (-row[token], token))[:count]

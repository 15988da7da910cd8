"""What the model says to each of a fixed set of prompts, run whole in one process: what every answer is compared with."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

PROMPTS = 64
LONGEST_PROMPT = 460
LONGEST_OUTPUT = 48
"""Together they stay below the 512 positions of the random model."""

TIMEOUT_S = 300.0


class Case(msgspec.Struct, frozen=True):
    """A prompt, and the one right answer to it: `max_tokens` tokens, and their text."""

    number: int
    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    text: str


def random_model(directory: Path) -> Path:
    """A small Llama with random weights and a tokenizer, written to `directory`."""
    command = [sys.executable, "-m", "tests.random_models", "llama", str(directory)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    return directory


def cases(model: Path, page_size: int) -> list[Case]:
    """The same for every seed of the faults. Computed in a process of its own. Raises `RuntimeError` where that fails."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_compute, args=(theirs, model, page_size), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError(f"the reference was not computed within {TIMEOUT_S:g} s")
        found: list[Case] = msgspec.json.decode(ours.recv_bytes(), type=list[Case])
        return found
    except EOFError:
        raise RuntimeError("the reference was not computed: its process ended") from None
    finally:
        ours.close()
        process.terminate()
        process.join()


def _compute(results: Connection, model: Path, page_size: int) -> None:
    from tokenizers import Tokenizer

    from shared.engine.whole import Whole, WholeConfig
    from shared.models.model import ModelOptions

    config = WholeConfig(options=ModelOptions(threads=1), page_size=page_size, kv_tokens=1024)
    whole = Whole(model, config)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    draw = random.Random(0)
    found = []
    for number in range(PROMPTS):
        length = 1 if number % 16 == 0 else draw.choice((draw.randint(2, 40), draw.randint(2, LONGEST_PROMPT)))
        prompt = draw.choices(range(5, tokenizer.get_vocab_size()), k=length)
        most = draw.randint(1, LONGEST_OUTPUT)
        tokens = whole.generate([prompt], most)[0]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        found.append(Case(number, prompt, most, tokens, text))
    results.send_bytes(msgspec.json.encode(found))

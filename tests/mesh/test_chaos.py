"""The chaos run itself, for some seconds: nothing wrong, nothing hung, nothing lost."""

from __future__ import annotations

import asyncio
import json
import sys


async def test_random_faults_under_load_make_no_answer_wrong_none_hang_and_lose_no_page(tmp_path):
    report = tmp_path / "report.json"
    options = ["--minutes", "0.2", "--seed", "4", "--every", "1.2", "--clients", "16", "--report", str(report)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.chaos", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(150):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    tally = json.loads(report.read_bytes())
    assert sum(tally["faults"].values()) > 4
    assert tally["verdicts"]["right"] > 64, "and under load"
    assert tally["shm_left"] == []

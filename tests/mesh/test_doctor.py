"""`kvmesh doctor` as `kvmesh up` says to call it, on a mesh that has served."""

from __future__ import annotations

import asyncio
import json

from tests.mesh.processes import up
from tests.mesh.test_up import prompt


async def test_a_mesh_that_has_served_is_well_and_knows_its_break_even(served_directory, expected):
    async with up(served_directory, "--decoders", "1") as mesh:
        for seed in range(3):
            await mesh.complete(prompt(100, seed))
        await mesh.until_line("services.cli doctor")
        line = next(line for line in mesh.lines if "services.cli doctor" in line)
        process = await asyncio.create_subprocess_shell(f"{line} --json", stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        said = json.loads(out)
        found = {finding["what"]: finding for finding in said["findings"]}
        assert said["status"] == process.returncode == 0, out
        assert found["pairs"]["numbers"]["pairs"] == 1
        assert found["prefill prefill"]["numbers"]["served_bytes_per_s"] > 0
        assert found["decode decode"]["numbers"]["fabric_connect_s"] > 0
        (about,) = [finding for what, finding in found.items() if what.startswith("break-even")]
        assert about["level"] == "ok"
        assert about["numbers"]["tokens_at_1_streams"] > 0
        assert await mesh.complete(prompt(40)) == expected(prompt(40))
        await mesh.until_idle()

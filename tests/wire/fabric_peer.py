"""A process with a fabric that does what it reads from its standard input, one JSON command a line; many run at once."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from shared.transfer.fabric import Fabric
from shared.transfer.handles import Connection
from tests.wire.fabric_rig import LostPeers, Memory, new_identity, paged


class Peer:
    fabric: Fabric
    memory: Memory
    connection: Connection
    lost: LostPeers
    identity: int

    async def open(self, provider: str, length: int, options: dict[str, Any]) -> None:
        self.identity = new_identity()
        self.fabric = await Fabric.open(provider=provider, identity=self.identity, **{"host": "127.0.0.1", **options})
        self.memory = Memory(self.fabric, length)
        self.lost = LostPeers(self.fabric)

    async def about(self) -> dict[str, str]:
        return {
            "identity": str(self.identity),
            "address": self.fabric.address.hex(),
            "descriptor": self.memory.descriptor.hex(),
        }

    async def fill(self, byte: int) -> None:
        self.memory.bytes[:] = bytes([byte]) * len(self.memory.bytes)

    async def connect(self, address: str, timeout_s: float) -> int:
        self.connection = await self.fabric.connect(bytes.fromhex(address), timeout_s=timeout_s)
        return self.connection.identity

    async def expect(self, immediate: int, count: int) -> None:
        await self.fabric.expect(immediate, count).wait()

    async def write_pages(
        self, target: str, pages: int, page_bytes: int, immediate: int, timeout_s: float, repeat: int = 1
    ) -> int:
        """All pages, `repeat` times over, as one transfer."""
        plan = paged(
            self.connection,
            self.memory,
            bytes.fromhex(target),
            [*range(pages)] * repeat,
            page_bytes=page_bytes,
            immediate=immediate,
            timeout_s=timeout_s,
        )
        return (await self.fabric.write_pages(plan).wait()).writes

    async def close(self) -> None:
        await self.fabric.close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    peer = Peer()

    async def run(command: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": command["id"]}
        try:
            reply["result"] = await getattr(peer, command["operation"])(**command["arguments"])
        except Exception as error:  # noqa: BLE001 - the other side raises it
            reply["error"] = [type(error).__name__, str(error)]
        print(json.dumps(reply), flush=True)

    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(run(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())

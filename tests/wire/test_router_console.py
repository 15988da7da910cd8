"""The console at a real router: the page, its headers, and what it reads."""

from __future__ import annotations

from pathlib import Path

from services.router import new_key
from services.router.console import PAGE
from tests.broker import Broker
from tests.fake_mesh import saying
from tests.front import front, ids


async def test_page_is_served_and_loads_only_itself(shared_broker: Broker) -> None:
    async with front(shared_broker) as router:
        for path, (_, kind) in PAGE.items():
            async with router.session.get(router.url + path) as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "http" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                text = (await answer.text()).replace("http://www.w3.org/2000/svg", "")
                assert "//" not in text.replace("// ", ""), "nothing comes from another host"


async def test_state_tells_of_instances_and_of_what_ended(shared_broker: Broker) -> None:
    async with front(shared_broker) as router:
        await router.mesh.decoder(saying(*ids("hello")))
        await router.mesh.prefiller()
        await router.until_ready(2)
        assert (await router.answer())[0] == 200
        async with router.session.get(router.url + "/console/state") as answer:
            assert answer.status == 200
            raw = await answer.text()
            state = await answer.json()
        assert [(one["name"], one["role"], one["state"]) for one in state["instances"]] == [
            ("d0", "decode", "ready"),
            ("p0", "prefill", "ready"),
        ]
        assert state["instances"][0]["load"]["free_pages"] == 1000
        assert (state["pairs"], state["reason"], state["queued"], state["running"]) == ([["p0", "d0"]], None, 0, 0)
        (request,) = state["requests"]
        assert (request["outcome"], request["prefiller"], request["decoder"]) == ("ok", "p0", "d0")
        assert (request["kv_wait_s"], request["first_step_s"]) == (0.01, 0.01)
        assert request["output_tokens"] == len(ids("hello"))
        assert 0 <= request["queue_s"] <= request["ttft_s"] <= request["total_s"]
        assert state["ttft"]["count"] == state["itl"]["count"] == 1
        assert "hello" not in raw


async def test_state_needs_the_key_and_the_page_does_not(shared_broker: Broker, tmp_path: Path) -> None:
    key = new_key.add(tmp_path / "keys", "team-a", None, None)
    async with front(shared_broker, api_keys=str(tmp_path / "keys")) as router:
        for path, sent, status in [
            ("/console", None, 200),
            ("/console/state", None, 401),
            ("/console/state", key[:-1], 401),
            ("/console/state", key, 200),
        ]:
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            async with router.session.get(router.url + path, headers=headers) as answer:
                assert answer.status == status, path

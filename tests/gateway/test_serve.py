"""The endpoint without an episode."""

from __future__ import annotations

from types import SimpleNamespace

import httpx

from agent_rl.commands.serve import served
from agent_rl.config_files import load_config
from agent_rl.gateway.episode import environment
from agent_rl.gateway.server import Gateway
from agent_rl.render import ChatRenderer


async def test_the_printed_environment_leads_to_the_model(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    config = load_config(kit.MODEL.parents[2] / "configs" / "quickstart.yaml", [])
    async with served(gateway, kit.Saying(renderer, ["hello"]), kit.rendering(renderer), config, 4000) as session:
        env = environment(session.key, gateway.port)
        headers = {"authorization": f"Bearer {env['OPENAI_API_KEY']}"}
        async with httpx.AsyncClient(headers=headers) as client:
            for _ in range(config.rollout.max_turns + 1):
                body = {"model": env["AGENT_RL_MODEL"], "messages": [{"role": "user", "content": "u"}]}
                answer = await client.post(f"{env['OPENAI_BASE_URL']}/chat/completions", json=body)
                assert answer.json()["choices"][0]["message"]["content"] == "hello"

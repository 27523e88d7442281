"""The environment of orders: tools, a customer, and orders that must be left as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.memory_env import PLAIN, TurnsEngine

from agent_rl.config.loader import load_config
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.scripted_policies import ByteRenderer, solver_runner
from agent_rl.types import StopReason
from envs import EnvContext, Environment, Task, TaskRecordError, load_environment
from envs.conformance import check_environment
from envs.orders import Orders
from tools import ToolCall, tool_format

NOWHERE = EnvContext(backend=None)  # type: ignore[arg-type]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def orders() -> Environment:
    return load_environment("orders", NOWHERE, {"train_tasks": 12, "heldout_tasks": 12})


async def test_environment_conforms_and_every_solution_is_right(orders: Environment) -> None:
    assert [finding for finding in await check_environment(orders) if not finding.ok] == []
    for policy, score in (("gold", 1.0), ("noop", 0.0)):
        run = solver_runner(orders, policy, EpisodeRules())
        ended = [await run(task) for split in ("train", "heldout") for task in orders.tasks(split)]
        assert [trajectory.reward for trajectory in ended] == [score] * 24
        assert {trajectory.stop for trajectory in ended} == {StopReason.SUBMITTED}


def test_splits_share_no_order_and_the_seed_draws_others() -> None:
    def ids(split: str, seed: int) -> set[str]:
        return {task.id for task in load_environment("orders", NOWHERE, {"seed": seed}).tasks(split)}

    train, heldout = ids("train", 0), ids("heldout", 0)
    assert (len(train), len(heldout)) == (640, 256)
    assert not (train | ids("train", 1)) & (heldout | ids("heldout", 1))
    assert train != ids("train", 1)
    with pytest.raises(TaskRecordError, match="no split 'test'"):
        ids("test", 0)


def task_in(orders: Environment, state: str) -> Task:
    return next(task for task in orders.tasks("train") if task.record["state"] == state)


async def drive(orders: Environment, task: Task, turns: Sequence[ToolCall | str], **limits: Any) -> Any:
    xml = tool_format("xml")
    texts = [turn if isinstance(turn, str) else xml.render(turn) for turn in turns]
    rules = PLAIN.override(**limits)
    return await run_episode(orders, task, TurnsEngine(texts), ByteRenderer(), xml, rules)


async def test_customer_is_content_only_with_what_is_right(orders: Environment) -> None:
    task = task_in(orders, "open")
    look, change, _ = orders.solution(task)  # type: ignore[attr-defined]
    said = "The fee is off."
    ended = await drive(orders, task, [said, look, said, change, said])
    assert (ended.stop, ended.reward, ended.metrics) == (StopReason.SUBMITTED, 1.0, {"messages": 3.0})
    assert [turn.observation.startswith("It is `") for turn in ended.turns] == [True, False, True, False, False]
    assert ended.turns[-1].observation == "Thank you."


async def test_sent_order_must_be_looked_up_and_left_as_it_is(orders: Environment) -> None:
    task, finish = task_in(orders, "sent"), ToolCall("finish", {})
    look, _ = orders.solution(task)  # type: ignore[attr-defined]
    fee = {**look.arguments, "command": "str_replace", "old_str": f" + {task.record['fee']}"}
    change = ToolCall("file_editor", fee)
    for turns, parts in (
        ([look, finish], {"right": 1.0, "looked": 1.0}),
        ([finish], {"right": 0.0, "looked": 0.0}),
        ([look, change, finish], {"right": 0.0, "looked": 1.0}),
    ):
        ended = await drive(orders, task, turns)
        assert (ended.parts, ended.resolved) == (parts, parts["right"] == 1.0)


async def test_customer_names_further_orders_one_after_another() -> None:
    several = load_environment("orders", NOWHERE, {"train_tasks": 6, "heldout_tasks": 6, "orders": 3})
    assert [finding for finding in await check_environment(several) if not finding.ok] == []
    task = several.tasks("train")[0]
    rows = [task.record, *task.record["further"]]
    assert len({row["page"] for row in rows}) == 3
    turns = several.solution(task)  # type: ignore[attr-defined]
    ended = await drive(several, task, turns)
    assert (ended.stop, ended.reward, ended.resolved) == (StopReason.SUBMITTED, 1.0, True)
    assert sum(f"{rows[1]['item']}({rows[1]['count']})" in turn.observation for turn in ended.turns) == 1
    only_first = [*turns[: 3 if rows[0]["state"] == "open" else 2], *[ToolCall("finish", {})] * 2]
    ended = await drive(several, task, only_first)
    assert (ended.stop, ended.resolved) == (StopReason.SUBMITTED, False)
    assert ended.parts == {"right": pytest.approx(1 / 3), "looked": pytest.approx(1 / 3)}


async def test_wrong_page_or_text_changes_nothing(orders: Environment) -> None:
    task = task_in(orders, "open")
    turns = [
        ToolCall("file_editor", {"command": "view", "path": "other.py"}),
        ToolCall("file_editor", {"command": "str_replace", "path": f"{task.record['page']}.py", "old_str": "none"}),
    ]
    ended = await drive(orders, task, turns, max_turns=2)
    assert [turn.observation for turn in ended.turns] == ["no such page", "not found"]
    assert (ended.stop, ended.reward) == (StopReason.MAX_TURNS, 0.0)


def test_config_trains_the_shipped_model_on_orders() -> None:
    config = load_config(ROOT / "configs/orders-small.yaml")
    assert (config.env.name, config.model.name) == ("orders", "tiny-moe")
    assert load_environment("orders", NOWHERE, config.env.options).tasks("heldout")


@pytest.mark.parametrize("orders", [1, 4, 8])
def test_a_split_has_different_tasks_or_says_how_many_it_has(orders: int) -> None:
    options = Orders.Options(train_tasks=2000, heldout_tasks=300, orders=orders)
    names = {split: {task["id"] for task in Orders.tasks(split, options)} for split in ("train", "heldout")}
    assert {split: len(ids) for split, ids in names.items()} == {"train": 2000, "heldout": 300}
    of = {split: {order for name in ids for order in name.split("_")} for split, ids in names.items()}
    assert not of["train"] & of["heldout"]


def test_more_orders_than_there_are_is_an_error() -> None:
    with pytest.raises(TaskRecordError, match=r"env\.options\.train_tasks: 5000: the split train has 2\d{3} orders"):
        Orders.tasks("train", Orders.Options(train_tasks=5000))

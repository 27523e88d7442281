"""The scripted engine keeps the same contract as the real one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_engine import ScriptedEngine, scripted_rows

from agent_rl.errors import EngineRejected
from agent_rl.types import FinishReason, SamplingParams
from r3.payload import RouteLayout
from r3.routing import validate
from r3.stitch import RouteStitcher

LAYOUT = RouteLayout(num_layers=4, moe_layer_ids=(0, 1, 2, 3), num_experts=8, top_k=2)


async def test_scripted_turns_come_in_order_and_stitch() -> None:
    transcripts = {"a": [[1, 2, 3], [4], [5, 6]], "b": [[9]]}
    engine = ScriptedEngine(lambda session, turn, tokens: transcripts[session][turn], layout=LAYOUT)
    tokens, stitcher = [10, 11, 12], RouteStitcher(moe_layers=4, top_k=2, num_experts=8)
    for turn in transcripts["a"]:
        got = await engine.generate(tokens, SamplingParams(), routes_from=stitcher.next_row, session="a")
        assert list(got.tokens) == turn
        assert len(got.logprobs) == len(turn)
        assert got.routing is not None
        validate(got.routing)
        tokens += [*got.tokens]
        stitcher.append(got.routing, sequence=len(tokens))
        tokens += [20, 21]
    routing = stitcher.finish(len(tokens), unseen=2)
    np.testing.assert_array_equal(routing.experts[: len(tokens) - 3], scripted_rows(0, len(tokens) - 3, LAYOUT))
    assert engine.rows_sent == len(tokens) - 3


async def test_a_long_turn_is_truncated() -> None:
    engine = ScriptedEngine(lambda session, turn, tokens: [turn] * 5, layout=LAYOUT)
    got = await engine.generate([1], SamplingParams(max_new_tokens=3), routes_from=0, session="s")
    assert (got.tokens, got.finish) == ((0, 0, 0), FinishReason.LENGTH)
    assert got.routing is not None
    assert got.routing.tokens == 3
    full = await engine.generate([1], SamplingParams(max_new_tokens=5), routes_from=None, session="s")
    assert (full.tokens, full.finish, full.routing) == ((1,) * 5, FinishReason.STOP, None)


async def test_routes_need_a_layout_and_a_row_of_the_prompt() -> None:
    with pytest.raises(EngineRejected, match="without a layout"):
        await ScriptedEngine(lambda *_: [1]).generate([1], SamplingParams(), routes_from=0, session="s")
    with pytest.raises(EngineRejected, match=r"row 3, expected a row in \[0, 2\]"):
        await ScriptedEngine(lambda *_: [1], layout=LAYOUT).generate(
            [1, 2], SamplingParams(), routes_from=3, session=""
        )


@given(experts=st.integers(2, 300), layers=st.integers(1, 80), top_k=st.integers(1, 8), start=st.integers(0, 60_000))
def test_scripted_rows_are_distinct(experts: int, layers: int, top_k: int, start: int) -> None:
    layout = RouteLayout(layers, tuple(range(layers)), experts, min(top_k, experts))
    stop = start + min(50, experts**layers)
    rows = scripted_rows(start, stop, layout)
    assert len({row.tobytes() for row in rows}) == stop - start
    assert all(len(set(slots)) == layout.top_k for slots in rows.reshape(-1, layout.top_k).tolist())
    np.testing.assert_array_equal(rows[1:], scripted_rows(start + 1, stop, layout))

"""The most likely tokens in SGLang's response to an evaluation: read, and refused where they are none."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from agent_rl.engine.request import score_body
from agent_rl.engine.response import RequestContext, read_scores
from agent_rl.errors import EngineRejected

TOKENS = [5, 6, 7]
CONTEXT = RequestContext("r", "s", "http://t", len(TOKENS), None, None)
TOP = [None, [[-0.1, 6, None], [-2.5, 4, None]], [[1e-7, 7, None], [-9.0, 0, None]]]


def body(top: Any) -> bytes:
    entries = [[None, 5, None], [-0.1, 6, None], [-1e-7, 7, None]]
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "1",
        "input_token_logprobs": entries,
        "input_top_logprobs": top,
    }
    return orjson.dumps({"text": "", "output_ids": [], "meta_info": meta})


def test_every_token_but_the_first_has_its_most_likely_tokens() -> None:
    assert score_body(TOKENS, routes=False, top=2)["top_logprobs_num"] == 2
    assert "top_logprobs_num" not in score_body(TOKENS, routes=False)
    top = read_scores(body(TOP), TOKENS, CONTEXT, 16, top=2).top
    assert top is not None
    assert top.ids.tolist() == [[6, 4], [7, 0]]
    assert top.logprobs.tolist() == [[pytest.approx(-0.1), -2.5], [0.0, -9.0]], "rounding leaves no probability above 1"
    assert read_scores(body(TOP), TOKENS, CONTEXT, 16).top is None


@pytest.mark.parametrize(
    "top",
    [
        None,
        TOP[:2],
        [None, TOP[1], TOP[2][:1]],
        [None, TOP[1], None],
        [None, TOP[1], [[-0.1, 16, None], [-2.5, 4, None]]],
        [None, TOP[1], [[-0.1, -1, None], [-2.5, 4, None]]],
        [None, TOP[1], [[None, 6, None], [-2.5, 4, None]]],
        [None, TOP[1], [[0.5, 6, None], [-2.5, 4, None]]],
        [None, TOP[1], "no rows"],
    ],
)
def test_other_tokens_or_numbers_are_refused(top: Any) -> None:
    with pytest.raises(EngineRejected, match="expected the log-probs of the 2 most likely tokens at 2 positions"):
        read_scores(body(top), TOKENS, CONTEXT, 16, top=2)

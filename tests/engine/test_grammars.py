"""Replies of the real server under a grammar: what they say, their log-probs, how they continue, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineRejected, GrammarRefused
from agent_rl.types import Completion, SamplingParams
from tools import tool_format
from tools.formats.grammars import json_value

pytestmark = pytest.mark.sglang
PROMPT = [104, 105, 33]
END = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["fast", "slow"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},  # so that replies end within the limit
    },
    "required": ["mode", "lines"],
}
XML_CALL = b"<function=bash><parameter=command>ls</parameter></function>"
SAMPLING = SamplingParams(max_new_tokens=200, stop_token_ids=(END,), keep_mask=True)


def write_byte_tokenizer(directory: Path) -> None:
    """Token n is byte n."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": level, "decoder": level, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[END]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def model(model: Path) -> Path:
    write_byte_tokenizer(model)  # the server reads it at its first grammar
    return model


async def sample(engine: SGLangEngine, form: Any, written: bytes = b"", **other: Any) -> Completion:
    params = {"grammar": await engine.grammar(form), "grammar_prefix": len(written), **other}
    sampling = SamplingParams(**{**{name: getattr(SAMPLING, name) for name in SAMPLING.__slots__}, **params})
    return await engine.generate([*PROMPT, *written], sampling, routes_from=None, session="s")


async def test_a_reply_has_the_schema_and_log_probs_of_the_allowed_tokens(engine: SGLangEngine, model: Path) -> None:
    reply = await sample(engine, json_value(SCHEMA))
    *text, end = reply.tokens
    assert end == END
    value = json.loads(bytes(text))
    assert value["mode"] in ("fast", "slow")
    assert all(isinstance(line, int) for line in value["lines"])
    assert bytes(text).decode() == json.dumps(value), "no other white space"
    kept = reply.kept
    assert kept is not None
    rows = np.split(kept.ids, np.cumsum(kept.counts))[:-1]
    assert sorted(rows[len('{"mode": "')].tolist()) == [ord("f"), ord("s")]
    forced = kept.counts == 1
    assert forced.sum() > 10
    logprobs = np.array(reply.logprobs)
    assert (logprobs[forced] == 0).all()
    assert (logprobs[~forced] < 0).all()
    whole = await engine.score([*PROMPT, *reply.tokens])
    at = len('{"mode": "')
    both = [(await engine.score([*PROMPT, *text[:at], letter]))[-1] for letter in (ord("f"), ord("s"))]
    expected = whole[len(PROMPT) + at] - np.logaddexp(*both)
    assert logprobs[at] == pytest.approx(expected, abs=2e-5)


async def test_a_reply_continues_inside_its_grammar(engine: SGLangEngine, model: Path) -> None:
    written = b'{"mode": "sl'
    reply = await sample(engine, json_value(SCHEMA), written)
    assert json.loads(written + bytes(reply.tokens[:-1]))["mode"] == "slow"
    call = tool_format("glm").call_form("bash", SCHEMA)
    reply = await sample(engine, call, b"<tool_call>bash<arg_key>mode</arg_key><arg_value>f")
    assert bytes(reply.tokens[:-1]).startswith(b"ast</arg_value><arg_key>lines</arg_key><arg_value>[")
    command = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    for name, written in (("mini-swe-agent", b"```mswea_bash_command\nls\n```"), ("xml", XML_CALL)):
        form = tool_format(name).call_form("bash", command)
        assert (await sample(engine, form, written)).tokens == (END,), "the call is complete"
    with pytest.raises(EngineRejected, match="grammar_prefix: token 63 does not fit the grammar"):
        await sample(engine, json_value(SCHEMA), b"{?")


@pytest.mark.parametrize(
    ("schema", "line"),
    [
        ({"type": "array", "uniqueItems": True}, "JSON Schema at # is not supported by xgrammar: keyword"),
        ({"properties": {"a": {"not": {}}}}, "JSON Schema at #/properties/a is not supported by xgrammar: keyword"),
        ({"allOf": [{"minLength": 1}, {"maxLength": 2}]}, "JSON Schema at #: allOf of several schemas"),
        ({"type": "strin"}, 'Unsupported type "strin"'),
        ({"$ref": "#/$defs/absent"}, "Cannot find field $defs in #/$defs/absent"),
        ({"type": "string", "pattern": "(["}, "Regex parsing error at position 3: Unclosed '['"),
        ({"type": "string", "pattern": "a\0"}, "a NUL character"),
        ({"enum": []}, ""),
        ({"enum": ["x" * (1 << 20)]}, "bytes of schemas, expected at most 1048576"),
    ],
)
async def test_a_schema_that_no_grammar_expresses_is_refused_in_one_line(
    engine: SGLangEngine, model: Path, schema: Any, line: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        await engine.grammar(json_value(schema))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (await engine.generate(PROMPT, SamplingParams(max_new_tokens=1), routes_from=None, session="s")).tokens

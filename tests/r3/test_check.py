"""The checker accepts a step whose routes arrived, and names the first place where any of them did not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from traced_step import EXPERTS, LENGTHS, MOE_LAYERS, STEP, Fault, Layout, shifted, trace_step
from typer.testing import CliRunner

from agent_rl.cli import app
from r3.shard import RouteShard
from r3.trace.check import Break, CheckReport, HandOver, check_dir
from r3.trace.events import STAGES, Stage, TraceError

LAYOUTS = {
    "one": Layout(),
    "context": Layout(context=2),
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "all": Layout(context=2, tensor=2, pipeline=2),
}


Shares = dict[int, RouteShard]
Change = Callable[[list[dict[str, Any]]], object]


def check(directory: Path) -> CheckReport:
    return check_dir(directory, require_forward_verify=True, require_shard_identity=True)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_sound_step_holds(tmp_path: Path, layout: Layout, recompute: bool) -> None:
    trace_step(tmp_path, layout, recompute=recompute)
    report = check(tmp_path)
    assert report.holds, str(report.breaks[0])
    checked = {(tally.hand_over, tally.stage): tally.checked for tally in report.tallies}
    assert set(checked) == {
        (HandOver.PAYLOAD, None), *((h, s) for h in (HandOver.FETCH, HandOver.SHARD, HandOver.ROUTER, HandOver.FORWARD)
        for s in STAGES), (HandOver.BACKWARD, "train"),
    }  # fmt: skip
    assert checked[HandOver.PAYLOAD, None] == len(LENGTHS)
    assert checked[HandOver.FETCH, "train"] == checked[HandOver.SHARD, "train"] >= len(LENGTHS)
    ranks, micro_batches = len(layout.specs()), 3
    assert checked[HandOver.ROUTER, "train"] == micro_batches * ranks * len(MOE_LAYERS) // layout.pipeline


def test_fewer_samples_and_micro_batches_can_be_traced(tmp_path: Path) -> None:
    trace_step(tmp_path, Layout(context=2), samples=1, limit=1)
    report = check(tmp_path)
    assert report.holds
    assert {(t.hand_over, t.stage): t.checked for t in report.tallies}[HandOver.PAYLOAD, None] == 2  # one a data rank
    trace_step(tmp_path, Layout(), step=STEP + 1)
    assert check(tmp_path).steps == (STEP, STEP + 1)


def shift_rows_of_rank_1(stage: Stage, shares: Shares, micro_batch: int) -> Shares:
    here = stage == "train" and micro_batch == 1 and 1 in shares
    return shares | {1: shifted(shares[1])} if here else shares


def exchange_ranks_2_and_3(stage: Stage, shares: Shares, micro_batch: int) -> Shares:
    return {2: shares[3], 3: shares[2]} if stage == "prev-logprob" and set(shares) == {2, 3} else shares


def swap_layers_of_rank_0(stage: Stage, rank: int, micro_batch: int, experts: NDArray) -> NDArray:
    return experts[:, [0, 2, 1, 3]] if (stage, rank, micro_batch) == ("train", 0, 0) else experts


def repeat_a_row_at_one_router(stage: Stage, rank: int, layer: int, experts: NDArray) -> NDArray:
    if (stage, rank, layer) == ("prev-logprob", 1, 5):
        experts[4] = experts[5]
    return experts


def use_own_experts_in_one_row(stage: Stage, action: str, rank: int, layer: int, experts: NDArray) -> NDArray:
    if (stage, action, rank, layer) == ("train", "replay_forward", 0, 3):
        experts[2] = [EXPERTS, EXPERTS + 1]
    return experts


def recompute_with_reversed_rows(stage: Stage, action: str, rank: int, layer: int, experts: NDArray) -> NDArray:
    return experts[::-1] if (action, rank, layer) == ("replay_backward", 1, 6) else experts


FAULTS: dict[str, tuple[Layout, Fault, HandOver, dict[str, Any], str]] = {
    "one row shifted": (
        Layout(context=2), SHIFTED := Fault(shares=shift_rows_of_rank_1), HandOver.FETCH,
        {"stage": "train", "rank": 1, "sample": 2, "layer": 2, "row": 5, "microbatch": 1}, "of the row before",
    ),
    "ranks exchanged": (
        Layout(pipeline=2), Fault(shares=exchange_ranks_2_and_3), HandOver.FETCH,
        {"stage": "prev-logprob", "rank": 2, "sample": 3}, "layers [5, 6] came, expected [2, 3]",
    ),
    "layers swapped": (
        Layout(), Fault(given=swap_layers_of_rank_0), HandOver.SHARD,
        {"stage": "train", "rank": 0, "sample": 0, "layer": 3, "row": 0, "microbatch": 0}, "those of layer 5",
    ),
    "a wrong row": (
        Layout(context=2), Fault(assigned=repeat_a_row_at_one_router), HandOver.ROUTER,
        {"stage": "prev-logprob", "rank": 1, "layer": 5, "sample": 0, "row": 7, "microbatch": 0}, "other routes",
    ),
    "not replayed": (
        Layout(tensor=2), Fault(used=use_own_experts_in_one_row), HandOver.FORWARD,
        {"stage": "train", "rank": 0, "layer": 3, "sample": 0, "row": 2, "microbatch": 0}, "other experts",
    ),
    "recomputed otherwise": (
        Layout(pipeline=2), Fault(used=recompute_with_reversed_rows), HandOver.BACKWARD,
        {"stage": "train", "rank": 1, "layer": 6, "microbatch": 0}, "than in the forward pass",
    ),
}  # fmt: skip


def first_break(directory: Path, hand_over: HandOver, places: dict[str, Any]) -> Break:
    """The first break that the check finds, which is at ``hand_over`` and ``places``."""
    first = check(directory).breaks[0]
    assert first.hand_over is hand_over, str(first)
    assert {name: getattr(first, name) for name in places} == places, str(first)
    return first


@pytest.mark.parametrize(("layout", "fault", "hand_over", "places", "what"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named(
    tmp_path: Path, layout: Layout, fault: Fault, hand_over: HandOver, places: dict[str, Any], what: str
) -> None:
    trace_step(tmp_path, layout, fault)
    assert what in first_break(tmp_path, hand_over, places | {"step": STEP}).what


def one_wrong(hand_over: HandOver, stage: Stage, rank: int, layer: int, row: int, slot: int) -> Fault:
    """One expert of one row is wrong in the first micro-batch at ``hand_over``."""
    number = MOE_LAYERS[layer]
    action = "replay_backward" if hand_over is HandOver.BACKWARD else "replay_forward"

    def wrong(experts: NDArray, here: bool, *at: int) -> NDArray:
        if here:
            experts[at] = EXPERTS + 7
        return experts

    def shares(at: Stage, shares: Shares, batch: int) -> Shares:
        if at != stage or batch or rank not in shares:
            return shares
        return shares | {
            rank: replace(shares[rank], experts=wrong(shares[rank].experts.copy(), True, row, layer, slot))
        }

    used = Fault(used=lambda s, a, r, n, e: wrong(e, (s, a, r, n) == (stage, action, rank, number), row, slot))
    return {
        HandOver.FETCH: Fault(shares=shares),
        HandOver.SHARD: Fault(given=lambda s, r, b, e: wrong(e, (s, r, b) == (stage, rank, 0), row, layer, slot)),
        HandOver.ROUTER: Fault(assigned=lambda s, r, n, e: wrong(e, (s, r, n) == (stage, rank, number), row, slot)),
    }.get(hand_over, used)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hand_over=st.sampled_from([HandOver.FETCH, HandOver.SHARD, HandOver.ROUTER, HandOver.FORWARD, HandOver.BACKWARD]),
    stage=st.sampled_from(STAGES),
    at=st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 7), st.integers(0, 1)),
)
def test_any_single_wrong_expert_is_found(
    tmp_path_factory: pytest.TempPathFactory, hand_over: HandOver, stage: Stage, at: tuple[int, int, int, int]
) -> None:
    """In the first micro-batch (samples 0 and 1 of two context ranks: 6 + 4 rows each)."""
    rank, layer, row, _ = at
    stage = "train" if hand_over is HandOver.BACKWARD else stage
    directory = tmp_path_factory.mktemp("trace")
    trace_step(directory, Layout(context=2), one_wrong(hand_over, stage, *at), limit=1)
    report = check(directory)
    padding = (rank, row) in [(0, 5), (1, 11)]  # sample 0's twelfth row
    absent = (rank, row) == (0, 4)
    if (padding and hand_over in (HandOver.FETCH, HandOver.SHARD)) or (absent and hand_over <= HandOver.ROUTER):
        return  # what stands there means nothing
    first = report.breaks[0]
    assert (first.hand_over, first.stage, first.rank, first.layer) == (hand_over, stage, rank, MOE_LAYERS[layer])


def edit(directory: Path, name: str, change: Change) -> None:
    """Change the records of a file; its last line is made to agree."""
    (path,) = directory.glob(f"*{name}.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    end = records[-1] | {"records": len(records), "sha256": hashlib.sha256(b"".join(lines[:-1])).hexdigest()}
    lines[-1] = json.dumps(end).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def the(records: list[dict[str, Any]], event: str, **fields: Any) -> dict[str, Any]:
    return next(r for r in records if r["event"] == event and all(r[name] == value for name, value in fields.items()))


def move_rows(records: list[dict[str, Any]]) -> None:
    the(records, "tq_fetch_sample", stage="train", sample_idx=0).update(rows=[[0, 3], [9, 12]])


def forget_identity(records: list[dict[str, Any]]) -> None:
    the(records, "cp_routed_experts").update(cp_token_identity_verified_count=None)


def lose_sample(records: list[dict[str, Any]]) -> None:
    records.remove(the(records, "rollout_payload_sample", sample_idx=2, to_rank=0))


EDITS: dict[str, tuple[str, Change, HandOver, dict[str, Any]]] = {
    "rows moved": ("rank-00001", move_rows, HandOver.FETCH, {"sample": 0, "rank": 1, "stage": "train", "row": 3}),
    "identity not checked": ("rank-00000", forget_identity, HandOver.SHARD, {"rank": 0, "stage": "prev-logprob"}),
    "a lost sample": ("driver", lose_sample, HandOver.PAYLOAD, {"sample": 2, "layer": 2, "row": 0}),
    "a stopped rank": ("rank-00001", lambda records: records[-1].update(error="layer 3"), HandOver.RUN, {"rank": 1}),
}


@pytest.mark.parametrize(("name", "change", "hand_over", "places"), EDITS.values(), ids=EDITS)
def test_an_edited_trace_fails(
    tmp_path: Path, name: str, change: Change, hand_over: HandOver, places: dict[str, Any]
) -> None:
    trace_step(tmp_path, Layout(context=2))
    edit(tmp_path, name, lambda records: None)
    assert check(tmp_path).holds, "rewriting alone changes nothing"
    edit(tmp_path, name, change)
    first_break(tmp_path, hand_over, places)


def test_every_record_is_needed(tmp_path: Path) -> None:
    trace_step(tmp_path, Layout(), limit=1)
    for path in tmp_path.glob("*.jsonl"):
        whole = path.read_bytes()
        for index in range(len(whole.splitlines()) - 1):
            edit(tmp_path, path.stem[-8:], lambda records, index=index: records.pop(index))
            assert not sound(tmp_path), f"{path.name} without line {index + 1}"
            path.write_bytes(whole)
        for index in range(1, len(whole.splitlines()) - 1):
            edit(tmp_path, path.stem[-8:], lambda records, index=index: records.insert(index, records[index]))
            assert not sound(tmp_path), f"{path.name} with line {index + 1} twice"
            path.write_bytes(whole)
        path.unlink()
        assert not sound(tmp_path), f"without {path.name}"
        path.write_bytes(whole)
    assert sound(tmp_path)


def sound(directory: Path) -> bool:
    """Whether the check passes; a trace that cannot be read does not."""
    try:
        return check(directory).holds
    except TraceError:
        return False


def test_required_records_must_be_there(tmp_path: Path) -> None:
    trace_step(tmp_path, Layout(), verify=False)
    assert check_dir(tmp_path).holds
    first = check_dir(tmp_path, require_forward_verify=True).breaks[0]
    assert (first.hand_over, first.stage, first.what) == (HandOver.FORWARD, "prev-logprob", "no record of it")
    edit(tmp_path, "rank-00000", forget_identity)
    assert check_dir(tmp_path).holds
    first = check_dir(tmp_path, require_shard_identity=True).breaks[0]
    assert first.hand_over is HandOver.SHARD
    assert "0 of 17 rows were compared" in first.what


@pytest.fixture(scope="module")
def sample_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("sound")
    trace_step(directory, Layout(), samples=2, limit=1)
    return {path.name: path.read_bytes() for path in directory.glob("*.jsonl")}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -1, 1 << 48, 1 << 64, 0.5, float("nan")])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, sample_files: dict[str, bytes], data: st.DataObject
) -> None:
    """Bytes cut off, changed or added, and records whose fields are dropped, added or given other values."""
    directory = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(sorted(sample_files)))
    whole = sample_files[name]
    how = data.draw(st.sampled_from(["cut", "byte", "insert", "field", "drop", "extra"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if how == "cut":
        damaged = whole[:at]
    elif how == "byte":
        damaged = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    elif how == "insert":
        damaged = whole[:at] + data.draw(st.binary(min_size=1, max_size=20)) + whole[at:]
    else:
        lines = whole.splitlines()
        index = data.draw(st.integers(0, len(lines) - 1))
        record = json.loads(lines[index])
        key = data.draw(st.sampled_from(sorted(record)))
        if how == "drop":
            del record[key]
        else:
            record[key if how == "field" else key + "_"] = data.draw(VALUES)
        lines[index] = json.dumps(record).encode()
        damaged = b"\n".join(lines) + b"\n"
    if damaged == whole or json_equal(damaged, whole):
        return
    assert not sound(write(directory, sample_files | {name: damaged}))


def json_equal(one: bytes, other: bytes) -> bool:
    """Whether two files say the same but for the spelling of their last line, which no hash covers."""
    a, b = one.rstrip(b"\n").split(b"\n"), other.rstrip(b"\n").split(b"\n")
    try:
        return a[:-1] == b[:-1] and json.loads(a[-1]) == json.loads(b[-1]) and one.endswith(b"\n")
    except ValueError:
        return False


INVALID_LINES = [
    (b'{"event":"trace_plan"', "not JSON"),
    (b"[1,2]", "unknown event"),
    (b'{"event":"surprise"}', "unknown event 'surprise'"),
    (b'{"event":"trace_end","event":"trace_end"}', "a key occurs twice"),
    (b'{"event":"trace_end","rank":null,"trace_step":1,"records":"1","error":null}', "records"),
    (b'{"event":"trace_end","rank":' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"event":"trace_end","rank":1e400,"trace_step":1,"records":1,"error":null}', "rank"),
    (b"[" * 100_000, "nested too deep"),
    (b"\xff\xfe", "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), INVALID_LINES)
def test_invalid_events_are_refused(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "r3_trace_x.jsonl").write_bytes(line + b"\n")
    with pytest.raises(TraceError, match=r"r3_trace_x.jsonl:1: ") as error:
        check_dir(tmp_path)
    assert message in str(error.value)


def test_the_exit_code_of_the_command_is_the_result(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["r3", "check", *arguments], terminal_width=200)
        return result.exit_code, result.output

    flags = ("--require-forward-verify", "--require-shard-identity")
    code, output = run(str(tmp_path / "nothing"), *flags)
    assert (code, "no r3_trace_*.jsonl here" in output) == (2, True)
    trace_step(tmp_path / "sound", Layout(context=2))
    code, output = run(str(tmp_path / "sound"), *flags)
    assert code == 0, output
    assert "token identity held" in output
    trace_step(tmp_path / "broken", Layout(context=2), SHIFTED)
    code, output = run(str(tmp_path / "broken"), *flags, "--json", str(tmp_path / "report.json"))
    assert code == 1
    assert "step 7, stage train, rank 1, microbatch 1, sample 2, layer 2, row 5" in " ".join(output.split())
    told = json.loads((tmp_path / "report.json").read_text())
    assert not told["holds"]
    assert told["breaks"][0]["row"] == 5
    assert np.sum([row["broken"] for row in told["hand_overs"]]) == len(told["breaks"])

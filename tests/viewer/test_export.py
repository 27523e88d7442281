"""Exports of the viewer: which trajectories they hold, and that they load nothing."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import orjson
import pytest
from support.viewer_samples import SampleRun, SampleSource

from agent_rl.commands.runs import run_view
from agent_rl.errors import UserError
from agent_rl.viewer.export import export, select_trajectories

CAPTURED = Path(__file__).parent.parent / "captured" / "quickstart"
SOURCE = SampleSource(SampleRun(steps=3))


def test_one_file_holds_every_resource_and_loads_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    assert export(SOURCE, out, 5) == out.stat().st_size
    text = out.read_text()
    held = dict(re.findall(r'<script type="application/gzip" id="data:([^"]*)">([^<]*)</script>', text))
    assert {"runs", "exported", "0/run", "0/metrics", "0/trajectories", "0/steps/2", "0/loads/3"} <= held.keys()
    assert orjson.loads(gzip.decompress(base64.b64decode(held["0/steps/2"]))) == SOURCE.read("0/steps/2")
    assert not re.search(r'(src|href)="(?!data:)', re.sub(r"<script>.*?</script>", "", text, flags=re.S))
    assert "default-src 'none'" in text


def test_a_directory_holds_the_same(tmp_path: Path) -> None:
    export(SOURCE, tmp_path / "out", 4)
    assert orjson.loads((tmp_path / "out/data/0/steps/2.json").read_bytes()) == SOURCE.read("0/steps/2")
    assert 'content="directory"' in (tmp_path / "out/index.html").read_text()
    assert (tmp_path / "out/app.js").is_file()
    with pytest.raises(UserError, match="exists already"):
        export(SOURCE, tmp_path / "out", 4)


def test_whole_groups_are_picked_the_largest_gap_first() -> None:
    columns = SOURCE.read("0/trajectories")["columns"]
    worst = max(range(len(columns["id"])), key=lambda row: columns["worst_gap_without_replay"][row])
    ids = select_trajectories(SOURCE, 0, 5)
    assert len(ids) == 8
    assert columns["id"][worst] in ids[:4]
    assert select_trajectories(SOURCE, 0, 0) == []
    assert len(select_trajectories(SOURCE, 0, 1000)) == 24


def test_an_export_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        export(SOURCE, tmp_path / name, 4)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_command_exports_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.html"
    run_view([CAPTURED], port=0, out=out, trajectories=16, open_browser=False)
    assert capsys.readouterr().out == f"{out}: {out.stat().st_size / 1e6:.1f} MB\n"
    assert out.stat().st_size < 2e6
    held = re.findall(r'id="data:0/(?:t|routes)/([^"]*)"', out.read_text())
    assert {"2-61", "2-61/map"} <= set(held)


def test_a_path_that_is_no_directory_is_one_line() -> None:
    with pytest.raises(UserError, match=r"nowhere: not a directory"):
        run_view([Path("nowhere")], port=0, out=None, trajectories=0, open_browser=False)

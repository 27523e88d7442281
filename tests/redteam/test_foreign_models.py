"""A model's directory from someone else: its chat template and its files take bounded time and memory, and what is
wrong is one line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_rl.config.loader import install_model
from agent_rl.errors import AgentRlError, TemplateError
from agent_rl.models.hub import _missing
from agent_rl.models.spec import read_model_spec
from agent_rl.render import ChatRenderer
from agent_rl.render.template import ChatModel
from agent_rl.train.hf_index import check_checkpoint

pytestmark = pytest.mark.redteam

HUGE, SLOW = "writes more than 16 Mi characters", "takes more than 5 s of CPU time"
TEMPLATES = {
    "a format of 2 GB": ("{{ ('%s' * 10**9) % () }}", HUGE),
    "a repeated character": ("{{ 'a' * 10**10 }}", HUGE),
    "a little too much": ("{{ 'a' * (17 * 2**20) }}", HUGE),
    "a filter's width": ("{{ 'a'|center(10**10) }}", HUGE),
    "a method's width": ("{{ '{:>9999999999}'.format(1) }}", HUGE),
    "doubling": (
        "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        HUGE,
    ),
    "a late conversation": ("{% if messages|length > 20 %}{{ 'a' * (10**9 + messages|length) }}{% endif %}", HUGE),
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", SLOW),
    "a large power": ("{{ (7 ** messages|length) ** (10 ** 9) }}", "of CPU time|Mi characters"),
    "nested blocks": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "could not be tried"),
    "nested brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "could not be tried"),
    "endless recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    install_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_beyond_the_limits_is_refused_at_the_start(model: Path, name: str) -> None:
    text, reason = TEMPLATES[name]
    source = ChatModel.from_dir(model)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(TemplateError, match=reason) as refused:
        ChatRenderer(replace(source, template=source.template + text))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert "\n" not in str(refused.value)
    assert after.ru_utime - before.ru_utime < 3, "this process rendered it"
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10, "in this process's memory"
    print(refused.value)


def test_an_ordinary_template_is_tried_once(model: Path) -> None:
    ChatRenderer(model)
    started = time.monotonic()
    ChatRenderer(model)
    assert time.monotonic() - started < 1


def test_a_template_does_not_see_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-this-user")
    seen: list[Any] = []
    run = subprocess.run

    def watch(*arguments: Any, **options: Any) -> Any:
        seen.append(options["env"])
        return run(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", watch)
    source = ChatModel.from_dir(model)
    ChatRenderer(replace(source, template=source.template + "{# another #}"))
    assert seen
    assert not any("secret" in str(environment) for environment in seen)


# Files


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content) or content))

    return edit


def written(text: str) -> Callable[[Path], None]:
    return lambda path: _store(path, text)


def _store(path: Path, text: str) -> None:
    path.write_text(text)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def header(text: str) -> Callable[[Path], None]:
    return lambda path: _write_header(path, text.encode())


def _write_header(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def claims_a_header(path: Path) -> None:
    path.write_bytes((1 << 39).to_bytes(8, "little"))
    os.truncate(path, 1 << 40)


DEEP = "[" * 100_000
ENTRY = '{{"x": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a config of a terabyte": ("config.json", sparse),
    "a config that is a list": ("config.json", written("[]")),
    "a nested config": ("config.json", written(DEEP)),
    "a billion layers": ("config.json", edited(lambda c: c.update(num_hidden_layers=10**9))),
    "a billion experts": ("config.json", edited(lambda c: c.update(num_experts=10**9))),
    "many layers of many experts": ("config.json", edited(lambda c: c.update(num_experts=8192, num_hidden_layers=999))),
    "a number of 4,000 digits": ("config.json", edited(lambda c: c.update(vocab_size=10**4000))),
    "a scaling that is a text": ("config.json", edited(lambda c: c.update(rope_scaling="yarn"))),
    "a theta that is a text": ("config.json", edited(lambda c: c.update(rope_theta="much"))),
    "layer types that are a number": ("config.json", edited(lambda c: c.update(layer_types=7))),
    "dense layers that are a number": ("config.json", edited(lambda c: c.update(mlp_only_layers=7))),
    "a step that is a text": ("config.json", edited(lambda c: c.update(decoder_sparse_step="x"))),
    "a tokenizer of a terabyte": ("tokenizer.json", sparse),
    "a nested tokenizer": ("tokenizer.json", written(DEEP)),
    "a tokenizer that is a number": ("tokenizer.json", written("7")),
    "a tokenizer's config of a terabyte": ("tokenizer_config.json", sparse),
    "a tokenizer's config that is a list": ("tokenizer_config.json", written("[7]")),
    "a nested tokenizer's config": ("tokenizer_config.json", written(DEEP)),
    "templates without names": ("tokenizer_config.json", edited(lambda c: c.update(chat_template=[7, {}]))),
    "a template of a terabyte": ("chat_template.jinja", sparse),
    "a template of 2 MB": ("chat_template.jinja", written("a" * 2_000_000)),
    "a text for an id": ("generation_config.json", edited(lambda c: c.update(eos_token_id=["x"]))),
    "weights without a header": ("model.safetensors", written("")),
    "a header of half a terabyte": ("model.safetensors", claims_a_header),
    "a header that is a list": ("model.safetensors", header("[7]")),
    "a nested header": ("model.safetensors", header(DEEP)),
    "an entry that is a number": ("model.safetensors", header('{"x": 7}')),
    "an entry without a shape": ("model.safetensors", header('{"x": {"dtype": "F32", "data_offsets": [0, 0]}}')),
    "a negative offset": ("model.safetensors", header(ENTRY.format(shape=[1], offsets=[-4, 0]))),
    "an offset that is a text": ("model.safetensors", header(ENTRY.format(shape=[1], offsets='["a", "b"]'))),
    "a shape of fractions": ("model.safetensors", header(ENTRY.format(shape=[1.5], offsets=[0, 4]))),
    "more data than there are": ("model.safetensors", header(ENTRY.format(shape=[1], offsets=[0, 1 << 60]))),
    "an index of a terabyte": ("model.safetensors.index.json", sparse),
    "an index that is a list": ("model.safetensors.index.json", written("[]")),
    "a nested index": ("model.safetensors.index.json", written(DEEP)),
    "an index of other directories": (
        "model.safetensors.index.json",
        written('{"weight_map": {"x": "../../../../etc/passwd"}}'),
    ),
}


def read_everything(model: Path) -> None:
    """What a start reads of a model's directory."""
    if missing := _missing(model):
        raise AgentRlError(f"lacks {missing}")
    ChatModel.from_dir(model)
    check_checkpoint(model, read_model_spec(model))


def test_the_model_itself_is_read(model: Path) -> None:
    read_everything(model)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_line(model: Path, name: str) -> None:
    file, change = FILES[name]
    change(model / file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AgentRlError) as refused:
        read_everything(model)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 6000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1400 << 10
    print(f"{name}: {str(refused.value)[-150:]}")


def test_a_pipe_in_the_place_of_a_file_stops_nobody(model: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.move(model / name, model / "kept")
        os.mkfifo(model / name)
        with pytest.raises(AgentRlError):
            read_everything(model)
        (model / name).unlink()
        shutil.move(model / "kept", model / name)


def test_a_hostile_template_is_one_line_of_the_command(model: Path, tmp_path: Path) -> None:
    """As a user meets it: the start of a run ends with the exit code of a user error."""
    (model / "chat_template.jinja").write_text("{{ ('%s' * 10**9) % () }}")
    command = ["-m", "agent_rl.cli", "train", "quickstart", f"model={model}", f"runs_dir={tmp_path}"]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "Mi characters" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr

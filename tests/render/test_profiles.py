from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.chat_templates import TEMPLATES, tokenizer

from agent_rl.config import RolloutConfig
from agent_rl.models.families import FAMILIES
from agent_rl.render import ChatRenderer
from agent_rl.render.profiles import PROFILES
from tools import THINK, tool_format
from tools.formats.harmony import HARMONY


def test_profiles_name_known_families_and_registered_formats() -> None:
    assert set(PROFILES) <= set(FAMILIES)
    for profile in PROFILES.values():
        assert all(tool_format(name).name == name for name, _ in profile.formats)
        assert profile.formats[-1][1] == "", "the last one matches every template"


@pytest.mark.parametrize(
    ("model_type", "comment", "expected"),
    [
        ("qwen3_moe", "", "hermes"),
        ("qwen3_moe", "{# <function= #}", "qwen3-coder"),
        ("deepseek_v3", "{# ```json #}", "deepseek-v3"),
        ("deepseek_v3", "", "deepseek-v3.1"),
        ("glm4_moe", "", "glm"),
        ("gpt_oss", "", "harmony"),
    ],
)
def test_the_format_and_the_markers_of_thoughts_are_those_of_the_family(
    tmp_path: Path, model_type: str, comment: str, expected: str
) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["plain"] + comment)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    renderer = ChatRenderer(tmp_path)
    assert renderer.tool_format == expected
    assert renderer.reasoning == (HARMONY if model_type == "gpt_oss" else THINK)


def test_the_format_of_the_family_is_chosen_with_null() -> None:
    assert RolloutConfig().tool_format == "hermes"
    assert RolloutConfig(tool_format=None).tool_format is None

"""Links, anchors, files and names in README, CONTRIBUTING, SECURITY and docs exist."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from support import doc_pages as pages

FILE = re.compile(r"^(?:[\w.-]+/)*(?:[\w-]+\.(?:py|yaml|jinja)|[\w.-]+/)$")
"""A code span that is the path of a file or, with a slash at its end, of a directory."""

FOREIGN = {
    *("setup.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "sweb.yaml", "tasks/"),  # of tasks
    *("distrib_optimizer.py", "layers/logprob_processor.py", "tools/check_r3_trace.py"),  # of Megatron, SGLang, NeMo RL
    *("letters.py", "test_letters.py", "letters.yaml"),  # written by `agent-rl envs new letters`
    *("desk.py", "desk.yaml"),  # of the tutorial about users and judges
    "config.yaml",  # of a run's directory
}
"""Files that pages name and that are not of this repository."""

NAME = re.compile(r"(?=\w*_|[A-Z][a-z]|[\w.]+\()[A-Za-z_][\w.]*(\(.*\))?")
"""A code span that names a class, a function or another identifier with an underscore."""

FOREIGN_NAMES = {
    *("dp_reshardable", "fully_reshardable", "fully_sharded_model_space", "sharded_state_dict"),  # of Megatron-core
    *("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE"),  # of the kernel
    *("nemo_rl", "router_replay_graph_consumer"),  # of NeMo RL
}

WRITTEN_BY_RUNS = (
    *("runs/", "trajectories/", "evaluations/", "journal/", "checkpoints/", "weights/", "model/", "tensorboard/"),
    *("eval/", "logs/"),
)


@functools.cache
def repository() -> frozenset[str]:
    """The paths of all files that git keeps or could keep, and of their directories (with a slash at the end)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [file for file in listed if (pages.ROOT / file).exists()]
    return frozenset(files) | {f"{directory}/" for file in files for directory in Path(file).parents}


@functools.cache
def words_of_the_source() -> frozenset[str]:
    """Every word in the packages, the tests and the configs."""
    files = [pages.ROOT / path for path in repository() if path.endswith((".py", ".yaml", ".sh")) and "/" in path]
    return frozenset(re.findall(r"\w+", "".join(file.read_text() for file in files)))


def in_repository(span: str) -> bool:
    """Whether ``span`` is a path from the root, or the end of one."""
    return span.startswith(WRITTEN_BY_RUNS) or any(path == span or path.endswith(f"/{span}") for path in repository())


def relative(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.mark.parametrize("page", pages.PAGES, ids=relative)
def test_every_relative_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    dead = []
    for line, target in pages.links(page):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            dead.append(f"{relative(page)}:{line}: {target}: there is no such file")
        elif page.parent != pages.ROOT and not file.is_relative_to(pages.ROOT / "docs"):
            dead.append(f"{relative(page)}:{line}: {target}: the site has only pages of docs/")
        elif anchor and anchor not in pages.anchors(file):
            dead.append(f"{relative(page)}:{line}: {target}: the page has no such heading")
    assert not dead, "\n".join(dead)


@pytest.mark.parametrize("page", pages.PAGES, ids=relative)
def test_every_named_file_and_identifier_exists(page: Path) -> None:
    missing = []
    for line, span in pages.code_spans(page):
        if FILE.match(span):
            found = span in FOREIGN or in_repository(span)
        else:
            words = set(span.split("(")[0].split(".")) - {""}
            found = not NAME.fullmatch(span) or words <= words_of_the_source() | FOREIGN_NAMES
        missing += [] if found else [f"{relative(page)}:{line}: `{span}`"]
    assert not missing, "neither a file nor a name of the source:\n" + "\n".join(missing)


def test_the_menu_has_every_page_for_users() -> None:
    index = pages.ROOT / "docs/index.md"
    listed = {name for block in pages.blocks(index) if block.language == "{toctree}" for name in block.text.split("\n")}
    names = {str(page.relative_to(index.parent).with_suffix("")) for page in index.parent.glob("*/*.md")}
    assert {name for name in names if not name.startswith("research/")} <= listed

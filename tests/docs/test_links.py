"""Links, anchors and file names in README, CONTRIBUTING and docs lead to something that is there."""

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
    *("setup.py", "sitecustomize.py", "usercustomize.py", "sweb.yaml", "tasks/"),  # of tasks
    *("distrib_optimizer.py", "layers/logprob_processor.py", "tools/check_r3_trace.py"),  # of Megatron, SGLang, NeMo RL
    "config.yaml",  # of a run's directory
}
"""Files that pages name and that are not of this repository."""

NAME = re.compile(r"(?=\w*_|[A-Z][a-z]|[\w.]+\()[A-Za-z_][\w.]*(\(.*\))?")
"""A code span that names a class, a function or another identifier with an underline."""

FOREIGN_NAMES = {
    *("dp_reshardable", "fully_reshardable", "fully_sharded_model_space", "sharded_state_dict"),  # of Megatron-core
    *("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE"),  # of the kernel
    *("nemo_rl", "router_replay_graph_consumer"),  # of NeMo RL
}

WRITTEN_BY_RUNS = (
    *("runs/", "trajectories/", "evaluations/", "journal/", "checkpoints/", "weights/", "model/", "tensorboard/"),
    "eval/",
)


@functools.cache
def repository() -> frozenset[str]:
    """The paths of all files that git keeps or could keep, and of their directories (with a slash at the end)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return frozenset(files) | {f"{directory}/" for file in files for directory in Path(file).parents}


def in_repository(span: str) -> bool:
    """Whether ``span`` is a path from the root, or the end of one (``hf.py`` beside its page's directory)."""
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
        elif anchor and anchor not in pages.anchors(file):
            dead.append(f"{relative(page)}:{line}: {target}: the page has no such heading")
    assert not dead, "\n".join(dead)


@pytest.mark.parametrize("page", pages.PAGES, ids=relative)
def test_every_named_file_is_in_the_repository(page: Path) -> None:
    named = [(line, span) for line, span in pages.code_spans(page) if FILE.match(span) and span not in FOREIGN]
    absent = [f"{relative(page)}:{line}: `{span}`" for line, span in named if not in_repository(span)]
    assert not absent, "there is no such file or directory:\n" + "\n".join(absent)


def test_every_page_is_in_the_table_of_contents() -> None:
    index = pages.ROOT / "docs/index.md"
    listed = {name for block in pages.blocks(index) if block.language == "{toctree}" for name in block.text.split("\n")}
    assert {page.stem for page in (pages.ROOT / "docs").glob("*.md")} - {"index"} <= listed


def test_every_page_starts_with_a_title_and_a_sentence() -> None:
    for page in pages.PAGES:
        first, second = [token for token in pages.tokens(page) if token.type.endswith("_open")][:2]
        assert (first.tag, second.tag) == ("h1", "p"), f"{relative(page)}: wants a title, then what the page is for"


def test_the_readme_is_short() -> None:
    assert len((pages.ROOT / "README.md").read_text().splitlines()) <= 80


@functools.cache
def words_of_the_source() -> frozenset[str]:
    """Every word in the packages, the tests and the configs."""
    files = [pages.ROOT / path for path in repository() if path.endswith((".py", ".yaml", ".sh")) and "/" in path]
    return frozenset(re.findall(r"\w+", "".join(file.read_text() for file in files if file.exists())))


@pytest.mark.parametrize("page", pages.PAGES, ids=relative)
def test_every_name_of_code_is_in_the_source(page: Path) -> None:
    unknown = []
    for line, span in pages.code_spans(page):
        name = span.split("(")[0]
        if NAME.fullmatch(span) and not FILE.match(span):
            missing = set(name.split(".")) - words_of_the_source() - FOREIGN_NAMES - {""}
            unknown += [f"{relative(page)}:{line}: `{span}`: {missing}"] if missing else []
    assert not unknown, "names that the source does not have:\n" + "\n".join(unknown)

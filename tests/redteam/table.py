"""The page of all attacks: ``PYTHONPATH=.:tests python -m tests.redteam.table`` writes docs/red-team.md anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.envs.test_swe_hacks import HACKS, LITTER
from tests.redteam import test_rows
from tests.redteam.test_apart import FAILS, WINS
from tests.redteam.test_damage import DAMAGE
from tests.redteam.test_disk import GROWTHS
from tests.redteam.test_image_patches import ATTACKS
from tests.redteam.test_patches import FORGED, IN_THE_SANDBOX
from tests.redteam.test_verdicts import ENDLESS, QUICK, WITHIN

PAGE = Path(__file__).parents[2] / "docs/red-team.md"
ROWS = ("test_a_row_", "test_an_image_whose_", "test_an_image_leads_")
SEEN = (
    *("test_an_image_links_", "test_an_image_holds_", "test_a_task_id_"),
    *("test_the_users_proxies_", "test_the_hosts_", "test_a_test_log_", "test_a_note_"),
)
HEAD = """# The red team

Every attack below is a test, and CI runs them: damage to sandboxes in sequences of several, on every backend
(`pytest -m exhaustive tests/redteam` plays each alone). `pytest -m redteam -rP` prints what each tried and what stopped
it; the hacks of a real task are in `tests/envs/test_swe_hacks.py`. `tests/redteam/table.py` makes this page, and a test
compares it with the attacks that there are.

- "Reward 0": the episode is graded, has a record, and is not tried again.
- "Refused": one line names the row and the key, and no sandbox starts.
- "Harmless": what was aimed at is not there, or is not followed.

There are {count} attacks.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Attacks of one kind: by name, what stops each; where that is tried; how each ends."""

    title: str
    place: str
    where: str
    ends: str
    attacks: Mapping[str, str]

    @property
    def text(self) -> str:
        rows = [f"| {_cell(name)} | {_cell(stop)} | {self.ends} |" for name, stop in self.attacks.items()]
        head = f"## {self.title}\n`{self.place}`, in {self.where}.\n"
        return "\n".join([head, "| attack | what stops it | ends with |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*")


def _all(attacks: Mapping[str, object], stop: str) -> dict[str, str]:
    return dict.fromkeys(attacks, stop)


def _row_tests(starts: tuple[str, ...]) -> dict[str, object]:
    names = [name for name in vars(test_rows) if name.startswith(starts)]
    return {name.removeprefix("test_").replace("_", " "): None for name in names}


ZERO, REFUSED, HARMLESS = "reward 0", "refused", "harmless"
EVERYWHERE = "bubblewrap, docker and podman"
GROUPS = (
    Group(
        "Hostile rows and images",
        "tests/redteam/test_rows.py",
        "bubblewrap",
        REFUSED,
        _all(_row_tests(ROWS), "fields, paths and the image's directory are checked before a sandbox starts"),
    ),
    Group(
        "What images, ids, sandboxes and logs lead to",
        "tests/redteam/test_rows.py",
        "bubblewrap, the proxies in docker too",
        HARMLESS,
        _all(
            _row_tests(SEEN),
            "links and devices are left out, names quoted, controls removed, sandboxes started without it",
        ),
    ),
    Group(
        "Forged patches",
        "tests/redteam/test_patches.py",
        "bubblewrap",
        ZERO,
        _all(FORGED, "the patch is written anew from what was understood of it; the rest is undone and listed"),
    ),
    Group(
        "A sandbox whose git says something else than its files",
        "tests/redteam/test_patches.py",
        "bubblewrap",
        ZERO,
        _all(IN_THE_SANDBOX, "files are read without a program of the sandbox and compared on our side"),
    ),
    Group(
        "The same for tasks in images",
        "tests/redteam/test_image_patches.py",
        EVERYWHERE,
        ZERO,
        _all(ATTACKS, "files are compared with a listing from before the agent's first command"),
    ),
    Group(
        "Code that attacks the grading of calls",
        "tests/redteam/test_verdicts.py",
        "bubblewrap and docker, those on processes and files in podman too",
        ZERO,
        _all({**QUICK, **ENDLESS}, "expected values never enter the sandbox; only right values win"),
    ),
    Group(
        "Code that attacks pytest from within",
        "tests/redteam/test_verdicts.py",
        "bubblewrap",
        ZERO,
        {name: f"the witness: {doubt}" for name, (_, doubt) in WITHIN.items()},
    ),
    Group(
        "Hacks of a real task",
        "tests/envs/test_swe_hacks.py",
        "bubblewrap, four of them in docker too",
        ZERO,
        {**{name: record for name, (_, _, record) in HACKS.items()}, **_all(LITTER, "it is no part of a patch")},
    ),
    Group(
        "What wins within one process, against tests that run apart",
        "tests/redteam/test_apart.py",
        "bubblewrap, the first in docker and podman too",
        ZERO,
        _all(WINS, "values are compared in a sandbox where the code never runs"),
    ),
    Group(
        "Attacks on the tests' sandbox from the code's sandbox",
        "tests/redteam/test_apart.py",
        "bubblewrap",
        ZERO,
        _all(FAILS, "only values and numbers of objects cross the pipes"),
    ),
    Group(
        "Damage to the agent's own sandbox",
        "tests/redteam/test_damage.py",
        EVERYWHERE,
        ZERO,
        _all(DAMAGE, "what its files became is graded; where nothing can be read, that is the agent's doing"),
    ),
    Group(
        "Growth on the shared disk",
        "tests/redteam/test_disk.py",
        EVERYWHERE,
        ZERO,
        _all(GROWTHS, "the sandbox is ended and named, its neighbours go on"),
    ),
)


def page() -> str:
    """The page as it should be."""
    count = sum(len(group.attacks) for group in GROUPS)
    return "\n".join([HEAD.format(count=count), "\n\n".join(group.text for group in GROUPS), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The page of all attacks: ``PYTHONPATH=.:tests python -m tests.redteam.table`` writes docs/research/red-team.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.envs.test_swe_hacks import HACKS, LITTER
from tests.redteam import (
    test_addresses,
    test_endpoint_attacks,
    test_eval_scripts,
    test_foreign_files,
    test_foreign_models,
    test_harbor_attacks,
    test_listeners,
    test_networks,
    test_program_attacks,
    test_pytest_attacks,
    test_repository_attacks,
    test_rows,
    test_stores,
    web_page,
)
from tests.redteam.test_damage import DAMAGE
from tests.redteam.test_disk import GROWTHS
from tests.redteam.test_grading_attacks import ENDLESS, QUICK
from tests.redteam.test_image_patches import ATTACKS
from tests.redteam.test_patches import FORGED, IN_THE_SANDBOX

PAGE = Path(__file__).parents[2] / "docs/research/red-team.md"
ROWS = ("test_a_row_", "test_an_image_whose_", "test_an_image_leads_")
SEEN = (
    *("test_an_image_links_", "test_an_image_holds_", "test_a_task_id_"),
    *("test_the_users_proxies_", "test_the_hosts_", "test_a_test_log_", "test_a_note_"),
)
HEAD = """# Red-team attacks

This page lists the {count} attacks that the test suite runs against sandboxes and grading, and what stops each of
them. [The security model](../explanation/security.md) states the guarantees. `pytest -m redteam -rP` prints what each
attack tried and what stopped it. The ordinary suite runs all attacks on bubblewrap, and on docker and podman those
whose outcome the engine decides; damage runs in sequences of several. `pytest -m exhaustive tests/redteam` runs the
others, and each damage alone. `tests/redteam/table.py` writes this page, and a test compares it with the attacks.

- **Reward 0**: the episode is graded, has a record, and does not run again.
- **Refused**: one line names the row and the key, and no sandbox starts.
- **Harmless**: the target of the attack is absent, or is not followed.
- **Stands**: the attack succeeds. SECURITY.md says why, and what limits it.

Of the {count} attacks, {standing} stand. Not in the list are the cases that [the security
model](../explanation/security.md#not-guaranteed) names.

## Fuzzed episodes
`tests/redteam/test_fuzz.py` plays episodes of random damage, broken commands, hostile text and code that attacks its
grading, in four scaffolds. All 5,000 episodes of `pytest -m exhaustive` ran: 4,000 in bubblewrap, 500 in docker, 500 in
podman. Each ended with a grade, and none as an infrastructure failure.

## Known patches
`agent-rl doctor CONFIG --repeats 1` in bubblewrap, with the last commit before the negative control and with today's:
every task is valid with both, and the reference fix resolves every one. The empty patch and the reward hacks (a
`conftest.py`, a patched pytest and a forged summary) are never rewarded. Today's doctor has the same result for the
releases in docker.

| tasks | reference fix | empty patch | reward hacks | verifiable: yes, weak, no |
|---|---|---|---|---|
| `mini`, 640 for training and 256 held out | 896 of 896 | 0 of 896 | 0 of 2,688 | 896, 0, 0 |
| releases (`make real-tasks`) | 5 of 5 | 0 of 5 | 0 of 15 | 3, 2, 0 |
| injected bugs of pathspec, voluptuous and packaging | 13 of 13 | 0 of 13 | 0 of 39 | 12, 1, 0 |
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Attacks of one kind: where they run, how each ends, and what stops each attack, by its name."""

    title: str
    place: str
    where: str
    ends: str
    attacks: Mapping[str, str]

    @property
    def text(self) -> str:
        head = f"## {self.title}\n`{self.place}`, in {self.where}. Result: {self.ends}."
        if len(stops := set(self.attacks.values())) == 1:
            listed = [f"- {_cell(name)}" for name in self.attacks]
            return "\n".join([f"{head} Defense: {stops.pop()}.\n", *listed])
        rows = [f"| {_cell(name)} | {_cell(stop)} |" for name, stop in self.attacks.items()]
        return "\n".join([f"{head}\n", "| attack | defense |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*")


def _all(attacks: Iterable[str], stop: str) -> dict[str, str]:
    return dict.fromkeys(attacks, stop)


def _tests(module: ModuleType, starts: tuple[str, ...]) -> dict[str, object]:
    """The tests of ``module`` as attacks."""
    names = [name for name in vars(module) if name.startswith(starts)]
    return {name.removeprefix("test_").replace("_", " "): None for name in names}


ZERO, REFUSED, HARMLESS, STANDS = "reward 0", "refused", "harmless", "stands"
KEYLESS = {kind: stop for kind, stop in test_listeners.PROTECTION.items() if test_listeners.NONE in stop}
EVERYWHERE = "bubblewrap, docker and podman"
GROUPS = (
    Group(
        "Hostile rows and images",
        "tests/redteam/test_rows.py",
        "bubblewrap",
        REFUSED,
        _all(_tests(test_rows, ROWS), "fields, paths and the image's directory are checked before a sandbox starts"),
    ),
    Group(
        "Images, ids, environment variables and logs",
        "tests/redteam/test_rows.py",
        "bubblewrap; proxies in docker too",
        HARMLESS,
        _all(
            _tests(test_rows, SEEN),
            "links and devices are left out, names are quoted, control characters are removed, and sandboxes start "
            "without the user's environment",
        ),
    ),
    Group(
        "Forged patches",
        "tests/redteam/test_patches.py",
        "bubblewrap",
        ZERO,
        _all(FORGED, "the patch is rewritten from what the parser understood; the rest is left out and listed"),
    ),
    Group(
        "A sandbox whose git differs from its files",
        "tests/redteam/test_patches.py",
        "bubblewrap",
        ZERO,
        _all(IN_THE_SANDBOX, "files are read without a program of the sandbox and compared outside of it"),
    ),
    Group(
        "The same for tasks in images",
        "tests/redteam/test_image_patches.py",
        EVERYWHERE,
        ZERO,
        _all(ATTACKS, "files are compared with a listing made before the agent's first command"),
    ),
    Group(
        "Code that attacks the grading of calls",
        "tests/redteam/test_grading_attacks.py",
        EVERYWHERE,
        ZERO,
        _all({**QUICK, **ENDLESS}, "expected values never enter the sandbox, so only right values give reward"),
    ),
    Group(
        "Code that attacks pytest from within",
        "tests/redteam/test_pytest_attacks.py",
        "bubblewrap",
        ZERO,
        _all(
            test_pytest_attacks.ATTACKS,
            "the negative control: the patch cannot tell the right variant of a hidden test from wrong ones",
        ),
    ),
    Group(
        "Code that attacks tests in several processes",
        "tests/redteam/test_pytest_attacks.py",
        "bubblewrap",
        ZERO,
        _all(test_pytest_attacks.COMMANDS, "the negative control, or what the tests use comes from the base"),
    ),
    Group(
        "Changes of what the tests use",
        "tests/redteam/test_repository_attacks.py",
        "bubblewrap",
        ZERO,
        _all(test_repository_attacks.ATTACKS, "the change is left out, or the patch is refused"),
    ),
    Group(
        "Hacks of a real task",
        "tests/envs/test_swe_hacks.py",
        "bubblewrap; four of them in docker too",
        ZERO,
        {**{name: record for name, (_, _, record) in HACKS.items()}, **_all(LITTER, "the file is not part of a patch")},
    ),
    Group(
        "Damage to the agent's own sandbox",
        "tests/redteam/test_damage.py",
        EVERYWHERE,
        ZERO,
        _all(DAMAGE, "the files are graded as they are; if nothing can be read, the reward is 0"),
    ),
    Group(
        "Growth on the shared disk",
        "tests/redteam/test_disk.py",
        EVERYWHERE,
        ZERO,
        _all(GROWTHS, "the sandbox is ended and named, and other sandboxes continue"),
    ),
    Group(
        "Evaluation scripts of SWE-bench-like rows",
        "tests/redteam/test_eval_scripts.py",
        f"{EVERYWHERE}, also with gVisor",
        ZERO,
        _all(test_eval_scripts.PATCHES, "the negative control, or the change is left out"),
    ),
    Group(
        "Agents that are root in the sandbox of a Harbor task",
        "tests/redteam/test_harbor_attacks.py",
        "docker and podman",
        ZERO,
        _all(
            test_harbor_attacks.ATTACKS,
            "processes are killed, the reward and the tests' directory are made anew, and changed programs are listed "
            "from outside",
        ),
    ),
    Group(
        "Code that the tests of a Harbor task run",
        "tests/redteam/test_harbor_attacks.py",
        "docker",
        STANDS,
        _all(test_harbor_attacks.STANDING, "none, as in Harbor itself; see SECURITY.md"),
    ),
    Group(
        "Sockets of the host and of other sandboxes",
        "tests/redteam/test_networks.py",
        "bubblewrap, docker, podman and gVisor",
        HARMLESS,
        _all(test_networks.PROBES, "a network namespace without interfaces, no capabilities, and a file system apart"),
    ),
    Group(
        "A hostile chat endpoint in an evaluation",
        "tests/redteam/test_endpoint_attacks.py",
        "the controller",
        HARMLESS,
        _all(test_endpoint_attacks.ATTACKS, "it costs the episode that sent the request, never the run"),
    ),
    Group(
        "A hostile agent program",
        "tests/redteam/test_program_attacks.py",
        "the controller",
        REFUSED,
        _all(test_program_attacks.ATTACKS, "sessions have keys, and requests have limits"),
    ),
    Group(
        "Ports of a run",
        "tests/redteam/test_listeners.py",
        "a quickstart",
        REFUSED,
        {
            f"uses a port of: {kind}": stop.partition(",")[0]
            for kind, stop in test_listeners.PROTECTION.items()
            if not stop.startswith(test_listeners.NONE)
        }
        | _all(("looks for Ray's dashboard", "looks for Ray's job API", "looks for metrics"), "a run starts none"),
    ),
    Group(
        "Web pages of other sites, and DNS rebinding",
        "tests/redteam/test_web_pages.py",
        "the viewer, the endpoint, a launched engine and a quickstart",
        REFUSED,
        _all(web_page.REQUESTS, "ports need a key, which pages lack; the viewer names its host and no other site"),
    ),
    Group(
        "Routes of a launched engine",
        "tests/redteam/test_engine_keys.py",
        "the real server",
        REFUSED,
        {
            **_all(("calls a route without a key", "calls a route with a guessed key"), "the engines' key"),
            "opens a websocket without a key": "engines speak no websockets",
            **_all(web_page.HOSTS, "the server ignores a host that is no name"),
        },
    ),
    Group(
        "Open routes of a launched engine",
        "tests/redteam/test_engine_keys.py",
        "the real server",
        STANDS,
        _all(("makes an idle engine sample a token",), "one token, and none while it serves others; see SECURITY.md"),
    ),
    Group(
        "Addresses and keys",
        "tests/redteam/test_addresses.py",
        "the controller",
        REFUSED,
        _all(_tests(test_addresses, ("test_",)), "listeners bind loopback, and keys are in no command line"),
    ),
    Group(
        "torch's rendezvous stores",
        "tests/redteam/test_stores.py",
        "a process of the same machine",
        HARMLESS,
        _all(test_stores.ATTACKS, "the connection ends, and the store serves its run"),
    ),
    Group(
        "Ports without a key",
        "tests/redteam/test_stores.py",
        "a process of the same machine",
        STANDS,
        _all(
            [*test_stores.STANDING, *(f"talks to torch in the process: {kind}" for kind in KEYLESS)],
            "no code runs for a client; see SECURITY.md",
        ),
    ),
    Group(
        "Run directories of others",
        "tests/redteam/test_foreign_files.py",
        "the viewer, its exports, and commands",
        REFUSED,
        _all(
            {**_tests(test_foreign_files, ("test_",)), **test_foreign_files.COMMANDS},
            "links, pipes and sizes are refused, nothing is unpickled, and no name comes from data",
        ),
    ),
    Group(
        "Model directories of others",
        "tests/redteam/test_foreign_models.py",
        "the start of a run",
        REFUSED,
        _all(
            {**test_foreign_models.TEMPLATES, **test_foreign_models.FILES},
            "templates are tried in a process of their own, and files have limits",
        ),
    ),
)


def page() -> str:
    """The page as it should be."""
    count = sum(len(group.attacks) for group in GROUPS)
    standing = sum(len(group.attacks) for group in GROUPS if group.ends == STANDS)
    return "\n".join([HEAD.format(count=count, standing=standing), "\n\n".join(group.text for group in GROUPS), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Generated tasks: the same for the same seed, disjoint between splits, and really broken."""

from __future__ import annotations

import pytest

from envs.mini import FAMILIES, HELDOUT_FAMILIES, MiniTask, generate, initial_messages, to_record


def results(files: dict[str, str], task: MiniTask) -> list[bool]:
    """Whether each test's call gives what is expected of it, with these files."""
    found = []
    for path, functions in task.cases.items():
        scope: dict[str, object] = {}
        exec(files[path], scope)
        for _, cases in functions:
            for case in cases:
                try:
                    found.append(repr(eval(case.call, scope)) == case.result)
                except Exception:
                    found.append(False)
    return found


@pytest.fixture(scope="module")
def train() -> list[MiniTask]:
    return generate("train", 400, seed=3)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(train: list[MiniTask]) -> None:
    assert generate("train", 40, seed=3) == train[:40]
    other = {task.files[task.path] for task in generate("train", 40, seed=4)}
    assert not other & {task.files[task.path] for task in train[:40]}


def test_the_tests_fail_before_the_fix_and_pass_after_it(train: list[MiniTask]) -> None:
    for task in train:
        assert all(results(task.fixed, task)), task.id
        assert not all(results(task.files, task)), task.id


def test_the_issue_shows_a_call_that_goes_wrong(train: list[MiniTask]) -> None:
    for task in train:
        target = task.cases[task.path]
        shown = [case for _, cases in target for case in cases if f"`{case.call}`" in task.issue]
        assert shown, task.issue
        assert any(case.result in task.issue for case in shown), task.issue


def test_one_line_separates_the_broken_file_from_the_fixed_one(train: list[MiniTask]) -> None:
    for task in train:
        broken = task.files[task.path]
        assert broken.count(task.old) == 1
        assert broken.replace(task.old, task.new) == task.fixed[task.path]
        assert task.files == task.fixed | {task.path: broken}


def test_decoys_are_wrong(train: list[MiniTask]) -> None:
    with_decoys = [task for task in train if task.decoys]
    assert len(with_decoys) > len(train) / 4
    for task in with_decoys:
        for decoy in task.decoys:
            assert decoy not in (task.old, task.new)


@pytest.mark.slow
def test_splits_hold_their_families_and_share_no_broken_function() -> None:
    seeds = {"train": (0, 1, 1_000_003), "heldout": (0, 1), "heldout_family": (0,)}
    tasks = {split: [t for s in some for t in generate(split, 300, s)] for split, some in seeds.items()}
    families = {split: {task.family for task in some} for split, some in tasks.items()}
    assert families["heldout_family"] == set(HELDOUT_FAMILIES)
    assert families["train"] == set(FAMILIES) - set(HELDOUT_FAMILIES) == families["heldout"]
    files = {split: {task.files[task.path] for task in some} for split, some in tasks.items()}
    assert not files["train"] & files["heldout"]
    assert not files["train"] & files["heldout_family"]


def test_repositories_have_one_to_three_files_of_many_templates(train: list[MiniTask]) -> None:
    assert {len(task.files) for task in train} == {1, 2, 3}
    assert len({task.template for task in train}) > 40


def test_record_has_the_row_shape_and_hides_the_tests(train: list[MiniTask]) -> None:
    for task in train[:40]:
        record = to_record(task)
        assert record.id == task.id
        assert record.is_local
        assert not record.verified
        assert set(record.expected.values()) == {"PASSED"}
        assert all(test.startswith("tests/test_") for test in record.expected)
        assert [line[1:].strip() for line in record.gold.splitlines() if line[0] == "-"][1:] == [task.old]
        system, user = initial_messages(record.problem_statement)
        assert (system["role"], user["content"]) == ("system", task.issue)
        assert not any(path.startswith("tests") for path in record.files)

"""Software-engineering tasks: records, episodes in a sandbox, and grading with hidden tests."""

from envs.swe.diff.git_diff import diff_files
from envs.swe.environment import SweEnvironment, unverifiable_counts
from envs.swe.episode import PatchError, SweEpisode, start_episode
from envs.swe.grading import grade_patch, verify_record
from envs.swe.pytest_log import TestVerdict, judge_pytest_log, parse_summary
from envs.swe.records import WORKDIR, SweRecord, write_jsonl
from envs.swe.sandboxes import SITE_PACKAGES
from envs.swe.sources import read_jsonl, read_records

__all__ = [
    "SITE_PACKAGES",
    "WORKDIR",
    "PatchError",
    "SweEnvironment",
    "SweEpisode",
    "SweRecord",
    "TestVerdict",
    "diff_files",
    "grade_patch",
    "judge_pytest_log",
    "parse_summary",
    "read_jsonl",
    "read_records",
    "start_episode",
    "unverifiable_counts",
    "verify_record",
    "write_jsonl",
]

"""Software-engineering tasks: records, episodes in a sandbox, grading with hidden tests."""

from envs.swe.diff.agent_patch import PatchError
from envs.swe.diff.git_diff import diff_files
from envs.swe.environment import SweEnvironment
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.grading import grade_patch, verify_record
from envs.swe.pytest_log import Verdict, judge, parse_summary
from envs.swe.records import WORKDIR, SweRecord, commit_content, write_jsonl
from envs.swe.sandboxes import SITE
from envs.swe.sources import read_jsonl, read_records

__all__ = [
    "SITE",
    "WORKDIR",
    "PatchError",
    "SweEnvironment",
    "SweEpisode",
    "SweRecord",
    "Verdict",
    "commit_content",
    "diff_files",
    "grade_patch",
    "judge",
    "parse_summary",
    "read_jsonl",
    "read_records",
    "start_episode",
    "verify_record",
    "write_jsonl",
]

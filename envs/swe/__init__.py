"""Software-engineering tasks: records, episodes in a sandbox, and grading with hidden tests."""

from envs.swe.diff.git_diff import diff_files
from envs.swe.environment import SweEnvironment, unverifiable_counts
from envs.swe.episode import PatchError, SweEpisode, start_episode
from envs.swe.grading import grade_patch, verify_record
from envs.swe.records import SweRecord, write_jsonl
from envs.swe.sources import read_jsonl, read_records

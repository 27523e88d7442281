"""SWE-bench: twelve fields, with or without swebench 5's four grading fields (docs/reference/datasets.md).

Similar rows without grading fields or image (SWE-bench-extra, SWE-Gym-Raw) are rejected here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.swe.datasets.spec import Row, as_record, image_of, parse_list, parse_object, pick_fields

_GRADING = (
    *("image", "eval_script", "log_parser", "eval_type"),
    *("version", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"),
)
JOINED = (*_GRADING, "install_config", "docker_image", "image_name")
"""The fields that a row can take from the row with its ``instance_id`` in another source."""


def recognizes(row: Row) -> bool:
    return "instance_id" in row and "parsed_commit_content" not in row  # NeMo Gym adds an instance_id to R2E-Gym's rows


def read(row: Row) -> dict[str, Any]:
    if not row.get("eval_script"):
        _reject_ungradable(row)
    if _image_assets(row).get("test_patch"):
        raise ValueError(
            "image_assets.test_patch: the hidden tests compare with files that must be downloaded, and sandboxes have "
            "no network; right would be a row without these files"
        )
    image = image_of(row, "swebench/sweb.eval.x86_64.", "_1776_")
    return as_record(row, pick_fields(row, *_GRADING), docker_image=image)


def has_images(row: Row) -> bool:
    """Whether the row's problem statement has images (SWE-bench Multimodal)."""
    return bool(_image_assets(row).get("problem_statement"))


def _image_assets(row: Row) -> Mapping[str, Any]:
    return parse_object(row["image_assets"], "image_assets") if row.get("image_assets") else {}


def _reject_ungradable(row: Row) -> None:
    if "FAIL_TO_PASS" in row and not parse_list(row["FAIL_TO_PASS"]):
        raise ValueError(
            "FAIL_TO_PASS: empty: the tests of SWE-Gym-Raw and of SWE-bench's train split were never run; "
            "right would be a row of SWE-Gym/SWE-Gym, or of SWE-bench's test split"
        )
    if isinstance(meta := row.get("meta"), dict) and "failed_lite_validators" in meta:
        raise ValueError(
            "install_config: required, and not given; SWE-bench-extra has neither test commands nor images; "
            "right would be its successor nebius/SWE-rebench (the option specs joins its rows by id)"
        )

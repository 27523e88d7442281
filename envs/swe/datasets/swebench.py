"""SWE-bench: twelve fields, with or without the four that swebench 5 needs to grade a row (docs/datasets.md).

Rows of its kin that say neither how nor in which image they are graded (SWE-bench-extra, SWE-Gym-Raw) are refused here.
"""

from __future__ import annotations

from typing import Any

from envs.swe.datasets.spec import Row, as_record, given, parse_list, parse_object, published_image

_SPEC_FIELDS = (
    "image",
    "eval_script",
    "log_parser",
    "eval_type",
    "version",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
JOINED = (*_SPEC_FIELDS, "install_config", "docker_image", "image_name")
"""What a row takes from the row of its ``instance_id`` in another source."""


def recognizes(row: Row) -> bool:
    return "instance_id" in row and "parsed_commit_content" not in row  # NeMo Gym gives R2E-Gym's rows an id, too


def read(row: Row) -> dict[str, Any]:
    if not row.get("eval_script"):
        _refuse_what_nothing_grades(row)
    _refuse_missing_baselines(row)
    derived = published_image(row, "swebench/sweb.eval.x86_64.", "_1776_")
    image = row.get("image") or row.get("docker_image") or derived
    return as_record(row, given(row, *_SPEC_FIELDS), docker_image=image)


def shows_images(row: Row) -> bool:
    """Whether the row's problem statement comes with images, as SWE-bench Multimodal's do."""
    assets = row.get("image_assets")
    return bool(assets) and bool(parse_object(assets, "image_assets").get("problem_statement"))


def _refuse_what_nothing_grades(row: Row) -> None:
    if "FAIL_TO_PASS" in row and not parse_list(row["FAIL_TO_PASS"]):
        raise ValueError(
            "FAIL_TO_PASS: empty, so nothing grades the row: SWE-Gym-Raw's and SWE-bench's train split's tests were "
            "never run. Right would be a row of SWE-Gym/SWE-Gym, or of SWE-bench's test split"
        )
    if isinstance(meta := row.get("meta"), dict) and "failed_lite_validators" in meta:
        raise ValueError(
            "install_config: required, and not given; SWE-bench-extra says neither how its tests run nor in which "
            "image. Right would be nebius/SWE-rebench, its successor (the option specs joins its rows by id)"
        )


def _refuse_missing_baselines(row: Row) -> None:
    assets = parse_object(row["image_assets"], "image_assets") if row.get("image_assets") else {}
    if assets.get("test_patch"):
        raise ValueError(
            "image_assets.test_patch: names files that the hidden tests compare with and that only a "
            "download brings; there is no network while tests run. Right would be a row whose tests need none"
        )

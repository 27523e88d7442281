"""NVIDIA's Nemotron rows in NeMo Gym's format: a model request that contains a row of another data set.

Two forms contain tasks: ``responses_create_params.metadata`` with an ``instance_dict`` (the other data set's row as
JSON), and ``instance`` with scripts derived from it (docs/reference/datasets.md).
"""

from __future__ import annotations

import re
from typing import Any

from envs.swe.datasets.spec import Row, as_record, eval_script, grading, parse_object, require

_REQUEST = "responses_create_params"
_OWN_GRADERS = ("nv-internal-1", "swe-bench-ext", "deepswe", "denovoswe")
_SIF = re.compile(r"(?:.*/)?(?P<namespace>[a-z0-9]+)_(?P<name>sweb\.eval\.[^/]+)\.sif")
_SHEBANG = re.compile(r"#!/bin/bash\n")


def recognizes(row: Row) -> bool:
    return _REQUEST in row


def read(row: Row) -> dict[str, Any]:
    """The record of an ``instance``. :func:`unwrap` handles requests around another data set's row first."""
    if "instance" not in row:
        raise ValueError(
            f"{_REQUEST}.metadata.instance_dict: missing, and so is instance: the row is a conversation, not "
            "a task; right would be a row of NeMo Gym's swe_agents or swerl_gen"
        )
    if row.get("mode", "eval") != "eval":
        raise ValueError(f"mode: {row['mode']!r} asks for a test that reproduces the issue; right would be 'eval'")
    instance = parse_object(row["instance"], "instance")
    require(instance, "NeMo Gym's swerl_gen", "instance_id", "repo", "setup_script", "test_script", "FAIL_TO_PASS")
    metadata = parse_object(row.get("metadata", {}), "metadata")
    setup, tests = (_SHEBANG.sub("", str(instance[name])) for name in ("setup_script", "test_script"))
    spec = grading({"test_patch": "", **instance}, eval_script([setup], [tests]), "parse_log_pytest_v2")
    return as_record(instance, spec, docker_image=_image(str(metadata.get("image", ""))))


def unwrap(row: Row) -> Row:
    """The other data set's row inside a request, or the row itself if it is not a request."""
    request = row.get(_REQUEST)
    metadata = request.get("metadata") if isinstance(request, dict) else None
    if not isinstance(metadata, dict) or not metadata.get("instance_dict"):
        return row
    if (name := metadata.get("dataset_name")) in _OWN_GRADERS:
        raise ValueError(f"dataset_name: {name!r} is graded only by NeMo Gym; right would be rows of SWE-Gym")
    return parse_object(metadata["instance_dict"], f"{_REQUEST}.metadata.instance_dict")


def _image(image: str) -> str:
    """The image name; for an Apptainer file (.sif), the name of the image that it was made from."""
    if not image:
        raise ValueError("metadata.image: required in a row of NeMo Gym's swerl_gen, and not given")
    match = _SIF.fullmatch(image)
    if match is None and image.endswith(".sif"):
        raise ValueError(f"metadata.image: {image!r}; right would be a container image, or NAMESPACE_sweb.eval.*.sif")
    return f"{match['namespace']}/{match['name']}:latest" if match else image

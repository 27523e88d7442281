"""A program that runs pip and downloads a source release without running the release's code.

pip normally runs a source release's set-up to read its metadata. ``pip download --no-deps`` uses only the name and the
version from it, which the request already contains.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> int:
    """pip's command line. Raises ``RuntimeError`` if this version of pip prepares source releases differently."""
    from pip._internal.cli.main import main as pip
    from pip._internal.distributions.sdist import SourceDistribution
    from pip._internal.metadata import get_metadata_distribution
    from pip._internal.req.req_install import InstallRequirement

    if "prepare_distribution_metadata" not in vars(SourceDistribution) or "get_dist" not in vars(InstallRequirement):
        raise RuntimeError("this pip prepares source releases in an unknown way")

    def requested_metadata(requirement: Any) -> object:
        request = requirement.req
        text = f"Metadata-Version: 2.1\nName: {request.name}\nVersion: {next(iter(request.specifier)).version}\n"
        return get_metadata_distribution(text.encode(), "METADATA", request.name)

    setattr(SourceDistribution, "prepare_distribution_metadata", lambda *_, **__: None)  # noqa: B010 (mypy)
    setattr(InstallRequirement, "get_dist", requested_metadata)  # noqa: B010 (mypy)
    return int(pip())


if __name__ == "__main__":
    sys.exit(main())

"""Run as a program: pip, with which a source release is downloaded without any of its code being run.

pip asks a source release for its metadata, which runs its set-up; all that ``pip download --no-deps`` makes of the
answer is the name and the version that it asked for.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> int:
    """pip's command line. An exception where this pip is made in another way than this program knows."""
    from pip._internal.cli.main import main as pip
    from pip._internal.distributions.sdist import SourceDistribution
    from pip._internal.metadata import get_metadata_distribution
    from pip._internal.req.req_install import InstallRequirement

    if "prepare_distribution_metadata" not in vars(SourceDistribution) or "get_dist" not in vars(InstallRequirement):
        raise RuntimeError("this pip prepares source releases in an unknown way")

    def as_asked(requirement: Any) -> object:
        asked = requirement.req
        text = f"Metadata-Version: 2.1\nName: {asked.name}\nVersion: {next(iter(asked.specifier)).version}\n"
        return get_metadata_distribution(text.encode(), "METADATA", asked.name)

    setattr(SourceDistribution, "prepare_distribution_metadata", lambda *_, **__: None)  # noqa: B010 (mypy)
    setattr(InstallRequirement, "get_dist", as_asked)  # noqa: B010 (mypy)
    return int(pip())


if __name__ == "__main__":
    sys.exit(main())

"""Downloads models by their id on the Hugging Face hub, once, into the hub's own cache; cached ones work offline."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.errors import UserError
from agent_rl.models.files import read_object

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""The files that engine, trainer and renderer read; weights in other formats are not downloaded."""


def fetch_models(config: RunConfig) -> RunConfig:
    """``config`` with the local directories of its models. Those named by a hub id are downloaded unless cached; an
    interrupted download resumes with the files that are missing. Blocks, and shows progress bars.

    Raises UserError, one line, for an id that the hub refuses, and for a download that fails.
    """
    fetched = config.model_copy(update={"model": fetch_model(config.model, "model")})
    kl = config.train.kl
    if kl.reference is None:
        return fetched
    kl = kl.model_copy(update={"reference": fetch_model(kl.reference, "train.kl.reference")})
    return fetched.model_copy(update={"train": config.train.model_copy(update={"kl": kl})})


def fetch_model(name: Path, key: str) -> Path:
    """The local directory of ``name``, the value of the config's ``key``: a directory, or a hub id
    ``OWNER/NAME[@REVISION]``, which is downloaded. Anything else is returned unchanged. Raises UserError."""
    if name.exists() or not _ID.fullmatch(str(name)):
        return name
    repository, _, revision = str(name).partition("@")
    directory = _snapshot(
        repository, revision or None, lambda why: UserError(f"{key}: {name}: no directory here, {why}")
    )
    if missing := _missing(directory):
        raise UserError(
            f"{key}: {name}: its copy in the cache lacks {missing} ({directory}): download it where there is a network"
        )
    return directory


def _snapshot(repository: str, revision: str | None, error: Callable[[str], UserError]) -> Path:
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_FILES)))
    except GatedRepoError:
        raise error(f"and {hub} requires accepting its terms: do so, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise error(f"and {hub} has no such model, or needs a token that may read it (HF_TOKEN)") from None
    except RevisionNotFoundError:
        raise error(f"and {hub} has no revision {revision} of it") from None
    except LocalEntryNotFoundError:
        raise error(
            f"not in the cache ({constants.HF_HUB_CACHE}), and {hub} cannot be reached: name a directory, or "
            f"download it where there is a network (hf download {repository})"
        ) from None
    except HfHubHTTPError as problem:
        raise error(f"and {hub} refuses it: {str(problem).splitlines()[0]}") from None
    except (httpx.HTTPError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
            raise
        raise error(f"and the connection to {hub} broke ({problem}): start again to resume the download") from None


def _missing(directory: Path) -> str | None:
    """The first file that the checkpoint in ``directory`` lacks, as after an interrupted download; None: complete."""
    index = directory / "model.safetensors.index.json"
    try:
        weights = set(read_object(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (ValueError, LookupError, AttributeError, TypeError):
        return f"a valid {index.name}"
    return next((name for name in ("config.json", *sorted(weights)) if not (directory / name).exists()), None)

"""A model by its id on the Hugging Face hub: fetched once, kept in the hub's own cache, and found there offline."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.errors import UserError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""What engine, trainer and renderer read of a checkpoint; the same weights in other forms are left on the hub."""


def with_models(config: RunConfig) -> RunConfig:
    """``config`` with the directories of its models: those that it names by a hub id are fetched first, where they
    are not cached. Blocks, with bars that say how far it is; a fetch that is cut short goes on where it stopped.

    Raises UserError, one line, for an id that the hub does not give us, and for one that cannot be fetched.
    """
    fetched = config.model_copy(update={"model": fetch(config.model, "model")})
    kl = config.train.kl
    if kl.reference is None:
        return fetched
    kl = kl.model_copy(update={"reference": fetch(kl.reference, "train.kl.reference")})
    return fetched.model_copy(update={"train": config.train.model_copy(update={"kl": kl})})


def fetch(name: Path, key: str) -> Path:
    """The directory of the model that the config's ``key`` calls ``name``: a directory's own, or of the hub id
    ``OWNER/NAME[@REVISION]``. What is neither is given back as it is. Raises UserError."""
    if name.exists() or not _ID.fullmatch(str(name)):
        return name
    repository, _, revision = str(name).partition("@")
    directory = _snapshot(
        repository, revision or None, lambda why: UserError(f"{key}: {name}: no directory here, {why}")
    )
    if missing := _missing(directory):
        raise UserError(f"{key}: {name}: its copy in the cache lacks {missing} ({directory}): fetch it with a network")
    return directory


def _snapshot(repository: str, revision: str | None, error: Callable[[str], UserError]) -> Path:
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
        raise error(f"and {hub} gives it only to those who accepted its terms: do so, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise error(f"and {hub} has no such model, or wants a token that may read it (HF_TOKEN)") from None
    except RevisionNotFoundError:
        raise error(f"and {hub} has no revision {revision} of it") from None
    except LocalEntryNotFoundError:
        raise error(
            f"not in the cache ({constants.HF_HUB_CACHE}), and {hub} cannot be reached: name a directory, or fetch it "
            f"where there is a network (hf download {repository})"
        ) from None
    except HfHubHTTPError as problem:
        raise error(f"and {hub} does not give it: {str(problem).splitlines()[0]}") from None
    except OSError as problem:  # the HTTP client's errors are among them
        if problem.errno == errno.ENOSPC:
            raise
        raise error(f"and the way to {hub} broke ({problem}): start again, it goes on where it stopped") from None


def _missing(directory: Path) -> str | None:
    """The first file that a checkpoint in ``directory`` lacks: of one fetched in part, found without a network."""
    index = directory / "model.safetensors.index.json"
    weights = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return next((name for name in ("config.json", *sorted(weights)) if not (directory / name).exists()), None)

"""Tasks in Harbor's layout: ``task.toml`` and the files beside it.

The format is that of harbor 0.26 (``models/task/config.py``, ``models/task/paths.py``), schema 1.4; older files name
the schema ``version``. What agent-rl cannot run is refused by name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from envs.types import TaskRecordError

CONFIG = "task.toml"
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_MARKER = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_SIZE = re.compile(r"([\d.]+)\s*([GMK])B?", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_NOBODY = ("nobody", "65534")
# Commands that need a network. A line that only speaks to its own machine, or to no index, does not.
_DOWNLOAD = re.compile(
    r"\b(?:apt-get|apt|apk|yum|dnf)\b.*\b(?:update|install|add)\b|\bpip3?\s+install\b|\buv\s+(?:pip|tool|add|sync|run)\b"
    r"|\buvx\s|\b(?:curl|wget)\s|\bgit\s+clone\b|\b(?:npm|pnpm|yarn|conda|cargo|gem|go)\s+(?:ci\b|i\b|install\b|add\b)"
)
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|--no-index|--offline")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class HealthCheck(_Section):
    """A command that must succeed before the agent begins, as docker's HEALTHCHECK."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: PositiveFloat = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: PositiveInt = 3


class AgentSection(_Section):
    timeout_sec: PositiveFloat | None = None
    user: str | int | None = None


class VerifierSection(_Section):
    timeout_sec: PositiveFloat = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None


class SolutionSection(_Section):
    env: dict[str, str] = Field(default_factory=dict)


class EnvironmentSection(_Section):
    build_timeout_sec: PositiveFloat = 600.0
    docker_image: str | None = None
    cpus: PositiveFloat | None = None
    memory_mb: PositiveInt | None = None
    storage_mb: PositiveInt | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    healthcheck: HealthCheck | None = None

    @model_validator(mode="before")
    @classmethod
    def _convert_sizes(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Old files have ``memory`` and ``storage``, for example "2G"."""
        data = dict(data)
        for old in ("memory", "storage"):
            if match := _SIZE.fullmatch(str(data.pop(old, "")).strip()):
                data.setdefault(f"{old}_mb", int(float(match[1]) * _MIB[match[2].upper()]))
        return data


class HarborConfig(_Section):
    schema_version: str = "1.4"
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, data: dict[str, Any]) -> dict[str, Any]:
        return data if "schema_version" in data or "version" not in data else data | {"schema_version": data["version"]}


@dataclass(frozen=True)
class HarborTask:
    """One task in ``directory``. ``network``: it asks for a network, which sandboxes do not have."""

    id: str
    directory: Path
    config: HarborConfig
    instruction: str
    network: bool

    @property
    def image(self) -> str | None:
        """The image that the task names; None if it is built from ``environment/``."""
        return self.config.environment.docker_image

    @property
    def uploads_environment(self) -> bool:
        """Whether the files of ``environment/`` go into the working directory: an image is named beside them."""
        environment = self.directory / "environment"
        return self.image is not None and environment.is_dir() and not (environment / "Dockerfile").exists()

    def downloads(self) -> list[str]:
        """The lines of the tests' scripts that need a network, each with its place."""
        return [
            f"{path.name}:{number}: {line.strip()[:80]}"
            for path in sorted((self.directory / "tests").rglob("*.sh"))
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
            if _DOWNLOAD.search(line.partition("#")[0]) and not _LOCAL.search(line)
        ]


def read_task(directory: Path) -> HarborTask:
    """The task in ``directory``. Raises ``TaskRecordError``, a line for each problem."""
    try:
        raw = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))
        config = HarborConfig.model_validate(raw)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskRecordError(f"{directory / CONFIG}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise TaskRecordError(f"{directory / CONFIG}: {field}: {first['msg']}, not {first['input']!r}") from None
    if problems := [*_unsupported(raw, directory), *_incomplete(config, directory)]:
        raise TaskRecordError("\n".join(f"task {directory.name}: {problem}" for problem in problems))
    instruction = _without_marker((directory / "instruction.md").read_text(encoding="utf-8"))
    return HarborTask(directory.name, directory, config, instruction, _asks_for_network(raw))


def resolve(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with ``${NAME:-default}`` replaced by the default: no variable of this machine enters a
    sandbox."""
    return {name: match[2] if (match := _TEMPLATE.fullmatch(value)) else value for name, value in env.items()}


def read_files(directory: Path, task: HarborTask) -> dict[str, tuple[bytes, bool]]:
    """The files below ``directory`` by relative path: content, and whether it is executable.

    Raises ``TaskRecordError`` for a link out of the task's directory.
    """
    files: dict[str, tuple[bytes, bool]] = {}
    root = task.directory.resolve()
    for path in sorted(directory.rglob("*")):
        if not path.resolve().is_relative_to(root):
            raise TaskRecordError(f"task {task.id}: {path}: a link out of the task's directory; use a file")
        if path.is_file():
            files[str(path.relative_to(directory))] = path.read_bytes(), bool(path.stat().st_mode & 0o111)
    return files


def _unsupported(raw: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """What the task needs and agent-rl does not have, a line each."""
    environment, verifier = raw.get("environment", {}), raw.get("verifier", {})
    separate = verifier.get("environment_mode") == "separate" or "environment" in verifier
    needs = {
        "several steps ([[steps]])": raw.get("steps") or (directory / "steps").is_dir(),
        "compose (environment/docker-compose.yaml)": any((directory / "environment" / n).exists() for n in _COMPOSE),
        "MCP servers ([environment].mcp_servers)": environment.get("mcp_servers"),
        "skills ([environment].skills_dir)": environment.get("skills_dir"),
        "GPUs ([environment].gpus)": environment.get("gpus") or environment.get("tpu"),
        "Windows ([environment].os)": str(environment.get("os", "linux")).lower() != "linux",
        "a separate verifier image ([verifier].environment)": separate,
        "collect commands ([[verifier.collect]])": verifier.get("collect"),
        "an earlier trajectory (trajectory.json)": (directory / "trajectory.json").exists(),
        "ignore rules (.harborignore)": any(directory.rglob(".harborignore")),
    }
    yield from (f"it needs {what}, which is not supported" for what, needed in needs.items() if needed)


def _incomplete(config: HarborConfig, directory: Path) -> Iterator[str]:
    """What is missing or wrong in the task itself, a line each."""
    if not config.schema_version.startswith("1."):
        yield f"schema_version {config.schema_version!r} is unknown; right would be 1.0 to 1.4"
    for name in ("instruction.md", "tests/test.sh"):
        if not (directory / name).is_file():
            yield f"{name} is missing"
    if config.environment.docker_image is None and not (directory / "environment/Dockerfile").is_file():
        yield "it has neither environment/Dockerfile nor [environment].docker_image"
    for section, owner in (
        ("environment", config.environment),
        ("verifier", config.verifier),
        ("solution", config.solution),
    ):
        for name, value in owner.env.items():
            if (match := _TEMPLATE.fullmatch(value)) and match[2] is None:
                yield f"[{section}].env.{name}: {value} has no default; sandboxes get no variable of this machine"
    for section, user in (("agent", config.agent.user), ("verifier", config.verifier.user)):
        if str(user).partition(":")[0] in _NOBODY:
            yield f"[{section}].user: the user nobody keeps the sandbox alive; right would be another user"


def _asks_for_network(raw: Mapping[str, Any]) -> bool:
    sections = [raw.get(name, {}) for name in ("environment", "agent", "verifier")]
    modes = {section.get("network_mode") for section in sections}
    return bool(modes & {"public", "allowlist"}) or bool(sections[0].get("allow_internet"))


def _without_marker(text: str) -> str:
    """The instruction without the leading lines that mark a benchmark's files; agents do not see them."""
    lines = text.splitlines()
    first = next((index for index, line in enumerate(lines) if not _MARKER.fullmatch(line.strip())), len(lines))
    return "\n".join(lines[first:]).strip("\n")

"""The section ``engine``."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agent_rl.bootstrap import NVIDIA, engine_python
from agent_rl.config.base import Precision, Section
from agent_rl.errors import ConfigError, UserError


class EngineConfig(Section):
    """The inference engines: SGLang servers that agent-rl launches, or running servers listed in `urls` and
    `urls_file`."""

    urls: tuple[str, ...] = Field(
        (),
        description="URLs of running SGLang servers. If this is empty and urls_file is null, agent-rl launches "
        "`count` servers.",
    )
    urls_file: Path | None = Field(
        None,
        description="File with the URLs of running SGLang servers, one per line. A run adds or removes engines when "
        "the file changes. null: no file.",
    )
    count: int = Field(1, gt=0, description="Number of servers to launch. Ignored if urls or urls_file is set.")
    gpus: int = Field(
        1, gt=0, description="GPUs (tensor parallel size) per server, launched or external. Unused on CPUs."
    )
    placement: Literal["local", "ray"] = Field(
        "local",
        description="Where launched servers run. local: on this node. ray: on nodes of the Ray cluster "
        "(train.ray_address) with enough free GPUs; without GPUs a server reserves `threads` CPUs.",
    )
    nodes: int = Field(1, gt=0, description="Nodes per server; each node provides gpus / nodes GPUs.")
    min_count: int | None = Field(
        None,
        gt=0,
        description="Number of servers required to start a run on a Ray cluster. The others start when nodes with "
        "free resources join. null: all servers.",
    )
    colocate: bool = Field(
        False,
        description="Run launched servers on the trainer's GPUs. The servers sleep and release their memory while the "
        "trainer works.",
    )
    health_interval: float = Field(5.0, gt=0, description="Seconds between two health checks of an engine.")
    restarts: int = Field(
        3,
        ge=0,
        description="Restarts of one engine allowed between two weight updates. After one more failure the engine is "
        "removed.",
    )
    python: str = Field(
        default_factory=lambda: str(engine_python()),
        description="Python interpreter for launched servers. Default: the environment made by "
        "`agent-rl install engine`.",
    )
    api_key_env: str | None = Field(
        None,
        description="Environment variable that holds the API key of the servers. null: no key for engine.urls, and a "
        "random key for launched servers.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of launched servers. auto: cuda if a GPU is available, else cpu."
    )
    dtype: Precision = Field("bfloat16", description="Data type of the engine's weights.")
    port: int = Field(
        0, ge=0, le=65535, description="First launched server's port; others take the next ones. 0: free ports."
    )
    threads: int = Field(0, ge=0, description="CPU threads per launched server. 0: all cores.")
    max_total_tokens: int = Field(65536, gt=0, description="KV cache capacity of a launched server, in tokens.")
    max_running_requests: int = Field(64, gt=0, description="Requests that a launched server runs concurrently.")
    extra_args: tuple[str, ...] = Field((), description="Additional command-line arguments of launched servers.")
    start_timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds until a launched server must report healthy. null: 600 on a CPU, and 1800 on a GPU, where "
        "SGLang compiles kernels at the first start.",
    )
    request_timeout: float = Field(600.0, gt=0, description="Timeout of one request, in seconds.")
    retries: int = Field(5, ge=0, description="Retries of a request after an infrastructure failure.")
    pause_mode: Literal["turn", "retract", "in_place"] = Field(
        "turn",
        description="What a weight update does to running requests. turn: end them; each turn continues in a new "
        "request with the new weights. retract: requeue them and recompute their KV cache with the new weights. "
        "in_place: continue them with the old KV cache.",
    )
    weight_sync: Literal["full", "delta"] = Field(
        "full",
        description="What a weight update sends. full: all weights. delta: the changes since the last update, which "
        "every engine proves by digests, and all weights when in doubt. delta costs host memory for one copy of the "
        "weights in trainer rank 0 and in each engine (an unnamed file in TMPDIR there); requires launched servers.",
    )
    weight_sync_timeout: float = Field(120.0, gt=0, description="Seconds for one call or broadcast of a weight update.")
    weight_bucket_mb: float | None = Field(
        None,
        gt=0,
        description="Size of one transfer of a weight update, in MiB. null: 512 where the trainer is on GPUs, else 30. "
        "On a CPU, every transfer of 32 MiB or more allocates new host memory, which takes longer than the copy.",
    )

    @property
    def launched(self) -> bool:
        """Whether agent-rl launches the servers."""
        return not self.urls and self.urls_file is None

    @property
    def local_device(self) -> str:
        """``cpu`` or ``cuda``: ``device``, or what this machine has."""
        if self.device != "auto":
            return self.device
        return "cuda" if NVIDIA.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "cpu"

    @property
    def may_use_gpus(self) -> bool:
        """Whether launched servers run on GPUs, or may: a Ray cluster can have GPUs that this machine lacks."""
        return self.local_device == "cuda" or (self.placement == "ray" and self.device == "auto")

    @property
    def start_seconds(self) -> float:
        """``start_timeout`` or its default."""
        return self.start_timeout or (1800.0 if self.may_use_gpus else 600.0)

    def bucket_mb(self, *, cuda: bool) -> float:
        """``weight_bucket_mb`` or its default. ``cuda``: whether the trainer is on GPUs."""
        return self.weight_bucket_mb or (512.0 if cuda else 30.0)

    @property
    def merges_adapters(self) -> bool:
        """Whether a weight update sends only the LoRA adapters (``train.lora``), which the servers merge.

        External servers cannot merge them. A colocated server loses its base weights when it sleeps.
        """
        return self.launched and not self.colocate

    @property
    def sglang_pause_mode(self) -> str:
        """``pause_mode`` under SGLang's name."""
        return "abort" if self.pause_mode == "turn" else self.pause_mode

    @property
    def external_urls(self) -> tuple[str, ...]:
        """The distinct URLs in ``urls`` and ``urls_file``.

        Raises UserError if ``urls_file`` cannot be read or no URL is found.
        """
        urls = [url.rstrip("/") for url in self.urls]
        if self.urls_file is not None:
            try:
                urls += parse_addresses(self.urls_file.read_text())
            except OSError as error:
                raise UserError(f"engine.urls_file: {self.urls_file}: {error.strerror}") from None
            if not urls:
                raise UserError(f"engine.urls_file: {self.urls_file} contains no URL; write one URL per line")
        return tuple(dict.fromkeys(urls))

    @property
    def api_key(self) -> str | None:
        """The servers' API key; None without one. Raises ConfigError if its variable is not set."""
        if self.api_key_env is None:
            return _process_key() if self.launched else None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"engine.api_key_env: the environment variable {self.api_key_env} is not set; store the key in it"
            )
        return key

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request to the engines. Raises ConfigError as :attr:`api_key`."""
        key = self.api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    @model_validator(mode="after")
    def _check_colocation(self) -> EngineConfig:
        conflicts = {
            "cannot use external servers: remove engine.urls and engine.urls_file": not self.launched,
            "conflicts with engine.placement ray, which reserves separate GPUs: set it to local": self.placement
            == "ray",
            "needs GPUs, and engine.device is cpu: set engine.colocate to false": self.device == "cpu",
        }
        if self.colocate and (messages := [message for message, conflict in conflicts.items() if conflict]):
            raise ValueError(f"engine.colocate {messages[0]}")
        return self

    @model_validator(mode="after")
    def _check_weight_sync(self) -> EngineConfig:
        conflicts = {
            "requires launched servers: remove engine.urls and engine.urls_file": not self.launched,
            "conflicts with engine.colocate, whose servers lose their weights when they sleep": self.colocate,
            f"requires servers on one node each, and engine.nodes is {self.nodes}": self.nodes > 1,
        }
        if self.weight_sync == "delta" and (texts := [text for text, conflict in conflicts.items() if conflict]):
            raise ValueError(f"engine.weight_sync delta {texts[0]}, or set weight_sync to full")
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> EngineConfig:
        if self.placement == "local" and (self.nodes > 1 or self.min_count):
            raise ValueError("engine.nodes and engine.min_count require a Ray cluster: set engine.placement to ray")
        if self.gpus % self.nodes and self.device != "cpu":
            raise ValueError(f"engine.gpus is {self.gpus}; it must be a multiple of engine.nodes ({self.nodes})")
        if self.min_count is not None and self.min_count > self.count:
            raise ValueError(f"engine.min_count is {self.min_count}; it must be at most engine.count ({self.count})")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.urls contains the same URL twice; list every server once")
        if self.port + self.count > 65536:
            raise ValueError(
                f"engine.port is {self.port}; {self.count} servers need a port each: use at most {65536 - self.count}"
            )
        return self


@functools.cache
def _process_key() -> str:
    """The key of all servers that this process launches."""
    return secrets.token_hex(32)


def parse_addresses(text: str) -> Sequence[str]:
    """The distinct URLs in ``text``: one per line, comments after ``#`` and blank lines ignored."""
    lines = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))

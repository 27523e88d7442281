"""The section ``engine``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agent_rl.bootstrap import engine_python
from agent_rl.config.base import Precision, Section
from agent_rl.errors import ConfigError, UserError


class EngineConfig(Section):
    """The inference engines: servers that we launch, or running ones by ``urls`` and ``urls_file``."""

    urls: tuple[str, ...] = Field((), description="Running SGLang servers; without any, count are launched.")
    urls_file: Path | None = Field(
        None,
        description="File with the addresses of running SGLang servers, one a line; lines that are added or taken away "
        "while a run goes on add engines or take them out of use.",
    )
    count: int = Field(1, gt=0, description="Servers to launch, where none are named.")
    gpus: int = Field(
        1, gt=0, description="GPUs of each server, launched or named: its tensor parallelism, where it runs on GPUs."
    )
    placement: Literal["local", "ray"] = Field(
        "local",
        description="Which machines launched servers run on: this one, or those of the Ray cluster (train.ray_address) "
        "that have the GPUs; without GPUs a server takes CPUs there, as many as threads.",
    )
    nodes: int = Field(1, gt=0, description="Machines that each server spans, with gpus / nodes GPUs on each.")
    min_count: int | None = Field(
        None,
        gt=0,
        description="Servers with which a run begins on a Ray cluster; the others are started when machines with room "
        "for them join. None: all.",
    )
    colocate: bool = Field(
        False,
        description="Whether servers launched on this machine have the trainer's GPUs: they sleep, and free their "
        "memory, while it works.",
    )
    health_interval: float = Field(5.0, gt=0, description="Seconds between two questions about an engine's health.")
    restarts: int = Field(
        3,
        ge=0,
        description="How often an engine may die, or lose its weights, between two updates it lives through; after one "
        "more it is not used again.",
    )
    python: str = Field(
        default_factory=lambda: str(engine_python()),
        description="Interpreter of the engine environment; by default that of `agent-rl install engine`.",
    )
    api_key_env: str | None = Field(
        None, description="Environment variable with the key of a gateway before engine.urls; None sends no key."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where a launched server runs.")
    dtype: Precision = Field("bfloat16", description="Precision of the engine's weights.")
    port: int = Field(0, ge=0, le=65535, description="Port of a launched server; 0 takes a free one.")
    threads: int = Field(0, ge=0, description="CPU threads of a launched server; 0 takes all cores.")
    max_total_tokens: int = Field(65536, gt=0, description="KV cache slots of a launched server.")
    max_running_requests: int = Field(64, gt=0, description="Requests a launched server runs at once.")
    extra_args: tuple[str, ...] = Field((), description="Further arguments of a launched server.")
    start_timeout: float = Field(180.0, gt=0, description="Seconds until a launched server must be healthy.")
    request_timeout: float = Field(600.0, gt=0, description="Seconds one request may take.")
    retries: int = Field(5, ge=0, description="Retries of a request that met an infrastructure failure.")
    pause_mode: Literal["turn", "retract", "in_place"] = Field(
        "turn",
        description="What a weight update does to running requests: end them with what they have, so that their turns "
        "go on by requests of the new weights; compute their prefixes again with the new weights; or go on with the "
        "old ones.",
    )
    weight_sync_timeout: float = Field(
        120.0, gt=0, description="Seconds that one call or broadcast of a weight update may take."
    )
    weight_bucket_mb: float = Field(
        30,
        gt=0,
        description="MiB of weights that travel at once in a weight update. From 32 on, host memory of that size is "
        "asked of the system anew each time, which costs more than filling it.",
    )

    @property
    def launched(self) -> bool:
        """Whether the servers are ours to start."""
        return not self.urls and self.urls_file is None

    @property
    def merges_adapters(self) -> bool:
        """Whether servers get adapters (``train.lora``) alone: those of others don't merge them with their weights, and
        one that slept has lost these."""
        return self.launched and not self.colocate

    @property
    def server_pause(self) -> str:
        """SGLang's name for what becomes of requests that still run when it is paused."""
        return "abort" if self.pause_mode == "turn" else self.pause_mode

    @property
    def named(self) -> tuple[str, ...]:
        """The addresses of running servers in ``urls`` and ``urls_file``. Raises UserError for a file that can't be
        read, or where there is none in it."""
        urls = [url.rstrip("/") for url in self.urls]
        if self.urls_file is not None:
            try:
                urls += addresses(self.urls_file.read_text())
            except OSError as error:
                raise UserError(f"engine.urls_file: {self.urls_file}: {error.strerror}") from None
            if not urls:
                raise UserError(f"engine.urls_file: {self.urls_file}: no address in it; write one a line")
        return tuple(dict.fromkeys(urls))

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the engines carries. Raises ConfigError where the key's variable is not set."""
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(f"engine.api_key_env: the environment has no {self.api_key_env}: put the key there")
        return {"authorization": f"Bearer {key}"}

    @model_validator(mode="after")
    def _can_be_colocated(self) -> EngineConfig:
        reasons = {
            "engine.urls and engine.urls_file name servers of others: leave them out": not self.launched,
            "engine.placement ray gives engines GPUs of their own: set placement to local": self.placement == "ray",
            "engine.device is cpu, where a server can release nothing: turn it off": self.device == "cpu",
        }
        if self.colocate and (wrong := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"engine.colocate shares the trainer's GPUs with servers of our own, and {wrong[0]}")
        return self

    @model_validator(mode="after")
    def _makes_sense(self) -> EngineConfig:
        if self.placement == "local" and (self.nodes > 1 or self.min_count):
            raise ValueError(
                "engine.nodes and engine.min_count are for servers on a Ray cluster: set engine.placement to ray"
            )
        if self.gpus % self.nodes and self.device != "cpu":
            raise ValueError(
                f"engine.gpus is {self.gpus} and engine.nodes {self.nodes}: take a multiple, each has as many"
            )
        if self.min_count is not None and self.min_count > self.count:
            raise ValueError(
                f"engine.min_count is {self.min_count} and engine.count {self.count}: lower it, or raise count"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.urls names a server twice: name each once")
        if self.port + self.count > 65536:
            raise ValueError(f"engine.port is {self.port} and {self.count} servers need one each: take a lower one")
        return self


def addresses(text: str) -> Sequence[str]:
    """The addresses in a file of them: one a line, what follows a ``#`` left out, each once."""
    lines = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))

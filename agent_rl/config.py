"""The typed schema of a config, a section a class. Imports no torch. :mod:`agent_rl.config_files` reads the files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from agent_rl.bootstrap import engine_python
from agent_rl.errors import ConfigError, UserError
from agent_rl.objective_facts import Aggregation, objective_facts
from tools import ToolFormatError, tool_format

RouteSource = Literal["sampled", "latest"]
FilterKind = Literal["none", "overlong", "compact"]
Precision = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]
Replay = Literal["r3", "r2", "off"]
Baseline = Literal["mean", "leave_one_out", "batch"]
AdvantageScale = Literal["group", "batch", "none"]
OldLogprobSource = Literal["recompute", "rollout", "rescore"]
CorrectionWeight = Literal["token", "sequence"]
CorrectionMask = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]
OnSpike = Literal["skip", "clip", "allow"]
Planner = Literal["foremoe", "eplb", "shadow"]
Home = Literal["contiguous", "measured"]
ExpertTransfer = Literal["pool", "exchange"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]

OWN_INTERFACE = "agent-rl"
MAX_STALENESS = 8
"""How many updates old a trained token's weights may be at most."""
_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads a bare ``off`` as false."""


def _registered(key: str, load: Callable[[str], object], error: type[Exception]) -> AfterValidator:
    """For the value of ``key``: a name for which ``load`` raises ``error``, in one line, is refused."""

    def check(name: str) -> str:
        try:
            load(name)
        except error as problem:
            raise ValueError(f"{key}: {problem}") from None
        return name

    return AfterValidator(check)


ToolFormat = Annotated[str, _registered("rollout.tool_format", tool_format, ToolFormatError)]
Objective = Annotated[str, _registered("train.objective", objective_facts, ConfigError)]


def _interface(name: str) -> str:
    """``name``, if it is an interface's. The usual one is known without a look at the environments' package."""
    if name == OWN_INTERFACE:
        return name
    from envs import InterfaceError, find_interface

    try:
        find_interface(name)
    except InterfaceError as error:
        raise ValueError(f"env.interface: {error}") from None
    return name


def _sandbox_backend(name: str) -> str:
    """``name``, if it is a sandbox backend's."""
    from sandbox import BACKENDS, SandboxUnavailableError

    try:
        BACKENDS.find(name)
    except SandboxUnavailableError as error:
        raise ValueError(f"sandbox.backend: {error}") from None
    return name


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    hosts: Literal["local", "ray"] = Field(
        "local",
        description="Which machines launched servers run on: this one, or those of the Ray cluster (train.ray_address) "
        "that have the GPUs; without GPUs a server takes CPUs there, as many as threads.",
    )
    nodes: int = Field(1, gt=0, description="Machines that each server spans, with gpus / nodes GPUs on each.")
    least: int | None = Field(
        None,
        gt=0,
        description="Servers with which a run begins on a Ray cluster; the others are started when machines with room "
        "for them join. None: all.",
    )
    health_every: float = Field(5.0, gt=0, description="Seconds between two questions about an engine's health.")
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
    def _makes_sense(self) -> EngineConfig:
        if self.hosts == "local" and (self.nodes > 1 or self.least):
            raise ValueError("engine.nodes and engine.least are for servers on a Ray cluster: set engine.hosts to ray")
        if self.gpus % self.nodes and self.device != "cpu":
            raise ValueError(
                f"engine.gpus is {self.gpus} and engine.nodes {self.nodes}: take a multiple, each has as many"
            )
        if self.least is not None and self.least > self.count:
            raise ValueError(f"engine.least is {self.least} and engine.count {self.count}: lower it, or raise count")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("engine.urls names a server twice: name each once")
        if self.port + self.count > 65536:
            raise ValueError(f"engine.port is {self.port} and {self.count} servers need one each: take a lower one")
        return self


def addresses(text: str) -> Sequence[str]:
    """The addresses in a file of them: one a line, what follows a ``#`` left out, each once."""
    lines = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


class SandboxConfig(Section):
    """Where the agent's commands run."""

    backend: Annotated[str, AfterValidator(_sandbox_backend)] = Field(
        "auto",
        description="auto, docker, podman, bubblewrap, or one of your own (docs/sandboxes.md). auto takes docker where "
        "an engine answers, bubblewrap where none does.",
    )
    runtime: str | None = Field(
        None,
        description="What the container engine starts boxes with: runsc for gVisor, where the engine knows it; None "
        "takes the engine's default.",
    )
    image: str | None = Field(None, description="Image for tasks that name none; None takes the backend's default.")
    image_root: Path | None = Field(
        None,
        description="Folder below which the images that tasks name must lie under bubblewrap, where an image is a "
        "folder of this machine. None: tasks with images of their own are refused there.",
    )
    memory_mb: int = Field(512, gt=0, description="Memory limit of one box.")
    pids: int = Field(128, gt=0, description="Process limit of one box.")
    cpus: float = Field(1.0, gt=0, description="CPU limit of one box.")
    disk_mb: int = Field(4096, gt=0, description="Disk in MiB by which one box may grow, or it is ended.")
    inodes: int = Field(200_000, gt=0, description="Files, folders and links by which one box may grow.")
    hosts: Literal["local", "ray"] = Field(
        "local",
        description="Which machines boxes are on: this one, or the nodes of the Ray cluster (train.ray_address).",
    )
    boxes_per_host: int = Field(
        64, gt=0, description="Boxes on one host of the Ray cluster; those that grade an episode come on top."
    )
    max_starts: int = Field(8, gt=0, description="Boxes being started on a host at once.")
    max_execs: int = Field(64, gt=0, description="Commands running in a host's boxes at once.")
    pull: bool = Field(False, description="Fetch container images that are not on the machine.")
    image_budget_gb: float | None = Field(
        None, gt=0, description="Disk for fetched images, in GB; those used longest ago are removed. None: no limit."
    )
    warm: int = Field(0, ge=0, description="Idle boxes that a host keeps ready, like those asked for lately.")


class EnvConfig(Section):
    """Which tasks. ``name`` is a registered environment, an entry point or a dotted path ``package.module:Class``."""

    name: str = Field("mini", description="The environment.")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment's constructor.")
    interface: Annotated[str, AfterValidator(_interface)] = Field(
        OWN_INTERFACE,
        description="How agents meet the tasks of swe and mini: agent-rl, r2egym, mini-swe-agent, openhands, or one of "
        "your own (docs/interfaces.md). It decides keys of rollout that the config leaves out.",
    )
    tool_style: Literal["full", "concise"] = Field(
        "full", description="concise shortens prompts and tool answers for models with a short context."
    )
    start_timeout: float = Field(
        600.0, gt=0, description="Seconds a task may take to start, beside waits for its turn and for image pulls."
    )
    grade_timeout: float = Field(300.0, gt=0, description="Seconds one run of the hidden tests may take.")
    quarantine: Path | None = Field(None, description="File of tasks to leave out, as `agent-rl doctor` writes it.")

    @property
    def grading_limit(self) -> float:
        """Seconds a whole grading may take: the hidden tests run twice at most (with the agent's patch, and with the
        true fix to compare with), each time in a box that is started for it."""
        return 2 * (self.start_timeout + self.grade_timeout)


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476): groups whose rewards are all equal are thrown away, and further tasks
    drawn until a step has its ``tasks_per_step`` groups."""

    enabled: bool = Field(False, description="Draw a further task for every group that teaches nothing.")
    max_draws: int = Field(4, gt=0, description="Tasks drawn for a step at most, in multiples of tasks_per_step.")
    when_short: Literal["train", "stop"] = Field(
        "train", description="A step that still lacks groups then: train on those it has, or end the run."
    )


class HarnessConfig(Section):
    """An agent program that drives the episodes, over the endpoint that serves it; see docs/harness.md."""

    command: str = Field(
        ..., description="What bash runs for an episode; its standard input is the task's text.", min_length=1
    )
    place: Literal["box", "host"] = Field(
        "box", description="Where it runs: in the task's box, or on this machine, its tools' calls in the box."
    )
    folder: Path | None = Field(
        None, description="Folder that the box sees read-only as /opt/agent-rl/harness: the program's own files."
    )
    dialects: tuple[Literal["chat", "responses", "messages"], ...] = Field(
        ("chat", "responses", "messages"), description="The APIs served: OpenAI's two, and Anthropic's Messages."
    )
    history: Literal["keep", "follow"] = Field(
        "keep",
        description="After a user's message: keep the thoughts of turns before, or render the conversation again as "
        "the chat template does, which may drop them and begin a branch.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables of the program.")


class RolloutConfig(Section):
    """How episodes are driven."""

    group_size: int = Field(8, gt=0, description="Trajectories a task (n).")
    tasks_per_step: int = Field(8, gt=0, description="Tasks a global step.")
    concurrency: int = Field(64, gt=0, description="Episodes in flight at once.")
    max_turns: int = Field(50, gt=0, description="Turns an episode may take.")
    max_tokens: int = Field(65536, gt=0, description="Tokens a trajectory may hold.")
    max_new_tokens: int = Field(4096, gt=0, description="Tokens one turn may sample.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 the log-probs are not renormalised.")
    tool_format: ToolFormat = Field(
        "hermes",
        description="Text format of tool calls: hermes, xml, or one of your own (docs/tools.md).",
    )
    describe_tools: bool = Field(
        True, description="Tell the agent its tools in the opening prompt; off for a model trained on these very tools."
    )
    tool_timeout: float = Field(90.0, gt=0, description="Seconds one tool call may take.")
    time_limit: float = Field(3600.0, gt=0, description="Seconds one episode may take.")
    max_parse_failures: int | None = Field(
        3, gt=0, description="Turns in a row without a well-formed call that end an episode; None: no number does."
    )
    sandbox_retries: int = Field(
        3, ge=0, description="Episodes of a group that may be run again after an infrastructure failure."
    )
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    harness: HarnessConfig | None = Field(None, description="An agent program in place of the built-in loop.")

    @property
    def logprob_temperature(self) -> float:
        """The temperature that log-probs are compared at; those of a greedy rollout (0) are the raw ones, of 1."""
        return self.temperature or 1.0


class ParallelConfig(Section):
    """Megatron's parallel layout. The data-parallel size follows from ``world_size``."""

    world_size: int = Field(1, gt=0, description="Trainer ranks.")
    tensor: int = Field(1, gt=0)
    pipeline: int = Field(1, gt=0)
    virtual_pipeline: int = Field(1, gt=0, description="Model chunks of a pipeline stage (interleaved 1F1B).")
    context: int = Field(1, gt=0)
    expert: int = Field(1, gt=0)
    dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="How tokens get to their experts; allgather only without pipeline stages."
    )
    distributed_optimizer: bool = Field(
        True,
        description="The ranks that hold a copy of a weight share its optimizer state out (ZeRO-1); a single copy "
        "is kept whole.",
    )


class BalanceTransferConfig(Section):
    """How borrowed experts reach the ranks that compute them; docs/balancing.md says what each costs."""

    recompute: ExpertTransfer = Field("pool", description="In passes without gradients.")
    update: ExpertTransfer = Field("exchange", description="In passes with gradients, which always return by exchange.")


class BalanceConfig(Section):
    """Expert ranks are given equal work in every micro-batch and layer, by the routes that replay knows beforehand
    (ForeMoE); docs/balancing.md says when it helps."""

    enabled: bool = Field(False, description="Let expert ranks borrow each other's experts for a micro-batch.")
    planner: Planner = Field(
        "foremoe", description="Who borrows what: by the foreseen routes, or a baseline to compare with."
    )
    slots: int = Field(4, gt=0, description="Experts that a rank may borrow at once, in each layer.")
    link_slots: int | None = Field(
        None, ge=0, description="How many of these may keep tokens within a machine; None: the planner chooses."
    )
    min_rows: int = Field(16, gt=0, description="Products of fewer tokens of a shared expert are filled up to so many.")
    transfer: BalanceTransferConfig = BalanceTransferConfig()
    within_machine: bool = Field(True, description="In updates, borrow only from ranks of the same machine.")
    ranks_per_machine: int | None = Field(
        None, gt=0, description="Neighbouring expert ranks that share a machine; None: as the ranks find themselves."
    )
    home: Home = Field(
        "contiguous",
        description="Which rank keeps an expert: by its number, or so that ranks and machines were even over the first "
        "step after a start or resume, for which the weights are loaded twice.",
    )
    prefetch: bool = Field(True, description="Fetch the next layer's experts while this one computes.")
    keep_order: bool = Field(
        True, description="Add up a token's experts in the order without balancing: the same bits (all-to-all alone)."
    )


class RescoreConfig(Section):
    """The engine evaluates each finished trajectory again, while other episodes still run (KwaiKAT's old log-probs)."""

    n: int = Field(8, gt=0, description="Evaluations of a trajectory; the mean of their log-probs is taken.")
    concurrency: int = Field(4, gt=0, description="Evaluations in flight at once, beside the episodes' own requests.")


class OldLogprobConfig(Section):
    """The old log-probs that the ratio is taken against; docs/old-logprobs.md says which to use when."""

    source: OldLogprobSource = Field(
        "recompute",
        description="The trainer's own before the update, the engine's as sampled, or the engine's evaluated again.",
    )
    rescore: RescoreConfig = RescoreConfig()


class CorrectionConfig(Section):
    """What is done about tokens that trainer and engine give different probabilities; see docs/trainer.md."""

    weight: CorrectionWeight | None = Field(
        None, description="Importance weights of the old policy over the rollout: of tokens, or of whole sequences."
    )
    weight_low: float = Field(0.0, ge=0, description="Weights below this are raised to it.")
    weight_high: float | None = Field(2.0, gt=0, description="Weights above this are cut to it; None: none is.")
    normalise: bool = Field(False, description="Divide the weights by their mean over the step.")
    mask: CorrectionMask | None = Field(
        None,
        description="Leave out tokens whose ratio of the trainer's probability to the rollout's is out of bounds: "
        "their own, that of their whole sequence, or its geometric mean.",
    )
    mask_low: float = Field(0.5, ge=0, description="The lowest ratio that the mask keeps.")
    mask_high: float = Field(2.0, gt=0, description="The highest ratio that the mask keeps.")
    veto: float | None = Field(None, gt=0, description="Leave out sequences with a token whose ratio is below this.")

    @model_validator(mode="after")
    def _makes_sense(self) -> CorrectionConfig:
        if self.weight_high is not None and self.weight_low > self.weight_high:
            raise ValueError(
                f"train.correction.weight_low is {self.weight_low:g}, above weight_high {self.weight_high:g}: swap them"
            )
        if self.mask_low > self.mask_high:
            raise ValueError(
                f"train.correction.mask_low is {self.mask_low:g}, above mask_high {self.mask_high:g}: swap them"
            )
        if self.normalise and self.weight is None:
            raise ValueError(
                "train.correction.normalise divides weights by their mean: set weight to token or sequence"
            )
        return self


class KlConfig(Section):
    """A penalty for leaving a reference model; docs/trainer.md says what each estimator's gradient is."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the penalty (beta); 0: no reference model is held.")
    estimator: KlEstimator = Field("k3", description="How a token's KL is estimated.")
    k3_limit: float | None = Field(
        10.0, gt=0, description="The most that k3 of one token may be; beyond it has no gradient. None: no limit."
    )
    where: Literal["loss", "reward"] = Field(
        "loss", description="A term of the loss (GRPO), or taken from the advantages token by token (REINFORCE++)."
    )
    reference: Path | None = Field(
        None, description="The reference's checkpoint, a folder or a hub id; None: the starting model."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> KlConfig:
        if self.estimator == "k1" and self.where == "loss":
            raise ValueError(
                "train.kl: k1 in the loss has a gradient whose mean is 0, it is noise alone: take estimator k2 "
                "(its gradient is the KL's) or k3, or set where to reward"
            )
        if self.reference is not None and not self.coefficient:
            raise ValueError("train.kl.reference is given and train.kl.coefficient is 0: give it a coefficient")
        return self


@dataclass(frozen=True, slots=True)
class Clip:
    """The clip of the ratio that is in effect: ``[1 - low, 1 + high]``.

    ``dual`` is dual-clip PPO's constant (arXiv 1912.09729): with A < 0 a token's loss is at most ``-dual * A``, however
    large its ratio; None leaves that out. ``tau``: the temperatures of a soft gate in place of the clip (SAPO), for
    A > 0 and for other A; None where the objective has none.
    """

    low: float
    high: float
    dual: float | None = None
    tau: tuple[float, float] | None = None


class OverlongConfig(Section):
    """DAPO's soft punishment of long trajectories (arXiv 2503.14476, eq. 13)."""

    buffer: int = Field(
        0, ge=0, description="Tokens before rollout.max_tokens over which the penalty rises from 0; 0: no penalty."
    )
    penalty: float = Field(1.0, gt=0, description="What is taken from the reward at rollout.max_tokens.")


class TrainConfig(Section):
    """The policy-gradient trainer."""

    steps: int = Field(20, ge=0, description="Global steps.")
    replay: Annotated[Replay, _OFF] = Field("r3", description="Whose routes the trainer uses (R3, R2 or its own).")
    lr: float = Field(2e-6, gt=0, description="Learning rate.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.95))
    grad_clip: float = Field(1.0, gt=0, description="Global gradient-norm limit.")
    objective: Objective = Field(
        "grpo",
        description="The policy objective: grpo, gspo, cispo, reinforce, sapo, gmpo, or one of your own "
        "(docs/trainer.md).",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Mean over tokens, over sequences of their means, or over sequences of sums / max_tokens. None: "
        "the objective's own (docs/trainer.md).",
    )
    baseline: Baseline = Field(
        "mean", description="What a reward is compared with: its group's mean, the others' of it, or the step's mean."
    )
    scale: AdvantageScale = Field(
        "group",
        description="Whose standard deviation advantages are divided by; batch: they are normalised over the step's "
        "sampled tokens.",
    )
    overlong: OverlongConfig = OverlongConfig()
    old_logprob: OldLogprobConfig = OldLogprobConfig()
    filter: FilterKind = Field(
        "none",
        description="Trajectories left out of the loss by how they ended: overlong those cut at the context's end, "
        "compact also those out of turns or time. Their rewards still count for their groups' advantages.",
    )
    correction: CorrectionConfig = CorrectionConfig()
    dual_clip: float | None = Field(None, gt=1, description="Dual clip's constant; None leaves it out.")
    eps_low: float | None = Field(
        None, gt=0, description="Lower clip of the ratio; None: the objective's own (docs/trainer.md)."
    )
    eps_high: float | None = Field(
        None, gt=0, description="Upper clip of the ratio (clip-higher); None: the objective's own (docs/trainer.md)."
    )
    tau_positive: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate for positive advantages; None: 1."
    )
    tau_negative: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate for other advantages; None: 1.05."
    )
    kl: KlConfig = KlConfig()
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss; 0: none.")
    mini_steps: int = Field(1, gt=0, description="Parts of a global step's samples, with an optimizer update each.")
    epochs: int = Field(1, gt=0, description="How often a global step goes through its samples.")
    microbatch_tokens: int = Field(
        8192, gt=0, description="Tokens a packed micro-batch may hold, context ranks together; >= rollout.max_tokens."
    )
    dtype: Precision = Field("float32", description="Precision of the trainer's passes.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto")
    recompute: Recompute = Field("none", description="Activation recomputation.")
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(
        ("core_attn",), description="What selective recomputation runs again; mlp is that of dense layers."
    )
    parallel: ParallelConfig = ParallelConfig()
    balance: BalanceConfig = BalanceConfig()
    ray_address: str | None = Field(None, description="A Ray cluster's address; None starts a local one.")
    restarts: int = Field(
        3,
        ge=0,
        description="How often dead ranks are started again, from the last checkpoint, before the next is complete.",
    )
    native_every: int = Field(1, ge=0, description="Measure mismatch_native/* every so many steps; 0 never.")
    checkpoint_every: int = Field(5, ge=0, description="Steps between checkpoints; 0 keeps only the last.")
    keep_checkpoints: int = Field(2, gt=0, description="The newest checkpoints kept.")
    keep_every: int = Field(0, ge=0, description="Also keep the checkpoints of multiples of so many steps; 0: none.")

    @model_validator(mode="after")
    def _makes_sense(self) -> TrainConfig:
        facts, tau = objective_facts(self.objective), self.tau_positive or self.tau_negative
        if problem := facts.refusal(self.objective, self.eps_low, self.eps_high, self.dual_clip, tau):
            raise ValueError(problem)
        if self.baseline == "batch" and self.scale == "group":
            raise ValueError(
                "train.scale group divides by a group's spread and train.baseline batch compares over groups: "
                "set scale to batch or none"
            )
        return self

    @property
    def clip(self) -> Clip:
        """The configured bounds, or the objective's own; no bounds at all for one that clips nothing."""
        facts = objective_facts(self.objective)
        low, high = facts.clip or (math.inf, math.inf)
        tau = facts.tau and (self.tau_positive or facts.tau[0], self.tau_negative or facts.tau[1])
        return Clip(self.eps_low or low, self.eps_high or high, self.dual_clip, tau)

    @property
    def averaged_over(self) -> Aggregation:
        """The configured aggregation, or the objective's own."""
        return self.aggregation or objective_facts(self.objective).aggregation

    @property
    def normalises_penalised(self) -> bool:
        """Whether the ranks normalise advantages over the step after the KL penalty was taken from them (REINFORCE++,
        arXiv 2501.03262, eq. 8 to 10)."""
        return bool(self.kl.coefficient) and self.kl.where == "reward" and self.scale == "batch"

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return max(1, self.steps * self.mini_steps * self.epochs)


class TraceConfig(Section):
    """What of the routes' way from engine to trainer is written down, for ``agent-rl r3 check``."""

    steps: tuple[int, ...] = Field((), description="Global steps to trace; empty traces none.")
    samples: int = Field(4, gt=0, description="Samples to follow, of those that a data rank has in them.")
    microbatches: int = Field(2, gt=0, description="Micro-batches of a pass to trace, the first on every data rank.")
    previews: int = Field(8, ge=0, description="Values of a tensor that are written beside its hash.")
    verify_forward: bool = Field(True, description="Also compare the experts every router used with those given.")
    dir: Path | None = Field(None, description="Folder of the trace; None is r3_trace in the run's folder.")


class R3Config(Section):
    """Rollout routing replay: which routes are kept, and what is done where some are missing."""

    source: RouteSource = Field(
        "sampled", description="A token's routes: those it was sampled with, or the newest prefill's."
    )
    missing: Literal["native", "drop_sample", "error"] = Field(
        "error", description="Tokens without routes: route natively, leave the trajectory out, or stop."
    )
    missing_budget: float = Field(
        0.01, ge=0, le=1, description="Share of a step's tokens that may lack routes before the run stops."
    )
    probe: bool = Field(True, description="Probe the engine's route capture before training starts.")
    audit: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the trajectories whose routes are asked for again, and compared.",
    )
    trace: TraceConfig = TraceConfig()

    @property
    def allows_missing(self) -> bool:
        """Whether a rollout goes on where an answer has no routes."""
        return self.missing != "error"


class LimitConfig(Section):
    """Limits on one metric of a step. A value that is not finite is always beyond them."""

    above: float | None = Field(None, description="The metric may not be above this; None: no such limit.")
    below: float | None = Field(None, description="The metric may not be below this; None: no such limit.")
    deviations: float | None = Field(
        None,
        gt=0,
        description="How many robust deviations (1.4826 x MAD) the metric may be from the median of the run's own "
        "history; None: not compared with it.",
    )


class GuardConfig(Section):
    """Watches a run for collapse, and its updates for broken gradients; see docs/guard.md."""

    action: Annotated[Literal["off", "warn", "stop"], _OFF] = Field(
        "stop", description="A metric beyond a limit: nothing, a warning, or also a checkpoint and the end of the run."
    )
    stop_on: Literal["absolute", "any"] = Field(
        "absolute", description="Limits that may end the run: absolute ones, or also those relative to its history."
    )
    patience: int = Field(3, gt=0, description="Steps in a row beyond a limit that end the run.")
    window: int = Field(50, gt=0, description="Steps of the run's own history that relative limits look back on.")
    min_history: int = Field(8, gt=2, description="Steps of history that a relative limit wants, or it does not hold.")
    k3_kl: LimitConfig = LimitConfig(above=0.1, deviations=10.0)
    f_tau_2: LimitConfig = LimitConfig(above=0.1)
    grad_norm: LimitConfig = LimitConfig(deviations=10.0)
    entropy: LimitConfig = LimitConfig(deviations=10.0)
    reward: LimitConfig = LimitConfig(deviations=10.0)
    audit: LimitConfig = LimitConfig(above=0.2)
    audit_cached: LimitConfig = LimitConfig(above=0.1)
    max_skipped: int = Field(
        3, ge=0, description="Updates within window that may be left out; one more ends the run, whatever the action."
    )
    spike_factor: float | None = Field(
        20.0, gt=1, description="A gradient norm beyond so many times the history's median is a spike; None: none is."
    )
    on_spike: OnSpike = Field(
        "clip", description="An update that is a spike: left out, scaled to the spike's limit, or taken as it is."
    )


class PipelineConfig(Section):
    """Sampling beside training."""

    depth: int = Field(
        0,
        ge=0,
        le=MAX_STALENESS,
        description="Batches that sampling may run ahead of training; 0: a step samples, then trains.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=MAX_STALENESS,
        description="Updates by which a trained token's weights may be older than those before its step; beyond depth, "
        "younger groups may overtake slow ones. None: as many as depth.",
    )

    @property
    def staleness(self) -> int:
        """The bound that holds."""
        return self.depth if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _makes_sense(self) -> PipelineConfig:
        if self.staleness < self.depth or (self.staleness and not self.depth):
            raise ValueError(
                f"pipeline.max_staleness is {self.staleness} and pipeline.depth {self.depth}: it is depth or more, and "
                "0 where depth is 0"
            )
        return self


class EvalConfig(Section):
    """Evaluation on held-out tasks before and after training, and every so many steps."""

    tasks: int = Field(256, ge=0, description="Held-out tasks; 0 turns evaluation off.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 only before and after.")
    greedy: bool = Field(True, description="Also evaluate with greedy decoding, before and after.")
    split: str = Field("heldout", description="The environment's split to evaluate on.")


class ObserveConfig(Section):
    """What of a run is kept for whoever looks at it."""

    token_detail: bool = Field(
        True,
        description="Keep what the trainer saw of every token it trained on: how far it is from the engine's "
        "log-probs, with and without replay, entropy, clipping, and the layers whose experts differ.",
    )
    sinks: tuple[SinkName, ...] = Field(
        ("tensorboard",),
        description="Where metrics go besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow.",
    )
    project: str = Field(
        "agent-rl", min_length=1, description="The project of Weights & Biases, or the experiment of MLflow."
    )


class HardwareConfig(Section):
    """The machines a run is meant for. Nothing but `agent-rl plan` reads it; sizes in GiB."""

    gpu_memory_gb: float | None = Field(None, gt=0, description="Memory of a GPU; None plans for CPU ranks, or device.")
    gpus_per_host: int = Field(8, gt=0, description="GPUs of a host.")
    trainer_hosts: int | None = Field(None, gt=0, description="Hosts for trainer ranks; None: as many as they fill.")
    host_memory_gb: float | None = Field(None, gt=0, description="Memory of a host; None: this machine's.")
    disk_gb: float | None = Field(None, gt=0, description="Room for runs_dir; None: what is free where it is.")


class RunConfig(Section):
    """A whole config file."""

    name: str = Field(..., pattern=r"^[\w.-]+$", description="The run's name; its folder is runs/<name>.")
    runs_dir: Path = Field(Path("runs"), description="Where run folders go.")
    seed: int = Field(0, ge=0)
    model: Path = Field(
        ...,
        description="What to start from: the folder of a Hugging Face checkpoint, an id on the hub (OWNER/NAME, or "
        "OWNER/NAME@REVISION), or tiny-moe, the shipped one.",
    )
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    r3: R3Config = R3Config()
    guard: GuardConfig = GuardConfig()
    pipeline: PipelineConfig = PipelineConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    hardware: HardwareConfig = HardwareConfig()

    @model_validator(mode="before")
    @classmethod
    def _filled_by_the_interface(cls, data: Any) -> Any:
        """``data`` with the keys of ``rollout`` that its interface decides and that it leaves out."""
        env, rollout = (data.get("env") or {}, data.get("rollout") or {}) if isinstance(data, dict) else (None, None)
        if not isinstance(env, dict) or not isinstance(rollout, dict):
            return data
        name = env.get("interface", OWN_INTERFACE)
        if name == OWN_INTERFACE or not isinstance(name, str):
            return data
        from envs import InterfaceError, find_interface

        try:
            interface = find_interface(name)
        except InterfaceError:
            return data  # told with its key where the key is read
        return {**data, "rollout": {**interface.defaults, **interface.fixed, **rollout}}

    @model_validator(mode="after")
    def _keeps_the_interface(self) -> RunConfig:
        if self.env.interface == OWN_INTERFACE:
            return self
        from envs import find_interface

        for key, value in find_interface(self.env.interface).fixed.items():
            if getattr(self.rollout, key) != value:
                raise ValueError(
                    f"rollout.{key} is {getattr(self.rollout, key)} and env.interface {self.env.interface} has "
                    f"{value}: leave rollout.{key} out"
                )
        if self.env.tool_style != "full":
            raise ValueError(
                f"env.tool_style {self.env.tool_style} is of the interface {OWN_INTERFACE}: leave it out with "
                f"env.interface {self.env.interface}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_rescored(self) -> RunConfig:
        if self.train.old_logprob.source == "rescore" and self.rollout.temperature not in (0.0, 1.0):
            raise ValueError(
                "train.old_logprob.source rescore: SGLang gives a prompt's log-probs at temperature 1 whatever is "
                f"asked, and rollout.temperature is {self.rollout.temperature:g}: set it to 1, or take recompute or "
                "rollout"
            )
        return self

    @model_validator(mode="after")
    def _reaches_the_endpoint(self) -> RunConfig:
        harness = self.rollout.harness
        if harness is not None and harness.place == "box" and self.sandbox.hosts == "ray":
            raise ValueError(
                "rollout.harness.place box and sandbox.hosts ray: boxes on other machines do not reach the endpoint; "
                "set place to host, or hosts to local"
            )
        return self

    @model_validator(mode="after")
    def _groups_teach(self) -> RunConfig:
        by_batch = self.train.baseline == "batch"
        if self.rollout.dynamic_sampling.enabled and by_batch:
            raise ValueError(
                "rollout.dynamic_sampling throws away groups whose rewards are all equal, which teach under "
                "train.baseline batch: turn it off, or set baseline to mean"
            )
        if self.rollout.group_size == 1 and not by_batch:
            raise ValueError(
                f"rollout.group_size is 1 and train.baseline {self.train.baseline} compares within a group: set it to "
                "2 or more, or baseline and scale to batch"
            )
        return self

    @model_validator(mode="after")
    def _leaves_room_before_the_penalty(self) -> RunConfig:
        if self.train.overlong.buffer >= self.rollout.max_tokens:
            raise ValueError(
                f"train.overlong.buffer is {self.train.overlong.buffer} and rollout.max_tokens "
                f"{self.rollout.max_tokens}: every trajectory would be punished; take a smaller buffer"
            )
        return self

    @model_validator(mode="after")
    def _corrects_what_is_stale(self) -> RunConfig:
        if not self.pipeline.depth:
            return self
        source, correction = self.train.old_logprob.source, self.train.correction
        if source == "rescore":
            raise ValueError(
                "pipeline.depth is above 0 and train.old_logprob.source rescore: the weights that sampled are gone "
                "when the engine is asked again; take rollout, or recompute with a train.correction"
            )
        if source == "recompute" and correction.weight is None and correction.mask is None:
            raise ValueError(
                "pipeline.depth is above 0 and train.old_logprob.source recompute without a train.correction: the "
                "loss would take old weights' tokens for the present ones'; set train.correction.weight, or source to "
                "rollout"
            )
        if self.engine.pause_mode == "retract" and self.wants_routes:
            raise ValueError(
                "pipeline.depth is above 0, train.replay r3 and engine.pause_mode retract: the routes of running "
                "requests would be computed again by other weights; take pause_mode turn"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def wants_routes(self) -> bool:
        """Whether a rollout brings its routes: only what replays the rollout's asks for them, and needs an engine that
        captures."""
        return self.train.replay == "r3"

    @property
    def reference_folder(self) -> Path | None:
        """The checkpoint of the KL penalty's reference model; None without a penalty."""
        kl = self.train.kl
        return (kl.reference or self.model) if kl.coefficient else None

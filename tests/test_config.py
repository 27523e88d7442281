from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agent_rl.config import RunConfig
from agent_rl.config.loader import INPUT_PATHS, find_config, load_config, shipped_configs
from agent_rl.errors import ConfigError
from agent_rl.train.requests import OptimizerSpec

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


QUICKSTART = next(path for path in CONFIGS if path.name == "quickstart.yaml")
COLOCATED = "engine.device=auto engine.colocate=true train.device=auto"
SAMPLED = "train.old_logprob.source=rollout"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(copy) == config


def test_overrides_reach_nested_keys_as_yaml_values() -> None:
    config = load_config(
        QUICKSTART, ["train.lr=0.001", "eval.greedy=false", "env.options.train_tasks=8", "engine.urls=[a, b]"]
    )
    assert (config.train.lr, config.eval.greedy, config.env.options["train_tasks"]) == (0.001, False, 8)
    assert config.engine.urls == ("a", "b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "unknown key 'train.lrr': did you mean 'lr'?"),
        ("trian.lr=1", "unknown key 'trian': did you mean 'train'?"),
        ("train.parallel.tensro=2", "unknown key 'train.parallel.tensro': did you mean 'tensor'?"),
        ("train.lr=fast", "train.lr: Input should be a valid number"),
        ("rollout.group_size=0", "rollout.group_size: Input should be greater than 0, got 0"),
        ("rollout.group_size=1", "rollout.group_size is 1; train.baseline mean"),
        ("rollout.dynamic_sampling.enabled=true train.baseline=batch train.advantage_scale=batch", "dynamic_sampling"),
        ("train.balance.planner=lpt", "planner: Input should be 'foremoe', 'eplb' or 'shadow', got 'lpt'"),
        ("train.replay=r4", "train.replay: Input should be 'r3', 'r2' or 'off', got 'r4'"),
        ("train.kl.estimator=k1", "train.kl.estimator k1 in the loss"),
        ("train.kl.reference=m", "train.kl.reference requires train.kl.coefficient above 0"),
        ("train={objective: gspo, eps_high: 0.2}", "defaults 0.0003 and 0.0004"),
        ("train={objective: reinforce, eps_low: 0.2}", "objective reinforce has no clip"),
        ("train={objective: cispo, dual_clip: 3}", "train.dual_clip: objective cispo"),
        ("train.objective_options={speed: 1}", "objective grpo has no option 'speed' (it has none)"),
        (
            "train.kl={coefficient: 1, estimator: k2, apply_to: reward, unbiased: true}",
            "requires train.kl.apply_to loss",
        ),
        ("train.baseline=batch", "set advantage_scale to batch or none"),
        (
            "train.objective=grop",
            "did you mean 'grpo'? (registered: cispo, clip_cov, dppo_kl, dppo_tv, gmpo, grpo, gspo, kl_cov, ",
        ),
        ("train.tau_positive=2", "train.tau_negative: objective grpo has no soft gate"),
        ("train.correction={weight_low: 3}", "train.correction.weight_low is 3; it must be at most weight_high (2)"),
        ("train.correction={mask: token, mask_low: 3}", "mask_low is 3; it must be at most mask_high (2)"),
        ("train.correction.normalize=true", "set train.correction.weight"),
        ("train.overlong.buffer=99999", "train.overlong.buffer is 99999; it must be below rollout.max_tokens"),
        ("train={offload_activations: true, recompute: selective}", "requires train.recompute full; it is selective"),
        ("rollout.tool_format=xlm", "unknown tool-call format 'xlm': did you mean 'xml'? (registered: "),
        ("sandbox.backend=dokcer", "sandbox.backend: unknown sandbox backend 'dokcer': did you mean 'docker'?"),
        ("engine.urls=[a, a]", "engine.urls contains the same URL twice"),
        ("engine={port: 65530, count: 9}", "engine.port is 65530; 9 servers"),
        ("engine={urls: [a], colocate: true}", "engine.colocate cannot use external servers"),
        ("rollout.harness.command=a sandbox.placement=ray", "set rollout.harness.bind to this machine's address"),
        ("engine={placement: ray, colocate: true}", "engine.colocate conflicts with engine.placement ray"),
        ("engine={device: cpu, colocate: true}", "engine.colocate needs GPUs"),
        ("engine.device=auto engine.colocate=true train.device=cpu", "engine.colocate needs GPUs, and train.device"),
        ("engine={urls: [a], weight_sync: delta}", "engine.weight_sync delta requires launched servers"),
        (f"{COLOCATED} engine.weight_sync=delta", "engine.weight_sync delta conflicts with engine.colocate"),
        ("engine={placement: ray, nodes: 2, gpus: 2, weight_sync: delta}", "requires servers on one node each"),
        ("engine.weight_sync=delta train.lora.rank=8", "engine.weight_sync delta conflicts with train.lora"),
        (f"{COLOCATED} train.ray_address=h:1", "remove train.ray_address"),
        (
            f"{COLOCATED} train.parallel.world_size=2",
            "engine.count x engine.gpus (1) equal to train.parallel.world_size",
        ),
        (f"{COLOCATED} async_rollout.depth=1 {SAMPLED}", "engine.colocate conflicts with async_rollout.depth"),
        ("async_rollout={depth: 2, max_staleness: 1}", "async_rollout.max_staleness is 1; it must be at least"),
        ("async_rollout.max_staleness=1", "and 0 if depth is 0"),
        ("async_rollout.depth=1 train.old_logprob.source=recompute", "set train.correction.weight"),
        ("async_rollout.depth=1 train.old_logprob.source=rescore", "train.old_logprob.source rescore"),
        ("rollout.top_p=0", "rollout.top_p: Input should be greater than 0, got 0"),
        ("rollout.top_k=0", "rollout.top_k: Input should be greater than or equal to 1, got 0"),
        ("rollout.top_k=4001", "rollout.top_k: Input should be less than or equal to 4000, got 4001"),
        ("rollout.min_p=1", "rollout.min_p: Input should be less than 1, got 1"),
        ("rollout.min_p=0.1 train.old_logprob.source=rescore", "rescore conflicts with rollout.top_p, top_k and min_p"),
        (f"async_rollout.depth=1 {SAMPLED} engine.pause_mode=retract", "set pause_mode to turn"),
        ("train.lr", "override 'train.lr': expected section.key=value"),
        ("eval={tasks", "override 'eval={tasks': not valid YAML: "),
        ("name.first=x", "override 'name.first=x': name is a value, not a section"),
    ],
)
def test_error_is_one_line_that_names_the_key(override: str, message: str) -> None:
    overrides = override.split(" ") if "{" not in override and "[" not in override else [override]
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "not valid YAML"), ("- 1", "mapping of sections, not a list"), ("{}", "required")]
)
def test_invalid_config_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_off_is_accepted_although_yaml_reads_it_as_false() -> None:
    config = load_config(QUICKSTART, ["train.replay=off", "guard.action=off"])
    assert (config.train.replay, config.guard.action) == ("off", "off")


def test_base_is_merged_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    root = "name: root\nmodel: m\ntrain: {lr: 0.1, parallel: {tensor: 2, world_size: 4}}\n"
    (tmp_path / "root.yaml").write_text(root)
    (tmp_path / "sub/middle.yaml").write_text("base: ../root.yaml\ntrain: {parallel: {tensor: 4}}\n")
    (tmp_path / "top.yaml").write_text("base: sub/middle.yaml\nname: top\nengine: {urls: [a]}\n")
    config = load_config(tmp_path / "top.yaml", ["train.lr=0.2"])
    assert (config.name, config.train.lr, config.engine.urls) == ("top", 0.2, ("a",))
    assert (config.train.parallel.tensor, config.train.parallel.world_size) == (4, 4)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("c.yaml", "base: c.yaml leads back"),
        ("d.yaml", "d.yaml: base: c.yaml leads back"),
        ("e.yaml", "file not found"),
    ],
)
def test_invalid_base(tmp_path: Path, base: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(f"base: {base}\n")
    (tmp_path / "d.yaml").write_text("base: c.yaml\n")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.yaml")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's directory, with another one as the working directory; the latter is returned."""
    (tmp_path / "project/models/own").mkdir(parents=True)
    (tmp_path / "project/tasks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_input_paths_are_resolved_against_the_config_first(project: Path) -> None:
    (project / "rows.jsonl").touch()
    (project / "base.yaml").write_text(
        "name: own\nmodel: models/own\ntrain: {kl: {coefficient: 0.1, reference: models/other}}\n"
        "env: {name: swe, quarantine: rows.jsonl, options: {path: rows.jsonl, data_split: tasks}}\n"
    )
    (project / "sub").mkdir()
    (project / "sub/c.yaml").write_text("base: ../base.yaml\nruns_dir: models\n")
    config = load_config(project / "sub/c.yaml")
    below = project / "sub/.."
    assert (config.model, config.env.quarantine) == (below / "models/own", below / "rows.jsonl")
    assert config.env.options == {"path": str(below / "rows.jsonl"), "data_split": "tasks"}
    assert (config.runs_dir, config.train.kl.reference) == (Path("models"), Path("models/other"))
    assert load_config(project / "base.yaml", ["model=models/own"]).model == Path("models/own")


def test_path_options_of_a_tool_class_are_resolved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tasks_of_files.py").write_text(
        "from pathlib import Path\nfrom pydantic import BaseModel\nfrom agent_rl.api import Task\n"
        "class Files:\n    class Options(BaseModel):\n        directory: Path\n        word: str\n"
        "    @classmethod\n    def tasks(cls, split: str, options: Options) -> list[dict]: ...\n"
        "    async def setup(self, task: Task) -> str: ...\n    async def grade(self) -> float: ...\n"
    )
    monkeypatch.syspath_prepend(str(project))
    env = "env: {name: 'tasks_of_files:Files', options: {directory: tasks, word: tasks}}"
    (project / "c.yaml").write_text(f"name: c\nmodel: m\n{env}\n")
    assert load_config(project / "c.yaml").env.options == {"directory": str(project / "tasks"), "word": "tasks"}


def test_shipped_config_and_model_load_by_name(project: Path) -> None:
    shipped = load_config(Path("quickstart"))
    assert shipped == load_config(Path("quickstart.yaml"))
    assert all(find_config(Path(name)).is_file() for name in shipped_configs()), "a name may contain a dot"
    assert (shipped.model / "model.safetensors").is_file()
    (project / "c.yaml").write_text("base: quickstart\nname: c\n")
    assert load_config(project / "c.yaml").model == shipped.model
    (project / "quickstart.yaml").write_text("name: mine\nmodel: m\n")
    assert load_config(project / "c.yaml").model == shipped.model, "a name without a suffix is a shipped config"
    (project / "c.yaml").write_text("base: quickstart.yaml\nname: c\n")
    assert load_config(project / "c.yaml").model == Path("m")
    with pytest.raises(ConfigError, match=r"file not found \(shipped configs: .*quickstart"):
        load_config(Path("configs/quickstart.yaml"))


def test_other_environment_drops_the_options_of_the_base(project: Path) -> None:
    (project / "c.yaml").write_text("base: quickstart\nenv: {name: 'calc:Calc', options: {count: 3}}\n")
    assert load_config(project / "c.yaml").env.options == {"count": 3}
    (project / "c.yaml").write_text("base: quickstart\nenv: {name: mini, options: {seed: 3}}\n")
    assert load_config(project / "c.yaml").env.options == {"train_tasks": 640, "heldout_tasks": 256, "seed": 3}
    overridden = load_config(project / "c.yaml", ["env.options.path=x", "env.quarantine=q", "env.name=swe"])
    assert (overridden.env.options, overridden.env.quarantine) == ({"path": "x"}, Path("q"))


def all_fields(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key of ``section`` and of the sections in it."""
    for name, field in section.model_fields.items():
        yield (*above, name), field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from all_fields(kind, (*above, name))


TEACHER = ("train", "distill", "teacher")
"""A URL or a path."""


def test_every_path_key_is_an_input_or_an_output() -> None:
    kinds = {key: (field.annotation, *get_args(field.annotation)) for key, field in all_fields(RunConfig)}
    paths = {key for key in kinds if Path in kinds[key]}
    assert paths == {*INPUT_PATHS, ("runs_dir",), ("r3", "trace", "dir")} - {("engine", "python"), TEACHER}


def test_every_key_has_a_description() -> None:
    assert [key for key, field in all_fields(RunConfig) if not field.description] == []


def test_async_training_accepts_rollout_log_probs_or_a_correction() -> None:
    for train in ({"old_logprob": {"source": "rollout"}}, {"correction": {"weight": "token"}}):
        config = RunConfig.model_validate({"name": "n", "model": "m", "async_rollout": {"depth": 2}, "train": train})
        assert config.async_rollout.staleness == 2


@pytest.mark.parametrize("section", ["name: a\nname: b\n", "name: a\nmodel: m\ntrain:\n  lr: 1.0e-4\n  lr: 1.0e-5\n"])
def test_a_key_that_occurs_twice_is_refused_with_its_line(tmp_path: Path, section: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(section)
    with pytest.raises(ConfigError, match=rf"yaml:{section.count(chr(10))}: not valid YAML: key '\w+' occurs twice"):
        load_config(path)


SOURCES = ["train.sources.fixes.env=mini", "train.sources.sums={env: math, weight: 2}"]


def test_a_run_evaluates_on_the_sources_of_training_unless_it_names_others() -> None:
    assert list(load_config(QUICKSTART).evaluations) == [""]
    assert list(load_config(QUICKSTART, SOURCES).evaluations) == ["fixes", "sums"]
    named = load_config(QUICKSTART, [*SOURCES, "eval.sources.hard={env: math, tasks: 3, samples: 2}", "eval.every=5"])
    settings = named.evaluations["hard"]
    assert (settings.tasks, settings.samples, settings.every, settings.split) == (3, 2, 5, "heldout")
    assert list(named.environments) == ["fixes", "sums", "hard"]
    assert list(load_config(QUICKSTART, ["eval.sources.hard.env=math"]).environments) == ["", "hard"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("eval.sources.sums={env: math, options: {levels: [2]}}", "eval.sources.sums and train.sources.sums differ"),
        ("eval.sources.heldout={env: math}", "'heldout' is the name of a split"),
        ("train.sources.a/b={env: math}", "train.sources.a/b"),
        ("train.sources.sums.weight=0", "train.sources.sums.weight: Input should be greater than 0"),
    ],
)
def test_invalid_sources_are_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(QUICKSTART, [*SOURCES, override])


def test_paths_in_the_options_of_a_source_are_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text("")
    file = tmp_path / "c.yaml"
    file.write_text("{base: quickstart, eval: {sources: {sums: {env: math, options: {path: problems.jsonl}}}}}")
    assert load_config(file).eval.sources["sums"].options["path"] == str(tmp_path / "problems.jsonl")


def test_warm_up_and_decay_count_global_steps() -> None:
    keys = ("steps=10", "mini_steps=2", "epochs=3", "lr_warmup_steps=2", "lr_schedule=cosine", "min_lr_ratio=0.1")
    spec = OptimizerSpec.of(load_config(QUICKSTART, [f"train.{key}" for key in keys]).train)
    assert (spec.warmup_steps, spec.total_steps, spec.schedule, spec.min_lr_ratio) == (12, 60, "cosine", 0.1)

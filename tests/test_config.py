from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from agent_rl.config import RunConfig
from agent_rl.config.loader import INPUTS, load_config
from agent_rl.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def quickstart() -> Path:
    return next(path for path in CONFIGS if path.name == "quickstart.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(copy) == config


def test_overrides_reach_nested_keys_as_yaml_values(quickstart: Path) -> None:
    config = load_config(
        quickstart, ["train.lr=0.001", "eval.greedy=false", "env.options.train_tasks=8", "engine.urls=[a, b]"]
    )
    assert (config.train.lr, config.eval.greedy, config.env.options["train_tasks"]) == (0.001, False, 8)
    assert config.engine.urls == ("a", "b")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.lrr=1", "unknown key 'train.lrr': did you mean 'lr'?"),
        ("trian.lr=1", "unknown key 'trian': did you mean 'train'?"),
        ("train.parallel.tensro=2", "unknown key 'train.parallel.tensro': did you mean 'tensor'?"),
        ("train.lr=fast", "train.lr: Input should be a valid number, unable to parse string as a number, got 'fast'"),
        ("rollout.group_size=0", "rollout.group_size: Input should be greater than 0, got 0"),
        ("train.balance.planner=lpt", "planner: Input should be 'foremoe', 'eplb' or 'shadow', got 'lpt'"),
        ("train.replay=r4", "train.replay: Input should be 'r3', 'r2' or 'off', got 'r4'"),
        ("train.kl.estimator=k1", "(its gradient is the KL's) or k3, or set apply_to to reward"),
        ("train.kl.reference=m", "train.kl.coefficient is 0: give it a coefficient"),
        ("train={objective: gspo, eps_high: 0.2}", "out (0.0003 and 0.0004), or give others as narrow"),
        ("train={objective: reinforce, eps_low: 0.2}", "objective reinforce clips nothing; leave them out"),
        ("train={objective: cispo, dual_clip: 3}", "the clipped surrogate, which objective cispo has not"),
        ("train.baseline=batch", "train.baseline batch compares over groups: set advantage_scale to batch or none"),
        ("train.objective=grop", "did you mean 'grpo'? (registered: cispo, gmpo, grpo, gspo, reinforce, sapo)"),
        ("train.tau_positive=2", "train.tau_negative: objective grpo has no soft gate; leave them out"),
        ("train.correction={weight_low: 3}", "weight_low is 3, above weight_high 2: swap them"),
        ("train.correction={mask: token, mask_low: 3}", "mask_low is 3, above mask_high 2: swap them"),
        ("train.correction.normalize=true", "divides weights by their mean: set weight to token or sequence"),
        ("train.overlong.buffer=99999", "every trajectory would be punished; take a smaller buffer"),
        (
            "rollout.tool_format=xlm",
            "unknown tool-call format 'xlm': did you mean 'xml'? "
            "(registered: hermes, mini-swe-agent, openhands, r2egym, xml)",
        ),
        (
            "sandbox.backend=dokcer",
            "sandbox.backend: unknown sandbox backend 'dokcer': did you mean 'docker'? "
            "(registered: auto, bubblewrap, docker, podman)",
        ),
        ("engine.urls=[a, a]", "engine.urls names a server twice: name each once"),
        ("engine={port: 65530, count: 9}", "engine.port is 65530 and 9 servers need one each: take a lower one"),
        (
            "engine={urls: [a], colocate: true}",
            "engine.urls and engine.urls_file name servers of others: leave them out",
        ),
        (
            "engine={placement: ray, colocate: true}",
            "engine.placement ray gives engines GPUs of their own: set placement to local",
        ),
        ("engine={device: cpu, colocate: true}", "where a server can release nothing: turn it off"),
        ("train.lr", "override 'train.lr': write it as section.key=value"),
        ("eval={tasks", "override 'eval={tasks': not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("name.first=x", "override 'name.first=x': name is a value, not a section"),
    ],
)
def test_a_mistake_is_told_in_one_line(quickstart: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(quickstart, [override])
    assert str(caught.value).endswith(told)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.group_size=1"], "rollout.group_size is 1 and train.baseline mean compares within a group"),
        (
            ["rollout.dynamic_sampling.enabled=true", "train.baseline=batch", "train.advantage_scale=batch"],
            "all equal, which teach under train.baseline batch",
        ),
    ],
)
def test_groups_that_could_not_teach_are_refused(quickstart: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(quickstart, overrides)


@pytest.mark.parametrize(
    ("text", "told"),
    [("a: [1", "not valid YAML"), ("- 1", "a config is a mapping of sections, this is a list"), ("{}", "required")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_config(path)


def test_off_is_a_word_also_where_yaml_reads_it_as_false(quickstart: Path) -> None:
    config = load_config(quickstart, ["train.replay=off", "guard.action=off"])
    assert (config.train.replay, config.guard.action) == ("off", "off")


def test_a_base_is_changed_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "root.yaml").write_text(
        "name: root\nmodel: m\ntrain: {lr: 0.1, parallel: {tensor: 2, world_size: 4}}\n"
    )
    (tmp_path / "sub/middle.yaml").write_text("base: ../root.yaml\ntrain: {parallel: {tensor: 4}}\n")
    (tmp_path / "top.yaml").write_text("base: sub/middle.yaml\nname: top\nengine: {urls: [a]}\n")
    config = load_config(tmp_path / "top.yaml", ["train.lr=0.2"])
    assert (config.name, config.train.lr, config.engine.urls) == ("top", 0.2, ("a",))
    assert (config.train.parallel.tensor, config.train.parallel.world_size) == (4, 4)


@pytest.mark.parametrize(
    ("base", "told"),
    [("c.yaml", "base: c.yaml leads back here"), ("d.yaml", "d.yaml: base: c.yaml leads back"), ("e.yaml", "no such")],
)
def test_a_base_that_is_none(tmp_path: Path, base: str, told: str) -> None:
    (tmp_path / "c.yaml").write_text(f"base: {base}\n")
    (tmp_path / "d.yaml").write_text("base: c.yaml\n")
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / "c.yaml")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's directory, with another one as the working directory; the latter is returned."""
    (tmp_path / "project/models/own").mkdir(parents=True)
    (tmp_path / "project/tasks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_what_a_run_reads_is_looked_for_beside_its_config_first(project: Path) -> None:
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


def test_options_that_a_class_of_tools_annotates_with_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tasks_of_files.py").write_text(
        "from pathlib import Path\nfrom pydantic import BaseModel\nfrom agent_rl.api import Task\n"
        "class Files:\n    class Options(BaseModel):\n        directory: Path\n        word: str\n"
        "    @classmethod\n    def tasks(cls, split: str, options: Options) -> list[dict]: ...\n"
        "    async def setup(self, task: Task) -> str: ...\n    async def grade(self) -> float: ...\n"
    )
    monkeypatch.syspath_prepend(str(project))
    (project / "c.yaml").write_text(
        "name: c\nmodel: m\nenv: {name: 'tasks_of_files:Files', options: {directory: tasks, word: tasks}}\n"
    )
    assert load_config(project / "c.yaml").env.options == {"directory": str(project / "tasks"), "word": "tasks"}


def test_a_shipped_config_and_model_go_by_their_names(project: Path) -> None:
    shipped = load_config(Path("quickstart"))
    assert shipped == load_config(Path("quickstart.yaml"))
    assert (shipped.model / "model.safetensors").is_file()
    (project / "c.yaml").write_text("base: quickstart\nname: c\n")
    assert load_config(project / "c.yaml").model == shipped.model
    (project / "quickstart.yaml").write_text("name: mine\nmodel: m\n")
    assert load_config(project / "c.yaml").model == shipped.model, "the name alone is the shipped one's"
    (project / "c.yaml").write_text("base: quickstart.yaml\nname: c\n")
    assert load_config(project / "c.yaml").model == Path("m")
    with pytest.raises(ConfigError, match=r"no such config file \(shipped, by name: .*quickstart"):
        load_config(Path("configs/quickstart.yaml"))


def test_another_environment_does_not_get_the_options_of_the_base(project: Path) -> None:
    (project / "c.yaml").write_text("base: quickstart\nenv: {name: 'calc:Calc', options: {count: 3}}\n")
    assert load_config(project / "c.yaml").env.options == {"count": 3}
    (project / "c.yaml").write_text("base: quickstart\nenv: {name: mini, options: {seed: 3}}\n")
    assert load_config(project / "c.yaml").env.options == {"train_tasks": 640, "heldout_tasks": 256, "seed": 3}
    overridden = load_config(project / "c.yaml", ["env.options.path=x", "env.quarantine=q", "env.name=swe"])
    assert (overridden.env.options, overridden.env.quarantine) == ({"path": "x"}, Path("q"))


def test_every_path_of_a_config_is_read_or_written() -> None:
    def paths(section: type[BaseModel], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        found = set()
        for name, field in section.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found |= paths(kind, (*above, name))
            if Path in kinds:
                found.add((*above, name))
        return found

    assert paths(RunConfig) == {*INPUTS, ("runs_dir",), ("r3", "trace", "dir")} - {("engine", "python")}


def test_every_key_is_described_or_speaks_for_itself() -> None:
    sections = [
        field.annotation for field in RunConfig.model_fields.values() if hasattr(field.annotation, "model_fields")
    ]
    assert len(sections) == 11
    for section in sections:
        undescribed = {
            name
            for name, field in section.model_fields.items()
            if not field.description and not hasattr(field.annotation, "model_fields")  # a section describes itself
        }
        assert undescribed <= {"weight_decay", "betas", "device"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"async_rollout": {"depth": 2, "max_staleness": 1}}, "max_staleness is 1 and async_rollout.depth 2"),
        ({"async_rollout": {"max_staleness": 1}}, "0 where depth is 0"),
        ({"async_rollout": {"depth": 1}}, "recompute without a train.correction"),
        (
            {"async_rollout": {"depth": 1}, "train": {"old_logprob": {"source": "rescore"}}},
            "source rescore: the weights",
        ),
        (
            {
                "async_rollout": {"depth": 1},
                "train": {"old_logprob": {"source": "rollout"}},
                "engine": {"pause_mode": "retract"},
            },
            "take pause_mode turn",
        ),
    ],
)
def test_what_would_train_wrongly_on_older_tokens_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunConfig.model_validate({"name": "n", "model": "m", **values})


def test_inputs_of_layers_that_are_not_run_again_can_not_be_moved() -> None:
    with pytest.raises(ValidationError, match=r"offload_activations .* train\.recompute is selective: set it to full"):
        RunConfig.model_validate(
            {"name": "n", "model": "m", "train": {"offload_activations": True, "recompute": "selective"}}
        )


def test_ahead_of_training_the_old_tokens_are_corrected_or_clipped() -> None:
    for train in ({"old_logprob": {"source": "rollout"}}, {"correction": {"weight": "token"}}):
        config = RunConfig.model_validate({"name": "n", "model": "m", "async_rollout": {"depth": 2}, "train": train})
        assert config.async_rollout.staleness == 2


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"async_rollout": {"depth": 1}, "train": {"old_logprob": {"source": "rollout"}}},
            "async_rollout.depth is above 0",
        ),
        ({"train": {"device": "cpu"}}, "train.device is cpu: turn it off"),
        ({"train": {"ray_address": "host:6379"}}, "train.ray_address may lead to other machines: leave it out"),
        ({"train": {"parallel": {"world_size": 2}}}, "engine.count times engine.gpus is 1 and .* 2: make them equal"),
    ],
)
def test_engines_that_cannot_share_the_trainers_gpus_are_refused(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RunConfig.model_validate({"name": "n", "model": "m", "engine": {"colocate": True}, **values})

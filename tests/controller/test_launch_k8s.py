"""The manifests of ``agent-rl launch k8s`` against a schema of the fields that they have. No cluster ever took them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_rl.commands.launch_k8s import CONFIG_PATH, Pods, manifests, run_command
from agent_rl.config.loader import load_config
from agent_rl.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
PODS = Pods("registry/agent-rl:1", "training:/shared", 96, "900Gi")
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Field(pattern=r"^[1-9]\d*(Mi|Gi|Ti)?$")]


class Fields(BaseModel):
    """An object without other fields, whose values have exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Fields):
    name: Label


class ConfigMap(Fields):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str]


class Amounts(Fields):
    cpu: Quantity
    memory: Quantity
    gpus: int | None = Field(None, alias="nvidia.com/gpu", gt=0)


class Resources(Fields):
    requests: Amounts
    limits: Amounts

    @model_validator(mode="after")
    def gpus_are_not_overcommitted(self) -> Resources:
        assert self.requests == self.limits
        return self


class Exec(Fields):
    command: list[str] = Field(min_length=1)


class Probe(Fields):
    exec: Exec
    periodSeconds: int = Field(gt=0)
    timeoutSeconds: int = Field(gt=0)
    failureThreshold: int = Field(gt=0)


class Mount(Fields):
    name: Label
    mountPath: str = Field(pattern="^/[^:]*$")


class Container(Fields):
    name: Label
    image: str = Field(min_length=1)
    resources: Resources
    readinessProbe: Probe
    livenessProbe: Probe
    volumeMounts: list[Mount]


class Claim(Fields):
    claimName: Label


class EmptyDirectory(Fields):
    medium: Literal["Memory"]


class Volume(Fields):
    name: Label
    configMap: Metadata | None = None
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDirectory | None = None

    @model_validator(mode="after")
    def has_one_source(self) -> Volume:
        assert len(self.model_fields_set) == 2
        return self


class PodSpec(Fields):
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume]

    @model_validator(mode="after")
    def mounts_name_volumes(self) -> PodSpec:
        names = [volume.name for volume in self.volumes]
        assert len(set(names)) == len(names)
        assert {mount.name for each in self.containers for mount in each.volumeMounts} <= set(names)
        return self


class Template(Fields):
    spec: PodSpec


class Head(Fields):
    rayStartParams: dict[str, str]
    template: Template


class Workers(Head):
    groupName: Label
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int = Field(ge=1)


class AuthOptions(Fields):
    mode: Literal["disabled", "token"]


class ClusterSpec(Fields):
    rayVersion: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    authOptions: AuthOptions
    headGroupSpec: Head
    workerGroupSpecs: list[Workers]


class RayCluster(Fields):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


def written(config: str, *overrides: str, pods: Pods = PODS) -> tuple[ConfigMap, RayCluster]:
    text = manifests(load_config(CONFIGS / f"{config}.yaml", ["runs_dir=/shared/runs", *overrides]), pods)
    first, second = yaml.safe_load_all(text)
    return ConfigMap.model_validate(first), RayCluster.model_validate(second)


@pytest.mark.parametrize(("config", "pods", "gpus"), [("two-nodes", 2, 8), ("quickstart", 1, None)])
def test_manifests_have_the_fields_of_the_schema(config: str, pods: int, gpus: int | None) -> None:
    _, cluster = written(config)
    groups = [cluster.spec.headGroupSpec, *cluster.spec.workerGroupSpecs]
    assert 1 + sum(group.replicas for group in cluster.spec.workerGroupSpecs) == pods
    assert {group.template.spec.containers[0].resources.limits.gpus for group in groups} == {gpus}
    assert cluster.spec.authOptions.mode == "token"


def test_pods_load_the_same_config(tmp_path: Path) -> None:
    config_map, cluster = written("two-nodes", "train.lr=3e-6")
    (tmp_path / "config.yaml").write_text(config_map.data["config.yaml"])
    again = load_config(tmp_path / "config.yaml")
    overrides = ["runs_dir=/shared/runs", "train.lr=3e-6", "train.ray_address=auto"]
    assert again == load_config(CONFIGS / "two-nodes.yaml", overrides)
    mounts = {mount.mountPath for mount in cluster.spec.headGroupSpec.template.spec.containers[0].volumeMounts}
    assert mounts == {str(Path(CONFIG_PATH).parent), "/shared", "/dev/shm"}
    assert "ray.io/cluster=two-nodes" in run_command(again)


@pytest.mark.parametrize(
    ("overrides", "pods", "message"),
    [
        (["runs_dir=/elsewhere"], PODS, "runs_dir is /elsewhere: set it to a directory below /shared"),
        (["name=Two_Nodes"], PODS, "name is 'Two_Nodes'"),
        (["train.ray_address=auto"], PODS, "train.ray_address is auto: remove it"),
        ([], Pods("i", "training", 1, "1Gi"), "--claim training: write it as NAME:PATH"),
        ([], Pods("i", "training:/shared", 1, "1 GB"), "--memory 1 GB: write it as 900Gi"),
        (["engine.placement=local"], PODS, "engine.placement is local and the job has 2 nodes"),
    ],
)
def test_what_no_cluster_could_run_is_refused(overrides: list[str], pods: Pods, message: str) -> None:
    with pytest.raises(UserError, match=message):
        written("two-nodes", *overrides, pods=pods)

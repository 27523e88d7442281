"""``agent-rl launch k8s``: manifests of a Ray cluster for the KubeRay operator, with the run's config.

Never applied to a cluster: the tests check the manifests against a schema of the fields that are written here, which
are those of KubeRay 1.6, https://docs.ray.io/en/master/cluster/kubernetes/references/api.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from agent_rl.commands.launch import check_placement, planned_gpus, planned_nodes
from agent_rl.config import RunConfig
from agent_rl.errors import UserError

CONFIG_PATH = "/etc/agent-rl/config.yaml"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
_CLAIM = re.compile(r"(?P<claim>[a-z0-9][-.a-z0-9]*):(?P<path>/[^:]*)")
_QUANTITY = re.compile(r"[1-9]\d*(Mi|Gi|Ti)")


@dataclass(frozen=True, slots=True)
class Pods:
    """What each node of the cluster is: a pod with ``cpus`` and ``memory`` (as ``900Gi``) that runs ``image``.

    ``claim``: ``NAME:PATH``, a PersistentVolumeClaim and where pods mount it. ``nodes``: their number, by default what
    the config's GPUs need.
    """

    image: str
    claim: str
    cpus: int
    memory: str
    nodes: int | None = None


def manifests(config: RunConfig, pods: Pods) -> str:
    """YAML of a ConfigMap with what ``config`` sets, and of a RayCluster. Raises UserError."""
    nodes = pods.nodes or planned_nodes(config)
    claim, path = _check(config, pods, nodes)
    given = config.model_dump(mode="json", exclude_unset=True)
    text = yaml.safe_dump(given | {"train": {**given.get("train", {}), "ray_address": "auto"}}, sort_keys=False)
    metadata = {"name": config.name}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.yaml": text}}
    group = {"rayStartParams": {}, "template": {"spec": _pod_spec(config, pods, claim, path)}}
    workers = {"groupName": "nodes", "replicas": nodes - 1, "minReplicas": nodes - 1, "maxReplicas": nodes - 1, **group}
    spec = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {**group, "rayStartParams": {"include-dashboard": "false"}},
        "workerGroupSpecs": [workers] if nodes > 1 else [],
    }
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
    return yaml.dump_all([config_map, cluster], Dumper=_Plain, sort_keys=False)


def run_command(config: RunConfig) -> str:
    """What starts or resumes the run in the head's pod."""
    pod = f"$(kubectl get pod -o name -l ray.io/cluster={config.name},ray.io/node-type=head)"
    return f"kubectl exec {pod} -- agent-rl {'train' if config.sft is None else 'sft'} {CONFIG_PATH}"


def _pod_spec(config: RunConfig, pods: Pods, claim: str, path: str) -> Mapping[str, Any]:
    resources: dict[str, Any] = {"cpu": str(pods.cpus), "memory": pods.memory}
    if planned_gpus(config):
        resources["nvidia.com/gpu"] = config.hardware.gpus_per_node
    volumes = {
        "config": ("/etc/agent-rl", {"configMap": {"name": config.name}}),
        "shared": (path, {"persistentVolumeClaim": {"claimName": claim}}),
        # Ray's object store and NCCL; a container has 64 MiB of its own.
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
    }
    # KubeRay's own probes need wget and Ray's dashboard.
    health = ["bash", "-c", 'ray health-check --address "${RAY_ADDRESS:-127.0.0.1:6379}"']
    probe = {"exec": {"command": health}, "periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 20}
    container = {
        "name": "ray",
        "image": pods.image,
        "resources": {"requests": resources, "limits": resources},
        "readinessProbe": probe,
        "livenessProbe": probe,
        "volumeMounts": [{"name": name, "mountPath": mount} for name, (mount, _) in volumes.items()],
    }
    return {"containers": [container], "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()]}


def _check(config: RunConfig, pods: Pods, nodes: int) -> tuple[str, str]:
    """The claim and its path."""
    check_placement(config, nodes)
    if not _NAME.fullmatch(config.name):
        raise UserError(f"name is {config.name!r}: Kubernetes takes at most 47 of a-z, 0-9 and -, with a letter first")
    if not _QUANTITY.fullmatch(pods.memory):
        raise UserError(f"--memory {pods.memory}: write it as 900Gi")
    if (claim := _CLAIM.fullmatch(pods.claim)) is None:
        raise UserError(f"--claim {pods.claim}: write it as NAME:PATH, for example training:/shared")
    if not PurePosixPath(config.runs_dir).is_relative_to(claim["path"]):
        raise UserError(
            f"runs_dir is {config.runs_dir}: set it to a directory below {claim['path']}, which all pods share"
        )
    return claim["claim"], claim["path"]


class _Plain(yaml.SafeDumper):
    """Repeats what occurs twice instead of naming it, and writes texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Plain.add_representer(str, _Plain.represent_str)

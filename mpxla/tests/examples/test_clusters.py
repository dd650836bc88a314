"""Ray's workers as ranks; Kubeflow's manifest: its fields, and what torchrun makes of them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]
CLUSTERS = REPOSITORY / "examples" / "clusters"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_workers_of_ray_are_ranks(stages, replicas):
    pytest.importorskip("ray.train", reason="ray is not installed")
    spec = importlib.util.spec_from_file_location("ray_train", CLUSTERS / "ray_train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for x, labels in map(example.batch_of, range(4)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    # Ray counts the machine's CPUs, of which there may be fewer than workers.
    variables = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "PYTHONPATH": str(REPOSITORY)}
    variables |= {"RAY_OVERRIDE_RESOURCES": '{"CPU": 6}'}
    job = subprocess.run(
        [sys.executable, str(CLUSTERS / "ray_train.py"), "--steps", "4", f"--stages={stages}",
         f"--replicas={replicas}"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=400,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-4000:]
    found = re.findall(r"^step (\d): loss ([\d.]+)$", job.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [0, 1, 2, 3]
    assert [float(loss) for _, loss in found] == pytest.approx(expected, abs=2e-6)


# --- Kubeflow -----------------------------------------------------------------------------------


def manifest():
    yaml = pytest.importorskip("yaml", reason="the manifest is YAML")
    return yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())


def problems(value, kind, models, path=""):
    """Where a value is not of a kind of the operator's client, such as `dict(str, int)`."""
    inner = re.fullmatch(r"(list|dict)[\[(](?:str, )?(\w.*)[\])]", kind)
    if inner and not isinstance(value, list if inner[1] == "list" else dict):
        return [f"{path}: {value!r} is no {kind}"]
    if inner:
        parts = enumerate(value) if inner[1] == "list" else value.items()
        return [p for k, v in parts for p in problems(v, inner[2], models, f"{path}.{k}")]
    plain = {"str": str, "int": int, "bool": bool}.get(kind)
    if plain is not None:
        return [] if type(value) is plain else [f"{path}: {value!r} is no {kind}"]
    model = getattr(models, kind, None)
    if model is None:  # such as `object` and quantities
        return []
    names = {spelled: name for name, spelled in model.attribute_map.items()}
    found = [f"{path}: {kind} has no {key}" for key in value if key not in names]
    for key in value.keys() & names.keys():
        found += problems(value[key], model.openapi_types[names[key]], models, f"{path}.{key}")
    try:
        model(**{names[key]: value[key] for key in value.keys() & names.keys()})
    except ValueError as error:  # what is required is not there
        found.append(f"{path}: {error}")
    return found


@pytest.mark.unit
def test_the_manifest_is_valid():
    models = pytest.importorskip(
        "kubeflow.training.models", reason="the operator's schema is in kubeflow-training"
    )
    assert problems(manifest(), "KubeflowOrgV1PyTorchJob", models) == []
    # What the check is worth.
    wrong = manifest()
    wrong["spec"]["nprocPerNode"] = 2
    (container,) = wrong["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["order"] = container.pop("command")
    del container["name"]
    texts = "\n".join(problems(wrong, "KubeflowOrgV1PyTorchJob", models))
    assert "nprocPerNode: 2 is no str" in texts and "V1Container has no order" in texts
    assert "Invalid value for `name`" in texts


@pytest.mark.unit
def test_all_pods_are_alike_and_share_a_secret():
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator sets variables of this one"
    assert [entry["name"] for entry in container["env"]] == ["MPXLA_SECRET", "OMP_NUM_THREADS"]


@pytest.mark.unit
def test_torchrun_takes_what_the_operator_sets(monkeypatch):
    from torch.distributed.run import config_from_args, parse_args

    (container,) = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    count = manifest()["spec"]["nprocPerNode"]
    variables = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": count}
    variables |= {"MASTER_ADDR": "mpxla-master-0", "MASTER_PORT": "23456"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    assert container["command"][0] == "torchrun"
    config, _, _ = config_from_args(parse_args(container["command"][1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert config.rdzv_endpoint == "mpxla-master-0:23456" and config.rdzv_configs["rank"] == 1

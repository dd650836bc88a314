"""Kubeflow's manifest: its fields are those of the schema, and torchrun understands it."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="the manifest is YAML")

pytestmark = pytest.mark.unit

MANIFEST = Path(__file__).parents[3] / "examples" / "clusters" / "pytorchjob.yaml"


def manifest():
    return yaml.safe_load(MANIFEST.read_text())


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


def test_all_pods_are_alike_and_share_a_secret():
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator sets variables of this one"
    assert [entry["name"] for entry in container["env"]] == ["MPXLA_SECRET", "OMP_NUM_THREADS"]


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

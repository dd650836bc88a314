"""Partial and full checkpoints of training runs, under one topology and under others."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import mpxla as smp
from mpxla.tests.checkpoint.worlds import WIDTH, Run, TiedNet, batch
from mpxla.tests.clients import logged
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

LOSS = {"rtol": 2e-5, "atol": 1e-6}


def error_of(action):
    try:
        action()
    except (smp.MpxlaError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Makes the system refuse to write more to a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def nobody():
    """Gives up the rights of root, which may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def train_and_save(path):
    """A run of two stages that saves in every way, and fails to."""
    run = Run(stages=2)
    errors = {"early": error_of(lambda: run.save(path, "early"))}
    run.train(2)
    run.save(path, "two")
    expected = run.train(1)
    pending = run.save(path, "three", asynchronous=True)
    expected += run.train(2)  # what is saved is from before
    pending.wait()
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    whole = {"model": run.model, "optimizer": run.optimizer, "user_content": {"n": 5}}
    with logged() as lines:
        smp.save_checkpoint(path, "whole", partial=False, **whole)
    assert any("saves the model alone: an optimizer" in line for line in lines)
    folder = Path(path)
    rank = smp.rank()
    mixed = {
        "tag": lambda: run.save(path, f"mixed{rank}"),
        "path": lambda: run.save(folder / str(rank), "mixed"),
        "partial": lambda: run.save(path, "mixed", partial=rank == 0),
    }
    errors |= {f"mixed {name}": error_of(action) for name, action in mixed.items()}
    with files_of_at_most(48 << 10) if rank == 1 else contextlib.nullcontext():
        errors["disk full"] = error_of(lambda: run.save(path, "four"))
        pending = run.save(path, "four", asynchronous=True)
        errors["disk full later"] = error_of(pending.wait)
        assert pending.is_done
        run.save(path, "four", asynchronous=True)
        errors["disk full next"] = error_of(lambda: run.save(path, "five"))
    with files_of_at_most(48 << 10) if rank == 0 else contextlib.nullcontext():
        errors["disk full, whole"] = error_of(
            lambda: smp.save_checkpoint(path, "whole", partial=False, model=run.model)
        )
    smp.barrier()
    if rank == 0:
        os.chmod(path, 0o555)
    smp.barrier()
    with nobody():
        errors["no permission"] = error_of(lambda: run.save(path, "four"))
    smp.barrier()
    if rank == 0:
        os.chmod(path, 0o755)
    wrong = {
        "tag": dict(tag="a/b"),
        "kept": dict(tag="four", num_kept_partial_checkpoints=0),
        "asynchronous": dict(tag="four", partial=False, asynchronous=True),
        "model": dict(tag="four", model=run.model.module),
        "optimizer": dict(tag="four", optimizer=run.optimizer.optimizer),
        "no model": dict(tag="four", partial=False),
        "content": dict(tag="four", user_content=lambda: None),
    }
    for name, arguments in wrong.items():
        errors[f"wrong {name}"] = error_of(lambda a=arguments: smp.save_checkpoint(path, **a))
    return expected, state, errors


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, losses after "two", final state, errors of both ranks)."""
    path = tmp_path_factory.mktemp("checkpoints")
    one, other = run_ranks(train_and_save, 2, str(path), timeout_s=120)
    return path, one[0], one[1], [one[2], other[2]]


def test_the_folder_is_as_documented(saved):
    path = saved[0]
    assert sorted(os.listdir(path)) == [
        *("newest", "three_partial", "two_partial", "user_content_whole", "whole"),
    ]
    assert (path / "newest").read_text() == "whole\n"
    assert sorted(os.listdir(path / "two_partial")) == [
        *("manifest.json", "model_0_0_0.pt", "model_1_0_0.pt"),
        *("optimizer_0_0_0.pt", "optimizer_1_0_0.pt", "param_groups.pt", "partition.pt"),
        *("rank_0_0_0.pt", "rank_1_0_0.pt", "user_content.pt"),
    ]


def test_every_file_loads_with_plain_torch_and_every_tensor_is_there_once(saved):
    names = []
    for file in sorted((saved[0] / "three_partial").glob("*.pt")):
        content = torch.load(file)
        if file.name.startswith("model_"):
            names += list(content)
    plain = TiedNet()
    assert sorted(names) == sorted(set(plain.state_dict()) - {"head.weight"})


ERRORS = {
    "early": r"CheckpointError: saving .* failed on rank 0, 1: the model is not partitioned yet",
    "mixed tag": r"called with tag 'mixed0' on rank 0 and 'mixed1' on rank 1; call it with the sa",
    "mixed path": r"called with path '.*/0' on rank 0 and '.*/1' on rank 1",
    "mixed partial": r"called with partial True on rank 0 and False on rank 1",
    "disk full": r"saving checkpoint 'four' .* failed on rank 1: .*_1_0_0\.pt: File too large",
    "disk full later": r"saving checkpoint 'four' .* failed on rank 1: .*_1_0_0\.pt: File too la",
    "disk full next": r"saving checkpoint 'four' .* failed on rank 1: .*_1_0_0\.pt: File too lar",
    "disk full, whole": r"saving full .* failed on rank 0: .*whole\.\d+-\w+\.writing: File",
    "no permission": r"saving .* failed on rank 0: .*checkpoints\d+.*: Permission denied",
    "wrong tag": r"the tag 'a/b' cannot name a checkpoint",
    "wrong kept": r"num_kept_partial_checkpoints is 0; keep at least 1",
    "wrong asynchronous": r"asynchronous=True goes with partial=True only",
    "wrong model": r"model is a TiedNet; pass the smp\.DistributedModel that wraps it",
    "wrong optimizer": r"optimizer is a AdamW; pass the smp\.DistributedOptimizer",
    "wrong no model": r"a full checkpoint \(partial=False\) is of a model; pass model=",
    "wrong content": r"failed on rank 0: user_content is the function .* cannot be saved: .*Keep",
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_raised_on_all_ranks(saved, case):
    for errors in saved[3]:
        assert re.search(ERRORS[case], errors[case] or "no error"), errors[case]


def test_all_errors_are_listed(saved):
    assert set(saved[3][0]) == set(ERRORS)


def test_a_full_checkpoint_is_a_plain_state_dict(saved):
    path, _, state, _ = saved
    plain = TiedNet()
    plain.load_state_dict(torch.load(path / "whole"))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.load(path / "user_content_whole") == {"n": 5}


# --- resuming -----------------------------------------------------------------------------------


def resume_and_train(path, stages, replicas, options, count, after_first_step=False, config=None):
    run = Run(stages=stages, replicas=replicas, seed=99, **(config or {}))
    if after_first_step:
        run.train(1)
    content = run.resume(path, **options)
    learning_rate = run.optimizer.param_groups[0]["lr"]
    return content, learning_rate, run.train(count), run.model.state_dict()


def mean_losses(results):
    return torch.tensor([r[2] for r in results]).mean(dim=0).tolist()


@pytest.mark.parametrize(
    ("stages", "replicas", "tag"),
    [
        (2, 1, "three"),
        (1, 1, "two"),
        (1, 2, "two"),
        pytest.param(4, 1, "three", marks=pytest.mark.slow),
    ],
)
def test_any_topology_continues_the_run(saved, stages, replicas, tag):
    path, losses, _, _ = saved
    results = run_ranks(
        resume_and_train, stages * replicas, str(path), stages, replicas, {"tag": tag}, 2
    )
    expected = losses[:2] if tag == "two" else losses[1:]
    content, learning_rate, actual, _ = results[0]
    assert content["number"] == (2 if tag == "two" else 3)
    assert learning_rate == 0.005
    if (stages, replicas) == (2, 1):
        assert actual == expected, "bitwise"
    else:
        assert mean_losses(results) == pytest.approx(expected, rel=2e-5)


def test_virtual_stages_continue_the_run(saved):
    path, losses, _, _ = saved
    config = {"virtual_pipeline_degree": 2}
    results = run_ranks(resume_and_train, 2, str(path), 2, 1, {"tag": "two"}, 2, False, config)
    assert results[0][2] == pytest.approx(losses[:2], rel=2e-5)


def test_resuming_after_the_first_step(saved):
    path, losses, _, _ = saved
    # "newest" names the full checkpoint, which holds no optimizer: the newest partial one counts.
    content, _, actual, _ = run_ranks(resume_and_train, 2, str(path), 2, 1, {}, 2, True)[0]
    assert content["number"] == 3
    assert actual == losses[1:]


def save_with_replicas(path):
    run = Run(stages=1, replicas=2)
    run.train(1)
    run.save(path, "one")
    pending = run.save(path, "again", asynchronous=True, num_kept_partial_checkpoints=1)
    pending.wait()
    return run.train(2)


def test_replicas_share_the_writing_and_any_topology_reads_it(tmp_path):
    expected = run_ranks(save_with_replicas, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["again_partial", "newest"]
    sizes = [os.stat(tmp_path / "again_partial" / f"optimizer_0_0_{r}.pt").st_size for r in (0, 1)]
    assert max(sizes) < 0.7 * sum(sizes)
    expected = torch.tensor(expected).mean(dim=0).tolist()
    same = run_ranks(resume_and_train, 2, str(tmp_path), 1, 2, {}, 2)
    assert mean_losses(same) == expected, "bitwise"
    other = run_ranks(resume_and_train, 2, str(tmp_path), 2, 1, {}, 2)
    assert mean_losses(other) == pytest.approx(expected, rel=2e-5)


# --- refusals -----------------------------------------------------------------------------------


class Wider(TiedNet):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.second = torch.nn.Linear(WIDTH, 16, bias=False)
        self.extra = torch.nn.Linear(2, 2)
        self.first = torch.nn.Linear(16, WIDTH, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(25)


class Stateful(TiedNet):
    def get_extra_state(self):
        return 5

    def set_extra_state(self, state):
        pass


def resume_in_vain(cases, build=TiedNet):
    run = Run(stages=2, build=build)
    return {name: error_of(lambda o=options: run.resume(**o)) for name, options in cases.items()}


def damaged_copies(saved_path, target):
    """Copies of a checkpoint, each with one damage; name -> arguments of the resume."""

    def copy(name):
        shutil.copytree(saved_path, target / name)
        return target / name / "two_partial"

    model = copy("altered") / "model_1_0_0.pt"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 16
    model.write_bytes(data)
    os.truncate(copy("truncated") / "optimizer_0_0_0.pt", 1000)
    (copy("missing") / "rank_1_0_0.pt").unlink()
    os.truncate(copy("manifest") / "manifest.json", 99)
    other = copy("mixed")
    shutil.copy(other.parent / "three_partial" / "model_0_0_0.pt", other / "model_0_0_0.pt")
    names = ("altered", "truncated", "missing", "manifest", "mixed")
    return {name: {"path": str(target / name), "tag": "two"} for name in names}


DAMAGE = {
    "altered": r"two_partial/model_1_0_0\.pt was altered since it was written",
    "truncated": r"two_partial/optimizer_0_0_0\.pt has 1000 bytes instead of \d+: it was trunc",
    "missing": r"two_partial/rank_1_0_0\.pt is missing, which the checkpoint needs",
    "manifest": r"two_partial/manifest\.json was truncated or altered",
    "mixed": r"two_partial/model_0_0_0\.pt (was altered|has \d+ bytes)",
    "nothing": r"has no file 'newest', so there is no checkpoint to resume from",
    "other tag": r"no partial checkpoint 'nine' in .*Its partial checkpoints: two, three",
    "full": r"no partial checkpoint 'whole' in .* a full one of that name: pass partial=False",
    "not full": r"has no full checkpoint 'two' but a partial one; pass partial=True",
    "neither": r"nine does not exist; check the path and the tag",
    "sharded": r"load_sharded_optimizer_state=False belongs to sharded data parallelism",
    "unsafe": r"evil holds objects whose loading could run code",
    "no state": r"no_state is no state dict of a model: 'n' is a int",
}


def test_what_cannot_be_loaded_is_refused_on_all_ranks(saved, tmp_path):
    path = str(saved[0])
    cases = damaged_copies(saved[0], tmp_path)
    cases["nothing"] = {"path": str(tmp_path)}
    cases["other tag"] = {"path": path, "tag": "nine"}
    cases["full"] = {"path": path, "tag": "whole"}
    cases["not full"] = {"path": path, "tag": "two", "partial": False}
    cases["neither"] = {"path": path, "tag": "nine", "partial": False}
    cases["sharded"] = {"path": path, "load_sharded_optimizer_state": False}
    shutil.copy(saved[0] / "user_content_whole", tmp_path / "no_state")
    cases["no state"] = {"path": str(tmp_path), "tag": "no_state", "partial": False}
    torch.save({"x": torch.nn.Linear(2, 2)}, tmp_path / "evil")
    cases["unsafe"] = {"path": str(tmp_path), "tag": "evil", "partial": False}
    results = run_ranks(resume_in_vain, 2, cases)
    assert set(cases) == set(DAMAGE)
    for errors in results:
        for name, text in DAMAGE.items():
            assert re.search(text, errors[name] or "no error"), (name, errors[name])


def test_another_model_is_refused(saved):
    cases = {"model": {"path": str(saved[0]), "tag": "two"}}
    cases["full"] = {"path": str(saved[0]), "tag": "whole", "partial": False}
    for errors in run_ranks(resume_in_vain, 2, cases, Wider):
        for text in (
            r"it does not have extra\.weight, extra\.bias",
            r"it has second\.bias, which the model does not have",
            r"norm\.weight is \[1024\] in it and \[25\] in the model",
        ):
            for case in cases:
                assert re.search(text, errors[case]), errors[case]
    (errors, _) = run_ranks(resume_in_vain, 2, cases, Stateful)
    assert "the model's state '_extra_state' is no parameter or buffer" in errors["model"]


# --- plain and Hugging Face files ---------------------------------------------------------------


def plain_files(folder):
    """One state dict in four forms; tied weights under one name, as Hugging Face saves them."""
    torch.manual_seed(31)
    plain = TiedNet()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    torch.save(state, folder / "plain.pt")
    untied = {name: value for name, value in state.items() if name != "embedding.weight"}
    save_file(untied, folder / "model.safetensors")
    names = sorted(untied)
    parts = {"part-1.safetensors": names[:4], "part-2.safetensors": names[4:]}
    for file, part in parts.items():
        save_file({name: untied[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"model": state, "epoch": 3}, folder / "wrapped.pt")
    return plain


def unwrap(saved):
    return saved["model"]


def load_plain(folder, tag, **options):
    run = Run(stages=2, seed=12)
    content = run.resume(folder, tag=tag, partial=False, **options)
    return content, run.train(1), run.model.local_state_dict()


def load_all_plain(folder):
    first = load_plain(folder, "model.safetensors")
    smp.shutdown()
    return first, load_plain(folder, "wrapped.pt", translate_function=unwrap)


def load_after_the_first_step(folder):
    """Every form into one partitioned model, which holds other values before."""
    run = Run(stages=2, seed=12)
    run.train(1)
    initial = run.model.state_dict()
    seen = {}
    for tag in ("plain.pt", "model.safetensors", "model.safetensors.index.json"):
        run.resume(folder, tag=tag, partial=False)
        seen[tag] = run.model.state_dict()
        run.model.load_state_dict(initial)
    partial = {n: v for n, v in torch.load(Path(folder) / "plain.pt").items() if "norm" in n}
    torch.save(partial, Path(folder) / f"norm{smp.rank()}.pt")
    error = error_of(lambda: run.resume(folder, tag="norm0.pt", partial=False))
    smp.barrier()
    run.resume(folder, tag="norm0.pt", partial=False, strict=False)
    seen["norm"] = run.model.state_dict()
    return seen, initial, error


def test_plain_and_hugging_face_files_load_into_a_partitioned_model(tmp_path):
    plain = plain_files(tmp_path)
    expected = plain.state_dict()
    for seen, initial, error in run_ranks(load_after_the_first_step, 2, str(tmp_path)):
        for tag in ("plain.pt", "model.safetensors", "model.safetensors.index.json"):
            for name, value in expected.items():
                assert torch.equal(seen[tag][name], value), (tag, name)
        assert "it does not have scale, embedding.weight" in error
        for name, value in seen["norm"].items():
            assert torch.equal(value, (expected if "norm" in name else initial)[name]), name


def test_plain_files_load_before_the_first_step(tmp_path):
    plain = plain_files(tmp_path)
    plain.train()
    ids, labels = batch(0)
    halves = zip(ids.chunk(2), labels.chunk(2), strict=True)
    loss = torch.stack([F.cross_entropy(plain(i), y) for i, y in halves]).mean()
    for first, second in run_ranks(load_all_plain, 2, str(tmp_path)):
        for content, losses, _ in (first, second):
            assert content is None
            assert losses == pytest.approx([loss.item()], rel=2e-5)

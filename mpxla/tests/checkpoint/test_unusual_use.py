"""Other optimizers, other moments, other places than the ones that everybody tries."""

import contextlib
import copy
import logging
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mpxla as smp
from mpxla.log import get_logger
from mpxla.tests.checkpoint.worlds import MICROBATCHES, Run, TiedNet, batch
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def error_of(action):
    try:
        action()
    except smp.MpxlaError as error:
        return str(error)
    return None


def save(path):
    run = Run(stages=2)
    run.train(2)
    run.save(path, "two")
    found = run.model.state_dict()
    return run.train(2), run.model.state_dict(), found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, losses after it, final state, saved state) of a run of two stages."""
    path = tmp_path_factory.mktemp("checkpoints")
    losses, state, found = run_ranks(save, 2, str(path))[0]
    return path, losses, state, found


# --- optimizers ---------------------------------------------------------------------------------


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)


class Extended(TiedNet):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.extra = torch.nn.Linear(16, 12, bias=False)

    def forward(self, ids):
        x = torch.tanh(self.norm(self.first(self.embedding(ids))))
        x = self.second(x)
        return self.head(x) + self.extra(x)


def resume_with_other_optimizers(path):
    seen = {}
    run = Run(stages=2, optimizer=momentum)
    seen["class"] = error_of(lambda: run.resume(path))
    run.resume(path, load_optimizer=False)
    run.train(1)
    seen["class later"] = error_of(lambda: run.resume(path))
    seen["rate"] = run.optimizer.param_groups[0]["lr"]
    smp.shutdown()
    run = Run(stages=2, optimizer=two_groups)
    seen["groups"] = error_of(lambda: run.resume(path))
    smp.shutdown()
    run = Run(stages=2, build=Extended)
    seen["not strict"] = error_of(lambda: run.resume(path, strict=False))
    run.resume(path, strict=False, load_optimizer=False)
    run.train(1)
    smp.shutdown()
    smp.init({"pipeline_parallel_degree": 2})
    smp.DistributedModel(TiedNet())
    heard = Heard()
    get_logger().addHandler(heard)
    smp.resume_from_checkpoint(path, load_optimizer=False)
    assert heard.texts == []
    smp.resume_from_checkpoint(path)
    get_logger().removeHandler(heard)
    seen["no optimizer"] = "\n".join(heard.texts)
    return seen


def resume_without_model(path):
    run = Run(stages=2)
    run.train(1)
    smp.save_checkpoint(path, "empty", user_content=3)
    heard = Heard()
    get_logger().addHandler(heard)
    assert smp.resume_from_checkpoint(path, load_optimizer=False) == 3
    get_logger().removeHandler(heard)
    return "\n".join(heard.texts)


def test_checkpoint_without_model_is_noticed(tmp_path):
    for text in run_ranks(resume_without_model, 2, str(tmp_path)):
        assert re.search(r"no weights are loaded from .*empty_partial: it was saved without", text)


OPTIMIZERS = {
    "class": r"two_partial holds the state of AdamW, and this optimizer is SGD\. Build the opt",
    "class later": r"holds the state of AdamW, and this optimizer is SGD\. .*load_optimizer=False",
    "groups": r"param group 0 of this optimizer and of the saved one differ in .*Build the opt",
    "not strict": r"differ in extra\.weight\. Build the optimizer as it was, or pass load_opt",
    "no optimizer": r"state in .*two_partial is not loaded, because no smp\.DistributedOptimizer w",
}


@pytest.mark.slow
def test_state_of_another_optimizer_is_refused(saved):
    for seen in run_ranks(resume_with_other_optimizers, 2, str(saved[0])):
        assert seen.pop("rate") == 0.1, "a refused checkpoint leaves the settings alone"
        assert set(seen) == set(OPTIMIZERS)
        for name, text in OPTIMIZERS.items():
            assert re.search(text, seen[name] or "no error"), (name, seen[name])


class CountsForAll(torch.optim.Optimizer):
    """Keeps a count and numbers of all its parameters in its state, as MADGRAD does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["k"] = torch.zeros(1, dtype=torch.int64)
        self.state["mean"] = {"rate": 1.0}

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        rate = self.state["mean"]["rate"] / (1 + self.state["k"].item())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", 0) + parameter.grad
                    parameter.sub_(state["sum"], alpha=rate * group["lr"])
        self.state["k"] += 1
        self.state["mean"] = {"rate": 0.5 + 0.5 * self.state["mean"]["rate"] ** 2 + 0.1}


def counts_for_all(parameters):
    """Of parameters that have names."""
    return CountsForAll([(f"p{number}", p) for number, p in enumerate(parameters)])


def keep_state_of_no_parameter(path, stages):
    run = Run(stages, optimizer=counts_for_all)
    run.train(2)
    run.save(path, "kept")
    full = run.optimizer.state_dict(), run.model.state_dict()
    names = [f"p{number}" for number in range(len(full[0]["param_groups"][0]["params"]))]
    expected = run.train(2)
    smp.shutdown()
    losses = []
    for load in (
        lambda run: run.resume(path),
        lambda run: (
            run.optimizer.load_state_dict(full[0]),
            run.model.load_state_dict(full[1]),
            run.resume(path, load_optimizer=False),
        ),
    ):
        run = Run(stages, seed=50, optimizer=counts_for_all)
        load(run)
        losses.append(run.train(2))
        state, groups = run.optimizer.state_dict().values()
        assert state["k"] == 4 and groups[0]["param_names"] == names
        smp.shutdown()
    return expected, losses, list(full[0]["state"])


def train_with_state_of_no_parameter():
    torch.manual_seed(5)
    model = TiedNet(0.0)
    optimizer = CountsForAll(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        parts = [batch(number, part, MICROBATCHES) for part in range(MICROBATCHES)]
        of_parts = [F.cross_entropy(model(ids), labels) for ids, labels in parts]
        losses.append(sum(of_parts) / MICROBATCHES)
        losses[-1].backward()
        optimizer.step()
        scheduler.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_state_that_belongs_to_no_parameter_is_kept(stages, tmp_path):
    results = run_ranks(keep_state_of_no_parameter, stages, str(tmp_path), stages)
    for expected, losses, keys in results:
        assert losses == [expected, expected]
        assert keys[-2:] == ["k", "mean"]
    assert results[0][0] == pytest.approx(train_with_state_of_no_parameter()[2:], rel=1e-5)


class WithBuffers(torch.optim.Optimizer):
    """Keeps a buffer for every momentum, as AggMo does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["buffers"] = {rate: torch.zeros_like(parameter) for rate in (0.0, 0.9)}
                    state["counts"] = [0, {"more": 1}]
                for rate, buffer in state["buffers"].items():
                    buffer.mul_(rate).add_(parameter.grad)
                    parameter.sub_(buffer, alpha=group["lr"] / 2)
                state["counts"][0] += 1


def keep_nested_state(path):
    """Saved from two stages; loaded where replicas divide it, in two ways."""
    run = Run(2, optimizer=WithBuffers)
    run.train(2)
    run.save(path, "kept")
    full = run.optimizer.state_dict(), run.model.state_dict()
    run.train(2)
    expected = run.optimizer.state_dict(), run.model.state_dict()
    smp.shutdown()
    found = []
    for is_file in (True, False):
        run = Run(1, seed=50, optimizer=WithBuffers, replicas=2, shard_optimizer_state=True)
        run.resume(path, load_optimizer=is_file)
        if not is_file:
            run.optimizer.load_state_dict(full[0])
            run.model.load_state_dict(full[1])
        run.train(2)
        found.append((run.optimizer.state_dict(), run.model.state_dict()))
        smp.shutdown()
    return expected, found


@pytest.mark.slow
def test_nested_state_of_a_parameter_is_kept(tmp_path):
    for (state, weights), found in run_ranks(keep_nested_state, 2, str(tmp_path)):
        for other_state, other in found:
            for name, value in weights.items():
                if "norm" not in name:  # each replica counts its own batches
                    torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(
                {n: of["buffers"] for n, of in other_state["state"].items()},
                {n: of["buffers"] for n, of in state["state"].items()},
                rtol=1e-3,
                atol=1e-4,
            )
            assert other_state["state"][0]["counts"] == [4, {"more": 1}]


# --- moments ------------------------------------------------------------------------------------


def use_at_other_moments(path, other):
    run = Run(stages=2, seed=40)
    run.resume(path)
    early = run.model.state_dict()
    losses = run.train(2)
    state = run.model.state_dict()
    run.save(other, "in flight", asynchronous=True)
    run.resume(other)  # the one above, though it is just being written
    number = run.number
    run.train(1)
    run.save(other, "a", asynchronous=True)
    run.save(other, "b")
    run.save(other, "c", asynchronous=True)
    run.save(other, "c", asynchronous=True)
    smp.shutdown()
    run = Run(stages=2, seed=41)
    run.resume(path)
    run.model.load_state_dict(state)  # the later one counts
    run.resume(other, load_optimizer=False)
    run.model.load_state_dict(state)
    smp.step(lambda model, ids: model(ids))(run.model, torch.zeros(4, dtype=torch.int64))
    return early, losses, state, number, run.model.state_dict()


def test_saving_and_loading_at_other_moments(saved, tmp_path):
    path, expected, final, found = saved
    other = tmp_path / "other"
    for early, losses, state, number, last in run_ranks(
        use_at_other_moments, 2, str(path), str(other)
    ):
        for name, value in found.items():
            assert torch.equal(early[name], value), name
        assert losses == expected
        assert number == 4
        for name, value in final.items():
            assert torch.equal(state[name], value), name
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(last[name], value), name
    tags = ("a", "b", "c", "in flight")
    assert sorted(os.listdir(other)) == sorted([*(f"{tag}_partial" for tag in tags), "newest"])
    assert (other / "newest").read_text() == "c\n"


def use_before_the_first_step(path, other):
    """Parameters read, copied and written between resuming and the first step."""
    evaluate = smp.step(lambda model, ids: model(ids))
    ids = torch.arange(4)
    results = []
    for partial in (True, False):
        run = Run(stages=2, seed=42)
        smp.resume_from_checkpoint(path if partial else other, "two", partial=partial)
        read = {name: p.detach().clone() for name, p in run.model.module.named_parameters()}
        copied = copy.deepcopy(run.model)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
        run.model.eval()
        copied.eval()
        evaluate(run.model, ids)
        evaluate(copied, ids)
        results.append((read, copied.state_dict(), run.model.state_dict()))
        if partial:
            run.model.load_state_dict(copied.state_dict())
            smp.save_checkpoint(other, "two", partial=False, model=run.model)
        smp.shutdown()
    return results


def test_values_of_a_checkpoint_are_there_before_the_first_step(saved, tmp_path):
    path, _, _, found = saved
    for results in run_ranks(use_before_the_first_step, 2, str(path), str(tmp_path)):
        for read, copied, written in results:
            for name, value in read.items():
                assert torch.equal(value, found[name]), name
                assert torch.equal(copied[name], found[name]), name
                assert torch.equal(written[name], found[name] * 0.5), name


# --- places -------------------------------------------------------------------------------------


def times_of(folder):
    return {file: file.stat().st_mtime_ns for file in [folder, *folder.rglob("*")]}


def use_other_places(path, base):
    run = Run(stages=2, seed=42)
    run.resume(path)
    losses = run.train(2)
    with contextlib.chdir(base):
        run.save("a b/é [x]", "with space")
        pending = run.save("link", "linked", asynchronous=True)
    pending.wait()
    places = [(f"{base}/link", "linked"), (f"{base}/a b/é [x]", "with space")]
    return losses, [run.resume(place, tag=tag)["number"] for place, tag in places]


def test_other_places(saved, tmp_path):
    path, expected, *_ = saved
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    before = times_of(path)
    results = run_ranks(use_other_places, 2, str(path), str(tmp_path))
    assert results == [(expected, [4, 4])] * 2
    assert times_of(path) == before, "loading writes nothing, so the folder may be read-only"
    assert sorted(os.listdir(Path(tmp_path, "real"))) == ["linked_partial", "newest"]

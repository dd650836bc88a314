"""Sharded data parallelism beside training: checkpoints, models without values, wrong use."""

import copy

import pytest
import torch
from torch import nn

from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.test_parity_sharded import Case, Model, batch_of, build, loss_of, make_optimizer
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks


class Trained:
    """A session with the model of the parity tests."""

    def __init__(self, case, seed=3, make=None):
        import mpxla as smp

        smp.init(case.config())
        self.case, self.number = case, 0
        self.model = smp.DistributedModel(build(seed) if make is None else make())
        inner = make_optimizer(self.model.parameters())
        self.optimizer = smp.DistributedOptimizer(inner)

        @smp.step
        def step(model, ids):
            loss = loss_of(model, ids)
            model.backward(loss)
            return loss

        self.step = step

    def train(self, count):
        import mpxla as smp

        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            batch = batch_of(self.number, self.case.replicas).chunk(self.case.replicas)
            returned = self.step(self.model, batch[smp.rdp_rank()])
            losses.append(returned.reduce_mean().item())
            self.optimizer.step()
            self.number += 1
        return losses

    def whole(self):
        return {name: value.cpu() for name, value in self.model.state_dict().items()}


DIVIDED = Case(2, keys=(("sdp_gradient_clipping", 1e9),))
GRADIENTS = Case(2, keeps_whole=True)
PLAIN = Case(1, groups=2, keys=(("shard_optimizer_state", True),))


def save_and_go_on(path, case):
    """Runs on every rank: a checkpoint in mid run, what it holds, and what comes after."""
    import mpxla as smp

    run = Trained(case)
    run.train(2)
    smp.save_checkpoint(path, "two", model=run.model, optimizer=run.optimizer)
    smp.save_checkpoint(path, "full", partial=False, model=run.model)
    return run.whole(), run.train(2), run.whole()


def resume(paths, full, case):
    """Runs on every rank: losses after each checkpoint, whole parameters of a full one."""
    import mpxla as smp

    found = []
    for path in paths:
        run = Trained(case, seed=9)
        run.number = 2
        smp.resume_from_checkpoint(path, "two")
        found.append((run.train(2), run.whole()))
        smp.shutdown()
    run = Trained(case, seed=9)
    smp.resume_from_checkpoint(full, "full", partial=False)
    run.train(0)
    run.step(run.model, batch_of(2, 1))
    return found, run.whole()


@pytest.mark.slow
def test_checkpoints_of_and_for_other_topologies(tmp_path):
    from mpxla.sharded_data_parallel_checkpoint import (
        get_full_state_dict_from_sharded_data_parallel_checkpoint as merged,
    )

    divided, plain, gradients = (str(tmp_path / name) for name in ("a", "b", "c"))
    env = {"MPXLA_DEVICE": "pjrt"}
    cases = {divided: DIVIDED, plain: PLAIN, gradients: GRADIENTS}
    results = {p: run_ranks(save_and_go_on, 2, p, case, env=env) for p, case in cases.items()}
    for path, of_ranks in results.items():
        full = merged(path, "two")
        for name, value in of_ranks[0][0].items():
            assert torch.equal(full[name], value), name
    assert merged(divided, "two", torch.bfloat16)["blocks.0.up.weight"].dtype is torch.bfloat16
    for own, case in cases.items():
        paths = [path for path in cases if path != own or case is DIVIDED]
        for rank, (found, full) in enumerate(run_ranks(resume, 2, paths, divided, case, env=env)):
            for (losses, state), path in zip(found, paths, strict=True):
                _, expected, after = results[path][rank]
                assert losses == pytest.approx(expected, rel=1e-5)
                torch.testing.assert_close(state, after, rtol=1e-5, atol=1e-6)
            for name, value in results[divided][0][0].items():
                assert torch.equal(full[name], value), name


def train_without_values(case):
    """Runs on every rank: a model that is built without values; losses of its first steps."""
    import mpxla as smp
    from mpxla.delayed import is_delayed

    made = []

    def make():
        torch.manual_seed(3 + smp.rank())  # as in ordinary models, the first replica's values count
        with smp.model_creation(zero_init=True):
            made.append(Large())
        assert is_delayed(made[0].blocks[0].up.weight)
        return made[0]

    run = Trained(case, make=make)
    losses = run.train(3)
    sizes = {name: p.numel() for name, p in run.model.tensors.parts.items()}
    return losses, sizes, all(p.is_meta for p in made[0].parameters() if p.numel() > 24)


class Large(Model):
    """Weights above what is made at once."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up = nn.Linear(12, 300)
            block.down = nn.Linear(300, 12)


def train_large_plainly(case, count):
    torch.manual_seed(3)
    model = Large()
    optimizer, losses = make_optimizer(model.parameters()), []
    for number in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(number, case.replicas))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses


@pytest.mark.slow
def test_a_model_without_values():
    case = Case(2)
    found = run_ranks(train_without_values, 2, case, env={"MPXLA_DEVICE": "pjrt"})
    losses = torch.tensor([of_rank[0] for of_rank in found]).mean(0)
    torch.testing.assert_close(
        losses, torch.tensor(train_large_plainly(case, 3)), rtol=1e-5, atol=0
    )
    for _, sizes, are_parts in found:
        assert are_parts
        assert sizes["blocks.0.up.weight"] == 12 * 300 // 2


def wrong_uses():
    """Runs on every rank: texts of errors, by what was done."""
    import mpxla as smp

    run = Trained(Case(2))
    calls = {
        "model outside": lambda: run.model(batch_of(0, 1)),
        "model.join()": lambda: run.model.join().__enter__(),
        "model.register_comm_hook()": lambda: run.model.register_comm_hook(None, print),
        "shared": lambda: smp.DistributedModel(nn.Sequential(run.model.module.embedding)),
        "norm": lambda: smp.register_parameter(run.model, "weight"),
    }
    texts = {}
    for what, call in calls.items():
        with pytest.raises(smp.MpxlaError) as error:
            call()
        texts[what] = str(error.value)
    smp.register_parameter(run.model.module, run.model.module.head.weight)
    run.train(1)

    @smp.step
    def evaluate(model, ids):
        return loss_of(model, ids)

    with pytest.raises(smp.RankMismatch) as error:
        (evaluate if smp.rank() == 0 else run.step)(run.model, batch_of(0, 1))
    texts["alone"] = str(error.value)
    return texts


def test_wrong_uses():
    for texts in run_ranks(wrong_uses, 2, env={"MPXLA_DEVICE": "pjrt"}):
        assert "its parameters are divided over ranks" in texts.pop("model outside")
        assert texts.pop("norm").startswith("smp.register_parameter takes a module and a parameter")
        assert "0.weight belongs to an earlier smp.DistributedModel" in texts.pop("shared")
        alone = texts.pop("alone")
        assert "hold the parameters of a model together" in alone
        assert "evaluate, and rank 1 with" in alone
        assert len(texts) == 2
        for what, text in texts.items():
            assert text.startswith(f"{what} does not go with sharded_data_parallel_degree yet")


def use_divided_gradients():
    """Runs on every rank: texts of errors, and weights after plain backwards."""
    import mpxla as smp

    run = Trained(GRADIENTS)
    calls = {
        "model.join()": lambda: run.model.join().__enter__(),
        "model.register_comm_hook()": lambda: run.model.register_comm_hook(None, print),
    }
    texts = {}
    for what, call in calls.items():
        with pytest.raises(smp.ConfigError) as error:
            call()
        texts[what] = str(error.value)
    with pytest.raises(smp.ConfigError, match=r"0\.weight belongs to an earlier"):
        smp.DistributedModel(nn.Sequential(run.model.module.embedding))
    with pytest.raises(smp.ConfigError, match="zero_init=True\\) belongs to sharded data"):
        smp.model_creation(zero_init=True).__enter__()
    for number in range(3):
        run.optimizer.zero_grad()
        batch = batch_of(number, 2).chunk(2)[smp.rdp_rank()]
        loss_of(run.model, batch).backward()  # outside of steps
        run.optimizer.step()
    assert all(p.grad.shape == p.shape for p in run.model.parameters())
    held = sum(p.numel() for group in run.optimizer.param_groups for p in group["params"])
    return texts, run.whole(), held, copy.deepcopy(run.model).state_dict()


@pytest.mark.slow
def test_divided_gradients_of_a_plain_backward():
    model = build()
    optimizer = make_optimizer(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        sum(loss_of(model, part) / 2 for part in batch_of(number, 2).chunk(2)).backward()
        optimizer.step()
    sizes = [p.numel() for p in model.parameters()]
    whole = sum(size for size in sizes if size < 16)
    found = run_ranks(use_divided_gradients, 2, env={"MPXLA_DEVICE": "pjrt"})
    for texts, state, _, copied in found:
        torch.testing.assert_close(state, model.state_dict(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(copied, state, rtol=0, atol=0)
        for what, text in texts.items():
            assert text.startswith(f"{what} does not go with shard_gradients yet")
    assert sum(held for _, _, held, _ in found) == sum(sizes) + whole


LENGTHS = (8, 8), (5, 8), (8, 5), (8, 8)
"""Of each replica's sequences, by step."""


def train_with_other_lengths(case):
    """Runs on every rank: each replica compiles its second plan in another step."""
    import mpxla as smp

    run = Trained(case)
    for number, lengths in enumerate(LENGTHS):
        run.optimizer.zero_grad()
        place = smp.rdp_rank()
        own = batch_of(number, case.replicas).chunk(case.replicas)[place]
        run.step(run.model, own[:, : lengths[place]].contiguous())
        run.optimizer.step()
    return run.whole()


@pytest.mark.slow
def test_replicas_compile_other_batches_at_other_times():
    model = build()
    optimizer = make_optimizer(model.parameters())
    for number, lengths in enumerate(LENGTHS):
        optimizer.zero_grad()
        for own, length in zip(batch_of(number, 2).chunk(2), lengths, strict=True):
            for part in own[:, :length].chunk(2):
                (loss_of(model, part) / 4).backward()
        optimizer.step()
    for state in run_ranks(train_with_other_lengths, 2, DIVIDED, timeout_s=120):
        assert_close_by_norm(state, model.state_dict(), 1e-5)


def call_apart_with_own_samples():
    """Runs on every rank: what replicas of two ranks each say that run different functions."""
    import mpxla as smp

    run = Trained(Case(2, keys=(("tensor_parallel_degree", 2),)))

    @smp.step
    def evaluate(model, ids):
        return loss_of(model, ids)

    with pytest.raises(smp.MpxlaError) as error:
        (evaluate if smp.rdp_rank() == 0 else run.step)(run.model, batch_of(0, 1))
    return str(error.value)


def test_calls_are_compared_where_ranks_of_a_replica_have_their_own_samples():
    for text in run_ranks(call_apart_with_own_samples, 4, env={"MPXLA_DEVICE": "pjrt"}):
        assert "hold the parameters of a model together" in text
        assert "evaluate, and rank 2 with" in text or "evaluate, and rank 3 with" in text

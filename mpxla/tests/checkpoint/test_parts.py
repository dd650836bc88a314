"""Checkpoints of models whose tensors are split over ranks: whole tensors, whoever reads them."""

import pytest
import torch
from torch import nn

import mpxla as smp
from mpxla.checkpoint.files import save_object
from mpxla.checkpoint.shards import ShardIndex, ShardReader, Slot
from mpxla.errors import CheckpointError
from mpxla.nn.shards import Shard
from mpxla.tests.checkpoint.worlds import Run, one_of
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

WIDTH = 8


class SplitNet(nn.Module):
    """Tied ends, a product in three blocks, and norms that stay whole."""

    _tp_plan = {"first": "colwise", "second": "rowwise"}

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.words.weight

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        x = self.words(ids)
        return self.head(self.norm(x + self.second(torch.tanh(self.first(x)))))


def build(dropout):
    model = SplitNet()
    smp.set_tensor_parallelism(model)
    return model


def start(stages=1, tensor=1, seed=5, **config):
    sizes = {"tensor_parallel_degree": tensor, "prescaled_batch": True, "ddp": True}
    run = Run(stages=stages, seed=seed, build=build, **(sizes if tensor > 1 else {}), **config)
    assert bool(run.model.shards_of_tensors) == (tensor > 1)
    return run


def save_in_mid_run(path, topology):
    run = start(**topology)
    run.train(2)
    run.save(path, "two")
    smp.save_checkpoint(path, "full", partial=False, model=run.model)
    states = run.model.state_dict(), run.optimizer.state_dict()
    local = run.model.local_state_dict(), run.optimizer.local_state_dict()
    losses = run.train(2)
    run.model.load_state_dict(local[0])
    run.optimizer.load_state_dict(local[1])
    run.number -= 2
    return losses, run.train(2), *states


def resume_each(paths, topology):
    results = {}
    for name, path in paths.items():
        run = start(seed=91, **topology)
        run.resume(path, tag="two")
        results[name] = run.train(2)
        run.model.load_state_dict(torch.load(f"{path}/full"))
        run.optimizer.load_state_dict(torch.load(f"{path}/optimizer"))
        run.number -= 2
        results[f"{name}, full"] = run.train(2)
        smp.resume_from_checkpoint(path, "full", partial=False)
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        expected = torch.load(f"{path}/full")
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        smp.shutdown()
    return results


def num_ranks(topology):
    sizes = (topology.get(axis, 1) for axis in ("stages", "tensor", "replicas"))
    return torch.Size(sizes).numel()


def check(tmp_path, topologies):
    """Every topology saves in mid-run, and goes on from what others have saved."""
    paths = {name: str(tmp_path / name) for name in topologies}
    saved = {}
    for name, topology in topologies.items():
        ranks = run_ranks(save_in_mid_run, num_ranks(topology), paths[name], topology)
        torch.save(ranks[0][3], f"{paths[name]}/optimizer")
        saved[name] = [ranks[0], torch.tensor([rank[:2] for rank in ranks]).mean(0)]
    (losses, *_, state, of_optimizer), _ = saved["one"]
    for name, ((*_, other, of_other), means) in saved.items():
        for way, found in zip(("went on", "local state loaded"), means.tolist(), strict=True):
            assert found == pytest.approx(losses, rel=2e-5), (name, way)
        assert_close_by_norm(other, state, 1e-5)
        assert of_other["param_groups"] == of_optimizer["param_groups"]
        assert of_other["state"].keys() == of_optimizer["state"].keys()
        for number, entry in of_optimizer["state"].items():
            assert_close_by_norm(of_other["state"][number], entry, 1e-4)
    for number, (name, topology) in enumerate(topologies.items()):
        others = one_of(paths, number, 1)
        results = run_ranks(resume_each, num_ranks(topology), others, topology, timeout_s=300)
        for other in results[0]:
            found = torch.tensor([result[other] for result in results]).mean(0).tolist()
            assert found == pytest.approx(losses, rel=2e-5), (other, name)


ONE, TWO = {"stages": 1}, {"tensor": 2}
DIVIDED = {
    "tensor": 2,
    "replicas": 2,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 17,
    "sdp_gradient_clipping": 1e9,
}
"""Each part of a tensor over two replicas; the norm and one bias stay whole."""


@pytest.mark.ranks
@pytest.mark.slow
def test_parts_are_saved_and_wholes_loaded(tmp_path):
    check(tmp_path, {"one": ONE, "tp2": TWO})


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_topologies_go_on_from_others(tmp_path):
    topologies = {
        "one": ONE,
        "tp2": TWO,
        "tp4": {"tensor": 4},
        "pp2 tp2": {"stages": 2, "tensor": 2},
        "tp2 sdp2": DIVIDED,
    }
    check(tmp_path, topologies)


# --- reading ------------------------------------------------------------------------------------

SHAPE = (4, 12)
WHOLE = torch.arange(48.0).view(SHAPE)


def saved_parts(folder, dim, size, blocks=1, kept=None):
    """A tensor in parts, each in two slots of one file."""
    entries = []
    for index in range(size) if kept is None else kept:
        shard = Shard(SHAPE, dim, index, size, blocks)
        part = shard.take(WHOLE).flatten()
        cuts = (0, 5), (5, part.numel())
        slots = [Slot("model", "w", "", "float32", SHAPE, a, b - a, shard.place) for a, b in cuts]
        runs = {s.title: part[a:b].clone() for s, (a, b) in zip(slots, cuts, strict=True)}
        save_object(folder / f"f{index}", runs)
        entries += [(s, f"f{index}") for s in slots]
    return ShardReader(folder, ShardIndex(entries, {}, {}))


@pytest.mark.unit
@pytest.mark.parametrize(("dim", "size", "blocks"), [(0, 2, 1), (1, 4, 1), (1, 2, 3)])
def test_any_part_is_read_from_any_parts(tmp_path, dim, size, blocks):
    reader = saved_parts(tmp_path, dim, size, blocks)
    assert torch.equal(reader.whole("model", "w"), WHOLE)
    for other in (Shard(SHAPE, 1, 1, 3), Shard(SHAPE, 0, 3, 4), Shard(SHAPE, 1, 1, 2, 3)):
        expected = other.take(WHOLE)
        assert torch.equal(reader.whole("model", "w", "", other), expected)
        some = reader.flat("model", "w", "", 3, 4, other)
        assert some.tolist() == expected.flatten()[3:7].tolist()


@pytest.mark.unit
def test_an_own_part_is_read_alone(tmp_path):
    reader = saved_parts(tmp_path, 1, 2, 3)
    own = Shard(SHAPE, 1, 1, 2, 3)
    assert torch.equal(reader.whole("model", "w", "", own), own.take(WHOLE))
    assert list(reader._files) == ["f1"]


@pytest.mark.unit
def test_parts_that_are_not_there_are_named(tmp_path):
    reader = saved_parts(tmp_path, 0, 2, kept=[0])
    with pytest.raises(CheckpointError, match=r"does not hold part 1 of 2 of model  w"):
        reader.whole("model", "w")

"""Tensor parallelism in real processes trains as one process does.

Losses, norms of gradients before clipping, and whole parameters after several steps, of unmodified
models of transformers, inside pipelines and replicas.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mpxla.tests.nn.test_split_models import WORDS, built, gpt2, llama, vit
from mpxla.tests.programs import traced_text
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.tolerances import assert_close_by_norm

pytestmark = pytest.mark.ranks

NUM_STEPS = 5
MICROBATCHES = 2


@dataclass(frozen=True)
class Case:
    """One way to train a model."""

    model: str
    tensor: int
    stages: int = 1
    replicas: int = 1
    backend: str = "torch_xla"
    transport: str = "auto"
    pipeline: str = "interleaved"
    prescaled: bool = True
    averaged: bool = True
    checkpointed: bool = False
    layers: int = 1
    keys: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        sizes = f"{self.model}-{self.stages}x{self.tensor}x{self.replicas}-{self.backend}"
        words = [sizes] + [self.transport] * (self.transport != "auto")
        words += [self.pipeline] * (self.pipeline != "interleaved")
        words += ["own"] * (not self.prescaled) + ["sums"] * (not self.averaged)
        words += ["checkpointed"] * self.checkpointed
        return "-".join(words + [f"{key}={value}" for key, value in self.keys])

    @property
    def num_batches(self) -> int:
        """Ranks that bring samples of their own."""
        return self.replicas * (1 if self.prescaled else self.tensor)

    @property
    def world_size(self) -> int:
        return self.tensor * self.stages * self.replicas

    def config(self):
        return {
            "ddp": True,
            "tensor_parallel_degree": self.tensor,
            "pipeline_parallel_degree": self.stages,
            "prescaled_batch": self.prescaled,
            "microbatches": MICROBATCHES,
            "memory_weight": 0.0,
            "transport": self.transport,
            "pipeline": self.pipeline,
            **dict(self.keys),
        }


@dataclass
class Found:
    """What a training gives."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    compilations: int = 0


def build(name, layers=2):
    import transformers

    transformers.logging.set_verbosity_error()
    if name in ("bert", "mixtral", "roberta"):
        return built(name)
    torch.manual_seed(3)
    if name == "vit":
        points = {"image_size": 2, "patch_size": 1, "num_channels": 2}
        return vit(num_hidden_layers=layers, num_labels=6, **points)
    return llama(num_hidden_layers=layers) if name == "llama" else gpt2(n_layer=layers)


def layers_of(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def batch_of(number, replicas):
    """The union of the replicas' batches."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (2 * MICROBATCHES * replicas, 8), generator=generator)


def labels_of(ids):
    """Some words do not count, so that a mean of means is not that of all."""
    return torch.where(ids < ids[0, 0] // 3, -100, ids)


def loss_of(model, name, ids, labels):
    if name == "vit":  # an image of eight points, and its class
        return model(pixel_values=ids.view(-1, 2, 2, 2) / WORDS, labels=ids[:, 0] % 6).loss
    return model(input_ids=ids, labels=labels).loss


def make_optimizer(parameters):
    """A large eps: gradients that are rounding only must not decide."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train_plainly(case):
    found, model = Found(), build(case.model, case.layers)
    optimizer = make_optimizer(model.parameters())
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        ids = batch_of(number, case.num_batches)
        rows = zip(
            *(t.chunk(MICROBATCHES * case.num_batches) for t in (ids, labels_of(ids))), strict=True
        )
        losses = [loss_of(model, case.model, part, labels) for part, labels in rows]
        count = len(losses) if case.averaged else case.num_batches
        (sum(losses) / count).backward()
        found.losses.append((sum(losses) / len(losses)).item())
        found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    found.state = {name: value.clone() for name, value in model.state_dict().items()}
    return found


def train(case):
    """Runs on every rank."""
    import mpxla as smp

    smp.init(case.config())
    raw = build(case.model, case.layers)
    if smp.tp_rank() > 0:  # the group takes over the values of its first rank
        torch.nn.init.zeros_(next(raw.parameters()))
    smp.set_tensor_parallelism(raw)
    model = smp.DistributedModel(raw, average_grads_across_microbatches=case.averaged)
    for layer in layers_of(model.get_module()) if case.checkpointed else ():
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def step(model, ids, labels):
        loss = loss_of(model, case.model, ids, labels)
        model.backward(loss)
        return loss

    from mpxla.session import current

    found = Found()
    for number in range(NUM_STEPS):
        if number == 2:
            found.compilations = -current().backend.num_compilations
        optimizer.zero_grad()
        ids = batch_of(number, case.num_batches)
        place = smp.rdp_rank() if case.prescaled else smp.dp_rank()
        own = [t.chunk(case.num_batches)[place] for t in (ids, labels_of(ids))]
        returned = step(model, *own)
        assert len(returned.outputs) == MICROBATCHES
        found.losses.append(returned.reduce_mean().item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.norms.append(norm.item())
        optimizer.step()
    found.compilations += current().backend.num_compilations
    if case.transport == "xla":
        (plan,) = model._engine.calls.plans
        stages = plan.runner.plan.programs.values()
        programs = [p for s in stages for p in (s.forward, s.backward)]
        kinds = {program.name: type(program).__name__ for program in programs}
        assert set(kinds.values()) == {"FusedExecutable"}, kinds
        found.texts = [traced_text(program) for program in programs]
    found.state = {name: value.cpu() for name, value in model.state_dict().items()}
    found.sizes = {name: tuple(p.shape) for name, p in model.local_named_parameters()}
    return found


PARTS = (("sharded_data_parallel_degree", 2), ("sdp_param_persistence_threshold", 17))
GRADIENTS = (("shard_gradients", True),)
CASES = (Case("gpt2", 2, backend="pjrt"),)
SWEEP = (
    Case("llama", 2, prescaled=False),
    Case("llama", 2, transport="xla"),
    Case("gpt2", 2, stages=2, prescaled=False, averaged=False, checkpointed=True),
    Case("bert", 2, stages=2, backend="pjrt", pipeline="zero_bubble"),
    Case("gpt2", 2, replicas=2, backend="pjrt", prescaled=False, keys=PARTS),
    Case("llama", 2, replicas=2, backend="pjrt", keys=(*GRADIENTS, PARTS[1])),
    Case("llama", 1, stages=2, replicas=2, keys=PARTS[:1]),  # nothing is large enough
    Case("mixtral", 2, stages=2),
    Case("vit", 2, replicas=2, keys=PARTS),
)
LONG = (
    Case("gpt2", 4, backend="pjrt"),
    Case("llama", 2, stages=2, backend="pjrt", pipeline="zero_bubble", layers=2),
    Case("llama", 2, stages=2, checkpointed=True, layers=2),
    Case("llama", 2, replicas=2, keys=PARTS, layers=2),
    Case("llama", 2, stages=2, replicas=2, backend="pjrt", keys=PARTS, checkpointed=True, layers=2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*SWEEP, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_training_in_many_ways(case):
    check(case)


def check(case):
    env = {"MPXLA_DEVICE": case.backend}
    found = run_ranks(train, case.world_size, case, timeout_s=240.0, env=env)
    expected = train_plainly(case)
    losses = torch.tensor([of_rank.losses for of_rank in found])
    torch.testing.assert_close(losses.mean(0), torch.tensor(expected.losses), rtol=1e-5, atol=1e-6)
    for of_rank in found:
        torch.testing.assert_close(of_rank.norms, expected.norms, rtol=1e-4, atol=1e-6)
        assert_close_by_norm(of_rank.state, expected.state, 1e-5, floor=1e-4)
        assert of_rank.compilations == 0
        assert all("all_reduce" in text for text in of_rank.texts)
    assert bool(found[0].texts) == (case.transport == "xla")
    whole = sum(p.numel() for p in build(case.model, case.layers).parameters()) * 1.0
    of_group = [
        torch.tensor([torch.Size(s).numel() for s in f.sizes.values()]).sum() for f in found
    ]
    share = 1.0 / (case.tensor * case.stages)
    if case.stages == 1:  # but for norms, biases of row layers and positions
        stays = 0.2 if case.model == "roberta" else 0.1  # the head has a layer of its own
        assert max(of_group) < whole * (share + stays)


def other_batches(differs, is_prescaled):
    """Runs on every rank; the ranks of a group are given different data."""
    import mpxla as smp

    smp.init(Case("llama", 2, prescaled=is_prescaled).config())
    raw = build("llama", 1)
    smp.set_tensor_parallelism(raw)
    model = smp.DistributedModel(raw)

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    number = smp.rank() * (differs == "values")
    size = 8 - 2 * smp.rank() * (differs == "shapes")
    model.train(smp.rank() == 0 or differs != "modes")
    try:
        step(model, batch_of(number, 1)[:, :size])
    except smp.RankMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_prescaled", [True, False])
def test_other_modes_in_a_group_are_noticed(is_prescaled):
    for text in run_ranks(other_batches, 2, "modes", is_prescaled):
        assert "call the step function alike: the modes of the model's modules (train or" in text
        assert "differ on ranks 0 and 1" in text


@pytest.mark.parametrize("differs", ["values", "shapes"])
def test_other_batches_in_a_group_are_noticed(differs):
    texts = run_ranks(other_batches, 2, differs, True)
    words = "the values that ranks 0 and 1 were given differ" if differs == "values" else "[2, 6]"
    for text in texts:
        assert words in text
        assert "Divide the data by smp.rdp_rank() and smp.rdp_size()" in text


def test_own_batches_have_one_shape():
    for text in run_ranks(other_batches, 2, "shapes", False):
        assert "rank 0 came with" in text and "and rank 1 with" in text and "[2, 6]" in text
        assert "with batches of one shape" in text
        assert "Give every rank as many samples" in text


def other_steps(differs, is_prescaled):
    """Runs on every rank; what the step function reads outside differs in a group."""
    import mpxla as smp

    smp.init(Case("llama", 2, prescaled=is_prescaled).config())
    raw = build("llama", 1)
    smp.set_tensor_parallelism(raw)
    model = smp.DistributedModel(raw)
    raw.factor = 1.0 + smp.rank() * (differs == "number")
    values = torch.full((WORDS,), 1.0 + smp.rank() * (differs == "tensor"))

    @smp.step
    def step(model, ids):
        scores = model(input_ids=ids).logits * raw.factor * values
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())
        model.backward(loss)
        return loss

    try:
        step(model, batch_of(0, 1))
        raw.factor += smp.rank() == 1
        step(model, batch_of(0, 1))
    except smp.RankMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("differs", "is_prescaled", "words"),
    [
        ("number", True, "captured another step than rank 0:\n  aten::mul in the step function"),
        pytest.param(
            *("tensor", True, "of shape [32], which the step function found outside, with values"),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                *("later", is_prescaled),
                "is another step on rank 1 than on rank 0: something that it reads",
                marks=pytest.mark.slow,
            )
            for is_prescaled in (True, False)
        ),
    ],
)
def test_other_steps_in_a_group_are_noticed(differs, is_prescaled, words):
    for text in run_ranks(other_steps, 2, differs, is_prescaled):
        assert words in text


def meet_whole():
    """Runs on every rank; a hook gives a whole value to a part of the columns."""
    import mpxla as smp

    smp.init(Case("llama", 2).config())
    raw = build("llama", 1)
    columns = torch.ones(32)
    raw.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: args[2] * columns)
    smp.set_tensor_parallelism(raw)
    model = smp.DistributedModel(raw)

    @smp.step
    def step(model, ids):
        return model(input_ids=ids, labels=ids).loss

    try:
        step(model, batch_of(0, 1))
    except smp.CaptureError as error:
        return str(error), str(error.__notes__)
    except smp.PeerFailure:  # of a rank that was faster
        return None


def test_code_that_needs_whole_layers_is_told_of_the_parts():
    found = [texts for texts in run_ranks(meet_whole, 2) if texts is not None]
    assert found
    for text, notes in found:
        assert "captured at" in text and "* columns" in text
        assert "leave the module whole: smp.set_tensor_parallelism(module, False)" in notes


def refused():
    """Runs on every rank: texts of what does not go with tensor parallelism yet."""
    import mpxla as smp

    smp.init(Case("llama", 2).config())
    raw = build("llama", 1)
    smp.set_tensor_parallelism(raw)
    model = smp.DistributedModel(raw)
    calls = {
        "model.register_comm_hook()": lambda: model.register_comm_hook(None, len),
        "Adafactor": lambda: smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters())),
    }
    texts = {}
    for what, call in calls.items():
        try:
            call()
        except smp.ConfigError as error:
            texts[what] = str(error)
    return texts


def test_what_would_take_parts_for_wholes_is_refused():
    for texts in run_ranks(refused, 2):
        assert len(texts) == 2
        for what, text in texts.items():
            assert text.startswith(what)
            assert "does not go with tensor_parallel_degree: 2 yet" in text

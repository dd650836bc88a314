"""Training in 16 bits against plain PyTorch that does the same in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.errors import StepError
from mpxla.tests.ranks.run import run_ranks
from mpxla.tests.wrong_uses import check_texts, refused

pytestmark = pytest.mark.ranks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WEIGHTS = (2.0**12, 2.0, 2.0, -(2.0**12))
"""Of microbatches. Gradients of the first and the last cancel; sums in bfloat16 lose the others."""
MICROBATCHES = len(WEIGHTS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


def made():
    torch.manual_seed(5)
    return Net()


def data(step, size=64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def repeated(step):
    """Equal microbatches, and the weight of every sample."""
    x, y = data(step, 4)
    weights = torch.tensor(WEIGHTS).repeat_interleave(4)
    return x.repeat(MICROBATCHES, 1), y.repeat(MICROBATCHES), weights


def state_of(model):
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def masters_of(optimizer):
    return [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]


# --- bf16: masters, and sums over microbatches in float32 -----------------------------------------


def train_bf16(config, num_steps, is_converted=False):
    import mpxla as smp
    from mpxla.session import current

    smp.init({"microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(made().to(BF16) if is_converted else made())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model, x, y, weights):
        loss = F.cross_entropy(model(x.to(BF16) if is_converted else x).float(), y)
        model.backward(loss * weights[0])
        return loss

    losses, compiled = [], []
    for number in range(num_steps):
        batch = [part.chunk(smp.dp_size())[smp.dp_rank()] for part in repeated(number)]
        optimizer.zero_grad()
        losses.append(step(model, *batch).reduce_mean().item())
        optimizer.step()
        compiled.append(current().backend.num_compilations)
    transfers = [
        (transfer.num_bytes, {spec.dtype for spec in transfer.specs})
        for cut in current().models.engine.first_cuts.values()
        for transfer in (*cut.forward, *cut.backward)
        if transfer.source is not None
    ]
    found = losses, masters_of(optimizer), state_of(model), transfers, compiled
    smp.shutdown()
    return found


def train_bf16_plainly(num_steps, sum_dtype=F32):
    """A model in bfloat16 with float32 masters; gradients of microbatches add up in `sum_dtype`."""
    masters = [p.detach().clone() for p in made().parameters()]
    model, losses = made().to(BF16), []
    for number in range(num_steps):
        sums = [torch.zeros_like(m, dtype=sum_dtype) for m in masters]
        total = 0.0
        parts = (part.chunk(MICROBATCHES) for part in repeated(number))
        for x, y, weights in zip(*parts, strict=True):
            loss = F.cross_entropy(model(x.to(BF16)).float(), y)
            weighted = loss * weights[0] / MICROBATCHES
            found = torch.autograd.grad(weighted, list(model.parameters()))
            sums = [s + g.to(sum_dtype) for s, g in zip(sums, found, strict=True)]
            total += loss.item() / MICROBATCHES
        losses.append(total)
        with torch.no_grad():
            for master, parameter, gradient in zip(masters, model.parameters(), sums, strict=True):
                master -= 0.5 * gradient.float()
                parameter.copy_(master)
    return losses, masters


def distance(found, expected):
    """Between two lists of parameters, against how far training has moved them."""
    start = [p.detach() for p in made().parameters()]
    moved = sum((e - s).square().sum() for e, s in zip(expected, start, strict=True))
    apart = sum((f - e).square().sum() for f, e in zip(found, expected, strict=True))
    return (apart / moved).sqrt().item()


BOUND = 0.02
"""Of what 20 steps move: operators round once more or less than PyTorch's. Gradients that add up in
bfloat16 over the microbatches are far beyond it."""
LOSS_BOUND = 0.01
"""The same for the losses of these steps, relative."""


def farthest(losses, expected):
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def test_the_bounds_tell_sums_in_bfloat16_apart():
    expected, masters = train_bf16_plainly(20)
    losses, worse = train_bf16_plainly(20, BF16)
    assert distance(worse, masters) > 20 * BOUND
    assert farthest(losses, expected) > 20 * LOSS_BOUND


@pytest.mark.parametrize(
    ("config", "num_ranks"),
    [
        ({"bf16": True, "pipeline_parallel_degree": 2}, 2),
        pytest.param({"bf16": True}, 1, marks=pytest.mark.slow),
        pytest.param(
            {"bf16": True, "ddp": True, "pipeline_parallel_degree": 2}, 4, marks=pytest.mark.slow
        ),
        pytest.param(
            {"bf16": True, "ddp": True, "shard_optimizer_state": True}, 2, marks=pytest.mark.slow
        ),
    ],
    ids=["stages", "one", "both", "zero1"],
)
def test_bf16_trains_as_plain_pytorch_with_masters(config, num_ranks):
    losses, masters = train_bf16_plainly(20)
    config = {**config, "microbatches": MICROBATCHES // (2 if config.get("ddp") else 1)}
    results = run_ranks(train_bf16, num_ranks, config, 20)
    is_whole = "shard_optimizer_state" not in config
    if is_whole:
        found = [m for result in results[: config.get("pipeline_parallel_degree", 1)]
                 for m in result[1]]  # fmt: skip
        assert all(m.dtype is F32 for m in found)
        assert distance(found, masters) < BOUND
        if not config.get("ddp"):
            assert farthest(results[0][0], losses) < LOSS_BOUND
    compute = [value.float() for value in results[0][2].values()]
    assert {value.dtype for value in results[0][2].values()} == {BF16}
    # The compute copy rounds the masters.
    assert distance(compute, masters) < BOUND + 2**-7
    for *_, transfers, compiled in results:
        assert len(set(compiled[1:])) == 1
        # Activations and their gradients, [2, 16]: half of what float32 takes.
        activations = [t for t in transfers if t[1] == {BF16}]
        assert not transfers or activations


@pytest.mark.slow
def test_a_model_in_bfloat16_is_trained_as_with_the_key():
    keyed = run_ranks(train_bf16, 1, {"bf16": True, "microbatches": 4}, 3)
    own = run_ranks(train_bf16, 1, {"microbatches": 4}, 3, True)
    assert keyed[0][0] != [] and keyed[0][0] == own[0][0]
    # One starts from the masters' values, the other from what the model had left of them.
    assert all(m.dtype is F32 for m in own[0][1])
    torch.testing.assert_close(own[0][1], keyed[0][1], rtol=0, atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_variables_of_torch_xla_mean_the_key(name):
    config = {"microbatches": 4}
    keyed = run_ranks(train_bf16, 1, {**config, "bf16": True}, 3)
    found = run_ranks(train_bf16, 1, config, 3, env={name: "1"})
    for (losses, masters, *_), (expected, wanted, *_) in zip(found, keyed, strict=True):
        assert losses == expected
        assert all(m.dtype is F32 for m in masters)
        torch.testing.assert_close(masters, wanted, rtol=0, atol=0)


def losses_of_odd_counts(dtype_of_loss):
    """Masters after steps whose model computes its loss in bfloat16, or in float32."""
    import mpxla as smp

    smp.init({"microbatches": 3})
    model = smp.DistributedModel(made().to(BF16))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x.to(BF16)).to(dtype_of_loss), y)
        model.backward(loss)

    for number in range(3):
        x, y = data(number, 12)
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    found = masters_of(optimizer)
    smp.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
def test_three_microbatches_are_a_third_each(dtype):
    """A third of a loss in bfloat16 is off by 2^-9 at the most, in plain PyTorch as well."""
    masters = [p.detach().to(BF16).float() for p in made().parameters()]
    model = made().to(BF16)
    for number in range(3):
        sums = [torch.zeros_like(m) for m in masters]
        for x, y in zip(*(part.chunk(3) for part in data(number, 12)), strict=True):
            loss = F.cross_entropy(model(x.to(BF16)).to(dtype), y) / 3
            found = torch.autograd.grad(loss, list(model.parameters()))
            sums = [s + g.float() for s, g in zip(sums, found, strict=True)]
        with torch.no_grad():
            for master, parameter, gradient in zip(masters, model.parameters(), sums, strict=True):
                master -= 0.5 * gradient
                parameter.copy_(master)
    (found,) = run_ranks(losses_of_odd_counts, 1, dtype)
    assert distance(found, masters) < BOUND


class WithCopies(torch.optim.Optimizer):
    """Keeps a float32 copy of every parameter, as the NeuronX guide has it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 2.0**-9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["copy"] = p.detach().float()
                    state["mean"] = torch.zeros_like(state["copy"])
                state["mean"].mul_(0.5).add_(p.grad.float())
                state["copy"].sub_(state["mean"] * group["lr"])
                p.copy_(state["copy"])


def train_with_copies(keys):
    import mpxla as smp

    smp.init({"microbatches": 2, **keys})
    model = smp.DistributedModel(made().to(BF16))
    optimizer = smp.DistributedOptimizer(WithCopies(model.parameters()))

    @smp.step
    def step(model, x, y):
        model.backward(F.cross_entropy(model(x.to(BF16)).float(), y))

    for number in range(10):
        x, y = (part.chunk(smp.dp_size())[smp.dp_rank()] for part in data(number, 8))
        optimizer.zero_grad()
        step(model, x, y)
        optimizer.step()
    found = state_of(model)
    smp.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "num_ranks"),
    [({"master_dtype": "same"}, 1), ({"master_dtype": "same", "ddp": True}, 2), ({}, 1)],
    ids=["same", "replicas", "masters"],
)
def test_an_optimizer_with_its_own_float32_copies(keys, num_ranks):
    model = made().to(BF16)
    optimizer = WithCopies(model.parameters())
    for number in range(10):
        optimizer.zero_grad()
        x, y = data(number, 8)
        F.cross_entropy(model(x.to(BF16)).float(), y).backward()
        optimizer.step()
    copies = [optimizer.state[p]["copy"] for p in model.parameters()]
    start = [p.detach().to(BF16).float() for p in made().parameters()]
    moved = torch.cat([(c - s).flatten() for c, s in zip(copies, start, strict=True)])
    for found in run_ranks(train_with_copies, num_ranks, keys):
        values = [value.float() for value in found.values()]
        apart = torch.cat([(v - c).flatten() for v, c in zip(values, copies, strict=True)])
        # The model rounds the copies by half an ulp, 2^-9 of weights below 1, and not more.
        assert apart.abs().max() < 2**-9 + 0.05 * moved.abs().max()


# --- how many bytes travel ------------------------------------------------------------------------


def planned_bytes():
    """What a microbatch sends over the cuts of the model, by the plan."""
    from mpxla.session import current

    cuts = current().models.engine.first_cuts.values()
    transfers = [t for cut in cuts for t in (*cut.forward, *cut.backward) if t.source is not None]
    return sum(transfer.num_bytes for transfer in transfers)


def bytes_of_a_step(config, autocast=False):
    """(sent in a step, planned for a microbatch)."""
    import mpxla as smp

    smp.init({"microbatches": 2, **config})
    torch.manual_seed(5)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model, x):
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            model.backward(model(x).float().square().mean())

    sent = []
    for _ in range(3):
        step(model, torch.ones(512, 64))
        optimizer.step()
        sent.append(smp.metrics()["bytes_sent"])
    planned = planned_bytes()
    smp.shutdown()
    return sent[2] - sent[1], planned


def bytes_of_stages():
    ways = [({}, False), ({"bf16": True}, False), ({"fp16": True}, False), ({}, True)]
    return [bytes_of_a_step({"pipeline_parallel_degree": 2, **keys}, on) for keys, on in ways]


def bytes_of_replicas():
    narrow = {"bf16": True, "reduction_dtype": "bfloat16"}
    sharded = {"shard_optimizer_state": True}
    ways = [{}, {"bf16": True}, narrow, sharded, {**sharded, **narrow}]
    return [bytes_of_a_step({"ddp": True, **keys})[0] for keys in ways]


@pytest.mark.slow
def test_messages_between_stages_are_halved():
    size = 256 * 64 * 4  # of a microbatch in float32, this way and that way
    for (whole, planned), *halves in run_ranks(bytes_of_stages, 2):
        assert whole >= 2 * size and planned == 2 * size
        for half, planned_half in halves:
            assert half == pytest.approx(whole / 2, rel=0.01)
            assert planned_half == size


@pytest.mark.slow
def test_messages_over_replicas_are_halved():
    num_parameters = 4 * (64 * 64 + 64)
    for plain, summed, narrow, sharded, both in run_ranks(bytes_of_replicas, 2):
        # Gradients travel in float32, in which they are added up, unless the key says otherwise.
        assert plain == pytest.approx(num_parameters * 4, rel=0.05)
        assert summed == pytest.approx(plain, rel=0.01)
        assert narrow == pytest.approx(plain / 2, rel=0.01)
        assert both == pytest.approx(sharded / 2, rel=0.05)


# --- other ways to a model in 16 bits -------------------------------------------------------------


class Wide(nn.Module):
    """Large enough for parameters to be created late."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 3000), nn.Linear(3000, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def wide_made(how):
    import mpxla as smp

    torch.manual_seed(6)
    if how == "created":
        with smp.model_creation(dtype=BF16):
            return Wide()
    if how == "delayed":
        with smp.delay_param_initialization():
            return Wide()
    if how == "default":
        torch.set_default_dtype(BF16)
        try:
            return Wide()
        finally:
            torch.set_default_dtype(F32)
    return Wide()


def train_made(how, keys):
    import mpxla as smp

    smp.init({"microbatches": 2, "pipeline_parallel_degree": 2, **keys})
    raw = wide_made(how)
    num_late = [p.device.type for p in raw.parameters()].count("meta")
    model = smp.DistributedModel(raw)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    own = next(p.dtype for p in raw.parameters())

    @smp.step
    def step(model, x, y):
        loss = F.cross_entropy(model(x.to(own)).float(), y)
        model.backward(loss)
        return loss

    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(step(model, *data(number, 8)).reduce_mean().item())
        optimizer.step()
    masters = masters_of(optimizer)
    smp.shutdown()
    return num_late, own, losses, masters


def train_in_every_way():
    bf16, fp16 = {"bf16": True}, {"fp16": True}
    return [
        (train_made("default", {}), train_made("created", {})),
        (train_made("plain", bf16), train_made("delayed", bf16)),
        (train_made("plain", fp16), train_made("delayed", fp16)),
        (train_made("plain", fp16), train_made("plain", {"fp16_params": True})),
    ]


@pytest.mark.slow
def test_late_creation_and_fp16_params_give_the_same_training():
    for pairs in run_ranks(train_in_every_way, 2, timeout_s=300):
        kinds = [(BF16, True), (BF16, True), (F16, True), (F16, False)]
        for (early, other), (dtype, is_late) in zip(pairs, kinds, strict=True):
            assert (other[0] > 0) == is_late and early[0] == 0
            assert early[1] is other[1] is dtype
            assert early[2] == other[2], "bitwise"
            assert all(m.dtype is F32 for m in other[3])
            torch.testing.assert_close(early[3], other[3], rtol=0, atol=0)


# --- float16: loss scales, and overflow on one rank -----------------------------------------------

OVERFLOWS_AT = 2


def limit_of(number):
    """Clips in some steps only: a clipped gradient does not tell how it was scaled."""
    return 0.3 if number == 1 else 1e3


def batch(number, rank, size):
    x, y = (part.chunk(size)[rank] for part in data(number))
    if number == OVERFLOWS_AT and rank == size - 1:
        # Infinite in float16: tanh saturates, and only gradients of the first layer are NaN.
        x[:, 0] = 1e6
    return x, y


def scaler_of(kind):
    import mpxla as smp

    make = torch.amp.GradScaler if kind == "torch" else smp.amp.GradScaler
    return make("xla", init_scale=2.0**10, growth_interval=3, enabled=kind != "key")


def train_scaled(config, kind):
    import mpxla as smp
    from mpxla.session import current

    smp.init({"microbatches": 4, **config})
    model = smp.DistributedModel(made())
    settings = {"init_scale": 2.0**10, "scale_window": 3}
    # Fused ones of torch skip updates by themselves, by what is known of one rank.
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, fused=kind != "key"),
        dynamic_loss_scale=True,
        dynamic_loss_args=settings,
    )
    uses_key, scaler = kind == "key", scaler_of(kind)

    @smp.step
    def step(model, x, y):
        with torch.autocast("cuda", dtype=F16, enabled=not uses_key):
            loss = F.cross_entropy(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5)
    scales, compiled, skipped = [], [], []
    for number in range(7):
        x, y = batch(number, smp.dp_rank(), smp.dp_size())
        optimizer.zero_grad()
        step(model, x, y)
        before = state_of(model)
        if uses_key:
            optimizer.clip_master_grads(limit_of(number))
            optimizer.step()
            scales.append(optimizer.loss_scale)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit_of(number))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        after = state_of(model)
        if all(torch.equal(after[name], before[name]) for name in after):
            skipped.append(number)
        else:
            scheduler.step()
        assert not uses_key or optimizer.overflow == (number in skipped)
        compiled.append(current().backend.num_compilations)
    found = scales, skipped, compiled, state_of(model), masters_of(optimizer)
    smp.shutdown()
    return found


def train_scaled_plainly():
    """In float32, without the batch that overflows: scales must not matter."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(7):
        if number != OVERFLOWS_AT:
            optimizer.zero_grad()
            x, y = data(number)
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit_of(number))
            optimizer.step()
            scheduler.step()
    return state_of(model)


@pytest.mark.parametrize(
    ("config", "num_ranks", "kind"),
    [
        ({"ddp": True, "fp16": True}, 2, "key"),
        pytest.param({"pipeline_parallel_degree": 2}, 2, "smp", marks=pytest.mark.slow),
        pytest.param({"ddp": True, "shard_optimizer_state": True}, 2, "torch",
                     marks=pytest.mark.slow),
        pytest.param({"ddp": True, "pipeline_parallel_degree": 2, "fp16": True}, 4, "key",
                     marks=pytest.mark.slow),
    ],
    ids=["key-replicas", "scaler-stages", "torch-zero1", "key-both"],
)  # fmt: skip
def test_an_overflow_on_one_rank_skips_the_update_on_all(config, num_ranks, kind):
    uses_key = kind == "key"
    results = run_ranks(train_scaled, num_ranks, config, kind)
    expected = train_scaled_plainly()
    size = 2.0**10
    for scales, skipped, compiled, state, masters in results:
        assert skipped == [OVERFLOWS_AT]
        # Halved after the overflow, doubled after three steps without.
        assert scales == [size, size, size / 2, size / 2, size / 2, size, size]
        assert len(set(compiled[OVERFLOWS_AT:])) == 1, "a changed scale compiles nothing"
        assert all(m.dtype is F32 for m in masters)
        assert {v.dtype for v in state.values()} == {F16 if uses_key else F32}
        wide = {name: value.float() for name, value in state.items()}
        torch.testing.assert_close(wide, expected, rtol=0.01, atol=2e-3)


def overflow_for_ever():
    """Gradients of rank 1 are infinite from the third step on."""
    import mpxla as smp

    smp.init({"ddp": True, "fp16": True})
    model = smp.DistributedModel(made())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 4.0, "min_scale": 1.0},
    )

    @smp.step
    def step(model, x):
        model.backward(model(x).square().mean())

    def train():
        for number in range(9):
            step(model, torch.full((2, 8), 1e6 if number > 1 and smp.rank() else 1.0))
            optimizer.step()

    return refused(train)


@pytest.mark.slow
def test_overflows_at_the_smallest_scale_name_the_last_finite_step():
    text = r"step 5 are inf or nan at the loss scale 1, the smallest; .* gradients was number 2 "
    check_texts(run_ranks(overflow_for_ever, 2), StepError, text)

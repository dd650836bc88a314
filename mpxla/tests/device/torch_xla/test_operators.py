"""Operators that torch_xla computes wrongly or not at all, in compiled steps.

`mpxla/tests/sweep` does the same with all of torch's own samples, on one and on two stages.
"""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

LABELS = torch.tensor([[1, 2, -1, 0], [0, -1, 1, 1], [3, 2, 1, 0]])
BAG, STARTS = torch.tensor([0, 1, 2, 3, 4, 4]), torch.tensor([0, 2, 3])


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape) * 100 + sum(shape))
    return torch.randn(*shape, generator=generator)


def positive(matrix):
    return matrix @ matrix.mT + torch.eye(matrix.shape[-1])


def pooled_and_back(x):
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values * 2, places, 2)


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 5))


def rebuilt(x):
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    return values, (left * values[..., None, :]) @ right


def along_an_order(x):
    """All that writes along a dimension, by an index that `sort` gives, and its derivative."""
    order = x[:, 0].sort().indices
    rest = torch.zeros_like(x)
    added = rest.index_add(0, order, x, alpha=2) + x.index_select(0, order)
    copied = rest.T.index_copy(1, order, x.T).T * x
    filled = x.index_fill(-2, order[:2], 3.0)
    return added.square() + copied + filled


CASES = {
    "indices_of_a_sort": (along_an_order, (6, 4)),
    "circular_padding_1d": (lambda x: F.pad(x.tanh(), (2, 1), mode="circular"), (2, 3, 6)),
    "circular_padding_2d": (lambda x: F.pad(x.tanh(), (2, 1, 1, 2), mode="circular"), (2, 3, 6, 5)),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, LABELS), (3, 4)),
    "singular_values": (torch.linalg.svdvals, (2, 4, 3)),
    "svd": (rebuilt, (2, 2, 3, 4)),
    "pinv": (torch.linalg.pinv, (2, 4, 3)),
    "nuclear_norm": (lambda x: torch.linalg.matrix_norm(x, "nuc"), (2, 4, 3)),
    "group_norm_far_from_zero": (lambda x: F.group_norm(x + 1000, 2), (2, 4, 6)),
    "instance_norm_far_from_zero": (lambda x: F.instance_norm(x + 1000), (2, 4, 6)),
    "cummax": (lambda x: torch.cummax(x.round(), 1), (3, 7)),
    "cummin": (lambda x: torch.cummin(x.round(), 0), (7, 3)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), (3, 7)),
    "max_pool_with_indices": (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        (2, 3, 8, 8),
    ),
    "max_pool_with_gaps": (lambda x: F.max_pool2d(x, 2, dilation=2, ceil_mode=True), (2, 3, 8, 7)),
    "max_pool_3d": (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "max_unpool": (pooled_and_back, (2, 3, 8, 8)),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, (3, 5)), (2, 3, 8, 8)),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (2, 3, 8, 8)),
    "adaptive_avg_pool_to_one": (lambda x: F.adaptive_avg_pool1d(x, 1), (2, 3, 8)),
    "repeat_interleave": (
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 5]), dim=0, output_size=6),
        (3, 4),
    ),
    "old_weight_norm": (old_weight_norm, (3, 4)),
    "std": (lambda x: (x.std(), x.std(-1), x.std((0, 1), unbiased=False)), (2, 3, 4)),
    "std_of_equal_values": (lambda x: (x * 0 + 1).std(-1), (2, 3)),
    "median": (lambda x: (x.median(), *x.median(1), x.nanmedian()), (3, 4)),
    "median_of_equal_values": (lambda x: x.round().median() + x.relu().median(), (3, 5)),
    "huber_loss": (lambda x: F.huber_loss(x, x.flip(0) * 2), (3, 4)),
    "gaussian_nll_loss": (
        lambda x: F.gaussian_nll_loss(x, x.flip(0), x.square(), full=True),
        (3, 4),
    ),
    "nll_loss_of_one_sample": (lambda x: F.cross_entropy(x, torch.tensor(2)), (5,)),
    "logaddexp": (lambda x: (torch.logaddexp(x, x.flip(0)), torch.logaddexp2(x, 2 * x)), (3, 4)),
    "lgamma": (lambda x: torch.lgamma(x * 5), (3, 4)),
    "grid_sample": (
        lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh() * 1.2, align_corners=False),
        (2, 3, 8, 8),
    ),
    "affine_grid": (lambda x: F.affine_grid(x, (2, 3, 4, 4), align_corners=False), (2, 2, 3)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), (2, 3, 8, 8)),
    "fold": (lambda x: F.fold(x, (8, 8), 2, stride=2), (2, 12, 16)),
    "embedding_bag": (
        lambda x: [F.embedding_bag(BAG, x, STARTS, mode=mode) for mode in ("sum", "mean", "max")],
        (5, 4),
    ),
    "cdist": (lambda x: (torch.cdist(x, x.flip(1)), torch.cdist(x, x * 2, p=1.0)), (2, 3, 4)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (2, 4, 3, 3)),
    "cholesky": (lambda x: torch.linalg.cholesky(positive(x)), (2, 5, 5)),
    "solve": (lambda x: torch.linalg.solve(positive(x), x[..., :2]), (2, 5, 5)),
    "determinant": (lambda x: (torch.det(x), torch.logdet(positive(x))), (2, 4, 4)),
    "quantile": (
        lambda x: (torch.quantile(x, 0.3), torch.quantile(x, torch.tensor([0.1, 0.5]), dim=1)),
        (3, 5),
    ),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(x.tril() + 3 * torch.eye(4)), (2, 4, 4)),
    "addmm_scaled": (lambda x: torch.addmm(x[0], x, x, beta=0.5, alpha=2.0), (4, 4)),
    "clamp_by_wider_tensor": (lambda x: torch.clamp_max(x[0], x * 0.5), (3, 4)),
    "diagflat": (torch.diagflat, (3,)),
    "vecdot": (lambda x: torch.linalg.vecdot(x[0], x[1]), (2, 4)),
    "aminmax": (lambda x: [*torch.aminmax(x.detach()), x.sum()], (3, 4)),
    "avg_pool_with_padding_counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        (2, 3, 8, 7),
    ),
    "one_element": (lambda x: x[0].index_select(0, torch.tensor([0])) + x[1].logsumexp(0), (2,)),
    "bucketize": (lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5)), (3, 4)),
    "count_nonzero": (lambda x: [torch.count_nonzero(x.relu()), x.sum()], (3, 4)),
    "hypot": (lambda x: torch.hypot(x, x.flip(0)), (3, 4)),
    "cross": (lambda x: torch.cross(x, x.flip(0), dim=-1), (2, 3)),
}
# What test_composition.py tries as well, in other shapes, what is compiled as these are, and what
# takes long.
SLOW = (
    *("singular_values", "svd", "pinv", "nuclear_norm", "cummax", "cummin", "max_pool_with_gaps"),
    *("max_pool_3d", "max_unpool", "adaptive_max_pool", "repeat_interleave", "median", "solve"),
    *("embedding_bag", "determinant", "bucketize", "cross", "lgamma", "cholesky_inverse"),
    *("circular_padding_2d", "adaptive_avg_pool_to_one", "std_of_equal_values", "diagflat"),
    *("median_of_equal_values", "nll_loss_of_one_sample", "affine_grid", "channel_shuffle"),
    *("addmm_scaled", "clamp_by_wider_tensor", "vecdot", "aminmax", "count_nonzero", "hypot"),
    *("logcumsumexp", "instance_norm_far_from_zero", "cholesky", "unfold", "fold", "logaddexp"),
    *("multilabel_margin_loss", "avg_pool_with_padding_counted", "adaptive_avg_pool", "std"),
)


def made(name):
    from mpxla.tests.sweep.samples import Case

    function, shape = CASES[name]
    function = function() if function is old_weight_norm else function
    value = numbers(*shape).requires_grad_()
    return Case(name, 0, function, (value, (), {}), lambda result: result, True)


def outcomes_of(names):
    from mpxla.tests.sweep.operators import try_case

    return {name: try_case(made(name), 1) for name in names}


ORDER = [*(name for name in CASES if name not in SLOW), *SLOW]
GROUP = len(CASES) - len(SLOW)
"""Cases that run in one process: all those that are not slow, and then as many of the others."""


@functools.cache
def outcomes(group):
    """Several cases in one call."""
    names = ORDER[group * GROUP : (group + 1) * GROUP]
    (found,) = run_ranks(outcomes_of, 1, names, timeout_s=250)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in ORDER]
)
def test_operator_gives_the_numbers_of_torch(name):
    outcome = outcomes(ORDER.index(name) // GROUP)[name]
    assert (outcome.status, outcome.text) == ("passed", "")


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40))
        self._draw = draw

    def forward(self):
        draws = [self._draw(self.weight), self._draw(self.weight)]
        # Elementwise and cheap: what a partitioner would rather compute again than keep.
        return sum(((self.weight * d).exp().log() * k).sum() for k, d in enumerate(draws, 1)), draws


DRAWS = {
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "uniform": lambda x: torch.empty_like(x).uniform_(),
    "normal": lambda x: torch.empty_like(x).normal_(),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(0, 0.1),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(0, 0.01),
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "rand": torch.rand_like,
    "randint": lambda x: torch.randint_like(x.detach(), 10),
    "multinomial": lambda x: torch.multinomial(x.detach(), 40).float() / 40,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.detach()),
    "generator": lambda x: torch.randn(40, generator=torch.Generator().manual_seed(1)),
}


def draw_twice():
    from mpxla.tests.sweep.local import LocalStep

    found = {}
    for name, draw in DRAWS.items():
        step = LocalStep(Noisy(draw), [], lambda model: model())
        values = [step.run(seed) for seed in (1, 1, 2)]
        found[name] = [(v.results, v.gradients["weight"]) for v in values]
    return found


@pytest.mark.slow
def test_random_operators_of_one_kind_differ_and_are_drawn_once():
    (found,) = run_ranks(draw_twice, 1, timeout_s=120)
    for name, runs in found.items():
        (first, second), gradient = runs[0]
        assert not torch.equal(first, second), name
        torch.testing.assert_close(gradient, first + 2 * second, msg=name)
        assert torch.equal(runs[1][0][0], first), f"{name} does not follow the seed"
        assert not torch.equal(runs[2][0][0], first), f"{name} does not follow the seed"


class Cumulative(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)
        self.last = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x):
        return (self.last(self.norm(x)).float() ** 3).sum()


def cumulative_norm(dtype):
    import copy

    from mpxla.tests.sweep.local import LocalStep

    model = Cumulative(dtype)
    model(numbers(5, 3).to(dtype))  # the average begins with a batch before
    plain, x = copy.deepcopy(model), numbers(4, 3).to(dtype)
    found = LocalStep(model, [x], lambda model, x: (model(x), [])).run()
    plain(x).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    return found, gradients, dict(plain.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batch_norm_with_cumulative_average(dtype):
    near = 1e-4 if dtype == torch.float32 else 1e-2
    ((found, gradients, buffers),) = run_ranks(cumulative_norm, 1, dtype)
    ours = {name: gradient.to(gradients[name].dtype) for name, gradient in found.gradients.items()}
    torch.testing.assert_close(ours, gradients, rtol=near, atol=near)
    torch.testing.assert_close(dict(found.new_buffers), buffers, rtol=near, atol=near)


def warning_of_generator():
    import logging

    from mpxla.log import forget_warnings, get_logger
    from mpxla.tests.sweep.local import LocalStep

    forget_warnings()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    get_logger().addHandler(handler)
    try:
        LocalStep(Noisy(DRAWS["generator"]), [], lambda model: model())
    finally:
        get_logger().removeHandler(handler)
    return texts


def test_generator_in_a_step_is_warned_of_with_its_line():
    ((text,),) = run_ranks(warning_of_generator, 1)
    assert text.startswith("randn(generator=...) in a step function at ")
    assert "test_operators.py" in text
    assert "pass the tensor in" in text

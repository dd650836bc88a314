"""Packed sequences of a captured step: one graph for all lengths, with the numbers of PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

from mpxla.errors import CaptureError
from mpxla.graph.capture.recorder import current_recorder
from mpxla.graph.capture.step import TensorLeaf, ToCapture, capture_step
from mpxla.graph.capture.torch_parts import torchs_recurrences
from mpxla.runtime.state import ModelState
from mpxla.tests.graph.capture.test_capture import outputs_of

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:LSTM with projections")]

LENGTHS = {
    "some": [3, 6, 1, 4],
    "all": [6, 6, 6, 6],
    "shorter": [2, 4, 4, 1],
    "one": [1, 1, 1, 1],
    "in order": [5, 4, 2, 2],
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(9, 5)
        self.lstm = nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True)
        self.small = nn.LSTM(5, 4, proj_size=2, bias=False)
        self.gru = nn.GRU(5, 4, bidirectional=True)
        self.rnn = nn.RNN(5, 3, 2, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(8, 9)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)


def packed(x, lengths, **options):
    options = {"batch_first": True, "enforce_sorted": False} | options
    return pack_padded_sequence(x, lengths.cpu(), **options)


# --- one after the other: x [4, 6, 5], its lengths, and words y [4, 6] ----------------------------


def padded_again(m, x, lengths, y):
    out, (h, c) = m.lstm(packed(x, lengths))
    out, found = pad_packed_sequence(out, batch_first=True, total_length=x.size(1))
    scores = m.head(out).sin()
    return scores.mean() + (h * 2).sum() + c.square().sum() + (found * h.sum((0, 2))).sum()


def in_time(m, x, lengths, y):
    """Time comes first; a projection."""
    out, (h, c) = m.small(packed(x.transpose(0, 1), lengths, batch_first=False))
    out, found = pad_packed_sequence(out, padding_value=0.5, total_length=8)
    return out.square().sum() + h.exp().sum() + (c[0, :, 0] * found).sum()


def last_states(m, x, lengths, y):
    """As text classification does it."""
    _, (h, _) = m.lstm(packed(m.words(y), lengths))
    _, g = m.gru(packed(x, lengths))
    return F.cross_entropy(m.head(torch.cat([h[-2], h[-1]], 1)) + g.sum(), y[:, 0])


def captions(m, x, lengths, y):
    """As the tutorial on captioning does it."""
    targets = packed(y, lengths)[0]
    rows, _ = m.lstm(packed(x, lengths))
    return F.cross_entropy(m.head(rows.data), targets) + F.nll_loss(
        m.head(rows[0]).log_softmax(-1), packed(y, lengths).data, reduction="sum"
    )


def of_the_longest(m, x, lengths, y):
    """There are as many steps as the longest sequence has."""
    out, found = pad_packed_sequence(m.lstm(packed(x, lengths))[0], batch_first=True)
    scores = m.head(out)
    steps = torch.arange(out.size(1))[None, :] < found[:, None]
    weights = scores[..., 0].masked_fill(~steps, -1e9).softmax(1)
    return (
        out.mean()
        + out.mean(1).square().sum()
        + (weights.unsqueeze(-1) * out).sum(1).square().sum()
        + torch.bmm(scores[..., 1].softmax(1).unsqueeze(1), out).square().sum()
        + out.max(1)[0].sum()
        + (out * steps.unsqueeze(-1)).sum(1).div(found.unsqueeze(1)).square().sum()
    )


def largest_in_time(m, x, lengths, y):
    out, _ = pad_packed_sequence(m.gru(packed(x, lengths))[0])
    last = out.permute(1, 2, 0)
    values, places = out.max(0)
    return (
        F.adaptive_max_pool1d(last, 1).sum()
        + F.adaptive_avg_pool1d(last, 1).square().sum()
        + F.max_pool1d(last, last.size(2)).sin().sum()
        + F.avg_pool1d(last, kernel_size=last.shape[2]).exp().sum()
        + (values * places).sum()
        + (values * out.argmin(0)).sum()
    )


def given_states(m, x, lengths, y):
    h, c = m.head.weight[:4, :4] * torch.ones(4, 1, 1), x[:, :4, :4].transpose(0, 1).cos()
    out, (h, c) = m.lstm(packed(x, lengths), (h, c))
    out, g = m.gru(packed(x, lengths), h[:2])
    return g.square().sum() + c.sin().sum() + out.data.square().mean()


def changed_rows(m, x, lengths, y):
    words = packed(y, lengths)
    rows = PackedSequence(
        F.dropout(m.words(words.data), 0.0),
        words.batch_sizes,
        words.sorted_indices,
        words.unsorted_indices,
    )
    out, h = m.rnn(rows)
    out = out._replace(data=F.pad(out.data, (0, 2)).tanh())
    out, _ = m.gru(out)
    return out.data.mean(0).square().sum() + h.sum() + pad_packed_sequence(out)[0].sum(0).mean()


def sorted_before(m, x, lengths, y):
    """The script sorts, and undoes it."""
    lengths, order = lengths.sort(descending=True)
    rows = pack_padded_sequence(x[order], lengths.tolist(), batch_first=True)
    out, _ = pad_packed_sequence(m.lstm(rows)[0], batch_first=True)
    return out[torch.argsort(order)].mean(1).square().mul(torch.arange(4.0)[:, None]).sum()


def listed(m, x, lengths, y):
    rows = pack_padded_sequence(x, list(lengths), batch_first=True, enforce_sorted=False)
    return m.rnn(rows)[1].square().sum() + rows.data.mean()


def taken_apart(m, x, lengths, y):
    parts = unpack_sequence(m.lstm(packed(x, lengths))[0])
    means = torch.stack([part.mean(0) for part in parts])
    return F.cross_entropy(m.head(means), y[:, 1]) + sum(p.square().sum() for p in parts)


def again_packed(m, x, lengths, y):
    out, found = pad_packed_sequence(m.rnn(packed(x, lengths))[0], batch_first=True)
    out = F.pad(out, (0, 2)).tanh()
    out, _ = m.lstm(packed(out, found))
    return out.data.square().mean() + pad_packed_sequence(out)[0].mean(0).square().sum()


def not_packed_again(m, x, lengths, y):
    """A second layer runs over the steps of the longest sequence, from both ends."""
    out, _ = pad_packed_sequence(m.rnn(packed(x, lengths))[0], batch_first=True)
    out, (h, c) = m.lstm(F.pad(out, (0, 2)).tanh())
    return out.square().mean() + h.sum() + c.square().sum()


def outputs_at_places(m, x, lengths, y):
    """The last output of each sequence, in the ways in which scripts read it."""
    out, found = pad_packed_sequence(m.lstm(packed(x, lengths))[0], batch_first=True)
    place = (found - 1).view(-1, 1, 1).expand(-1, 1, out.size(2))
    return (
        out[torch.arange(out.size(0)), lengths - 1].square().sum()
        + out.gather(1, place).sin().sum()
        + out[:, -1].exp().sum()
        + out[:, 0].sum()
    )


def labels_of_the_longest(m, x, lengths, y):
    out, _ = pad_packed_sequence(m.lstm(packed(x, lengths))[0], batch_first=True)
    return F.cross_entropy(m.head(out).view(-1, 9), y[:, : out.size(1)].reshape(-1)) + (
        F.cross_entropy(m.head(out).transpose(1, 2), y[:, : out.shape[1]], ignore_index=3)
    )


def masks_of_the_longest(m, x, lengths, y):
    out, found = pad_packed_sequence(m.lstm(packed(x, lengths))[0], batch_first=True)
    one = torch.arange(lengths.max())[None] < lengths[:, None]
    other = torch.arange(found.max().item()).expand(4, found.max().item()) < found.unsqueeze(1)
    means = (out * one[..., None]).sum(1) / lengths[:, None]
    return means.square().sum() + out[other].square().mean()


def trimmed(m, x, lengths, y):
    x = x[:, : lengths.max()]
    rows = pack_padded_sequence(x, lengths.cpu().numpy(), batch_first=True, enforce_sorted=False)
    out, _ = pad_packed_sequence(m.rnn(rows)[0], batch_first=True, total_length=x.size(1))
    return (
        out.mean() + out.square().mean(1).sum() + sum(out[i, : lengths[i]].mean() for i in range(4))
    )


def letters(m, x, lengths, y):
    """As speech recognition does it."""
    out, found = pad_packed_sequence(m.lstm(packed(x, lengths))[0])
    scores, words = m.head(out).log_softmax(-1), y[:, :2].clamp(1)
    counts = torch.tensor([1, 2, 1, 2])
    return F.ctc_loss(scores, words, found, counts, zero_infinity=True) + F.ctc_loss(
        scores, words, found, counts, reduction="sum", zero_infinity=True
    )


def attended_to(m, x, lengths, y):
    out, found = pad_packed_sequence(m.lstm(packed(x, lengths))[0], batch_first=True)
    is_padding = torch.arange(out.size(1))[None] >= found[:, None]
    found, weights = m.attention(out, out, out, key_padding_mask=is_padding)
    found = found + m.attention(out, out, out, need_weights=False)[0]
    return found.mean() + weights.square().sum()


def of_chosen_sequences(m, x, lengths, y):
    out, (h, c) = m.lstm(x[lengths > 2])
    return out.square().sum() + h.sum() + c.square().sum()


def of_known_lengths(m, x, lengths, y):
    rows = pack_padded_sequence(x, [2, 5, 3, 4], batch_first=True, enforce_sorted=False)
    out, (h, _) = m.lstm(rows)
    padded, found = pad_packed_sequence(out, batch_first=True)
    assert out.data.shape == (14, 8) and padded.shape == (4, 5, 8) and int(found.max()) == 5
    parts = pack_sequence([x[0, :2], x[1, :5], x[2, :5]], enforce_sorted=False)
    _, g = m.gru(
        pack_padded_sequence(pad_sequence([x[0, :2], x[1, :4]]), [2, 4], enforce_sorted=False)
    )
    return padded.mean() + h.sum() + parts.data.square().mean() + g.sum()


FUNCTIONS = [padded_again]
MORE = [
    *(
        captions,
        of_the_longest,
        in_time,
        last_states,
        largest_in_time,
        given_states,
        changed_rows,
        sorted_before,
        listed,
        again_packed,
    ),
    *(not_packed_again, outputs_at_places, labels_of_the_longest, masks_of_the_longest),
    *(trimmed, letters, attended_to, of_chosen_sequences, of_known_lengths),
]


@pytest.fixture(autouse=True)
def torchs_own():
    with torchs_recurrences():
        yield


def slow(values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def capture(function):
    model = Model()

    def step(leaves):
        value = function(model, *leaves)
        if not value.dim():
            current_recorder().backward(value)
        return value

    leaves = (
        TensorLeaf((4, 6, 5), torch.float32),
        TensorLeaf((4,), torch.int64),
        TensorLeaf((4, 6), torch.int64),
    )
    return model, capture_step(ToCapture(step, model, leaves, ModelState(model).canonical_names))


def numbers(model, value):
    model.zero_grad()
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("function", [*FUNCTIONS, *slow(MORE)], ids=lambda f: f.__name__)
def test_values_and_gradients(function):
    model, step = capture(function)
    sizes = [node.meta["val"] for node in step.graph.nodes if node.op == "call_function"]
    assert not any(isinstance(value, torch.SymInt) for value in sizes)
    for kind, lengths in LENGTHS.items():
        given = torch.randn(4, 6, 5), torch.tensor(lengths), torch.randint(0, 9, (4, 6))
        expected = numbers(model, function(model, *given))
        found = numbers(model, outputs_of(step, model, given)[0])
        for mine, torchs in zip(found, expected, strict=True):
            mine = torch.zeros(()) if mine is None else mine
            mine, zero = torch.broadcast_tensors(
                mine, torch.zeros(()) if torchs is None else torchs
            )
            torch.testing.assert_close(mine, zero, msg=f"{function.__name__}, {kind}")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[3, 0, 1, 4], [3, 7, 1, 4]])
def test_wrong_lengths_are_marked(lengths):
    """PyTorch raises, or reads beyond the batch."""
    model, step = capture(last_states)
    given = torch.randn(4, 6, 5), torch.tensor(lengths), torch.randint(0, 9, (4, 6))
    with torch.no_grad():
        assert outputs_of(step, model, given)[0].isnan()


def test_what_is_refused():
    def first(m, x, lengths, y):
        sizes = torch.full((6,), 4)
        return m.rnn(PackedSequence(x.flatten(0, 1), sizes))[1].sum()

    text = r"A packed sequence at .*test_packed\.py:\d+: .* was not packed in the step function"
    with pytest.raises(CaptureError, match=text):
        capture(first)
    with pytest.raises(
        CaptureError, match="is a result of the step: return values of a fixed size"
    ):
        capture(lambda m, x, lengths, y: m.rnn(packed(x, lengths))[0].data.square())

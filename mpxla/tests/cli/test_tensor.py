"""What tensor parallelism sends is part of a plan."""

import functools
import re

import pytest
import torch

from mpxla.cli.factory import capture_part
from mpxla.config import Config
from mpxla.errors import MpxlaError
from mpxla.graph.cost import MachineModel
from mpxla.parallel.models import cut_report
from mpxla.runtime.plans.cut import cut_step
from mpxla.runtime.plans.forecast import forecast
from mpxla.tests.device.null import plain_lowering
from mpxla.tests.nn.test_split_models import llama, words

pytestmark = pytest.mark.unit

SLOW_LINKS = MachineModel(link_bytes_per_s=1e5)


def train(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@functools.cache
def captured(num_layers):
    torch.manual_seed(0)
    return capture_part(llama(num_hidden_layers=num_layers), (words(),), train, 2)


def planned(num_layers, machine, memory="keep"):
    step = captured(num_layers)
    config, lowering = Config(activation_memory=memory), plain_lowering()
    return forecast(cut_step(step, config, lowering, {}, None), config, machine, lowering)


@pytest.mark.slow
def test_messages_of_a_block():
    """Halves of two sums each way, of [2, 8, 16] floats, and small ones for norms' parameters."""
    one, two = planned(1, SLOW_LINKS), planned(2, SLOW_LINKS)
    programs = [zip(f.programs, ("forward", "backward"), strict=True) for f in (one, two)]
    counts = [{what: (p.num_collectives, p.collective_bytes) for p, what in f} for f in programs]
    added = {
        what: tuple(b - a for a, b in zip(counts[0][what], counts[1][what], strict=True))
        for what in ("forward", "backward")
    }
    stream, norm = 2 * 8 * 16 * 4, 2 * 16 * 4
    assert added == {"forward": (4, 4 * stream), "backward": (6, 4 * stream + 2 * norm)}
    slower = two.timeline.makespan - one.timeline.makespan
    assert slower > (8 * stream + 2 * norm) / SLOW_LINKS.link_bytes_per_s


def test_the_report_counts_what_is_split():
    """Embedding, four products of attention, three of the MLP, and the head; no norms."""
    header, row = cut_report(planned(1, SLOW_LINKS).cut).splitlines()[1:3]
    assert re.search(r"parameters +split +gradients\+state", header)
    assert re.search(r" 12 \([\d.]+ KiB\) +9 ", row), row


@pytest.mark.slow
def test_recomputation_repeats_no_message():
    kept, again = planned(2, SLOW_LINKS), planned(2, SLOW_LINKS, "recompute")
    assert again.activation_bytes[0] < 0.8 * kept.activation_bytes[0]
    messages = [
        [(p.num_collectives, p.collective_bytes) for p in f.programs] for f in (kept, again)
    ]
    assert messages[0] == messages[1]


def test_what_cannot_be_split_is_told():
    with pytest.raises(MpxlaError, match="--tp 2: nothing of the model can be split"):
        capture_part(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), lambda out: out.sum(), 2)

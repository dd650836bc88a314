"""What cannot be wrapped is named before anything happens."""

import pytest
import torch
from torch import nn

from mpxla.errors import MpxlaError
from mpxla.parallel.wrappable import check_module

pytestmark = pytest.mark.unit


def observed():
    layer = nn.Linear(2, 3)
    layer.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(nn.Sequential(layer))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: len, r"wraps a torch\.nn\.Module, not builtin_function_or_method"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"^parameter 0\.weight has no shape yet .*once"),
        (
            observed,
            r"^0\.weight_fake_quant\..* is an observer \(prepare_qat\) .*call the model once",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_refused(make, text):
    with pytest.raises(MpxlaError, match=text):
        check_module(make())


def test_plain_modules_are_taken():
    check_module(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)))

"""`torch.load` in code that the launcher runs: where tensors go, and what stays shared."""

import functools
import io

import pytest
import torch
from torch import nn

from mpxla.tests.backends import backend_here
from mpxla.tests.compat.launching import inside, refusal

pytestmark = pytest.mark.ranks


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def load_files():
    device = backend_here().device
    state = {"w": nn.Parameter(torch.ones(2)), "list": [torch.zeros(1)], "n": 3}
    places = ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}]
    places += [
        lambda storage, location: storage.cuda(0),
        lambda storage, location: storage.cuda(),
        lambda storage, location: storage.cuda(torch.device("cuda"), non_blocking=True),
    ]
    for place in places:
        found = torch.load(saved(state), map_location=place)
        assert found["w"].device == found["list"][0].device == device
        assert isinstance(found["w"], nn.Parameter) and found["n"] == 3
        assert found["w"].tolist() == [1.0, 1.0] and found["list"][0].item() == 0.0
    for place in (None, "cpu", torch.device("cpu"), lambda storage, location: storage):
        assert torch.load(saved(state), map_location=place)["w"].device.type == "cpu"
    assert torch.load(saved(torch.ones(2).cuda())).device == device


def test_loading():
    inside(load_files)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(1))


def load_modules():
    model = Tied()
    for place in ("cuda:0", lambda storage, location: storage.cuda(0)):
        found = torch.load(saved({"net": model}), map_location=place, weights_only=False)["net"]
        assert found.head.weight is found.embedding.weight, "it is tied as before"
        assert isinstance(found.head.weight, nn.Parameter) and found.head.weight.requires_grad
        assert {str(t.device) for t in found.state_dict().values()} == {str(backend_here().device)}
        assert torch.equal(found.head.weight.detach().cpu(), model.head.weight.detach())
    on_host = torch.load(saved(model), map_location="cpu", weights_only=False)
    assert {str(t.device) for t in on_host.state_dict().values()} == {"cpu"}


def test_whole_modules_are_loaded_onto_the_device():
    inside(load_modules)


def load_safetensors(path):
    from safetensors.torch import load_file, save_file

    save_file({"w": torch.ones(2)}, path)
    for place in ("cuda", "cuda:0", 0, torch.device("cuda")):
        found = load_file(path, device=place)["w"]
        assert found.device == backend_here().device and found.tolist() == [1.0, 1.0]
    assert load_file(path)["w"].device.type == "cpu"
    return [refusal(lambda: load_file(path, "cuda:3"))]


def test_safetensors_are_loaded_onto_the_device(tmp_path):
    (index,) = inside(functools.partial(load_safetensors, tmp_path / "w.safetensors"))
    assert "there is no device cuda:3: 1 process(es) run on this host" in index


def load_wrongly():
    storage = torch.ones(2).untyped_storage()
    return [
        refusal(lambda: storage.cuda(0)),
        refusal(lambda: torch.load(saved(torch.ones(2)), map_location=lambda s, _: s.cuda(3))),
    ]


def test_storages_and_devices_that_do_not_exist():
    outside, index = inside(load_wrongly)
    assert "test_loading.py:" in outside and "refusal(lambda: storage.cuda(0))" in outside
    assert "a storage cannot be moved to an XLA device, whose tensors have none" in outside
    assert "there is no device cuda:3: 1 process(es) run on this host" in index

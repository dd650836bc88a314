"""States of parameters that optimizers nest, flat and back."""

import pytest
import torch

from mpxla.parallel.updates.nested_state import flattened, restored
from mpxla.parallel.updates.pieces import cut_state, join_shards

pytestmark = pytest.mark.unit

KEYS = {
    "step": ("step", 3),
    "a list": ("Q[0]", [5]),
    "a tuple": ("pair(1)", (0, 5)),
    "a dictionary": ("buffers{0.9}", {0.9: 5}),
    "deep": ("a[1]{'b'}(0)", [1, {"b": (5,)}]),
    "brackets in a key": ("%5Ba%5D", 5),
    "brackets in an inner key": ("d{%27%7Bx%25%27}", {"{x%": 5}),
    "no text": ("{3}", 5),
}


@pytest.mark.parametrize(("path", "value"), KEYS.values(), ids=KEYS)
def test_the_key_of_a_value_is_the_way_to_it(path, value):
    name = {"{3}": 3, "%5Ba%5D": "[a]"}.get(path, path.partition("[")[0].partition("(")[0])
    name = name.partition("{")[0] if isinstance(name, str) else name
    state = {name: value, "other": None}
    flat = flattened(state)
    assert path in flat
    assert all(not isinstance(v, list | tuple | dict) for v in flat.values())
    assert restored(flat) == state


def test_empty_containers_and_what_has_no_written_keys_stay():
    key = torch.zeros(())
    state = {"list": [], "tuple": ((),), "dictionary": {"a": {}}, "by tensor": {key: 1}}
    assert restored(flattened(state)) == state


def test_tensors_in_containers_are_cut_and_joined():
    whole = torch.arange(6.0).view(2, 3)
    state = {"buffers": {0.0: whole, 0.9: whole + 1}, "pair": [whole + 2, 7], "step": 4}
    parts = [
        {"state": {0: cut_state(state, (2, 3), a, b)}, "_mpxla_shard": {0: ((a, b), (2, 3))}}
        for a, b in ((0, 4), (4, 6))
    ]
    assert parts[1]["state"][0]["buffers"][0.9].tolist() == [5, 6]
    (joined,) = join_shards(parts)["state"].values()
    assert torch.equal(joined["buffers"][0.9], whole + 1)
    assert torch.equal(joined["pair"][0], whole + 2)
    assert joined["pair"][1] == 7 and joined["step"] == 4

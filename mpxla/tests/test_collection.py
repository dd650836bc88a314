"""Free memory goes back to the system after graphs were made, and not at every step."""

from mpxla import collection
from mpxla.collection import collection_paused, give_back_memory


def test_memory_goes_back_twice_after_graphs(monkeypatch):
    given_back = []
    monkeypatch.setattr(collection, "_trim", given_back.append)
    with collection_paused():
        pass
    for _ in range(4):
        give_back_memory()
    assert given_back == [0, 0]


def test_other_c_libraries_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(collection, "_trim", None)
    with collection_paused():
        pass
    give_back_memory()

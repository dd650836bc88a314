"""Names in a checkpoint folder."""

import os

import pytest

from mpxla.checkpoint import layout
from mpxla.errors import CheckpointError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("tag", ["step_100", "a.b", 7, "model.safetensors.index.json"])
def test_tags_are_words(tag):
    assert layout.check_tag(tag) == str(tag)


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden", "newest", "user_content_1", "x_partial"])
def test_tags_that_would_be_other_files_are_refused(tag):
    with pytest.raises(CheckpointError, match=r"the tag '.*' cannot name a checkpoint; use a word"):
        layout.check_tag(tag)


def test_the_documented_names(tmp_path):
    assert layout.partial_folder(tmp_path, "t") == tmp_path / "t_partial"
    assert layout.rank_file("model", layout.rank_info(2, 0, 1)) == "model_2_0_1.pt"
    assert layout.full_file(tmp_path, "t") == tmp_path / "t"
    assert layout.full_user_content(tmp_path, "t") == tmp_path / "user_content_t"


def test_partial_tags_are_the_complete_ones_in_order_of_time(tmp_path):
    for number, name in enumerate(["b_partial", "a_partial", ".c_partial.writing", "d_partial"]):
        (tmp_path / name).mkdir()
        manifest = tmp_path / name / "manifest.json"
        if name != "d_partial":
            manifest.touch()
            os.utime(manifest, (number, number))
    assert layout.partial_tags(tmp_path) == ["b", "a"]


def test_newest_is_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no file 'newest', so there is no checkpoint"):
        layout.read_newest(tmp_path)
    (tmp_path / "newest").write_text("\n")
    with pytest.raises(CheckpointError, match=r"newest is empty; pass the tag"):
        layout.read_newest(tmp_path)
    (tmp_path / "newest").write_text("t5\n")
    assert layout.read_newest(tmp_path) == "t5"

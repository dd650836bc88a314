"""Names in a checkpoint folder."""

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


def test_complete_folders_have_a_name_and_a_manifest(tmp_path):
    for name in ("b_partial", "a_partial", ".c_partial.7f.writing", "d_partial"):
        (tmp_path / name).mkdir()
        if name != "d_partial":
            (tmp_path / name / "manifest.json").touch()
    expected = {tag: tmp_path / f"{tag}_partial" / "manifest.json" for tag in "ab"}
    assert layout.manifests(tmp_path) == expected


def test_what_is_left_of_attempts_is_found(tmp_path):
    writing = layout.writing_folder(tmp_path, "my_partial.run", "7f")
    replaced = layout.hidden_folder(tmp_path, "a", "replaced")
    for folder in (writing, replaced, tmp_path / "a_partial", tmp_path / ".a_partial.mine"):
        folder.mkdir()
    assert sorted(layout.leftovers(tmp_path)) == [
        ("a", "replaced", replaced),
        ("my_partial.run", "writing", writing),
    ]


def test_newest_is_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no file 'newest', so there is no checkpoint"):
        layout.read_newest(tmp_path)
    (tmp_path / "newest").write_text("\n")
    with pytest.raises(CheckpointError, match=r"newest is empty; pass the tag"):
        layout.read_newest(tmp_path)
    (tmp_path / "newest").write_text("t5\n")
    assert layout.read_newest(tmp_path) == "t5"
    (tmp_path / "newest").write_bytes(b"t\xff5")
    assert layout.read_newest(tmp_path) == "t\ufffd5", "a tag that nothing has, and no other error"

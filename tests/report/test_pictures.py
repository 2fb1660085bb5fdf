"""Pictures of a script: only what is a picture, only from its own folder."""

import base64
import os

import made_captures
import pytest

from narrowcast.report._files import kind_of, pictures

SVG = b'<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>'


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\nrest", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (SVG, "image/svg+xml"),
        (b"\xef\xbb\xbf <svg width='1'/>", "image/svg+xml"),
        (b"<html><svg></svg></html>", None),
        (b"<!DOCTYPE html><script>window.hacked=1</script>", None),
        (b"RIFF\x00\x00\x00\x00WAVE", None),
        (b"\x89PNG", None),
        (b"<!--" * 1000, None),
        (b"", None),
    ],
)
def test_the_first_bytes_tell_what_it_is(data, kind):
    assert kind_of(data) == kind


@pytest.fixture
def folders(tmp_path):
    found = [("FP32", tmp_path / "in" / "fp32-0"), ("mixed", tmp_path / "in" / "mixed-0")]
    for _, folder in found:
        folder.mkdir(parents=True)
    return found


def reasons(found):
    return {name: [picture.left_out for picture in pair] for name, pair in found.pairs}


def test_pictures_of_one_name_stand_side_by_side(folders, tmp_path):
    for (_, folder), shade in zip(folders, (10, 90), strict=True):
        made_captures.picture(folder / "a.PNG", shade=shade)
        made_captures.picture(folder / "deep" / "b.png", shade=shade)
    made_captures.picture(folders[1][1] / "only.png")
    (folders[0][1] / "capture.jsonl").write_text("")
    found = pictures(folders, tmp_path / "in")
    assert [name for name, _ in found.pairs] == ["a.PNG", os.path.join("deep", "b.png"), "only.png"]
    left, right = found.pairs[0][1]
    assert (left.run, right.run, left.left_out) == ("FP32", "mixed", None)
    assert base64.b64decode(left.uri.partition(",")[2]) == (folders[0][1] / "a.PNG").read_bytes()
    assert left.uri != right.uri
    assert reasons(found)["only.png"] == ["this run saved none of this name", None]


def test_links_are_never_followed(folders, tmp_path):
    outside = made_captures.picture(tmp_path / "outside" / "secret.png")
    own = made_captures.picture(folders[0][1] / "own.png")
    (folders[0][1] / "file.png").symlink_to(outside)
    (folders[0][1] / "inner.png").symlink_to(own)
    (folders[0][1] / "folder").symlink_to(outside.parent)
    folders[1][1].rmdir()
    folders[1][1].symlink_to(outside.parent)
    assert reasons(pictures(folders, tmp_path / "in")) == {
        "own.png": [None, "this run saved none of this name"]
    }
    up = [("up", tmp_path / "in" / ".." / "outside")]
    assert pictures(up, tmp_path / "in").pairs == ()


def test_what_is_no_picture_or_too_large_is_left_out_with_a_word(folders, tmp_path):
    folder = folders[0][1]
    (folder / "html.png").write_text("<html><script>window.hacked=1</script>")
    (folder / "empty.jpg").write_bytes(b"")
    with (folder / "large.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(60 * 2**20)
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "locked.svg").write_bytes(SVG)
    found = reasons(pictures(folders[:1], tmp_path / "in"))
    assert found == {
        "empty.jpg": ["its content is not a picture"],
        "html.png": ["its content is not a picture"],
        "large.png": ["larger than 2 MiB"],
        "locked.svg": [None],
    }


def test_a_page_has_room_for_so_many(folders, tmp_path):
    folder = folders[0][1]
    for number in range(100):
        (folder / f"{number:03}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(2**20))
    found = pictures(folders[:1], tmp_path / "in")
    assert (len(found.pairs), found.more) == (60, 40)
    kept = [picture.uri for _, pair in found.pairs for picture in pair if picture.uri]
    assert len(kept) >= 3
    assert sum(map(len, kept)) < 7 * 2**20
    assert found.pairs[-1][1][0].left_out == "the page has no room left for it"

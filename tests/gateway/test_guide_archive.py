"""The archive of the guide is refused if it cannot be served; only files with plain names are served."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from gateway.requests import guide_archive
from gateway.requests.guide_archive import BadGuide, GuideArchive
from streams.testing import ServerFailed, running_server


def archive_of(folder: Path, files: dict[str, bytes]) -> str:
    path = folder / "site.zip"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(path)


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    guide = GuideArchive(archive_of(tmp_path, {"index.html": b"first", "a/b.css": b"css", "a.exe": b"no"}))
    assert guide.find("") == "index.html" and guide.find("a.exe") is None and guide.find("a") is None
    assert guide.content("a/b.css") is None
    assert guide.read("a/b.css") == b"css" == guide.content("a/b.css")
    assert guide.tag("a/b.css") != guide.tag("index.html")


@pytest.mark.parametrize(
    "name",
    ["../up.html", "/root.html", "a/../b.html", ".hidden", "a\\b.html", "a//b.html", "é.html", "a b.css"],
)
def test_a_name_that_is_no_plain_path_is_not_served(tmp_path: Path, name: str) -> None:
    guide = GuideArchive(archive_of(tmp_path, {"index.html": b"", name: b""}))
    assert guide.find("index.html") and guide.find(name) is None


def test_an_archive_that_is_too_large_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive_of(tmp_path, {"index.html": b"", "big.html": b"0" * 10_000})
    monkeypatch.setattr(guide_archive, "BYTES_MAX", 9_999)
    with pytest.raises(BadGuide, match="at most 5000 files of 9999 bytes"):
        GuideArchive(path)
    monkeypatch.undo()
    monkeypatch.setattr(guide_archive, "FILES_MAX", 1)
    with pytest.raises(BadGuide, match="2 files"):
        GuideArchive(path)


def test_an_archive_without_a_first_page_and_no_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadGuide, match=r"has no index\.html; write it with `make site`"):
        GuideArchive(archive_of(tmp_path, {"other.html": b""}))
    (tmp_path / "text.zip").write_text("text")
    with pytest.raises(BadGuide, match="is no zip archive"):
        GuideArchive(str(tmp_path / "text.zip"))
    with pytest.raises(BadGuide, match="No such file"):
        GuideArchive(str(tmp_path / "none.zip"))


def test_damage_inside_the_archive_is_reported_when_the_file_is_read(tmp_path: Path) -> None:
    path = Path(archive_of(tmp_path, {"index.html": b"whole" * 100}))
    content = bytearray(path.read_bytes())
    content[len("index.html") + 32] ^= 0xFF
    path.write_bytes(content)
    guide = GuideArchive(str(path))
    with pytest.raises(BadGuide, match=r"index\.html cannot be read"):
        guide.read("index.html")


def test_a_server_with_a_bad_archive_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"STREAMS_GUIDE is .*none\.zip"),
        running_server(guide=tmp_path / "none.zip"),
    ):
        pass

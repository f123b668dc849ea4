"""The audit's reader of files: strict JSON, and no way out of the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_kvqual.audit.checks import Report
from pytest_kvqual.audit.files import DamagedError, Hashed, Tree, canonical, one_line, parse, pretty, sha256
from pytest_kvqual.audit.receipts import place_of, read_receipt
from pytest_kvqual.audit.settings import _normal, _options

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "receipts"


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"\xff",
        b"",
        b"{",
        b"[" * 200_000,
        b"9" * 5000,
        b"{} {}",
    ],
    ids=lambda data: data[:12].decode("latin-1"),
)
def test_json_that_nobody_here_writes_is_refused(data: bytes) -> None:
    """A key twice, a number that is none, damage and nesting without end are refused in one line."""
    with pytest.raises(DamagedError) as caught:
        parse(data)
    assert "\n" not in one_line(str(caught.value))


def test_the_canonical_form_has_sorted_keys_and_no_white_space() -> None:
    """Equal values have equal bytes, and numbers keep their form."""
    assert canonical(parse(b'{"b": 1.0, "a": [1, "\xc3\xa9"]}')) == b'{"a":[1,"\xc3\xa9"],"b":1.0}'
    assert pretty({"a": 1}) == b'{\n  "a": 1\n}\n'


def test_a_lone_surrogate_has_no_canonical_form() -> None:
    """Text that UTF-8 cannot hold is refused where it would be written."""
    with pytest.raises(DamagedError):
        canonical(parse(rb'"\ud800"'))


def test_links_pipes_and_ways_up_are_not_opened(tmp_path: Path) -> None:
    """Only regular files below the folder are opened, by way of real folders."""
    (tmp_path / "inside" / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    (tmp_path / "inside" / "file").write_bytes(b"file")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside" / "secret")
    (tmp_path / "inside" / "folder").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "inside" / "pipe")
    tree = Tree(tmp_path / "inside")
    assert tree.read("file") == b"file"
    assert [tree.kind(name) for name in tree.names()] == ["folder", "file", "link", "link", "other"]
    assert tree.kind("missing") == "none"
    for parts in (("link",), ("folder", "secret"), ("pipe",), ("..", "outside", "secret"), ("deep",)):
        with pytest.raises((OSError, DamagedError)):
            tree.read(*parts)
    tree.close()


def test_lines_are_digested_as_they_are_read(tmp_path: Path) -> None:
    """The digest and the size are those of the whole file, whatever was made of its lines."""
    data = b"one\ntwo\n\nlast"
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file:
        hashed = Hashed(file)
        assert list(hashed.lines()) == [b"one\n", b"two\n", b"\n", b"last"]
        assert (hashed.sha256, hashed.size) == (sha256(data), len(data))


@pytest.mark.parametrize("name", ["pass.json", "fail.json", "refused.json"])
def test_stored_receipts_are_read_without_a_finding(name: str) -> None:
    """The golden receipts, which another reader wrote, are in order in themselves."""
    report = Report()
    receipt = read_receipt((GOLDEN / name).read_bytes(), name, report)
    assert report.findings == []
    assert receipt.outcome == name.removesuffix(".json").upper()


def test_an_edited_receipt_names_both_digests() -> None:
    """A changed figure is not the content that the receipt states."""
    data = (GOLDEN / "pass.json").read_bytes().replace(b"upper bound", b"lower bound", 1)
    with pytest.raises(DamagedError, match=r"content of sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        read_receipt(data, "pass.json", Report())


@pytest.mark.parametrize(
    ("folder", "prefix", "place"),
    [
        ("candidate-1024-65536", "", ("candidate", 1024, 65536)),
        ("8k-candidate-8192-65536", "8k-", ("candidate", 8192, 65536)),
        ("candidate-1024-65536", "8k-", None),
        ("candidate-1024", "", None),
        ("candidate-x-1", "", None),
    ],
)
def test_a_folder_is_named_by_arm_length_and_size(folder: str, prefix: str, place: tuple[str, int, int] | None) -> None:
    """The place of receipts and evidence is in their folder's name."""
    assert place_of(folder, prefix) == place


def test_flags_are_read_in_each_of_their_forms() -> None:
    """``--a=1``, ``--a 1``, ``--a`` and ``--no-a`` are one argument's values, whatever the server calls them."""
    words = ["--block-size", "16", "--dtype=float16", "--no-enable-prefix-caching", "--eager", '--over={"n": 1}']
    found = {key: _normal(value) for key, value in _options(words).items()}
    assert found == {
        "block_size": 16, "dtype": "float16", "enable_prefix_caching": False, "eager": True, "over": {"n": 1},
    }  # fmt: skip
    assert _normal(["Tiny"]) == "Tiny"

from __future__ import annotations

import pytest

from pytest_kvqual.errors import StudyError
from pytest_kvqual.kv.geometry import NAMED, Geometry, parse_geometry


@pytest.mark.parametrize(
    ("name", "heads"), [("qwen3-8b", (32, 8, 128)), ("phi-4", (40, 10, 128)), ("smollm2", (9, 3, 64))]
)
def test_named(name: str, heads: tuple[int, int, int]) -> None:
    """A name stands for the head counts and head size of the model's published configuration."""
    geometry = parse_geometry(name)
    assert (geometry.query_heads, geometry.kv_heads, geometry.head_size) == heads


@pytest.mark.parametrize("geometry", NAMED.values(), ids=NAMED)
def test_spelled_out(geometry: Geometry) -> None:
    """The printed form of a geometry parses to the same geometry."""
    assert parse_geometry(str(geometry)) == geometry


def test_group() -> None:
    """The group is the number of query heads per KV head."""
    assert parse_geometry("hq=28,hkv=4,d=64,block=16").group == 7


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("llama", "'llama'"),
        ("", "''"),
        ("hq=4,hkv=2,d=64", "no block"),
        ("hq=4,hkv=2,d=64,block=16,x=1", "'x=1'"),
        ("hq=4,hq=4,hkv=2,d=64,block=16", "'hq' twice"),
        ("hq=4,hkv=2,d=-64,block=16", "'-64'"),
        ("hq=4,hkv=2,d=\N{SUPERSCRIPT TWO},block=16", "'\N{SUPERSCRIPT TWO}'"),
        ("hq=4,hkv=0,d=64,block=16", "0"),
        ("hq=5,hkv=2,d=64,block=16", "5 query heads over 2"),
    ],
)
def test_refused(text: str, found: str) -> None:
    """A malformed geometry is refused in one line that says what was found."""
    with pytest.raises(StudyError, match="expected") as error:
        parse_geometry(text)
    assert f"found {found}" in str(error.value)
    assert "\n" not in str(error.value)

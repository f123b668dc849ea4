"""Properties of studies and locks: no edit goes unseen, and no file raises anything but its own error."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_study import STUDY, TinyStudy

from pytest_kvqual.errors import LockError, StudyError
from pytest_kvqual.study.freeze import freeze, verify_lock
from pytest_kvqual.study.load import load_study
from pytest_kvqual.study.panels import check_files, load_scales

STUDY_BYTES = STUDY.encode()


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> TinyStudy:
    """A study and its lock."""
    tiny = TinyStudy.write(tmp_path_factory.mktemp("frozen") / "studies" / "tiny")
    freeze(load_study(str(tiny.folder)))
    return tiny


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_edited_byte_of_any_locked_file_is_seen(frozen: TinyStudy, data: st.DataObject) -> None:
    """Any byte of the declaration, a panel, the scales or the lock, changed to any other, ends in one line."""
    paths = sorted(path for path in frozen.folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(paths))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
    try:
        with pytest.raises((LockError, StudyError)) as caught:
            verify_lock(load_study(str(frozen.folder)))
    finally:
        path.write_bytes(content)
    assert caught.value.line().isprintable()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, len(STUDY_BYTES) - 1), st.integers(0, 6), st.binary(max_size=6) | st.sampled_from([b"true", b"nan"])
)
def test_no_declaration_raises_anything_but_a_study_error(place: int, cut: int, new: bytes) -> None:
    """Whatever is written into a study, it is read or refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyStudy.write(Path(folder) / "tiny")
        tiny.toml.write_bytes(STUDY_BYTES[:place] + new + STUDY_BYTES[place + cut :])
        try:
            check_files(load_study(str(tiny.folder)))
        except StudyError as error:
            assert error.line().isprintable()  # noqa: PT017  # the absence of an error is right too


@given(st.lists(st.floats(width=32, min_value=2.0**-140, max_value=2.0**127, allow_nan=False), min_size=1, max_size=8))
def test_every_positive_float32_is_a_scale(scales: list[float]) -> None:
    """A scale that float32 holds comes back bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        path.write_text(f'{{"schema": 1, "v_scale": {scales}}}')
        back = load_scales(path, len(scales))
    assert struct.pack(f"<{len(scales)}f", *back) == struct.pack(f"<{len(scales)}f", *scales)

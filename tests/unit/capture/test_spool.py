"""The spool: what was kept is read back, up to where the file was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.capture._spool import STAMPS, Spool, SpoolReader

TIMES = st.integers(0, 2**62)
RECORDS = st.lists(
    st.tuples(
        st.tuples(*[st.one_of(st.none(), TIMES)] * len(STAMPS)),
        st.sampled_from([{}, {"eof": True, "failure": ["transport", "é"]}]),
        st.lists(st.tuples(TIMES, st.binary(max_size=40)), max_size=5),
    ),
    max_size=5,
)
Kept = list[tuple[tuple[int | None, ...], dict[str, object], list[tuple[int, bytes]]]]


def keep(path: Path, records: Kept) -> None:
    path.unlink(missing_ok=True)
    spool = Spool(path, {"requests": []})
    for index, (stamps, more, reads) in enumerate(records):
        spool.add(index, more, stamps, [at for at, _ in reads], [data for _, data in reads])
    spool.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool") / "a.spool"


@given(RECORDS, st.integers(0, 60))
def test_what_was_kept_is_read_back(path: Path, records: Kept, missing: int) -> None:
    """Stamps, reads and their times come back as given; a file without its last bytes lacks its last records alone."""
    keep(path, records)
    reader = SpoolReader(path)
    whole = [reader.record(index) for index in range(len(records) + 1)]
    reader.close()
    assert whole.pop() is None
    for index, ((stamps, more, reads), found) in enumerate(zip(records, whole, strict=True)):
        assert found is not None
        meta, times, data = found
        assert meta == {"index": index, **dict(zip(STAMPS, stamps, strict=True)), **more}
        assert list(zip(times, data, strict=True)) == reads

    if not records or not missing:
        return
    path.write_bytes(path.read_bytes()[:-missing])
    reader = SpoolReader(path)
    left = [reader.record(index) for index in range(len(records))]
    reader.close()
    assert left[-1] is None
    kept = [found for found in left if found is not None]
    assert kept == whole[: len(kept)]
    assert left[len(kept) :] == [None] * (len(records) - len(kept))

"""Which stage of its start an engine is in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvqual.progress import BootStage
from pytest_kvqual.server.boot_log import BootLog

LOG = (
    b"(EngineCore) INFO [core.py:133] Initializing a V1 LLM engine\n"
    b"(EngineCore) INFO [cpu_model_runner.py:68] Starting to load model /models/smol...\n"
    b"(EngineCore) INFO [default_loader.py:501] Loading weights took 0.35 seconds\n"
    b"(EngineCore) INFO [gpu_model_runner.py:5150] Model loading took 0.25 GiB memory and 1.2 seconds\n"
)
ORDER: tuple[BootStage, ...] = ("starting", "loading weights", "warming up")


def expected(seen: bytes) -> BootStage:
    if b"Loading weights took" in seen:
        return "warming up"
    return "loading weights" if b"Starting to load model" in seen else "starting"


@given(cuts=st.lists(st.integers(0, len(LOG)), max_size=12).map(sorted), earlier=st.sampled_from([b"", LOG]))
def test_however_the_log_grows_the_stage_is_that_of_its_text(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], earlier: bytes
) -> None:
    """A mark that is written in two parts counts once it is whole; what an earlier start logged counts for nothing."""
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_bytes(earlier)
    log, place = BootLog(path, start=len(earlier)), 0
    for cut in [*cuts, len(LOG)]:
        with path.open("ab") as file:
            file.write(LOG[place:cut])
        place = cut
        assert log.stage() == expected(LOG[:cut])


def test_the_stage_never_goes_back(tmp_path: Path) -> None:
    """A second model that is loaded while the engine warms up is no earlier stage; nor is a log that is gone."""
    path = tmp_path / "server.log"
    path.write_bytes(LOG)
    log = BootLog(path)
    assert log.stage() == "warming up"
    with path.open("ab") as file:
        file.write(b"Starting to load model drafter\n")
    assert log.stage() == "warming up"
    path.unlink()
    assert log.stage() == "warming up"


def test_a_log_that_is_not_there_is_a_start(tmp_path: Path) -> None:
    """Before the first line nothing is known but that it starts."""
    assert BootLog(tmp_path / "none").stage() == "starting"

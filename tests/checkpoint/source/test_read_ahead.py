"""Reading ahead is a favour: it reads what there is, stops when told, and leaves errors to the run."""

from pathlib import Path

import pytest

from kbitq.checkpoint import QuantizeOptions, plan_quantize
from kbitq.checkpoint.source import read_ahead
from kbitq.checkpoint.source.read_ahead import ReadAhead
from kbitq.checkpoint.source.storage import LocalFile


def test_reads_every_file_up_to_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = LocalFile.read_into

    def read_into(file: LocalFile, buffer: memoryview, offset: int) -> None:
        read.append(len(buffer))
        real(file, buffer, offset)

    plan = plan_quantize(folder, None, QuantizeOptions(k=3))
    sizes = [p.stat().st_size for p in sorted(folder.glob("*.safetensors"))]
    monkeypatch.setattr(LocalFile, "read_into", read_into)
    for step, most, total in ((1 << 20, 1 << 30, sum(sizes)), (1000, 5000, 5000)):
        monkeypatch.setattr(read_ahead, "_STEP", step)
        monkeypatch.setattr(read_ahead, "_MOST", most)
        read.clear()
        ahead = ReadAhead(plan.checkpoint)
        with ahead:
            ahead._thread.join()
        assert sum(read) == total


def test_stops_at_the_end_of_the_block(folder: Path) -> None:
    ahead = ReadAhead(plan_quantize(folder, None, QuantizeOptions(k=3)).checkpoint)
    with pytest.raises(KeyboardInterrupt), ahead:
        raise KeyboardInterrupt
    assert not ahead._thread.is_alive()


def test_a_source_that_is_gone_is_left_to_the_run(folder: Path) -> None:
    plan = plan_quantize(folder, None, QuantizeOptions(k=3))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with ReadAhead(plan.checkpoint) as ahead:
        ahead._thread.join(10)
        assert not ahead._thread.is_alive()  # and pytest would report an exception that the thread ended with

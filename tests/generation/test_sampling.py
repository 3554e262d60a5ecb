"""Drawing a set: the same files whatever the processes, exactly n, gone on with after any stop, never hanging."""

from __future__ import annotations

import logging
import os
import signal

import numpy as np
import pytest
import torch

from tests.generation.stub import CLASSES, Stub
from tests.processes import run_processes
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.signals import StopRequest, stop_requests
from vit3.errors import Interrupted, UserError
from vit3.generation import sampling
from vit3.generation.folder import SampleFolder
from vit3.generation.sampling import draw, finish, missing_batches, wait_for_others

CPU = Processes(torch.device("cpu"))
IN_TURN = (2, 0, 1)


def start(path, n):
    return SampleFolder.start(path, n, {"seed": 0}, IN_TURN, CLASSES, {})


def sample(path, n, generate, batch_size=8, processes=CPU, patience=60.0, **options):
    """What the tool does once the network is built."""
    processes.on_main(lambda: start(path, n) and None)
    folder = SampleFolder(path)
    with stop_requests() as stop:
        batches = draw(folder, generate, processes, stop, batch_size=batch_size)
        if processes.main:
            wait_for_others(folder, batches, stop, patience=patience, every=0.02)
            finish(folder, stop, **{**dict(new=bool(batches), npz=True, sheet=6, title="t"), **options})
    return generate.batches


def sample_together(path, n, channels=3):
    return sample(path, n, Stub(channels), processes=start_processes("cpu"))


def die_together(path, n):
    """Process 1 is killed in its second batch; process 0 may believe for a second that it is alive."""
    processes = start_processes("cpu")

    def trouble(numbers):
        if processes.rank == 1 and numbers[0] >= 16:
            os._exit(9)

    return sample(path, n, Stub(trouble=trouble), processes=processes, patience=1)


def fail_together(path, n):
    """Process 1 fails at its first batch and says so; process 0 is left."""
    processes = start_processes("cpu")
    try:
        sample(path, n, Stub(size=(5, 7 + processes.rank)) if processes.main else None, processes=processes, patience=1)
    except (UserError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def content(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*.*") if file.suffix != ".json"
    }


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    """The files of 50 images, drawn by one process."""
    path = tmp_path_factory.mktemp("fifty")
    sample(path, 50, Stub())
    return content(path)


@pytest.mark.parametrize(
    ("there", "n", "missing"),
    [
        ([], 10, [range(0, 4), range(4, 8), range(8, 10)]),
        ([], 1, [range(0, 1)]),
        ([], 8, [range(0, 4), range(4, 8)]),
        (range(10), 10, []),
        ([*range(5), 8, 9], 10, [range(4, 8)]),
        (range(10), 11, [range(8, 11)]),  # a batch that grows is drawn anew
    ],
)
def test_batches_that_are_missing(there, n, missing):
    assert missing_batches(set(there), n, 4) == missing


def test_exactly_n_images_of_the_classes_in_turn(fifty, tmp_path):
    assert sorted(fifty) == [f"images/{i:06d}.png" for i in range(50)] + ["samples.npz", "sheet.png"]
    (tmp_path / "a.npz").write_bytes(fifty["samples.npz"])
    archive = np.load(tmp_path / "a.npz")
    expected = np.stack([Stub().image(IN_TURN[i % 3], i).numpy() for i in range(50)])
    assert np.array_equal(archive["arr_0"], expected)
    assert archive["arr_1"].tolist() == [IN_TURN[i % 3] for i in range(50)]


def test_two_processes_write_the_same_files(fifty, tmp_path):
    """R20: 50 images, batch 8; each process draws every second batch, none twice."""
    drawn = run_processes(sample_together, 2, tmp_path, 50)
    assert [[batch[0] for batch in batches] for batches in drawn] == [[0, 16, 32, 48], [8, 24, 40]]
    assert content(tmp_path) == fifty


def test_more_processes_than_batches(tmp_path):
    drawn = run_processes(sample_together, 3, tmp_path / "three", 9, 1)
    assert [sum(batches, []) for batches in drawn] == [list(range(8)), [8], []]
    sample(tmp_path / "one", 9, Stub(1))
    assert content(tmp_path / "three") == content(tmp_path / "one")


def test_a_process_that_is_killed_hangs_no_other_and_one_goes_on(fifty, tmp_path):
    with pytest.raises(AssertionError, match="died without a word|rank 0 raised"):
        run_processes(die_together, 2, tmp_path, 50, timeout=60)
    there = set(SampleFolder(tmp_path).files())
    assert set(range(8, 16)) <= there and not there & set(range(24, 32))
    (tmp_path / ".samples.npz.x1").touch()  # as if killed there, too
    batches = sample(tmp_path, 50, Stub())
    assert not any(there.issuperset(batch) for batch in batches)  # the one at hand when process 0 died is drawn whole
    assert content(tmp_path) == fifty


def test_a_process_that_fails_is_told_by_the_others(tmp_path):
    said = run_processes(fail_together, 2, tmp_path, 20, timeout=60)
    assert said[1].startswith("TypeError")
    assert "8 of 20 images are missing and none has come for 0:00:01" in said[0] and "goes on" in said[0]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_leaves_whole_batches_and_the_next_start_goes_on(fifty, tmp_path, name):
    def trouble(numbers):
        if numbers[0] == 16:
            os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(Interrupted, match=f"stopped by {name}; 16 of 50 images .* the same command goes on") as stopped:
        sample(tmp_path, 50, Stub(trouble=trouble))
    assert stopped.value.code == {"SIGINT": 130, "SIGTERM": 75}[name]
    assert sorted(content(tmp_path)) == [f"images/{i:06d}.png" for i in range(16)]
    assert sum(sample(tmp_path, 50, Stub()), []) == list(range(16, 50))
    assert content(tmp_path) == fifty


def test_growing_gives_what_drawing_at_once_gives(fifty, tmp_path):
    sample(tmp_path, 13, Stub())
    assert sum(sample(tmp_path, 50, Stub()), []) == list(range(8, 50)) and content(tmp_path) == fifty


def test_a_complete_set_is_left_as_it_is(tmp_path, monkeypatch):
    sample(tmp_path, 5, Stub())
    monkeypatch.setattr(sampling, "write_archive", lambda *args: pytest.fail("the archive is there"))
    assert sample(tmp_path, 5, Stub()) == []


def test_images_that_are_renewed_are_written_before_those_that_are_new(tmp_path, monkeypatch):
    """Else process 0 could believe that all is there while another process still writes."""
    sample(tmp_path, 11, Stub())
    written, write = [], SampleFolder.write

    def note(self, number, image):
        write(self, number, image)
        written.append(number)

    monkeypatch.setattr(SampleFolder, "write", note)
    (tmp_path / "images" / "000008.png").unlink()
    sample(tmp_path, 16, Stub())
    assert set(written[:2]) == {9, 10} and set(written[2:]) == {8, 11, 12, 13, 14, 15}


def test_an_image_that_was_deleted_is_drawn_again(fifty, tmp_path):
    sample(tmp_path, 50, Stub())
    (tmp_path / "images" / "000020.png").unlink()
    assert sample(tmp_path, 50, Stub()) == [list(range(16, 24))] and content(tmp_path) == fifty


def test_one_grey_image(tmp_path):
    sample(tmp_path, 1, Stub(1))
    assert sorted(content(tmp_path)) == ["images/000000.png", "samples.npz", "sheet.png"]
    assert np.load(tmp_path / "samples.npz")["arr_0"].shape == (1, 5, 7, 3)


def test_other_channels_have_no_sheet(tmp_path):
    sample(tmp_path, 2, Stub(5))
    assert sorted(content(tmp_path)) == ["images/000000.npy", "images/000001.npy", "samples.npz"]
    assert np.load(tmp_path / "samples.npz")["arr_0"].shape == (2, 5, 7, 5)


def test_neither_archive_nor_sheet(tmp_path):
    sample(tmp_path, 2, Stub(), npz=False, sheet=0)
    assert sorted(content(tmp_path)) == ["images/000000.png", "images/000001.png"]


def test_the_log_tells_how_long_it_takes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sampling._Pace, "every", 0)
    sample(tmp_path, 10, Stub())
    with caplog.at_level(logging.INFO):
        sample(tmp_path, 26, Stub())
    assert "8 of 26 images are there already" in caplog.text
    lines = [record.getMessage() for record in caplog.records if "left" in record.getMessage()]
    assert len(lines) == 3 and lines[0].startswith("8 of 18 images  ") and lines[-1].endswith(" 0:00:00 left")


def test_a_full_disk_and_a_full_memory_are_one_sentence(tmp_path, monkeypatch):
    def memory(numbers):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def disk(self, number, image):
        raise OSError("no space left on device")

    with pytest.raises(UserError, match="batch_size=8 needs more memory than cpu has; use a smaller one"):
        sample(tmp_path, 9, Stub(trouble=memory))
    monkeypatch.setattr(SampleFolder, "write", disk)
    with pytest.raises(UserError, match="cannot be written .no space left on device.; free space"):
        sample(tmp_path, 9, Stub())


def test_what_generate_gives_is_checked(tmp_path):
    def floats(labels, numbers, progress):
        return torch.zeros(len(labels), 5, 7, 3)

    with pytest.raises(ValueError, match=r"must give 8 images .* gave \(8, 5, 7, 3\) as torch.float32"):
        draw(start(tmp_path, 9), floats, CPU, StopRequest(), batch_size=8)

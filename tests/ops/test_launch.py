"""Launch tables: what fits a device, what is refused in words, and how the fastest is found and kept."""

import json
from types import SimpleNamespace

import pytest
import torch

from vit3.ops import launch
from vit3.ops.launch import Launch, Limits, Tuned, bucket, choose, fitting, padded, refusal

pytest.importorskip("triton", reason="Triton is not installed")

from vit3.ops.dwconv_ttt.triton import LAUNCHES as DWCONV  # noqa: E402
from vit3.ops.glu_ttt.triton import LAUNCHES as GLU  # noqa: E402

TABLES = {"glu": GLU, "dwconv": DWCONV}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 8, 16, 24, 32, 48, 64, 80, 128]
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
SLOW, FAST = Launch(32, 16, 4, 1, 1000), Launch(64, 16, 4, 1, 2000)
SMALL_TABLE = {"kernel": {(16, 4): (SLOW, FAST)}}


def device(kib, capability=(8, 0)):
    return Limits(kib * 1024, capability)


@pytest.mark.parametrize(("d", "width"), [(1, 16), (8, 16), (16, 16), (17, 32), (48, 64), (80, 128), (128, 128)])
def test_padded(d, width):
    assert padded(d) == width


@each_table
@pytest.mark.parametrize("kib", [48, 64, 99, 163, 227])
def test_everything_fits_or_is_refused(table, kib):
    for d in WIDTHS:
        for dtype in DTYPES:
            reason = refusal(table, d, dtype, device(kib))
            assert reason is None or "bytes of shared memory" in reason
            assert reason is None or (kib < 99 and d > 64), f"{kib} KiB, D={d}, {dtype}: {reason}"
            if reason is None:
                for kernel, rows in table.items():
                    if (padded(d), dtype.itemsize) in rows:
                        fits = fitting(table, kernel, d, dtype, device(kib))
                        assert fits and all(0 <= c.shared <= kib * 1024 for c in fits)


@each_table
def test_little_shared_memory_is_refused_in_words(table):
    if table is GLU:
        assert "bytes of shared memory at head width 64, this device has 2048" in refusal(
            table, 64, torch.float32, device(2)
        )


@each_table
def test_nothing_is_refused_without_a_device(table):
    assert all(refusal(table, d, dtype, None) is None for d in WIDTHS for dtype in DTYPES)


@each_table
@pytest.mark.parametrize(
    ("d", "dtype", "limits", "words"),
    [
        (129, torch.float32, None, "head widths up to 128, not 129"),
        (32, torch.float64, None, "not float64"),
        (32, torch.float16, Limits(99 * 1024, (7, 5)), "compute capability 8.0, this device has 7.5"),
    ],
)
def test_refusals(table, d, dtype, limits, words):
    assert words in refusal(table, d, dtype, limits)


@each_table
def test_tables_are_complete(table):
    for rows in table.values():
        for (width, size), candidates in rows.items():
            assert width in (16, 32, 64, 128) and size in (2, 4)
            assert candidates and len(set(candidates)) == len(candidates)
            assert all(c.columns <= width and c.shared >= 0 for c in candidates)
    if table is GLU:  # a backward pass is one launch or two
        for width in (16, 32, 64, 128):
            for size in (2, 4):
                for name in ("apply_backward", "gradient_backward"):
                    parts = [(width, size) in table.get(f"{name}{part}", {}) for part in ("", "_write", "_sum")]
                    assert parts in ([True, False, False], [False, True, True])


def fake_times(found):
    """A timer that prefers FAST and writes down whom it was asked about."""

    def timer(run, candidate):
        found.append(candidate)
        return 1.0 if candidate == FAST else 2.0

    return timer


def test_one_tuning_per_size_class(tmp_path):
    asked = []
    tuned = Tuned(tmp_path / "launches.json", fake_times(asked))
    sizes = [224 + 32 * i for i in range(30)]
    classes = {bucket((side // 16) ** 2, 6) for side in sizes}
    for side in sizes * 2:
        key = ("kernel", 16, "torch.float32", bucket((side // 16) ** 2, 6))
        assert tuned.best(key, (SLOW, FAST), lambda _: None) == FAST
    assert len(asked) == 2 * len(classes) <= 14


def test_winner_is_kept_between_processes(tmp_path):
    path = tmp_path / "new" / "folder" / "launches.json"
    Tuned(path, fake_times([])).best(("a", 16), (SLOW, FAST), lambda _: None)
    assert [p.name for p in path.parent.iterdir()] == ["launches.json"]  # no temporary file is left
    asked = []
    assert Tuned(path, fake_times(asked)).best(("a", 16), (SLOW, FAST), lambda _: None) == FAST
    assert asked == []


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", '{"a/16": "x"}', '{"a/16": 7}', '{"a/16": -1}', "\x00\xff"]
)
def test_corrupt_file_is_ignored(tmp_path, text):
    path = tmp_path / "launches.json"
    path.write_bytes(text.encode("latin-1"))
    assert Tuned(path, fake_times([])).best(("a", 16), (SLOW, FAST), lambda _: None) == FAST
    assert list(json.loads(path.read_text()).values()) == [1]


def test_unwritable_file_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    asked = []
    tuned = Tuned(tmp_path / "file" / "launches.json", fake_times(asked))
    for _ in range(2):
        assert tuned.best(("a", 16), (SLOW, FAST), lambda _: None) == FAST
    assert len(asked) == 2  # still tuned once in this process
    assert "not kept" in caplog.text


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A stand-in for a tensor on a GPU, with a cache folder of its own; ``asked`` holds what was timed."""
    asked = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "limits", lambda _: device(99))
    monkeypatch.setattr(launch, "_milliseconds", fake_times(asked))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU/7")
    launch._tuned.cache_clear()
    yield SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32, asked=asked, cache=tmp_path / "vit3")
    launch._tuned.cache_clear()


def chosen(like, table=SMALL_TABLE, tokens=100, autotune=True):
    return choose(table, "kernel", 8, like, tokens=tokens, heads=6, run=lambda _: None, autotune=autotune)


def test_best_guess_without_autotune(gpu):
    assert chosen(gpu, autotune=False) == SLOW
    assert not gpu.asked and not gpu.cache.exists()


def test_autotune(gpu):
    assert [chosen(gpu, tokens=n) for n in (65, 100, 128)] == [FAST] * 3
    assert gpu.asked == [SLOW, FAST]
    assert chosen(gpu, tokens=129) == FAST and len(gpu.asked) == 4
    (file,) = gpu.cache.iterdir()
    assert "A-GPU-7" in file.name and file.suffix == ".json"


def test_other_table_is_tuned_anew(gpu):
    chosen(gpu)
    assert chosen(gpu, table={"kernel": {(16, 4): (FAST, SLOW)}}) == FAST
    assert len(gpu.asked) == 4


def test_what_does_not_fit_is_not_timed(gpu, monkeypatch):
    monkeypatch.setattr(launch, "limits", lambda _: Limits(1500, (8, 0)))
    assert chosen(gpu) == SLOW
    assert not gpu.asked


def test_nothing_is_tuned_off_the_gpu(gpu):
    assert chosen(torch.zeros(1)) == SLOW
    assert not gpu.asked


def test_nothing_is_tuned_inside_a_graph(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen(gpu) == SLOW
    assert not gpu.asked


@pytest.fixture
def setting():
    """PyTorch's setting for float32 products, put back at the end."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has no fp32_precision")
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


@pytest.mark.parametrize(("value", "expected"), [("ieee", "ieee"), ("tf32", "tf32")])
def test_precision_follows_setting(setting, value, expected):
    setting.fp32_precision = value
    assert launch.product_precision(torch.zeros(1)) == expected
    assert launch.product_precision(torch.zeros(1, dtype=torch.float16)) == "ieee"


def test_no_tf32_where_it_does_not_compile(setting, gpu, monkeypatch):
    setting.fp32_precision = "tf32"
    assert launch.product_precision(gpu) == "tf32"
    monkeypatch.setattr(launch, "limits", lambda _: device(227, (10, 0)))
    assert launch.product_precision(gpu) == "ieee"

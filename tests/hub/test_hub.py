"""Reading from a Hub, with the real client against a local server."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import logging
from safetensors.torch import save

from helpers.fake_hub import CUT, FakeHub, tiny_repo
from kbitq.checkpoint import QuantizeOptions, plan_quantize, run, verify
from kbitq.checkpoint.passes import journal
from kbitq.checkpoint.source import memory
from kbitq.errors import CheckpointError, NonFiniteError
from kbitq.hub import HubStorage, Repo, download, parse_repo, remote
from kbitq.hub.problems import HubError, explained


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", Repo("Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/3", Repo("a/b", "refs/pr/3")),
        ("a/b@v1.0", Repo("a/b", "v1.0")),
        ("model.safetensors", None),
        ("folder/model.safetensors", None),
        ("a/b/c", None),
        ("../b", None),
        ("/a/b", None),
        ("a/", None),
        ("a/b@", None),
        ("./a", None),
    ],
)
def test_what_a_repository_looks_like(text: str, expected: Repo | None) -> None:
    assert parse_repo(text) == expected


def test_a_path_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_repo("org/name") is None
    assert parse_repo("org/other") == Repo("org/other")


def test_streaming_gives_the_bytes_of_a_download(hub: FakeHub, tiny: Repo, tmp_path: Path) -> None:
    streamed = run(plan_quantize(HubStorage(tiny), tmp_path / "streamed", QuantizeOptions(k=3)))
    folder = download(tiny)
    local = run(plan_quantize(folder, tmp_path / "local", QuantizeOptions(k=3)))
    names = sorted(p.name for p in local.out.iterdir())
    assert names == sorted(p.name for p in streamed.out.iterdir())
    for name in names:
        assert (local.out / name).read_bytes() == (streamed.out / name).read_bytes(), name
    assert hub.ranges, "no range was asked for"
    assert not any("pytorch_model.bin" in request for request in hub.requests)
    assert not (folder / "pytorch_model.bin").exists()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def fetched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes asked of each file from now on."""
    counts: dict[str, int] = {}
    real = remote.HubFile._range

    def counting(self: remote.HubFile, start: int, count: int) -> bytes:
        counts[self.where] = counts.get(self.where, 0) + count
        return real(self, start, count)

    monkeypatch.setattr(remote.HubFile, "_range", counting)
    return counts


@pytest.mark.parametrize("codebook", ["optimal", "fit"])
def test_a_stream_is_fetched_once(
    hub: FakeHub, tiny: Repo, tmp_path: Path, codebook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SPOOL_BYTES", 1)  # one tensor at a time
    options = QuantizeOptions(k=3, codebook=codebook, max_memory=1)
    plan = plan_quantize(HubStorage(tiny), tmp_path / "streamed", options)
    assert plan.spool_bytes == 1 + 96 * 160 * 4
    counts = fetched(monkeypatch)
    run(plan)
    assert counts["someone/tiny/model.safetensors"] == plan.bytes_in
    run(plan_quantize(download(tiny), tmp_path / "local", options))
    assert bytes_of(tmp_path / "streamed") == bytes_of(tmp_path / "local")


def test_a_spooled_run_goes_on_where_it_was(
    hub: FakeHub, tiny: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SPOOL_BYTES", 1)
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)
    options = QuantizeOptions(k=3, max_memory=1)
    run(plan_quantize(download(tiny), tmp_path / "local", options))
    stops = 0
    for last in range(2, 40):
        calls = 0

        def stop(progress: object, last: int = last) -> None:
            nonlocal calls
            calls += 1
            if calls == last:
                raise KeyboardInterrupt

        try:
            run(plan_quantize(HubStorage(tiny), tmp_path / "streamed", options), stop)
            break
        except KeyboardInterrupt:
            stops += 1
            assert not (tmp_path / "streamed").exists()
    assert stops > 3
    assert bytes_of(tmp_path / "streamed") == bytes_of(tmp_path / "local")


def test_a_stream_with_values_that_are_not_finite(hub: FakeHub, tmp_path: Path) -> None:
    repo = tiny_repo()
    bad = torch.ones(96, 160)
    bad[3, 4] = torch.inf
    repo.files["model.safetensors"] = save({"a.weight": torch.ones(96, 160), "b.weight": bad})
    hub.repos["someone/bad"] = repo
    with pytest.raises(NonFiniteError, match=r"b\.weight.*first at \[3, 4\]"):
        run(plan_quantize(HubStorage(Repo("someone/bad")), tmp_path / "out", QuantizeOptions(k=3)))
    assert list(tmp_path.glob("*out*")) == []
    keep = plan_quantize(HubStorage(Repo("someone/bad")), tmp_path / "out", QuantizeOptions(k=3, on_nonfinite="keep"))
    assert keep.spool_bytes == 0
    assert {row["name"]: row["verdict"] for row in run(keep).tensors} == {"a.weight": "quantized", "b.weight": "kept"}


def test_default_output_is_named_after_the_repository(tiny: Repo, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_quantize(download(tiny), None, QuantizeOptions(k=3)).out.name == "tiny-kbitq-k3"
    assert plan_quantize(HubStorage(tiny), None, QuantizeOptions(k=3)).out.name == "tiny-kbitq-k3"


def test_a_second_download_fetches_nothing(hub: FakeHub, tiny: Repo) -> None:
    download(tiny)
    before = [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r]
    download(tiny)
    assert [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r] == before


@pytest.mark.parametrize("status", [429, 500, 502, 503, CUT])
def test_passing_faults_are_tried_again(hub: FakeHub, tiny: Repo, tmp_path: Path, status: int) -> None:
    storage = HubStorage(tiny)
    hub.fail("model.safetensors", status, times=3)
    out = run(plan_quantize(storage, tmp_path / "out", QuantizeOptions(k=3))).out
    hub.repos["someone/tiny"] = tiny_repo()
    reference = run(plan_quantize(HubStorage(tiny), tmp_path / "reference", QuantizeOptions(k=3))).out
    assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refused"), (403, "refused"), (404, "not found|no such"), (429, "limits requests"), (500, "fault")],
)
def test_lasting_faults_are_said(hub: FakeHub, tiny: Repo, tmp_path: Path, status: int, message: str) -> None:
    storage = HubStorage(tiny)
    hub.fail("resolve", status, times=100)
    with pytest.raises(CheckpointError, match=message) as caught:
        plan_quantize(storage, tmp_path / "out", QuantizeOptions(k=3))
    assert "someone/tiny" in str(caught.value)
    assert list(tmp_path.glob("out*")) == []


def test_refusals_name_the_repository(hub: FakeHub, tiny: Repo) -> None:
    with pytest.raises(CheckpointError, match=r"no/such: no such repository"):
        HubStorage(Repo("no/such"))
    with pytest.raises(CheckpointError, match=r"someone/tiny@v9: there is no such revision"):
        HubStorage(Repo("someone/tiny", "v9"))
    hub.repos["someone/tiny"].gated = True
    hub.token = "another"
    with pytest.raises(CheckpointError, match="access is gated"):
        HubStorage(tiny)


def test_an_unreachable_hub_is_said(hub: FakeHub, tiny: Repo) -> None:
    hub.close()
    with pytest.raises(CheckpointError, match="could not be reached"):
        HubStorage(tiny)


def test_names_that_leave_the_folder_are_refused(hub: FakeHub, tiny: Repo) -> None:
    hub.repos["someone/tiny"].files["../evil.json"] = b"{}"
    with pytest.raises(CheckpointError, match="leaves the folder"):
        HubStorage(tiny)


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..", "a\\..\\b", "a\0b"])
def test_so_a_download_refuses_them(name: str, hub: FakeHub, tiny: Repo) -> None:
    hub.repos["someone/tiny"].files[name] = b"{}"
    for read in (HubStorage, download):
        with pytest.raises(HubError) as caught:
            read(tiny)
        assert "do not trust" in (caught.value.hint or "") or "no such file" in str(caught.value)


@pytest.mark.parametrize("size", ["1000", -1, 1.5, True, [1], {"a": 1}, "x\x1b[2J"])
def test_sizes_that_are_none(size: object, hub: FakeHub, tiny: Repo) -> None:
    hub.sizes["model.safetensors"] = size
    with pytest.raises(HubError, match=r"size|client failed"):
        HubStorage(tiny)


@pytest.mark.parametrize("size", [0, 1, 10**6, 1 << 70])
def test_sizes_that_are_wrong(size: int, hub: FakeHub, tiny: Repo, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = size
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        run(plan_quantize(HubStorage(tiny), tmp_path / "out", QuantizeOptions(k=3)))


@pytest.mark.parametrize(
    "told", [{"sha": None}, {"sha": 5}, {"sha": "../x"}, {"siblings": "x"}, {"siblings": [5]}, {"siblings": [{}]}]
)
def test_a_listing_that_makes_no_sense(told: dict[str, object], hub: FakeHub, tiny: Repo) -> None:
    hub.info = told
    for read in (HubStorage, download):
        with pytest.raises(HubError):
            read(tiny)


def test_short_answers_do_not_go_on_for_ever(hub: FakeHub, tiny: Repo, tmp_path: Path) -> None:
    hub.longest = 1
    with pytest.raises(HubError, match="requests in a row with too little"):
        plan_quantize(HubStorage(tiny), tmp_path / "out", QuantizeOptions(k=3))
    assert len(hub.ranges) <= 20


def test_short_answers_that_bring_something_are_enough(
    hub: FakeHub, tiny: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LEAST_PROGRESS_BYTES", 8000)
    hub.longest = 8000
    run(plan_quantize(HubStorage(tiny), tmp_path / "out", QuantizeOptions(k=3)))
    hub.longest = None
    run(plan_quantize(HubStorage(tiny), tmp_path / "usual", QuantizeOptions(k=3)))
    made = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "usual")]
    assert made[0] == made[1]


def test_a_run_that_short_answers_ended_goes_on(
    hub: FakeHub, tiny: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(memory, "SPOOL_BYTES", 1)
    options, calls = QuantizeOptions(k=3, max_memory=1), 0

    def shortened(_: object) -> None:
        nonlocal calls
        calls += 1
        hub.longest = 1 if calls > 3 else None

    with pytest.raises(HubError, match="too little"):
        run(plan_quantize(HubStorage(tiny), tmp_path / "out", options), shortened)
    assert (tmp_path / ".out.kbitq-partial" / "journal").stat().st_size
    hub.longest = None
    run(plan_quantize(HubStorage(tiny), tmp_path / "out", options))
    assert verify(tmp_path / "out").problems == []


def test_reads_are_cut_into_requests(hub: FakeHub, tiny: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "REQUEST_BYTES", 10_000)
    file = HubStorage(tiny).open("model.safetensors")
    buffer = bytearray(file.size - 7)
    file.read_into(memoryview(buffer), 7)
    assert bytes(buffer) == hub.repos["someone/tiny"].files["model.safetensors"][7:]
    assert len(hub.ranges) == -(-len(buffer) // 10_000)


def test_a_full_disk_stays_a_full_disk(hub: FakeHub, tiny: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left"):
        download(tiny)


def test_a_token_that_a_server_repeats_is_not_shown(hub: FakeHub, tiny: Repo) -> None:
    hub.fail("api/models", 400, times=1000, message=f"bad: Bearer {hub.token}")
    with pytest.raises(HubError, match="bad: Bearer") as caught:
        HubStorage(tiny)
    assert hub.token not in str(caught.value)


def test_the_clients_warnings_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity()
    with explained("x"):
        warnings.warn("Warnings while validating metadata in README.md", stacklevel=1)
        logging.get_logger("huggingface_hub.hf_api").warning("No files have been modified since last commit.")
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == before

"""The verb `import`: an archive of another machine is checked as data, kept whole, and compared with one's own."""

import hashlib
import os
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.ptdp2021 import interleaving
from experiments.torchtitan2024 import llama
from harness.analysis.points import Point, points
from harness.analysis.render import Column
from harness.experiment import folders
from harness.experiment.loading import load
from harness.experiment.paper import table_of
from harness.records.store import SIMULATED, Store, with_digest
from harness.report import inbox, zipped
from harness.report.zipped import pack, unpack
from impl.cost.flops import hardware_flops
from impl.errors import InputError
from impl.run import Run
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import document as document_of
from tests.harness.made_up_records import record_of

NAME = "quickstart"
RUNS = load(NAME).runs["smoke"][:2]
Files = dict[str, bytes]


def put(out: Path, run: Run, experiment: str = NAME, tier: str = "smoke", **fields: object) -> Path:
    full = document_of(record_of(run, tier=tier, **fields)) | {"schema": 2, "experiment": experiment}
    return Store(out, experiment, tier).write(full)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Two points of another machine, one of three repeats, and a simulated record."""
    out = tmp_path / "theirs"
    for repeat, seconds in enumerate((0.09, 0.10, 0.11)):
        put(out, replace(RUNS[0], repeat=repeat), seconds=seconds, device_name="AMD EPYC 9654", cores=96)
    put(out, RUNS[1], seconds=0.5, device_name="AMD EPYC 9654", cores=96)
    place = {"system": "selene", "device": "cuda", "device_name": "A100", "backend": "nccl"}
    simulated = document_of(record_of(RUNS[0])) | {"source": SIMULATED, "environment": place, "experiment": NAME}
    Store(out, NAME, "smoke", "selene").write(simulated | {"evaluations": []})
    changes = Store(out, NAME, "smoke").changes / "ab12.diff"
    changes.parent.mkdir()
    changes.write_text(" M impl/run.py\n")
    return out


@pytest.fixture
def small(theirs: Path) -> Files:
    """The part of its archive that is needed."""
    below = {path.relative_to(theirs).as_posix(): path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    return {"README.md": b"# quickstart\n", **{f"results/{path}": data for path, data in below.items()}}


def packed(files: Files, name: str = "one.zip") -> Path:
    path = Path(name)
    path.write_bytes(pack(NAME, files))
    return path


def test_what_export_wrote_is_read_as_any_folder_of_records(theirs: Path) -> None:
    assert call("export", NAME, "--results", theirs, "--out", "one.zip").status == 0
    answer = call("import", "one.zip")
    assert answer.status == 0
    digest = hashlib.sha256(Path("one.zip").read_bytes()).hexdigest()
    kept = Path("inbox", f"quickstart-{digest[:8]}")
    assert f"imported: {kept} (sha256 {digest})" in answer.output
    assert "4 measured at smoke on AMD EPYC 9654 (device cpu, backend gloo, cores 96)" in answer.output
    assert "1 simulated at smoke on selene (device cuda, backend nccl)" in answer.output
    wanted = {path.relative_to(theirs): path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    wanted = {path: data for path, data in wanted.items() if not {"tables", "figures"} & set(path.parts)}
    found = {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert found.pop(Path("archive.zip")) == Path("one.zip").read_bytes()
    assert found == wanted
    assert stat.S_IMODE(kept.stat().st_mode) == 0o755
    for verb in (["table", "--format", "csv"], ["claims"]):
        told = [call(verb[0], NAME, *verb[1:], "--out", out) for out in (theirs, kept)]
        assert told[0].status == 0
        assert told[0] == told[1]


def test_importing_twice_is_one_folder_and_two_machines_are_two(small: Files) -> None:
    one = packed(small)
    assert [document(call("import", one, "--json").output)["is_new"] for _ in range(2)] == [True, False]
    assert "there already: inbox/quickstart-" in call("import", one).output
    other = packed({**small, "README.md": b"# another\n"}, "other.zip")
    assert document(call("import", other, "--json", "--out", "inbox").output)["is_new"]
    assert len(list(Path("inbox").iterdir())) == 2


def test_throughputs_are_compared_by_point_with_intervals(small: Files) -> None:
    for repeat, seconds in enumerate((0.18, 0.20, 0.22)):
        put(Path("runs"), replace(RUNS[0], repeat=repeat), seconds=seconds, device_name="Intel Xeon")
    answer = document(call("import", packed(small), "--json").output)
    [table] = answer["tables"]
    [row] = table["rows"]
    tokens = RUNS[0].tokens_per_step
    each = [tokens / seconds for seconds in (0.09, 0.10, 0.11)]
    assert row["tokens_per_second"] == pytest.approx(sum(each) / 3)
    assert row["ours"] == pytest.approx(row["tokens_per_second"] / 2)
    assert row["relative"] == pytest.approx(2)
    half_width, error = row["tokens_per_second_half_width"], row["tokens_per_second_half_width"] / 4.302653
    assert row["ours_half_width"] == pytest.approx(half_width / 2)
    # equal relative errors of two means of three: Welch's freedom is 4
    assert row["relative_half_width"] == pytest.approx(
        2 * 2.776445 * 2**0.5 * error / row["tokens_per_second"], rel=1e-5
    )
    assert (row["device_name"], row["our_device"], row["n"], row["our_n"]) == ("AMD EPYC 9654", "Intel Xeon", 3, 3)
    assert answer["environments"][0]["on"] == "AMD EPYC 9654"
    assert not any("makes them" in note for note in answer["notes"])
    shown = " ".join(call("import", "one.zip").output.split())
    assert "Throughput, theirs and ours: quickstart, smoke tier" in shown
    assert "records: your own in runs" in shown


def test_one_s_own_archive_is_exactly_as_fast(theirs: Path, small: Files) -> None:
    theirs.rename("runs")
    rows = document(call("import", packed(small), "--json").output)["tables"][0]["rows"]
    assert [(row["relative"], row["relative_half_width"]) for row in rows] == [(1.0, None)] * 2


def test_ranks_that_shared_cores_have_no_ratio(small: Files) -> None:
    put(Path("runs"), RUNS[0], cores=1)
    answer = document(call("import", packed(small), "--json").output)
    [row] = answer["tables"][0]["rows"]
    assert (row["shared"], row.get("relative")) == ("†", None)


def test_without_common_points_the_command_that_makes_them_is_named(small: Files) -> None:
    put(Path("runs"), load(NAME).runs["smoke"][3])
    answer = call("import", packed(small))
    assert f"`lmscale run {NAME} --tier smoke` makes them" in answer.output
    assert "theirs" not in answer.output
    alone = packed({path: data for path, data in small.items() if "/records/" not in path}, "simulated.zip")
    assert "all of it was simulated, by no machine" in call("import", alone).output


def flops(run: Run) -> float:
    """FLOPs of a step as PTD-P counts them: the recomputed forward pass, too."""
    return hardware_flops("ptdp", run.model, run.train.global_batch, recompute="full")


@pytest.mark.parametrize(
    ("name", "paper", "work"),
    [("torchtitan2024/llama", llama.PAPER, lambda run: run.tokens_per_step), ("ptdp2021/interleaving", None, flops)],
)
def test_a_cluster_beside_simulations_and_the_published_rate(
    name: str, paper: dict[Run, Point] | None, work: Callable[[Run], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "ARCHIVE", Path(load.__code__.co_filename).parents[2] / "results")
    run, one = next(iter((paper or interleaving.FIGURE.printed).items()))
    seconds = work(run) / run.plan.world_size / (0.93 * one.printed["published_rate"])
    path = put(Path("theirs"), run, name, "paper", seconds=seconds, device="cuda", device_name="NVIDIA H200")
    made = packed({f"results/{name}/paper/records/{path.name}": path.read_bytes()})
    answer = document(call("import", made, "--json").output)
    [table] = answer["tables"]
    [row] = table["rows"]
    assert row["of_published"] == pytest.approx(0.93)
    assert row["our_device"].endswith(", simulated"), "of the committed records"
    assert row["relative"] == pytest.approx(row["tokens_per_second"] / row["ours"])
    assert f"Published: {load(name).source}, on its authors' devices." in table["notes"]


@pytest.mark.parametrize(("unit", "shares"), [("samples/s", [0.8]), ("tokens/s", [])])
def test_a_rate_is_of_the_published_one_only_in_its_unit(unit: str, shares: list[float]) -> None:
    columns = [
        Column(key="rate", header="rate", si="samples/s", of=lambda _: 4.0),
        Column(key="published_rate", header="published", si=unit, of=lambda _: 5.0),
    ]
    found = replace(load(NAME), table=table_of("rates", "Rates", columns, lambda records: points(records, inbox.rate)))
    assert list(inbox.of_published(found, [record_of(RUNS[0])]).values()) == shares


# What is refused ------------------------------------------------------------------------------------------------------


def entry(
    name: str, data: bytes = b"x", kind: int = 0, method: int = zipfile.ZIP_STORED
) -> Callable[[Path, Files], object]:
    """A fault: one more entry in the zip."""

    def add(path: Path, _: Files) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o644) << 16
            archive.writestr(info, data, method)

    return add


def with_files(change: Callable[[Files], Files]) -> Callable[[Path, Files], object]:
    """A fault in files whose checksums are made again."""
    return lambda path, files: path.write_bytes(pack(NAME, change(files)))


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Files], object]:
    return lambda path, _: path.write_bytes(change(path.read_bytes()))


def with_sums(change: Callable[[bytes], bytes]) -> Callable[[Path, Files], object]:
    """A fault in the list of checksums, or in a file without it."""

    def write(path: Path, files: Files) -> None:
        with zipfile.ZipFile(path) as archive:
            inside = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in inside.items():
                archive.writestr(name, change(data) if name.endswith("SHA256SUMS") else data)

    return write


def of_a_record(change: Callable[[bytes], bytes]) -> Callable[[Path, Files], object]:
    name = f"results/{NAME}/smoke/records/{RUNS[1].id}.json"
    return with_files(lambda files: files | {name: change(files[name])})


def digested(content: bytes) -> bytes:
    return with_digest("{" + content.decode().partition(",")[2]).encode()


def renamed(old: str, new: str) -> Callable[[Path, Files], object]:
    return with_files(lambda files: {path.replace(old, new): data for path, data in files.items()})


def to_pipe(path: Path, _: Files) -> None:
    path.unlink()
    os.mkfifo(path)


def nothing(path: Path, _: Files) -> None:
    path.unlink()


FAULTS = {
    "no file": (nothing, "No such file"),
    "a pipe": (to_pipe, "not a file"),
    "a folder": (lambda path, _: (path.unlink(), path.mkdir()), "directory"),
    "no zip": (with_bytes(lambda _: b"some text" * 99), "no whole zip"),
    "an empty zip": (with_bytes(lambda _: b"PK\5\6" + b"\0" * 18), "below no folder"),
    "cut short": (with_bytes(lambda data: data[:-30]), "no whole zip"),
    "cut in the middle": (with_bytes(lambda data: data[:200] + data[300:]), "no whole zip"),
    "a flipped bit": (with_bytes(lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]), "no whole zip"),
    "encrypted": (
        with_bytes(lambda data: data.replace(b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\1")),
        "is encrypted, or packed",
    ),
    "another method": (entry("quickstart/x", method=zipfile.ZIP_LZMA), "is encrypted, or packed by another method"),
    "up": (entry("quickstart/../../x"), "'quickstart/../../x' is no path of a file below a folder"),
    "up at once": (entry("../x"), "'../x' is no path"),
    "absolute": (entry("/etc/x"), "'/etc/x' is no path"),
    "of Windows": (entry("quickstart\\..\\x"), "is no path"),
    "hidden": (entry("quickstart/.ssh"), "is no path"),
    "a folder in it": (entry("quickstart/more/"), "is no path"),
    "without a folder": (entry("x"), "'x' is no path"),
    "two folders": (entry("other/x"), "files below other, quickstart, not below one folder"),
    "a link": (entry("quickstart/x", b"/etc/passwd", stat.S_IFLNK), "'quickstart/x' is a link, or no file"),
    "a device": (entry("quickstart/x", b"", stat.S_IFCHR), "is a link, or no file"),
    "twice": (entry("quickstart/README.md"), "quickstart/README.md is in it twice"),
    "not listed": (entry("quickstart/x"), "x is not listed in SHA256SUMS"),
    "missing": (with_sums(lambda sums: sums + b"0" * 64 + b"  x\n"), "'x' is listed in SHA256SUMS, but missing"),
    "no sums": (with_sums(lambda _: b""), "README.md is not listed"),
    "another sum": (with_sums(lambda sums: b"x" + sums[1:]), "README.md was changed"),
    "another number": (of_a_record(lambda data: data.replace(b"0.5", b"0.4")), "its SHA-256 differs"),
    "no digest": (of_a_record(lambda data: b"{" + data.partition(b",")[2]), "it has no SHA-256"),
    "another run": (
        of_a_record(lambda data: digested(data.replace(b'"seed": 0', b'"seed": 7'))), "it is that of the run"
    ),
    "a deep record": (of_a_record(lambda _: b'{"a": NaN, "b": ' + b"[" * 100_000), "maximum recursion"),
    "no record": (of_a_record(lambda _: b"{}"), "records/"),
    "of another tier": (renamed("/smoke/", "/small/"), "its tier is 'smoke', not 'small'"),
    "of another experiment": (renamed("/quickstart/", "/slowstart/"), "its experiment is 'quickstart'"),
    "of another system": (renamed("/selene/", "/other/"), "it is not about the system other"),
    "by another name": (renamed(RUNS[1].id, "0" * 12), "not '000000000000'"),
    "an attempt": (
        with_files(lambda files: files | {f"results/{NAME}/smoke/attempts/x/job.json": b"{}"}), "is no file of results"
    ),
    "nothing in it": (with_files(lambda _: {"README.md": b"x"}), "results of nothing, not of one experiment"),
    "no records": (
        with_files(lambda files: {path: data for path, data in files.items() if ".json" not in path}), "no records of"
    ),
    "two experiments": (
        with_files(lambda files: files | {"results/other/smoke/changes/a.diff": b""}), "results of other, quickstart"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_in_a_line_and_nothing_is_written(fault: str, small: Files) -> None:
    path, (plant, told) = packed(small), FAULTS[fault]
    plant(path, small)
    before = set(Path().rglob("*"))
    error = refused("import", path)
    assert error.startswith("error: one.zip: ")
    assert told in error
    assert path.is_file() is ("valid: an archive that `lmscale export` wrote" in error)
    assert set(Path().rglob("*")) == before


def test_sizes_are_bounded_as_declared_and_as_unpacked(small: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = {f"{i}": b"\0" * 2**20 for i in range(8)}
    content = pack(NAME, bomb)
    assert len(content) < 2**14
    monkeypatch.setattr(zipped, "MOST_UNPACKED", 2**22)
    faults = {"open": zipfile.ZipFile, "sum": zipped}
    for name, owner in faults.items():  # nothing is read where too much is declared; else what is read is counted
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: 0, raising=False)
            with pytest.raises(InputError, match="more than 4,194,304 bytes"):
                unpack(content)
    claimed = content.replace((2**20).to_bytes(4, "little"), (9).to_bytes(4, "little"))
    with pytest.raises(InputError, match="no whole zip"):
        unpack(claimed)
    monkeypatch.setattr(zipped, "MOST_FILES", 8)
    with pytest.raises(InputError, match="more than 8 files"):
        unpack(content)
    packed(small)
    monkeypatch.setattr(inbox, "MOST_PACKED", 1000)
    assert "too long" in refused("import", "one.zip")


def test_a_disk_that_is_full_leaves_nothing(small: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    write, path = inbox.write_atomically, packed(small)

    def full(path: Path, data: bytes, **how: Any) -> None:
        if path.name == inbox.KEPT:
            raise OSError(28, "No space left on device", str(path))
        write(path, data, **how)

    monkeypatch.setattr(inbox, "write_atomically", full)
    assert "No space left" in refused("import", path)
    assert list(Path("inbox").iterdir()) == []
    Path("file").touch()
    assert "file" in refused("import", path, "--out", "file")


def test_code_in_an_archive_is_not_imported(small: Files) -> None:
    text = b"open('imported', 'w')\n"
    own = "mine"
    renamed_files = {path.replace("/quickstart/", f"/{own}/"): data for path, data in small.items()}
    path = Path("theirs-too")
    put(path, RUNS[0], own)
    record = next(path.rglob("*.json"))
    files = {path: data for path, data in renamed_files.items() if not path.endswith(".json")}
    files |= {f"results/{own}/smoke/records/{record.name}": record.read_bytes(), f"experiments/{own}.py": text}
    answer = call("import", packed(files))
    assert answer.status == 0
    assert f"{own} is no experiment here; archive.zip has its file: code, to be read before it is used" in answer.output
    assert not Path("imported").exists()
    assert not list(Path("inbox").rglob("*.py"))


def test_control_characters_of_its_records_do_not_reach_the_terminal(theirs: Path, small: Files) -> None:
    path = put(theirs, RUNS[1], device_name="\x1b]0;title\x07")
    put(Path("runs"), RUNS[1])
    answer = call("import", packed(small | {f"results/{path.relative_to(theirs)}": path.read_bytes()}))
    assert answer.status == 0
    assert not set("\x1b\x07") & set(answer.output + answer.errors)

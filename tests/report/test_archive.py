"""The verb `export`: one archive with all that a paper's artifact needs, equal bytes for equal records."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest

from harness.experiment.loading import load
from harness.records.store import SIMULATED, Store
from harness.report import archive as exporting
from harness.report.zipped import BEGINNING
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import document as document_of
from tests.harness.made_up_records import record

NAME = "megatron2019/layernorm_placement"
TOP = "megatron2019-layernorm_placement"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two measured records at `smoke`, and a simulated one at `paper`."""
    out = tmp_path / "runs"
    for norm in ("pre", "post"):
        full = record(model__norm_placement=norm, nats=2.2 if norm == "pre" else 2.4)
        Store(out, NAME, "smoke").write(document_of(full) | {"experiment": NAME})
    place = {"system": "selene", "stack": "any", "device": "cuda", "device_name": "A100", "backend": "nccl"}
    predicted = document_of(record(tier="paper")) | {"source": SIMULATED, "environment": place, "experiment": NAME}
    Store(out, NAME, "paper", "selene").write(predicted | {"evaluations": []})
    return out


def unpacked(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert {name.split("/")[0] for name in archive.namelist()} == {TOP}
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_an_archive_has_everything_and_sums_that_hold(results: Path, tmp_path: Path) -> None:
    changes = Store(results, NAME, "smoke").changes / "ab12.diff"
    changes.parent.mkdir()
    changes.write_text(" M impl/run.py\n")
    told = document(call("export", "layernorm_placement", "--json").output)
    file = tmp_path / f"{TOP}.zip"
    inside = unpacked(file)
    assert (told["id"], told["file"]) == (NAME, file.name)
    assert told["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert told["bytes"] == file.stat().st_size
    assert told["files"] == sorted(inside)
    lines = [line.split("  ") for line in inside.pop("SHA256SUMS").decode().splitlines()]
    sums = {path: digest for digest, path in lines}
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in inside.items()}
    here = f"results/{NAME}"
    assert len([name for name in inside if name.startswith(f"{here}/smoke/records/")]) == 2
    assert len([name for name in inside if name.startswith(f"{here}/paper/simulated/selene/")]) == 1
    assert inside[f"{here}/smoke/changes/ab12.diff"] == changes.read_bytes()
    assert {f"{here}/smoke/tables/claims.{suffix}" for suffix in ("md", "csv", "tex")} <= set(inside)
    assert f"{here}/smoke/figures/curves.png" in inside
    assert {
        "README.md", "specification.json", "environment.json", "verdicts.md", "verdicts.csv", "LICENSE", "CITATION.cff",
        "requirements.lock", "published/megatron2019.csv", "systems/selene.yaml", f"experiments/{NAME}.py",
    } <= set(inside)  # fmt: skip
    for path in Path(results / NAME / "smoke" / "records").iterdir():
        assert inside[f"{here}/smoke/records/{path.name}"] == path.read_bytes()


def test_its_documents_say_what_was_asked_and_found(results: Path, tmp_path: Path) -> None:
    assert call("export", NAME, "--out", "one.zip", "--results", results).status == 0
    inside = unpacked(tmp_path / "one.zip")
    asked, experiment = json.loads(inside["specification.json"]), load(NAME)
    assert asked["question"] == experiment.question
    assert {tier: len(runs) for tier, runs in asked["runs"].items()} == {
        tier: len(runs) for tier, runs in experiment.runs.items()
    }
    assert asked["runs"]["smoke"][0]["id"] == experiment.runs["smoke"][0].id
    assert asked["runs"]["smoke"][0]["config"]["plan"]["dp"] == 2
    places = json.loads(inside["environment.json"])["of_the_records"]
    assert sorted(len(place["records"]) for place in places) == [1, 2]
    readme = inside["README.md"].decode()
    assert readme.startswith(f"# {NAME}\n\n**Where should LayerNorm stand")
    assert f"lmscale run {NAME} --tier smoke" in readme
    assert "so does GPT" in readme
    assert "1.22 to 1.22 times pre" in readme


def test_the_same_records_give_the_same_bytes(results: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.zip", tmp_path / "b.zip"]
    for file in files:
        assert call("export", NAME, "--out", file, "--results", results).status == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_one_tier_alone(results: Path, tmp_path: Path) -> None:
    said = call("export", NAME, "--tier", "paper", "--out", "paper.zip")
    assert said.status == 0
    assert "records: your own in runs" in said.output
    inside = unpacked(tmp_path / "paper.zip")
    assert not [name for name in inside if "/smoke/" in name]
    assert list(json.loads(inside["specification.json"])["runs"]) == ["paper"]


def test_what_cannot_be_exported_leaves_nothing(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no records" in refused("export", "quickstart")
    assert "has no records" in refused("export", NAME, "--tier", "small")
    assert "valid: a file that ends in .zip" in refused("export", NAME, "--out", "archive.tar")
    (tmp_path / "folder.zip").mkdir()
    assert "valid: a file that ends in .zip" in refused("export", NAME, "--out", "folder.zip")
    assert "is not an experiment" in refused("export", "unheard_of")
    kept = tmp_path / "kept.zip"
    kept.write_bytes(b"an older one")

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "pack", full)
    assert "No space left" in refused("export", NAME, "--out", kept)
    assert kept.read_bytes() == b"an older one"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "folder.zip", "kept.zip"}


def test_a_zip_is_readable_by_others_and_without_the_time_of_day() -> None:
    with zipfile.ZipFile(io.BytesIO(exporting.pack("top", {"b": b"2", "a": b"1"}))) as archive:
        infos = archive.infolist()
    assert [info.filename for info in infos] == ["top/SHA256SUMS", "top/a", "top/b"]
    assert {info.date_time for info in infos} == {BEGINNING}
    assert {info.external_attr >> 16 for info in infos} == {0o644}

"""The verb `predict`, the systems that it knows, and simulated records beside measured ones."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.analysis import tables
from harness.analysis.simulated_columns import twin
from harness.analysis.tables import denominators, failures_table
from harness.experiment.claims import Claim, Evidence, tally
from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.predict.simulated_record import document_of
from harness.predict.simulation import given_by
from harness.predict.systems import FOLDER, load_system, names
from harness.records.labels import DEFAULTS, fields
from harness.records.measures import frame
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import SIMULATED, Store
from harness.report.experiments_md import page, read
from impl.cost.peaks import PEAKS
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, from_dict
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import record_of as measured_record_of
from tests.predict.test_simulation import flags

NAME = "ptdp2021/interleaving"
WITH_PIPELINE = ["--model", "gpt-175b", "--plan.tp", "8", "--plan.pp", "16", "--plan.dp", "2", "--precision", "fp16"]
WITH_PIPELINE += ["--train.global-batch", "64", "--train.microbatch", "1", "--plan.recompute", "full"]
ENDS = ("verdict", "numbers")
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "rest")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small(precision: Precision = "bf16", batch: int = 8, **plan: Any) -> Run:
    model = ModelConfig(num_layers=4, hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=51200)
    return Run(
        model=model, plan=Plan(**plan), train=Recipe(global_batch=batch, microbatch=1, steps=8), precision=precision
    )


def told(*arguments: str) -> Any:
    answer = call("predict", *arguments, "--json")
    assert (answer.status, answer.errors) == (0, "")
    return document(answer.output)


@pytest.mark.parametrize("name", names())
def test_packaged_systems_are_complete_and_every_number_has_its_source(name: str) -> None:
    system = load_system(name)
    assert (system.name, system.device.kind) == (name, "cuda")
    assert system.hardware in PEAKS
    for precision, peak in PEAKS[system.hardware].flops.items():
        assert system.peak(precision) == peak
    numbers = [*vars(system.node).values(), *system.device.peak_flops.values(), system.device.memory_bytes]
    assert all(len(number.source) > 5 for number in numbers)


def test_a_file_is_a_system_too_and_gives_itself_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(load_system("selene").as_dict() | {"name": "mine"}))
    assert load_system(str(path)) == replace(load_system("selene"), name="mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("value: 25e9", "value: -1"), ("node.nic_bandwidth", "-1", "greater than 0")),
        (lambda text: text.replace("312e12", "fast"), ("device.peak_flops", "'fast'", "valid number")),
        (lambda text: text.replace("hardware:", "hardwear:"), ("hardw",)),
        (lambda text: text.replace("send_blocks:", "luck:"), ("luck", "valid: ")),
        (lambda text: text + "name: twice\n", ("'name'", "twice")),
        (lambda text: text + "\tnode: 1\n", ("line ", "no YAML")),
        (lambda _: "- 1\n", ("describes no system",)),
        (lambda _: "", ("describes no system",)),
    ],
)
def test_a_bad_file_is_one_line_with_the_field_and_what_is_valid(
    change: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(change((FOLDER / "selene.yaml").read_text()))
    said = refused("predict", "--system", path)
    for word in ("bad.yaml", *words):
        assert word in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--system", "selen"], ("'selen' does not exist", "did you mean selene?", "frontier")),
        (["--system", "none.yaml"], ("none.yaml", "No such file")),
        ([], ("--system",)),
        (["--system", "dgx2h", "--precision", "fp64"], ("fp64", "valid there: fp16")),
        (["--system", "selene", "--plan.tp", "3", "--precision", "bf16"], ("plan.tp 3",)),
        (["--system", "selene", "--precision", "bf16", "--engine", "torch"], ("torch engine", "valid: --engine")),
        (["--system", "selene", "--precision", "bf16", "--slowdown", "1", "2"], ("--slowdown", "1 pipeline rank")),
        (["--system", "selene", "--precision", "bf16", "--slowdown", "-1"], ("slowdown",)),
        (["--system", "selene", "--only", "x"], ("--only, --tier and --out", "valid: with an experiment")),
        (["--system", "selene", "--restart-seconds", "9"], ("--restart-seconds are of goodput; valid: with --mtbf",)),
        (["no_such", "--system", "selene"], ("'no_such' is not an experiment",)),
        (["quickstart", "--system", "selene", "--seed", "3"], ("an experiment and fields of a run",)),
        (["--rows", "x.csv", "--system", "a100_cluster", "--seed", "3"], ("--rows and fields of a run",)),
        (["--rows", "x.csv", "--system", "a100_cluster"], ("x.csv", "No such file")),
        (
            ["--rows", "x.csv", "--system", "h100", "--slowdown", "2"],
            ("--slowdown, --stack, --spread, --imbalance and --mtbf",),
        ),
        (
            ["--rows", "x.csv", "--system", "h100", "--stack", "another"],
            ("--slowdown, --stack, --spread, --imbalance and --mtbf",),
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: tuple[str, ...]) -> None:
    said = refused("predict", *arguments)
    for word in words:
        assert word in said


def test_a_run_is_predicted_with_its_parts_its_memory_and_an_interval() -> None:
    found = told(*WITH_PIPELINE, "--system", "selene")
    assert found["low"] < found["seconds"] < found["high"]
    assert found["devices"] == 256
    assert found["tokens_per_s"] == pytest.approx(64 * 2048 / found["seconds"])
    assert found["mfu"] == pytest.approx(found["model_flops_per_gpu_s"] / 312e12)
    assert 0 < found["mfu"] < found["hfu"] < 0.6
    assert [rank["pipeline_rank"] for rank in found["memory"]] == list(range(16))
    for rank in found["memory"]:
        assert rank["bytes"]["total"] == sum(rank["bytes"][name] for name in CATEGORIES)
    for rank in found["parts"]:
        assert sum(rank["seconds"].values()) == pytest.approx(found["seconds"])
    assert found["fits"] is True
    assert any("as Megatron-LM 2021 does it: dropout 0.1" in text for text in found["warnings"])
    text = call("predict", *WITH_PIPELINE, "--system", "selene").output
    for word in ("step", "tokens/s", "MFU", "HFU", "bubble", "exposed communication", "activations", "fits: "):
        assert word in text
    for word in (
        "a batch of 64, microbatches of",
        "sequences of 2,048 tokens",
        "memory is that of this suite's engine",
    ):
        assert word in text


def test_stages_that_a_software_could_not_make_equal_are_doubted() -> None:
    doubts = lambda layers: [
        text
        for text in told(*WITH_PIPELINE, "--model.num-layers", layers, "--system", "selene")["warnings"]
        if text.startswith("extrapolates: stages ")
    ]
    assert doubts("95") == ["extrapolates: stages 95 layers on 16, calibrated on equal ones"]
    assert doubts("96") == []


def test_heads_that_no_tensor_core_takes_are_named_with_what_they_cost_and_which_would_not() -> None:
    bloom = ("--model.num-layers", "78", "--model.hidden-size", "13824", "--model.seq-len", "2048", "--plan.tp", "8",
             "--plan.pp", "6", "--system", "jean_zay", "--json")  # fmt: skip
    seconds = {}
    for heads, said in ((128, "128 heads of 108 are computed without tensor cores: about "), (64, None)):
        found = document(call("predict", *bloom, "--model.num-heads", str(heads)).output)
        warned = [text for text in found["warnings"] if "tensor cores" in text]
        assert [text.startswith(said or "") and text.endswith(" slower than 144 of 96") for text in warned] == (
            [True] if said else []
        )
        seconds[heads] = found["seconds"]
    assert 1.2 < seconds[128] / seconds[64] < 1.4, "156.84 and 121.28 s were measured"


def test_a_slow_rank_slows_the_step_and_other_software_widens_the_interval() -> None:
    plain = told(*WITH_PIPELINE, "--system", "selene")
    slow = told(*WITH_PIPELINE, "--system", "selene", "--slowdown", *["1"] * 7, "1.5", *["1"] * 8)
    assert slow["seconds"] > 1.15 * plain["seconds"]
    other = told(*WITH_PIPELINE, "--system", "selene", "--stack", "another")
    assert other["seconds"] == plain["seconds"]
    assert other["high"] / other["low"] > plain["high"] / plain["low"]
    assert any("not of another" in text for text in other["warnings"])


def test_a_run_is_predicted_as_the_systems_software_does_it() -> None:
    habits = load_system("a100_cluster").habits
    run = small(dp=2, tp=2)
    done = habits.of(run)
    assert (done.model.dropout, done.fp32_gradients, done.plan.overlap_grad_reduce) == (0.1, False, False)
    no = ("fp32 gradients", "overlapped input gradients", "overlapped gradients")
    assert habits.changes(run, done) == ["dropout 0.1", *(f"no {name}" for name in no)]
    assert habits.of(done) == done
    assert habits.of(run, ["model.dropout"]).model.dropout == 0
    assert habits.of(replace(run, precision="fp32")).problems() == []
    assert [habits.stages_of(small(pp=pp)) for pp in (1, 2, 3, 4)] == ["even", "even", None, "even"]


def test_bf16_is_predicted_as_fp16_where_there_is_no_bf16() -> None:
    bf16, fp16 = (told("--model", "gpt-355m", "--precision", name, "--system", "dgx2h") for name in ("bf16", "fp16"))
    assert any("predicted as fp16" in text for text in bf16["warnings"])
    assert bf16["seconds"] == fp16["seconds"]


def test_what_does_not_fit_says_so() -> None:
    found = call("predict", "--model", "gpt-175b", "--system", "h100", "--precision", "bf16")
    assert found.status == 0
    assert "does not fit" in found.output
    assert "warning: pipeline rank 0 (parameters" in found.output


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("predicted")
    answer = call("predict", NAME, "--system", "selene", "--out", out, "--json")
    assert (answer.status, answer.errors) == (0, "")
    return out, document(answer.output)


def test_an_experiment_becomes_simulated_records_apart_from_measured_ones(predicted: tuple[Path, Any]) -> None:
    out, said = predicted
    measured, simulated = Store(out, NAME, "paper"), Store(out, NAME, "paper", "selene")
    assert measured.records() == []
    assert measured.read(said["records"][0]["id"]) is None
    found = simulated.records()
    assert [r.id for r in found] == sorted(run.id for run in load(NAME).runs["paper"])
    assert [r.id for r in measured.with_simulated()] == [r.id for r in found]
    assert {(r.source, r.status, r.environment.system) for r in found} == {(SIMULATED, "ok", "selene")}
    assert (out / NAME / "paper" / "simulated" / "selene" / f"{found[0].id}.json").exists()


def test_a_point_of_an_experiment_is_predicted_as_by_its_fields(predicted: tuple[Path, Any]) -> None:
    for record in predicted[1]["records"][:2]:
        run = from_dict(record["config"])
        differ = {name: value for name, value in fields(run).items() if value != DEFAULTS[name]}
        told_of = {name: value for name, value in differ.items() if name.startswith(("model", "plan", "precision"))}
        sizes = {"train.global_batch": run.train.global_batch, "train.microbatch": run.train.microbatch}
        found = told(*flags(told_of | sizes), "--system", "selene")
        assert found["seconds"] == record["prediction"]["seconds"]
        assert found["warnings"] == record["prediction"]["warnings"]
        most = [max(one["peak_memory_bytes"] for one in record["ranks"])]
        assert max(rank["bytes"]["total"] for rank in found["memory"]) == most[0]


def test_simulated_and_published_rates_stand_side_by_side_with_verdicts(predicted: tuple[Path, Any]) -> None:
    out, said = predicted
    made = {table["name"]: table for table in said["tables"]}
    rows = made["interleaving"]["rows"]
    assert len(rows) == 10
    assert all(abs(row[twin("counted_rate")] / row["published_rate"] - 1) < 0.15 for row in rows)
    assert "counted_rate" not in [column["key"] for column in made["interleaving"]["columns"]]  # nothing was measured
    assert any(file.endswith("figures/interleaving.png") for file in said["files"])
    verdicts = [row["verdict, simulated on selene"] for row in made["claims"]["rows"]]
    assert (verdicts[0], verdicts[-1]) == ("reproduced", "cannot tell here")
    text = page(next(one for one in read(out) if one.experiment.id == NAME), out)
    assert "No records yet." not in text
    assert "Tier `paper`, simulated for selene (Megatron-LM 2021). As Megatron-LM 2021 does it: dropout 0.1" in text
    assert "| paper, simulated for selene | reproduced |" in text


def test_a_simulated_record_is_never_taken_for_a_measured_one(predicted: tuple[Path, Any], tmp_path: Path) -> None:
    out, _ = predicted
    store = Store(out, NAME, "paper", "selene")
    record = store.document(store.records()[0].id)
    measured = Store(tmp_path, NAME, "paper")
    measured.write(record)
    assert measured.records() == []
    assert "lies elsewhere" in next(iter(measured.ignored.values()))
    other = Store(tmp_path, NAME, "paper", "h100")
    other.write(record)
    assert other.records() == []
    assert "not about the system h100" in next(iter(other.ignored.values()))
    assert document(call("status", NAME, "--tier", "paper", "--out", tmp_path, "--json").output)


def simulated_of(run: Run, system: str = "selene") -> Record:
    store, known = Store(Path("out"), "made_up", "smoke", system), load_system(system)
    return of_document(document_of(run, store, known, given_by(run, (), known)))


def measured_of(run: Run) -> Record:
    return measured_record_of(run, seconds=0.1, device="cuda", device_name="NVIDIA A100-SXM4-80GB", tier="smoke")


def test_measured_and_simulated_steps_of_a_point_share_a_row() -> None:
    ran, selene, h100 = measured_of(small()), simulated_of(small()), simulated_of(small(), "h100")
    table = tables.throughput_table([ran, selene])
    (row,) = table.frame.to_dict("records")
    assert row["step_seconds"] == pytest.approx(0.1)
    assert row[twin("step_seconds")] == pytest.approx(selene.prediction.seconds)
    keys = [column.key for column in table.columns]
    assert keys.index(twin("step_seconds")) == keys.index("step_seconds") - 1
    assert "simulated on" not in [column.header for column in table.columns]
    two = tables.throughput_table([ran, selene, h100])
    assert sorted(two.frame["simulated_on"]) == ["h100", "selene"]
    assert sum(value > 0 for value in two.frame["step_seconds"]) == 1
    assert not any(str(key).startswith("simulated") for key in tables.throughput_table([ran]).frame)


def noted(seen: list[list[Record]], **fields: Any) -> Claim:
    """A claim that holds for any records, which it adds to `seen`."""

    def check(records: Sequence[Record]) -> Evidence | None:
        seen.append(list(records))
        return tally([True])

    return Claim(text="alike", source="ours", check=check, **fields)


def test_points_simulated_for_two_stacks_on_one_device_are_compared_unless_a_point_has_both() -> None:
    runs, systems, seen = [small(batch=8), small(batch=16)], ("selene", "selene_2022"), []
    one, two = (simulated_of(run, system) for run, system in zip(runs, systems, strict=True))
    together = claims_table((noted(seen),), [one, two])
    assert list(together.frame) == [
        "claim",
        "source",
        "kind",
        *(f"{n}, simulated on selene, selene_2022" for n in ENDS),
    ]
    assert set(frame([one, two])["device_name"]) == {"NVIDIA A100-SXM4-80GB, simulated"}
    both_on_one = simulated_of(runs[0], "selene_2022")
    apart = claims_table((noted(seen),), [one, both_on_one])
    assert [f"verdict, simulated on {name}" in apart.frame for name in systems] == [True, True]
    assert set(frame([one, both_on_one])["device_name"]) == {"selene, simulated", "selene_2022, simulated"}
    assert list(map(len, seen)) == [2, 1, 1]


def test_simulated_points_scale_like_measured_ones_and_are_counted_apart() -> None:
    records = [simulated_of(small(batch=8 * dp, dp=dp)) for dp in (1, 2, 4)]
    rows = tables.scaling_table(records).frame
    assert list(rows["ranks"]) == [1, 2, 4]
    assert all(0.3 < value <= 1 for value in rows[twin("efficiency")].tolist())
    assert denominators([*records, measured_of(small())]) == "1 point: 1 ok; simulated: 3 points: 3 ok"


def test_what_cannot_be_predicted_is_a_record_with_the_reason() -> None:
    invalid = simulated_of(replace(small(), engine="torch"))
    large = simulated_of(replace(small(), model=named("gpt-175b")))
    assert (invalid.status, large.status) == ("invalid", "oom")
    assert "a device has 80 GiB" in str(large.reason)
    assert list(failures_table([invalid, large]).frame["system"]) == ["selene"] * 2
    assert math.isnan(frame([large])["tokens_per_second"].iloc[0])


def test_claims_about_bytes_are_not_judged_by_the_formula_that_made_them() -> None:
    check = lambda records: tally([True]) if any(r.tp_bytes_sent > 0 for r in records) else None
    ran, selene = measured_of(small(tp=2)), simulated_of(small(tp=2))
    assert frame([selene])["tp_bytes_sent"].iloc[0] > 0
    shown = claims_table((Claim(text="it sends", source="ours", check=check),), [ran, selene]).frame
    assert shown.loc[0, ["verdict", "verdict, simulated on selene"]].tolist() == ["reproduced", "not run here"]


def test_a_claim_that_compares_has_both_kinds_of_rows() -> None:
    seen: list[list[Record]] = []
    table = claims_table((noted(seen, compares=True),), [measured_of(small()), simulated_of(small())])
    assert [{record.source for record in records} for records in seen] == [{"measured", SIMULATED}]
    assert table.frame["verdict"].tolist() == ["not run here"]

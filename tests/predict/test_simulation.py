"""One run is predicted the same however it is described, and every field of it counts or is said to be ignored."""

import csv
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from harness.cli.predict import Circumstances, predict_run
from harness.predict.csv_rows import CALIBRATE, COUNTS, OPTIONAL, REQUIRED
from harness.predict.doubt import without
from harness.predict.goodput import Failures
from harness.predict.held_out import CASES, rows_of
from harness.predict.interval import BASELINE, features, interval, reach
from harness.predict.simulated_record import document_of
from harness.predict.simulation import Done, given_by, predicted_seconds, simulated
from harness.predict.systems import load_system, names
from harness.records.labels import DEFAULTS, FIELDS, differing
from harness.records.store import Store
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run, with_fields
from impl.simulator.plans import every
from impl.simulator.system import System
from tests.harness.calls import call, document

PLANS = 4
"""Of each system."""
MODEL = ModelConfig(num_layers=8, hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=32000)
COLUMNS = REQUIRED | OPTIONAL
LARGE = {
    **{"model.num_layers": 8, "model.hidden_size": 1024, "model.num_heads": 16, "model.seq_len": 512},
    **{"model.vocab_size": 32000, "train.global_batch": 32, "train.microbatch": 4, "precision": "bf16"},
    **{"plan.tp": 2, "plan.pp": 2, "plan.dp": 2, "plan.recompute": "full", "plan.zero_stage": 1},
}
"""A run of which every part of a plan has something to do."""
CHANGES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "model.family": ("bert", {}),
    "model.num_layers": (16, {}),
    "model.hidden_size": (2048, {}),
    "model.num_heads": (8, {"plan.recompute": "none", "model.seq_len": 1024}),
    "model.seq_len": (1024, {}),
    "model.vocab_size": (51200, {}),
    "model.norm_placement": ("post", {}),
    "model.norm": ("rmsnorm", {}),
    "model.kv_heads": (4, {}),
    "model.positions": ("rotary", {}),
    "model.rotary_fraction": (0.5, {"model.positions": "rotary"}),
    "model.parallel_residual": (True, {}),
    "model.mlp": ("swiglu", {}),
    "model.mlp_size": (2048, {}),
    "model.biases": (False, {}),
    "model.tied": (False, {}),
    "model.experts": (8, {}),
    **{
        f"model.{name}": (value, {"model.experts": 8})
        for name, value in {
            "experts_every": 2, "expert_prototypes": 2, "experts_per_token": 2, "expert_size": 512,
            "shared_expert_size": 512, "expert_capacity": 0.5, "balance_loss": 0.1, "balance_bias": 0.1,
        }.items()
    },
    "plan.ep": (2, {"model.experts": 8}),
    "model.shared_layers": (True, {"plan.pp": 1}),
    "model.dropout": (0.1, {}),
    "plan.dp": (4, {}),
    "plan.zero_group": (1, {}),
    "plan.tp": (4, {}),
    "plan.tp3": ((1, 2, 1), {}),
    "plan.cp": (2, {}),
    "plan.cp_attention": ("ulysses", {"plan.cp": 2}),
    "plan.sequence_parallel": (True, {}),
    "plan.overlap_input_grad_reduce": (False, {}),
    "plan.pp": (4, {}),
    "plan.schedule": ("gpipe", {}),
    "plan.chunks": (4, {"plan.schedule": "interleaved", "plan.chunks": 2}),
    "plan.scatter_gather": (False, {}),
    "plan.bucket_bytes": (2**30, {}),
    "plan.overlap_grad_reduce": (False, {}),
    "plan.zero_stage": (3, {}),
    "plan.overlap_param_gather": (False, {"plan.zero_stage": 3}),
    "plan.offload_optimizer": (True, {}),
    "plan.recompute": ("selective", {}),
    "plan.partition_activations": (True, {}),
    "plan.offload_activations": (True, {}),
    "train.global_batch": (64, {}),
    "train.microbatch": (8, {}),
    "train.clip_norm": (0.0, {}),
    "data.race": ("synthetic", {"model.family": "bert", "plan.pp": 1}),
    "precision": ("fp32", {}),
    "fp32_gradients": (False, {}),
    "engine": ("torch", {"plan.tp": 1, "plan.pp": 1, "plan.recompute": "none"}),
    "compile": (True, {}),
    "threads": (2, {}),
}  # fmt: skip
"""Another value of a field, and what else a run has where that counts."""
WITHOUT_EFFECT = {
    *("train.steps", "train.lr", "train.min_lr", "train.warmup_steps", "train.decay", "train.weight_decay"),
    *("train.beta1", "train.beta2", "train.eps", "train.initial_loss_scale", "train.loss_scale_window"),
    *("train.parametrization", "train.base_hidden_size", "train.base_layers"),
    "model.attention_dropout",  # fused attention keeps and moves nothing for it
    *(
        "model.init_std", "model.rotary_base", "model.rotary_scaling", "model.norm_epsilon", "seed", "repeat",
        "start", "keep_end",
    ),
    *(name for name in FIELDS if name.startswith("evaluation.")),  # between steps
    "data.dataset",  # only its vocabulary counts, and only where the model has none
}  # fmt: skip
"""Fields that cannot change how long a training step takes, nor its memory."""


def sampled(system: System, chance: random.Random) -> Iterator[Run]:
    """Runs that differ in all that a row can have."""
    for _ in range(PLANS):
        gpus, batch = chance.choice((4, 16, 32)), chance.choice((16, 64))
        model = replace(MODEL, dropout=chance.choice((0.0, 0.1)), family=chance.choice(("gpt", "bert")))
        plans = every(model, gpus, batch)
        precision = chance.choice(list(system.device.peak_flops))
        base = Run(model=model, train=Recipe(global_batch=batch, microbatch=1), precision=precision)
        changes = {
            "plan.bucket_bytes": chance.choice((4 * 2**20, 2**30)),
            "fp32_gradients": precision == "fp32" or chance.random() < 0.5,
        }
        yield with_fields(plans.run(chance.randrange(len(plans)), base), changes)


def flags(given: Mapping[str, Any]) -> list[str]:
    """The options of the command line that give these fields."""
    words = []
    for name, value in given.items():
        group, dot, field = name.replace("_", "-").rpartition(".")
        no = "no-" if value is False else ""
        words += [f"--{group}{dot}{no}{field}", *([] if isinstance(value, bool) else [str(value)])]
    return words


def by_rows(given: list[dict[str, Any]], system: str, path: Path) -> list[dict[str, Any]]:
    """Predictions for a table of runs, with empty cells for what is not given."""
    with path.open("w") as file:
        table = csv.DictWriter(file, [*COUNTS, *OPTIONAL])
        table.writeheader()
        for run in given:
            cells = {name: run.get(field, "") for name, field in COLUMNS.items()}
            table.writerow(cells | {"gpus": run["plan.tp"] * run["plan.dp"] * run["plan.pp"] * run.get("plan.cp", 1)})
    return document(call("predict", "--rows", path, "--system", system, "--json").output)["rows"]


def given_in(run: Run) -> dict[str, Any]:
    """The columns that say a run: those that every row has, and what differs from a new run."""
    values = {field: attrgetter(field)(run) for field in COLUMNS.values()}
    return {name: of for name, of in values.items() if name in REQUIRED.values() or of != DEFAULTS[name]}


@pytest.mark.parametrize("system", names())
def test_a_run_is_predicted_the_same_by_fields_by_rows_and_as_a_record(system: str, tmp_path: Path):
    chance, known = random.Random(f"7 {system}"), load_system(system)
    runs = list(sampled(known, chance))
    given = list(map(given_in, runs))
    for run, row in zip(runs, by_rows(given, system, tmp_path / "all.csv"), strict=True):
        record = document_of(run, Store(tmp_path, "made_up", "smoke", system), known, given_by(run, (), known))
        if row["problem"]:  # as a habit of the software makes it
            assert record["reason"] == row["problem"]
            continue
        assert row["predicted_s"] == record["prediction"]["seconds"]
        assert row["doubts"] == "; ".join(record["prediction"]["warnings"])
        assert row["memory_bytes"] == max(rank["peak_memory_bytes"] for rank in record["ranks"])
        assert row["fits"] == (record["status"] == "ok")
    # some fields are left out of both
    partly = [{k: v for k, v in one.items() if k in REQUIRED.values() or chance.random() < 0.5} for one in given]
    for one, row in zip(partly, by_rows(partly, system, tmp_path / "partly.csv"), strict=True):
        answer = call("predict", *flags(one), "--system", system, "--json")
        if row["problem"]:
            assert answer.errors == f"error: {row['problem']}\n"
            continue
        found = document(answer.output)
        assert (row["predicted_s"], row["fits"]) == (found["seconds"], found["fits"])
        assert row["memory_bytes"] == max(rank["bytes"]["total"] for rank in found["memory"])
        assert (row["low_s"], row["high_s"]) == (found["low"], found["high"])


CONTRARY = {
    **{"model.dropout": 0.0, "fp32_gradients": True},
    **{"plan.overlap_grad_reduce": True, "plan.overlap_input_grad_reduce": True},
}
"""Values of fields that `a100_cluster`'s software has a habit against."""


@pytest.mark.usefixtures("errors_found_once")
@pytest.mark.parametrize("field", CONTRARY)
def test_a_given_field_wins_over_a_habit_by_fields_by_rows_and_in_a_search(field: str, tmp_path: Path):
    plan = {"plan.tp": 2, "plan.pp": 1, "plan.dp": 2, "plan.zero_stage": 0, "train.microbatch": 4}
    usual = LARGE | plan | {"plan.recompute": "none", "precision": "fp16", "plan.bucket_bytes": 2**25}
    given = [usual, usual | {field: CONTRARY[field]}]
    rows = by_rows(given, "a100_cluster", tmp_path / "rows.csv")
    assert rows[0]["predicted_s"] != rows[1]["predicted_s"]
    for one, row in zip(given, rows, strict=True):
        found = document(call("predict", *flags(one), "--system", "a100_cluster", "--json").output)
        assert (found["seconds"], found["fits"]) == (row["predicted_s"], row["fits"])
        assert max(rank["bytes"]["total"] for rank in found["memory"]) == row["memory_bytes"]
        words = [text for text in found["warnings"] if text.startswith("as Megatron-DeepSpeed")]
        assert len(words[0].split(",")) == 4 - (field in one)
    knob = field.removeprefix("plan.")
    if knob != field:
        fix = [f"{name.removeprefix('plan.')}={value}" for name, value in (plan | {"plan.recompute": "none"}).items()]
        fix = [text.replace("train.", "") for text in fix] + ["sequence_parallel=false", "offload_optimizer=false"]
        shape = ("--model", "ptdp-1.7b", "--gpus", "4", "--global-batch", "32", "--system", "a100_cluster", "--json")
        best = [
            document(call("tune", *shape, "--fix", *fix, *more).output)["best"][0] for more in ([], [f"{knob}=true"])
        ]
        assert [one[knob] for one in best] == [False, True]
        assert best[0]["seconds"] != best[1]["seconds"]


def test_a_point_of_an_experiment_gives_what_it_sets_and_what_its_experiment_varies():
    system, runs = load_system("a100_cluster"), [with_fields(Run(), {"plan.recompute": to}) for to in ("none", "full")]
    done = lambda run, varied: simulated(run, given_by(run, varied, system), system).done
    assert done(runs[0], ()).plan.recompute == "full"
    assert [done(run, differing(runs)).plan.recompute for run in runs] == ["none", "full"]
    loud = with_fields(Run(), {"model.dropout": 0.2})
    assert (done(runs[0], ["model.dropout"]).model.dropout, done(loud, ()).model.dropout) == (0.1, 0.2)


def predicted(run: Run, capsys: pytest.CaptureFixture[str]) -> Any:
    system = load_system("h100")
    predict_run(simulated(run, FIELDS, system), system, Circumstances(), Failures(), json=True)
    return document(capsys.readouterr().out)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_prediction_or_is_said_to_be_ignored(field: str, capsys: pytest.CaptureFixture[str]):
    if field in WITHOUT_EFFECT:
        assert field not in CHANGES
        return
    value, besides = CHANGES[field]
    run = with_fields(Run(), LARGE | dict(besides))
    other = with_fields(run, {field: value})
    before = predicted(run, capsys)
    if field == "engine":
        with pytest.raises(InputError, match="the torch engine is not simulated"):
            predicted(other, capsys)
        return
    after = predicted(other, capsys)
    counts = any(before[name] != after[name] for name in ("seconds", "memory"))
    said = [line for line in after["warnings"] if line.startswith(f"ignored: {field} ")]
    assert counts != bool(said)
    assert not any(line.startswith("ignored:") for line in before["warnings"])


def test_what_is_ignored_is_printed_in_one_line():
    arguments = ("predict", "--model", "gpt-355m", "--precision", "bf16", "--system", "h100", "--compile")
    assert call(*arguments).output.count("warning: ignored: compile True: ") == 1


def test_a_systems_defaults_hold_for_what_is_not_given(tmp_path: Path):
    """vTrain's table has only the columns that every table has."""
    counts = {"global_batch": 8, "micro_batch": 1, "hidden": 1024, "heads": 16, "layers": 16, "seq_len": 1024}
    given = {field: counts.get(name, 2) for name, field in REQUIRED.items()}
    predict = lambda given, *more: call("predict", *flags(given), "--system", "a100_cluster", *more).output
    found = document(predict(given, "--json"))
    assert found["assumed"] == load_system("a100_cluster").defaults
    assert (found["config"]["plan"]["recompute"], found["config"]["precision"]) == ("full", "fp16")
    (row,) = by_rows([given], "a100_cluster", tmp_path / "rows.csv")
    assert row["predicted_s"] == found["seconds"]
    named = document(predict(given | {"plan.recompute": "none"}, "--json"))
    assert "plan.recompute" not in named["assumed"]
    assert named["config"]["plan"]["recompute"] == "none"
    assert "plan.recompute full" in predict(given)


@pytest.mark.parametrize("defaults", [{"plan.luck": 1}, {"luck": 1}, {"seed.x": 1}, {"plan.recompute": "most"}])
def test_defaults_of_a_system_are_fields_of_a_run(defaults: dict[str, Any]):
    with pytest.raises(InputError, match=r"system field defaults .*(luck|seed|recompute)"):
        System.from_dict(load_system("h100").as_dict() | {"defaults": defaults})


@pytest.mark.parametrize("system", [name for name in names() if load_system(name).calibration])
def test_packaged_calibrations_cover_what_their_rows_do(system: str):
    case = next(case for case in CASES if case.system == system)
    known = load_system(system)
    file = (case.fitted or case.asked[0]).file
    runs = [row.asked.done for row in rows_of(file, system) if row.asked and row.split == CALIBRATE]
    assert known.calibration is not None
    assert len(known.calibration.rows) == len(runs)
    assert (known.calibration.ranges, known.calibration.features) == reach(runs, known)


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"plan.zero_stage": 3}, "zero_stage 3, calibrated on 0"),
        ({"plan.sequence_parallel": True}, "sequence_parallel true, calibrated on false"),
        ({"plan.tp": 16, "model.num_heads": 32}, "tp_over_nodes true, calibrated on false"),
        ({"plan.recompute": "selective"}, "recompute selective, calibrated on full"),
        ({"plan.cp": 2}, "cp_attention ring, calibrated on none"),
        ({"plan.tp3": (1, 2, 1)}, "block divided features, calibrated on gpt"),
        ({"precision": "fp32"}, "precision fp32, calibrated on 16-bit"),
        ({"plan.schedule": "gpipe"}, "schedule gpipe, calibrated on interleaved and one_f_one_b"),
        ({"plan.offload_optimizer": True}, "offload_optimizer true, calibrated on false"),
    ],
)
def test_features_that_no_fitted_row_had_are_doubts(changes: dict[str, Any], doubt: str):
    system, run = load_system("selene"), with_fields(Run(), LARGE | {"plan.zero_stage": 0})
    asked = lambda run: simulated(run, FIELDS, system)
    doubts = lambda run: [text for text in interval(system, asked(run), 1.0)[2] if text.split()[1] in BASELINE]
    assert doubts(run) == []
    assert doubts(with_fields(run, changes)) == [f"extrapolates: {doubt}"]


def test_a_feature_without_effect_is_none():
    alone = with_fields(Run(), {"precision": "fp16", "plan.zero_stage": 3, "plan.sequence_parallel": True})
    assert (
        features(Done(alone), load_system("selene")).keys().isdisjoint({"zero_stage", "sequence_parallel", "schedule"})
    )


def test_all_of_a_step_on_one_device_is_computing_or_communication():
    """The null models' machines: with an optimizer on the host, its update is computing, copies are communication."""
    system = load_system("selene")
    run = with_fields(Run(model=MODEL), {"plan.offload_optimizer": True, "precision": "fp16"})
    done = simulated(run, FIELDS, system).done
    found = without(done, system)
    assert found["network"] < 0.95 * predicted_seconds(done, system)
    assert found["network"] + found["computing"] == pytest.approx(predicted_seconds(done, system), rel=0.01)

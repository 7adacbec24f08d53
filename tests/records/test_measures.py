import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.tables import throughput_table
from harness.records.labels import labels_by, varying
from harness.records.measures import about, frame, size_name
from harness.records.parts import Collective
from harness.records.steps import Steps
from impl.errors import InputError
from impl.run import Run, from_dict
from tests.harness.made_up_records import changed, config, document, made_of, record, with_pipeline, without_numbers


def run_of(**changed: Any) -> Run:
    return from_dict(config(**changed))


@given(
    dp=st.sampled_from([1, 2, 4, 8]),
    microbatch=st.sampled_from([1, 2, 4]),
    accumulation=st.integers(1, 4),
    steps=st.integers(2, 40),
    seconds_per_token=st.floats(1e-7, 1e-2),
)
def test_throughput_is_one_over_the_wall_time_of_a_token(
    dp: int, microbatch: int, accumulation: int, steps: int, seconds_per_token: float
) -> None:
    batch = dp * microbatch * accumulation
    layout: dict[str, Any] = {
        "plan__dp": dp,
        "train__microbatch": microbatch,
        "train__global_batch": batch,
        "train__steps": steps,
    }
    run = record(seconds=seconds_per_token * batch * 128, **layout)
    assert run.tokens_per_second == pytest.approx(1 / seconds_per_token)
    row = frame([run]).iloc[0]
    assert row["tokens_per_second_per_device"] * dp == pytest.approx(row["tokens_per_second"])


def test_slowest_rank_and_largest_memory_count_and_warmup_does_not() -> None:
    run = record(plan__dp=2, train__steps=8)
    seconds = lambda step: [9.0, 9.0] if step.step < 3 else [0.1, 0.2]
    run.steps = Steps(replace(step, seconds=seconds(step)) for step in run.steps)
    run.ranks[0].peak_memory_bytes = 7_000_000_000
    row = frame([run]).iloc[0]
    assert run.timed_seconds == [0.2] * 5
    assert row["tokens_per_second"] == pytest.approx(16 * 128 / 0.2)
    assert row["peak_memory_bytes"] == 7e9


def test_steps_after_a_resumption_are_not_timed() -> None:
    run = changed(record(train__steps=10), times={"resumed_at": [5]})
    run.steps = Steps(replace(step, seconds=[5.0 if step.step in (0, 5, 6, 7) else 0.1]) for step in run.steps)
    assert run.timed_seconds == [0.1] * 4
    assert run.step_seconds == 0.1


def test_mfu_only_where_the_peak_is_known_and_never_on_a_cpu() -> None:
    known = record(device="cuda", device_name="NVIDIA H200", precision="bf16")
    unknown = record(device="cuda", device_name="Some GPU", precision="bf16")
    cpu = record(device="cpu", device_name="NVIDIA H200", precision="bf16")
    shares = {name: frame([r]).iloc[0] for name, r in (("known", known), ("unknown", unknown), ("cpu", cpu))}
    rate = shares["known"]["flop_rate"]
    assert shares["known"]["mfu"] == pytest.approx(rate / 989e12)
    assert math.isnan(shares["unknown"]["mfu"])
    assert math.isnan(shares["cpu"]["mfu"])


def test_skipped_steps_are_counted_where_there_is_a_loss_scale() -> None:
    run = record(precision="fp16")
    run.steps = Steps(replace(step, skipped=step.step == 1) for step in run.steps)
    assert frame([run]).iloc[0]["skipped_steps"] == 1
    assert math.isnan(frame([record()]).iloc[0]["skipped_steps"])
    assert "skipped steps" in {column.header for column in throughput_table([run]).columns}
    assert "skipped steps" not in {column.header for column in throughput_table([record()]).columns}


def test_hfu_counts_what_is_recomputed_and_mfu_does_not() -> None:
    at: dict[str, Any] = {"device": "cuda", "device_name": "NVIDIA H200", "precision": "bf16"}
    ways = ("none", "selective", "full")
    none, selective, full = (frame([record(plan__recompute=way, **at)]).iloc[0] for way in ways)
    assert none["mfu"] == none["hfu"] == selective["mfu"] == full["mfu"]
    assert none["hfu"] < selective["hfu"] < full["hfu"] < none["mfu"] * 4 / 3
    assert full["hfu"] == pytest.approx(full["hardware_flop_rate"] / 989e12)
    assert full["recompute"] == "full"


def test_flop_rate_is_palm_12_per_device_and_its_share_of_the_gemm_rate() -> None:
    run = record(plan__dp=2, seconds=0.5)
    run.ranks[0].gemm_flops_per_s, run.ranks[1].gemm_flops_per_s = 10e9, 30e9
    row = frame([run]).iloc[0]
    layers, h, s, vocab = 2, 128, 128, 257
    flops = 16 * s * (6 * (12 * layers * h * h + vocab * h) + 12 * layers * h * s)
    assert row["flop_convention"] == "palm_12"
    assert row["flop_rate"] == pytest.approx(flops / 0.5 / 2)
    assert row["gemm_share"] == pytest.approx(flops / 0.5 / 2 / 20e9)


def label(run: Run, runs: Sequence[Run], skip: Sequence[str] = ()) -> str:
    """Return what distinguishes a run from the others, usual values only if nothing else does."""
    names = varying(runs, skip)
    return labels_by([run], names)[0] or labels_by([run], names, unsaid={})[0]


def test_label_names_the_fewest_telling_fields() -> None:
    runs = [
        run_of(model__norm_placement="post", train__lr=1e-3, seed=1, data__dataset="/a/books"),
        run_of(model__norm_placement="post", train__lr=2e-3, repeat=2, data__dataset="/a/books"),
        run_of(model__norm_placement="pre", train__lr=2e-3, plan__overlap_grad_reduce=False),
    ]
    assert label(runs[0], runs) == "norm=post lr=0.001"
    assert label(runs[2], runs) == "norm=pre lr=0.002"
    assert label(runs[1], runs[1:]) == "norm=post"
    assert label(runs[1], runs[1:], skip=["model.norm_placement"]) == ""
    assert label(runs[0], runs, skip=["train.lr"]) == "norm=post"
    plans = [run_of(), run_of(plan__overlap_grad_reduce=False)]
    assert [label(run, plans) for run in plans] == ["overlap=on", "overlap=off"]
    assert label(runs[0], runs[:1]) == ""


def test_a_label_names_the_tensor_parallel_degree_even_where_the_shape_tells_as_much() -> None:
    grown = [run_of(), run_of(model__hidden_size=256, plan__tp=2)]
    assert [label(run, grown) for run in grown] == ["hidden=128 tp=1", "hidden=256 tp=2"]
    assert label(grown[1], grown, skip=["model.hidden_size"]) == "tp=2"
    assert label(grown[1], grown[1:]) == ""


def test_a_label_leaves_out_how_layers_usually_work() -> None:
    ways: list[dict[str, Any]] = [{}, {"plan__sequence_parallel": True}, {"plan__overlap_input_grad_reduce": False}]
    made = [run_of(plan__tp=tp, **way) for tp, way in ((1, {}), *((2, way) for way in ways))]
    assert [label(run, made) for run in made] == ["tp=1", "tp=2", "tp=2 sequence_parallel=on", "tp=2 input_overlap=off"]
    assert [label(run, made[1:3]) for run in made[1:3]] == ["sequence_parallel=off", "sequence_parallel=on"]


def test_what_ranks_hold_is_the_largest_and_what_they_send_is_a_rings() -> None:
    run = record(plan__tp=4, plan__sequence_parallel=True)
    for rank, (split, calls) in zip(run.ranks, ((10, 1), (30, 2), (20, 2), (5, 2)), strict=True):
        rank.state_bytes = {"split": split, "whole": 7}
        rank.activation_bytes = {"model": 100 + split, "layer": split}
        rank.traffic = {"tp": {"all_reduce": Collective(calls, 400), "all_gather": Collective(1, 80)}}
    row = frame([run]).iloc[0]
    assert (row["tp"], row["ranks"], row["sequence_parallel"]) == (4, 4, True)
    assert (row["split_state_bytes"], row["whole_state_bytes"]) == (30, 7)
    assert (row["model_activation_bytes"], row["layer_activation_bytes"]) == (130, 30)
    assert (row["tp_calls"], row["tp_bytes_sent"]) == (3, (2 * 400 + 80) * 3 / 4)


def test_a_pipelines_bubble_is_measured_and_simulated_and_what_is_in_flight_counted() -> None:
    interleaved: dict[str, Any] = {"plan__schedule": "interleaved", "plan__chunks": 2, "model__num_layers": 4}
    run = with_pipeline(record(plan__pp=2, train__global_batch=16, train__microbatch=2, **interleaved))
    row = frame([run]).iloc[0]
    assert (row["pp"], row["schedule"], row["chunks"], row["microbatches"], row["ranks"]) == (2, "interleaved", 2, 8, 2)
    assert row["bubble"] == pytest.approx(1 / 16)
    assert row["predicted_bubble"] == pytest.approx(1 / 16)
    assert row["pipeline_seconds"] == pytest.approx(row["predicted_pipeline_seconds"]) == pytest.approx(0.0255)
    assert row["microbatches_in_flight"] == 2.5
    assert row["in_flight_bytes"] == 2.5 * (run.ranks[0].activation_bytes or {})["model"]
    assert (row["pp_sends"], row["pp_bytes_sent"]) == (24, 24 * 2 * 128 * 128 * 4)


def test_a_late_pipeline_has_a_larger_bubble_than_simulated() -> None:
    row = frame([with_pipeline(record(plan__pp=2), late=1e-3)]).iloc[0]
    assert row["bubble"] > 1.5 * row["predicted_bubble"] > 0
    compiled = with_pipeline(record(plan__pp=2))
    for rank in compiled.ranks:
        rank.activation_bytes = None
    assert math.isnan(frame([compiled]).iloc[0]["in_flight_bytes"])


def test_a_label_names_the_schedule_and_its_chunks_where_they_vary() -> None:
    plans: list[dict[str, Any]] = [{}, {"plan__pp": 2}, {"plan__pp": 2, "plan__schedule": "zb_h1"}]
    made = [run_of(**plan) for plan in plans]
    assert [label(run, made) for run in made[:2]] == ["pp=1 schedule=one_f_one_b", "pp=2 schedule=one_f_one_b"]
    assert [label(run, made[1:]) for run in made[1:]] == ["schedule=one_f_one_b", "schedule=zb_h1"]
    ways = [run_of(plan__pp=2, plan__tp=2, plan__scatter_gather=on, seed=s) for s, on in enumerate((True, False))]
    assert [label(run, [*ways, made[0]]) for run in ways] == ["tp=2 pp=2", "tp=2 pp=2 scatter_gather=off"]


def test_records_from_before_tensor_parallelism_are_read() -> None:
    old = document(record(plan__dp=2))
    for name in ("tp", "sequence_parallel", "overlap_input_grad_reduce", "pp", "schedule", "chunks", "scatter_gather"):
        del old["config"]["plan"][name]
    for rank in old["ranks"]:
        for name in ("state_bytes", "activation_bytes", "traffic"):
            del rank[name]
    row, _ = frame([made_of(old), record(plan__dp=2, repeat=1)]).to_dict("records")
    assert (row["ranks"], row["tp"], row["sequence_parallel"]) == (2, 1, False)
    assert row["varies"] == ""
    assert all(math.isnan(row[name]) for name in ("split_state_bytes", "tp_bytes_sent", "pp_bytes_sent", "bubble"))
    assert (row["pp"], row["microbatches"]) == (1, 1)
    assert row["point"] == record(plan__dp=2).point
    compiled = record()
    compiled.ranks[0].activation_bytes = None
    assert math.isnan(frame([compiled]).iloc[0]["layer_activation_bytes"])


def test_a_start_from_another_run_is_called_pretrained_unless_its_id_alone_tells_points_apart() -> None:
    small, large = (replace(run_of(), start=name * 12) for name in "ab")
    large = replace(large, model=replace(large.model, num_layers=12))
    assert labels_by([small, large, run_of()], ["start"]) == ["start=pretrained", "start=pretrained", "start=none"]
    twice = [small, replace(small, start="c" * 12)]
    assert labels_by(twice, ["start"]) == ["start=aaaaaaaaaaaa", "start=cccccccccccc"]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["pre", "post"])), min_size=1, max_size=8, unique=True))
def test_labels_tell_points_apart(points: list[tuple[int, str]]) -> None:
    runs = [run_of(train__steps=steps, model__norm_placement=norm) for steps, norm in points]
    assert len({label(run, runs) for run in runs}) == len(points)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (481_152, "0.5M"), (25_300_000, "25M"), (999_700_000, "1B"), (1_240_000_000, "1.2B"), (1.008e12, "1T"),
        (9e3, "9K"),
    ],
)  # fmt: skip
def test_sizes_are_named_as_in_the_papers(parameters: float, name: str) -> None:
    assert size_name(int(parameters)) == name


def test_models_of_one_size_are_told_apart_by_their_shape() -> None:
    deep, wide = record(model__num_layers=8), record(model__hidden_size=256)
    assert set(frame([deep, wide])["model"]) == {"GPT 0.5M (L8 h128 a2)", "GPT 0.5M (L2 h256 a2)"}


def test_a_run_without_numbers_is_a_row() -> None:
    rows = frame([record(status="invalid", reason="heads"), without_numbers(record(seed=1), "timeout"), record(seed=2)])
    assert list(rows["status"]) == ["invalid", "timeout", "ok"]
    assert list(rows["tokens_per_second"].isna()) == [True, True, False]
    assert frame([]).empty


def test_diverged_is_nan_or_a_loss_above_the_first() -> None:
    assert record(nats=6.0).has_diverged
    assert without_numbers(record(), "nan").has_diverged
    assert not record().has_diverged
    assert not record(status="failed").has_diverged


def test_more_threads_than_cores_is_oversubscribed() -> None:
    assert record(plan__dp=2, threads=2, cores=3).is_oversubscribed
    assert not record(plan__dp=2, threads=2, cores=4).is_oversubscribed
    assert not record(plan__dp=8, device="cuda", cores=4).is_oversubscribed


@pytest.mark.parametrize(
    ("places", "is_shared"),
    [
        ([(0, 0, 2), (0, 0, 2)], False),  # a rank on each of two hosts
        ([(0, 0, 2), (1, 0, 2)], False),
        ([(0, 0, 1), (1, 0, 1)], True),  # two ranks on a core of one host
        ([(0, 0, 1), (1, 1, 1)], False),
    ],
)
def test_cores_are_those_of_the_ranks_and_not_of_the_machine_that_started_them(
    places: list[tuple[int, int, int]], is_shared: bool
) -> None:
    used = {"seconds": 1.0, "own": 1.0, "busy": 1.0, "stolen": 0.0}
    hosts = [used | dict(zip(("local_rank", "core", "cores"), place, strict=True)) for place in places]
    ranks = [{"rank": i, "host": host} for i, host in enumerate(hosts)]
    for cores in (1, 64):
        assert changed(record(plan__dp=2, cores=cores), ranks=ranks).is_oversubscribed == is_shared


def test_tiers_do_not_mix() -> None:
    with pytest.raises(InputError, match="small, smoke"):
        about([record(tier="small"), record()])


def test_import_needs_neither_torch_nor_scipy_nor_matplotlib() -> None:
    code = "import harness.figures.figures, sys; print({'torch', 'scipy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.analysis import perplexity, tables
from harness.analysis.render import Column, Table
from harness.analysis.tables import failures_table
from harness.records.evaluations import floor_of
from harness.records.parts import Data, Entropy, Evaluation, Sample
from harness.records.record import Record
from harness.report import results
from impl.data.synthetic import SyntheticConfig, code_length, make_source
from impl.errors import InputError
from impl.seeding import derive
from tests.harness.made_up_records import KEY, record, with_pipeline, without_numbers


def rows(table: Table) -> list[dict]:
    return table.frame.to_dict("records")


def weak_and_strong(**more: Any) -> list[Record]:
    one = [record(seconds=s, repeat=i, train__microbatch=1, **more) for i, s in enumerate((0.1, 0.1, 0.1))]
    strong = [record(seconds=0.0625, plan__dp=2, train__microbatch=1, **more)]
    weak = [record(seconds=0.125, plan__dp=2, train__microbatch=1, train__global_batch=32, **more)]
    return [*weak, *one, *strong]


def test_repeats_are_one_row_and_a_single_run_has_no_interval() -> None:
    table = tables.throughput_table([record(seconds=s, repeat=i) for i, s in enumerate((0.1, 0.11, 0.12))])
    assert [(r["n"], r["tokens_per_second_half_width"] > 0) for r in rows(table)] == [(3, True)]
    single = tables.throughput_table([record()])
    assert rows(single)[0]["n"] == 1
    assert math.isnan(rows(single)[0]["tokens_per_second_half_width"])
    assert "±" not in single.cells[0][single.columns.index(tables.RATE)]


def test_scaling_efficiency_and_its_baseline() -> None:
    found = {(r["kind"], r["ranks"]): r for r in rows(tables.scaling_table(weak_and_strong()))}
    assert found["weak", 2]["efficiency"] == pytest.approx(0.8)
    assert found["strong", 2]["efficiency"] == pytest.approx(0.8)
    assert found["strong", 2]["speedup"] == pytest.approx(1.6)
    assert found["weak", 1]["baseline"] == "baseline"
    assert found["weak", 2]["baseline"] == "1 rank"
    assert len(found) == 4


def test_the_baseline_is_the_fewest_ranks_that_ran() -> None:
    runs = [record(plan__dp=dp, train__microbatch=1, seconds=0.8 / dp) for dp in (8, 4, 2)]
    table = tables.scaling_table([*runs, record(status="failed", reason="killed", train__microbatch=1)])
    assert [r["baseline"] for r in rows(table)] == ["baseline", "2 ranks", "2 ranks"]


def test_oversubscribed_rows_are_marked_and_have_no_efficiency() -> None:
    table = tables.scaling_table(weak_and_strong(cores=1))
    assert all(math.isnan(r["efficiency"]) and r["mark"] == "†" for r in rows(table) if r["ranks"] == 2)
    assert tables.OVERSUBSCRIBED in table.notes


def test_different_devices_are_not_compared() -> None:
    mixed = [record(train__microbatch=1), record(plan__dp=2, train__microbatch=1, device_name="another")]
    assert tables.scaling_table(mixed).frame.empty


def degrees(seconds: dict[tuple[int, int], float], **more: Any) -> list[Record]:
    """A record for each (dp, tp), of the same global batch."""
    return [record(seconds=s, plan__dp=dp, plan__tp=tp, train__microbatch=1, **more) for (dp, tp), s in seconds.items()]


def test_strong_scaling_is_over_any_mix_of_degrees() -> None:
    table = tables.scaling_table(degrees({(1, 1): 0.8, (2, 1): 0.5, (1, 2): 0.8, (2, 2): 0.25}))
    found = {(r["kind"], r["dp"], r["tp"]): r for r in rows(table)}
    assert {key: r["speedup"] for key, r in found.items()} == {
        ("strong", 1, 1): 1,
        ("strong", 2, 1): pytest.approx(1.6),
        ("strong", 1, 2): pytest.approx(1.0),
        ("strong", 2, 2): pytest.approx(3.2),
    }
    assert {(r["varies"], r["curve"]) for r in rows(table)} == {
        ("dp=1 tp=1", ""),
        ("dp=2 tp=1", "dp"),
        ("dp=1 tp=2", "tp"),
        ("dp=2 tp=2", "dp with tp=2"),
    }


def test_weak_scaling_keeps_the_tensor_parallel_degree() -> None:
    runs = [
        record(plan__dp=dp, plan__tp=tp, train__microbatch=1, train__global_batch=4 * dp, model__hidden_size=128 * tp)
        for dp in (1, 2)
        for tp in (1, 2)
    ]
    found = [(r["kind"], r["tp"], r["ranks"], r["baseline"], r["curve"]) for r in rows(tables.scaling_table(runs))]
    assert found == [
        ("weak", 1, 1, "baseline", ""),
        ("weak", 1, 2, "1 rank", "tp=1"),
        ("weak", 2, 2, "baseline", ""),
        ("weak", 2, 4, "2 ranks", "tp=2"),
    ]


def test_ways_of_tensor_parallelism_share_the_baseline_that_has_none() -> None:
    runs = degrees({(1, 1): 0.8, (1, 2): 0.5, (1, 4): 0.4})
    runs += degrees({(1, 2): 0.4, (1, 4): 0.25}, plan__sequence_parallel=True)
    found = {(r["varies"], r["curve"]): r["efficiency"] for r in rows(tables.scaling_table(runs))}
    assert found == {
        ("tp=1", ""): 1,
        ("tp=2", "tp"): pytest.approx(0.8),
        ("tp=4", "tp"): pytest.approx(0.5),
        ("tp=2 sequence_parallel=on", "tp sequence_parallel=on"): pytest.approx(1.0),
        ("tp=4 sequence_parallel=on", "tp sequence_parallel=on"): pytest.approx(0.8),
    }
    without = [r for r in runs if r.run.plan.tp > 1]
    assert [r["baseline"] for r in rows(tables.scaling_table(without))].count("baseline") == 2


def test_strong_scaling_is_over_pipelines_too_and_every_schedule_shares_the_baseline() -> None:
    plans: list[dict[str, Any]] = [
        {}, {"plan__pp": 2}, {"plan__pp": 2, "plan__schedule": "zb_h1"}, {"plan__pp": 2, "plan__dp": 2},
        {"plan__tp": 2, "plan__pp": 2, "plan__schedule": "zb_h1"},
    ]  # fmt: skip
    seconds = (0.8, 0.5, 0.4, 0.25, 0.25)
    runs = [record(seconds=s, train__microbatch=1, **plan) for s, plan in zip(seconds, plans, strict=True)]
    found = {(r["pp"], r["tp"], r["dp"], r["schedule"]): r for r in rows(tables.scaling_table(runs))}
    assert {at: round(r["efficiency"], 3) for at, r in found.items()} == {
        (1, 1, 1, "one_f_one_b"): 1, (2, 1, 1, "one_f_one_b"): 0.8, (2, 1, 1, "zb_h1"): 1,
        (2, 1, 2, "one_f_one_b"): 0.8, (2, 2, 1, "zb_h1"): 0.8,
    }  # fmt: skip
    assert {r["curve"] for r in found.values()} == {
        "", "pp schedule=one_f_one_b", "pp schedule=zb_h1", "dp with pp=2 schedule=one_f_one_b",
        "tp with pp=2 schedule=zb_h1",
    }  # fmt: skip
    without = tables.scaling_table(runs[1:])
    assert {r["schedule"] for r in rows(without) if r["baseline"] == "baseline"} == {"one_f_one_b", "zb_h1"}


def test_the_bubble_of_a_pipeline_is_in_the_throughput_table() -> None:
    table = tables.throughput_table([with_pipeline(record(plan__pp=2))])
    assert tables.BUBBLE in table.columns
    assert rows(table)[0]["bubble"] == pytest.approx(0.5)
    assert tables.BUBBLE not in tables.throughput_table([record()]).columns


def test_runs_of_two_steps_are_not_compared() -> None:
    runs = degrees({(1, 1): 0.8, (1, 2): 0.5}, train__steps=2)
    assert tables.scaling_table(runs).frame.empty
    assert len(tables.throughput_table(runs).frame) == 2


def test_perplexity_with_floor_and_share_above_it() -> None:
    (table,) = perplexity.perplexity_tables([record(nats=2.2)])
    row = rows(table)[0]
    assert row["token_perplexity"] == pytest.approx(math.exp(2.2))
    assert row["word_perplexity"] == pytest.approx(math.exp(2.2 * 4))
    assert row["bits_per_byte"] == pytest.approx(2.2 / math.log(2))
    assert row["floor"] == pytest.approx(math.exp(2.0))
    assert row["floor_half_width"] == pytest.approx(1.96 * 0.005 * math.exp(2.0))
    assert row["above_floor"] == pytest.approx(math.exp(0.2) - 1)


def test_the_floor_is_less_certain_where_a_part_of_the_text_is_scored() -> None:
    part = record(nats=2.2)
    assert part.resolved.data is not None
    part.resolved.data.valid_tokens = 9 * (part.last_evaluations[0].tokens or 0)
    (table,) = perplexity.perplexity_tables([part])
    assert rows(table)[0]["floor_half_width"] == pytest.approx(3 * 1.96 * 0.005 * math.exp(2.0))


def test_a_languages_own_probabilities_are_within_the_error_of_its_floor() -> None:
    """On the first windows of the held-out text too, of which a run scores no more."""
    config = SyntheticConfig()
    source = make_source(config)
    words = source.sample(derive(config.seed, "valid"), round(config.valid_tokens / source.letters_per_word))
    floor, error = code_length(source, words)
    entropy = Entropy(nats_per_token=source.nats_per_letter, valid=Sample(nats_per_token=floor, standard_error=error))
    perfect = record()
    perfect.resolved.data = Data(valid_tokens=len(source.spell(words)), entropy=entropy)
    for count in (500, 1000, 5000, 10_000):
        tokens = len(source.spell(words[:count]))
        nats = code_length(source, words[:count])[0] * tokens
        found = floor_of(perfect, Evaluation(name="valid", kind="causal", step=1, nats=nats, tokens=tokens))
        assert abs(found["above_floor"]) < 2 * found["floor_standard_error"] / found["floor"]


def test_sizes_against_placements_with_what_diverged() -> None:
    big: dict[str, Any] = {"parameters": 2_000_000, "model__hidden_size": 256}
    runs = [record(model__norm_placement=norm) for norm in ("sandwich", "post", "pre")]
    runs += [record(model__norm_placement="pre", **big), record(model__norm_placement="post", **big)]
    runs[-1] = without_numbers(runs[-1], "nan", "loss is nan")
    seeds = [record(model__norm_placement="sandwich", seed=s, nats=n, **big) for s, n in ((0, 2.1), (1, 6.0))]
    matrix, points = perplexity.perplexity_tables([*runs, *seeds])
    assert [c.key for c in matrix.columns] == ["model", "pre", "post", "sandwich", "floor"]
    assert [r["model"] for r in rows(matrix)] == ["GPT 0.5M", "GPT 2M"]
    assert matrix.cells[1][2:4] == ["diverged", "diverged 1 of 2"]
    assert (points.name, len(points.frame)) == ("perplexity_valid_points", 6)


def test_repeats_of_a_seed_are_one_measurement_of_what_was_learned() -> None:
    runs = [record(repeat=repeat, nats=2.2) for repeat in range(3)]
    (row,) = rows(perplexity.perplexity_table(runs, "valid", "causal"))
    assert (row["n"], math.isnan(row["token_perplexity_half_width"])) == (1, True)
    (row,) = rows(perplexity.perplexity_table([*runs, record(seed=1, nats=2.4)], "valid", "causal"))
    assert row["n"] == 2
    assert row["token_perplexity"] == pytest.approx((math.exp(2.2) + math.exp(2.4)) / 2)


def test_learning_rates_get_columns_where_a_model_has_several() -> None:
    matrix, _ = perplexity.perplexity_tables([record(train__lr=lr) for lr in (1e-3, 1e-4)])
    assert [c.key for c in matrix.columns][1:3] == ["pre lr=0.0001", "pre lr=0.001"]


def test_keys_are_never_mixed_but_split_into_tables() -> None:
    runs = [record(seed=0), record(seed=1, key=KEY | {"context": 256})]
    with pytest.raises(InputError, match="context: 128, 256"):
        perplexity.perplexity_table(runs, "valid", "causal")
    assert [t.name for t in perplexity.perplexity_tables(runs)] == [
        "perplexity_valid_context_128",
        "perplexity_valid_context_256",
    ]


def test_an_unknown_evaluation_is_refused() -> None:
    with pytest.raises(InputError, match=r"valid: valid \(causal\)"):
        perplexity.perplexity_table([record()], "wikitext2.test", "words")


def test_accuracy_and_word_perplexity_have_tables_of_their_own() -> None:
    run = record()
    run.evaluations += [
        Evaluation("lambada", "last_word", 100, correct=3, total=12, key=KEY),
        Evaluation("wikitext2.test", "words", 100, nats=40.0, tokens=20, words=10, key=KEY),
    ]
    found = {t.name: t for t in perplexity.perplexity_tables([run])}
    assert rows(found["accuracy_lambada"])[0]["accuracy"] == 0.25
    assert rows(found["perplexity_wikitext2_test"])[0]["word_perplexity"] == pytest.approx(math.exp(4))


def test_what_values_are_comparable_is_said_even_if_the_first_run_failed() -> None:
    (table,) = perplexity.perplexity_tables([record(status="failed", reason="killed"), record(seed=1)])
    assert [note for note in table.notes if note.startswith("Comparable are values with ")]


def test_masked_perplexity_has_no_floor() -> None:
    (table,) = perplexity.perplexity_tables([record(model__family="bert")])
    assert "floor" not in [c.key for c in table.columns]


def test_failures_with_denominators() -> None:
    bad = [record(status="invalid", reason="heads", plan__dp=3), record(status="failed", reason="SIGKILL", seed=7)]
    table = failures_table([record(), *bad, record(train__lr=1e-2)])
    assert [(r["status"], r["reason"]) for r in rows(table)] == [("failed", "SIGKILL"), ("invalid", "heads")]
    assert table.notes == ("3 points (4 runs): 1 ok, 1 failed, 1 invalid",)
    assert tables.denominators([record()]) == "1 point: 1 ok"


def test_every_table_refuses_mixed_tiers() -> None:
    mixed = [record(), record(tier="paper", seed=1)]
    makers = (tables.throughput_table, tables.scaling_table, perplexity.perplexity_tables, failures_table)
    for make in makers:
        with pytest.raises(InputError, match="tiers"):
            make(mixed)


@pytest.mark.parametrize("status", ["nan", "invalid", "oom", "failed", "timeout"])
def test_only_bad_runs_still_give_a_table(status: str, tmp_path: Path) -> None:
    bad = [record(status="invalid", reason="no"), without_numbers(record(seed=1), status)]
    written = results.write(results.all_tables(bad), tmp_path)
    assert {path.stem for path in written} == {"failures"}
    assert results.all_tables([]) == []


def own_table(records: Sequence[Record]) -> Table:
    frame = pd.DataFrame([{"runs": len(records)}] if records else [])
    return Table("mine", "Of my own", (Column(key="runs", header="runs"),), frame)


def test_an_experiments_own_table_is_one_of_them_and_goes_with_its_rows(tmp_path: Path) -> None:
    names = [table.name for table in results.all_tables([record()], table=own_table)]
    assert names == ["throughput", "perplexity_valid", "mine"]
    written = results.write(results.all_tables([record()], table=own_table), tmp_path, table=own_table)
    assert {"mine.md", "mine.csv", "mine.tex"} <= {path.name for path in written}
    assert (tmp_path / "mine.csv").read_text() == "runs\n1\n"
    assert results.write([], tmp_path, table=own_table) == []
    assert list(tmp_path.iterdir()) == []


def test_write_replaces_what_an_earlier_call_left(tmp_path: Path) -> None:
    results.write(results.all_tables([*weak_and_strong(), record(status="failed", reason="x")]), tmp_path)
    (tmp_path / "kept.md").write_text("a reader's own notes")
    written = results.write(results.all_tables([record()]), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in written} | {"kept.md"}
    header, row = csv.reader((tmp_path / "throughput.csv").read_text().splitlines())
    assert float(row[header.index("step, median (s)")]) == pytest.approx(0.1)
    assert float(row[header.index("memory per rank (B)")]) == 2**28

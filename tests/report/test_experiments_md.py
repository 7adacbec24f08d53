"""An experiment's page shows the committed records of the highest tier, and does without; the index lists all pages."""

import subprocess
from pathlib import Path
from typing import Any

from harness.records.record import Record
from harness.records.store import Store
from harness.report.experiments_md import index, page, page_of, read
from tests.harness.made_up_records import document, record, without_numbers

NAME = "ours/data_parallel_scaling"


def keep(out: Path, of: Record, tier: str = "smoke", name: str = NAME, commit: str = "a" * 40, **more: Any) -> Path:
    full, git = document(of), {"commit": commit, "dirty": False, **more}
    place = {"experiment": name, "tier": tier, "environment": full.get("environment", {}) | {"git": git}}
    return Store(out, name, tier).write(full | place)


def shown_of(out: Path, name: str = NAME) -> str:
    """The page of an experiment."""
    [found] = read(out, [name])
    return page(found, out)


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_without_records_there_are_no_tables(tmp_path: Path) -> None:
    shown, text = shown_of(tmp_path), index(read(tmp_path))
    assert "No records yet." in shown
    assert "###" not in shown
    assert f"[{NAME}]({page_of(NAME)})" in text
    assert "1 reproduced" not in text
    assert f"- [{NAME}]({page_of(NAME)}): a rank keeps more" in section(text, "Not run here")


def test_a_papers_table_is_found_by_its_number(tmp_path: Path) -> None:
    rows = section(index(read(tmp_path)), "By paper and number").splitlines()
    [row] = [row for row in rows if row.startswith("| [PTD-P 2021]") and "| figure 13 |" in row]
    assert "[ptdp2021/tensor_versus_pipeline](results/ptdp2021/tensor_versus_pipeline/README.md)" in row
    assert row.endswith("| 10 digitised |")
    assert [row for row in rows if row.startswith("| [Megatron-LM 2019]") and "| table 8 |" in row]


def test_tables_device_commit_and_denominators(tmp_path: Path) -> None:
    one = record(train__microbatch=1)
    two = record(train__microbatch=1, plan__dp=2, seconds=0.0625)
    keep(tmp_path, one)
    keep(tmp_path, two, commit="b" * 40, step=3, before=[{"commit": "c" * 40, "dirty": True}])
    keep(tmp_path, without_numbers(record(train__microbatch=1, plan__dp=4), "oom", "rank 3: MemoryError"))
    shown = shown_of(tmp_path)
    two_codes = "`cccccccccccc` with changes and from step 3 `bbbbbbbbbbbb`"
    assert f"Tier `smoke`, measured on AMD EPYC (cpu, gloo) at commit `aaaaaaaaaaaa`, {two_codes}." in shown
    assert "3 points: 2 ok, 1 oom." in shown
    assert "### Scaling efficiency" in shown
    assert "1.60" in shown  # two ranks over one
    assert shown.count("### Token perplexity") == 1
    assert "[smoke](smoke)" in shown
    assert "| smoke | 6 | 1 min, 2 CPU cores | 0.25 GiB, measured |" in shown.replace("256 MiB", "0.25 GiB")


def test_verdicts_and_the_headline_stand_in_the_section_and_in_the_overview(tmp_path: Path) -> None:
    for repeat, slower in enumerate((1.0, 1.01, 0.99)):
        keep(tmp_path, record(repeat=repeat, plan__dp=1, train__global_batch=8, seconds=0.1 * slower))
        keep(tmp_path, record(repeat=repeat, plan__dp=2, train__global_batch=16, seconds=0.105 * slower))
        keep(tmp_path, record(repeat=repeat, plan__dp=2, train__global_batch=8, seconds=0.075 * slower))
    shown, text = shown_of(tmp_path), index(read(tmp_path))
    assert "| headline | published | simulated | measured (smoke) |" in shown
    assert "| 1 of 1 degrees; 95% and 67% (2 ranks) |" in shown
    assert "| smoke, measured | reproduced |" in shown
    [row] = [row for row in section(text, "All experiments").splitlines() if f"[{NAME}]" in row]
    assert row.endswith("| 1 reproduced | – |")
    assert "measured: 1 reproduced" in section(text, "All experiments")


def test_sizes_and_placements_are_one_table_without_its_points(tmp_path: Path) -> None:
    for norm in ("pre", "post"):
        keep(tmp_path, record(model__norm_placement=norm))
    shown = shown_of(tmp_path)
    assert shown.count("### ") == 1
    assert "by point" not in shown


def test_the_highest_tier_is_shown_alone(tmp_path: Path) -> None:
    keep(tmp_path, record())
    keep(tmp_path, record(tier="small"), tier="small")
    shown = shown_of(tmp_path)
    assert "Tier `small`" in shown
    assert "smoke tier" not in shown


def test_an_experiments_own_table_is_shown(tmp_path: Path) -> None:
    name = "megatron2019/tensor_parallel_scaling"
    keep(tmp_path, record(**BASE), name=name)
    assert "### Efficiency of tensor parallelism" in shown_of(tmp_path, name)


BASE: dict[str, Any] = {"model__num_layers": 2, "model__hidden_size": 128, "model__num_heads": 4}


def test_only_runs_that_failed_are_said_to(tmp_path: Path) -> None:
    keep(tmp_path, record(status="failed", reason="rank 0 was killed by SIGKILL"))
    shown = shown_of(tmp_path)
    assert "no run ended well" in shown
    assert "1 point: 0 ok, 1 failed" in shown


def test_in_a_repository_only_tracked_records_count(tmp_path: Path) -> None:
    git = lambda *words: subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    git("init")
    out = tmp_path / "results"
    tracked = keep(out, record(model__norm_placement="pre"))
    keep(out, record(model__norm_placement="post"))
    keep(out, record(tier="small"), tier="small")
    assert "No records yet." in shown_of(out)
    git("add", str(tracked))
    shown = shown_of(out)
    assert "1 point: 1 ok" in shown
    assert "Tier `smoke`" in shown

"""The verbs `show` and `list`: a table or figure of a paper by its number, and experiments by a word."""

from pathlib import Path

import pytest

from harness.cli.show import located
from harness.experiment.loading import experiment_ids
from harness.records.store import Store
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import document as document_of
from tests.harness.made_up_records import record


@pytest.mark.parametrize(
    ("text", "place", "experiment"),
    [
        ("PTD-P figure 12", "figure 12", "ptdp2021/interleaving"),
        ("ptd-p 2021, figure 12", "figure 12", "ptdp2021/interleaving"),
        ("zero figure 2", "figure 2", "zero2019/zero_throughput"),
        ("Megatron-LM table 3", "table 3", "megatron2019/model_size_perplexity"),
        ("Korthikanti table 5", "table 5", "korthikanti2022/activation_recomputation"),
    ],
)
def test_a_place_is_found_by_the_usual_names(text: str, place: str, experiment: str) -> None:
    found, experiments = located(text)
    assert str(found) == place
    assert experiment in [each.id for each in experiments]


def test_published_numbers_verdicts_and_own_records_stand_together(tmp_path: Path) -> None:
    name = "megatron2019/tensor_parallel_scaling"
    for tp in (1, 2):
        Store(tmp_path, name, "smoke").write(document_of(record(plan__tp=tp)) | {"experiment": name, "tier": "smoke"})
    answer = call("show", "megatron", "figure", "5", "--out", tmp_path)
    assert answer.status == 0, answer.errors
    order = ["figure 5, as published", f"{name}: ", "claims about it", "measured, tier smoke"]
    at = [answer.output.index(text) for text in order]
    assert at == sorted(at)
    assert f"again: lmscale run {name} --tier paper" in answer.output
    found = document(call("show", "megatron", "figure", "5", "--out", tmp_path, "--json").output)
    assert (found["paper"], found["place"]) == ("megatron2019", "figure 5")
    assert len(found["published"]["rows"]) > 3
    by_id = {each["id"]: [table["runs"] for table in each["tables"]] for each in found["experiments"]}
    assert by_id[name] == ["claims about it", "measured, tier smoke"]


def test_what_is_no_single_known_place_is_refused() -> None:
    assert "names no table or figure of a paper; valid: one, as PTD-P figure 12" in refused("show", "figure", "12")
    assert "names several tables and figures" in refused("show", "PTD-P", "figures", "12", "and", "13")
    assert "PTD-P 2021 has no figure 99 here; valid: table 1" in refused("show", "ptd-p", "figure", "99")


def test_experiments_are_listed_by_a_word_and_a_few_of_them_with_all_that_is_known() -> None:
    *lines, _, last = call("list").output.splitlines()
    assert len(lines) == len(experiment_ids())
    assert max(map(len, lines)) <= 120
    assert last.startswith(f"{len(lines)} experiments, with their points at smoke, small, paper; ")
    few = call("list", "ptdp2021/INTER").output
    assert all(words in few for words in ("ptdp2021/interleaving", "figure 12", "96 GPUs", "smoke", "paper"))
    assert {each["id"] for each in document(call("list", "ptdp2021/interleaving", "--json").output)} == {
        "ptdp2021/interleaving"
    }
    assert "is in no id, question or source of an experiment" in refused("list", "no such word")

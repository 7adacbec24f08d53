"""Sources are read as their authors write them, and the index by number misses nothing."""

import pytest

from harness.experiment.loading import experiment_ids, load
from harness.experiment.published import papers, published
from harness.experiment.references import PAPERS, Place, answered, of_experiment, places, title

EXPERIMENTS = [load(name) for name in experiment_ids()]


@pytest.mark.parametrize(
    ("source", "paper", "found"),
    [
        ("Megatron-LM 2019, section 5.1, tables 1 and 8, figure 5", "", "megatron2019: table 1, table 8, figure 5"),
        ("tables 3 and 7 to 9, figures 6 to 8", "zero2019", "zero2019: table 3, 7 8 9; figure 6, 7 8"),
        ("table 5, figure 8", "korthikanti2022", "korthikanti2022: table 5; figure 8"),
        ("PTD-P, figure 17", "korthikanti2022", "ptdp2021: figure 17"),
        (
            "Korthikanti et al. 2022, figure 7; PTD-P 2021, figure 17",
            "",
            "korthikanti2022: figure 7 ptdp2021: figure 17",
        ),
        ("ZeRO (Rajbhandari et al. 2019), section 7; table 2", "", "zero2019: table 2"),
        ("PTD-P 2021, section 2.2; Qi et al. 2023, table 2", "", "zerobubble2024: table 2"),
        ("our own; ZeRO 2019, section 7, and Megatron-LM 2019, figure 5", "", "megatron2019: figure 5"),
        ("Frontier 2023, tables I and IV, figure 7a", "", "frontier2023: table 1 4 figure 7"),
        ("figure 7", "ours", ""),
        ("Kaplan et al. 2020, table 3; figure 4", "ptdp2021", ""),
        ("section 5.3.2, 12", "ptdp2021", ""),
        ("figure 12.5", "ptdp2021", ""),
    ],
)
def test_a_source_is_read(source: str, paper: str, found: str) -> None:
    expected, name, kind = [], "", ""
    for word in found.replace(",", "").replace(";", "").split():
        if word.endswith(":"):
            name = word[:-1]
        elif word.isdigit():
            expected.append(Place(name, kind, int(word)))
        else:
            kind = word
    assert places(source, paper) == expected


def test_a_table_is_called_as_its_paper_numbers_it() -> None:
    assert [str(place) for place in places("Frontier 2023, table IV, figure 4")] == ["table IV", "figure 4"]
    assert str(Place("zero2019", "table", 4)) == "table 4"


def test_every_table_and_figure_that_an_experiment_names_leads_to_it() -> None:
    index = answered(EXPERIMENTS)
    for experiment in EXPERIMENTS:
        for place in of_experiment(experiment):
            assert experiment.id in index[place.paper][place]


def test_every_published_table_and_figure_is_in_the_index() -> None:
    index = answered([])
    for paper in papers():
        for where in published(paper)["where"]:
            for place in places(where, paper):
                assert index[paper][place] == []


def test_papers_are_in_one_order_and_tables_stand_before_figures() -> None:
    index = answered(EXPERIMENTS)
    assert list(index) == [paper for paper in PAPERS if paper in index]
    for found in index.values():
        assert list(found) == sorted(found, key=lambda place: (place.kind != "table", place.number))
    assert index["ptdp2021"][Place("ptdp2021", "figure", 17)], "the experiment is another paper's"


def test_every_folder_of_a_paper_has_a_title() -> None:
    folders = {name.partition("/")[0] for name in experiment_ids() if "/" in name} - {"ours"} | set(papers())
    assert [folder for folder in folders if title(folder) == folder] == []

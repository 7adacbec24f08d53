"""What a run lacks is found before it starts."""

from dataclasses import replace
from pathlib import Path

from harness.launch.preflight import Datasets, Site, why_invalid
from impl.data.config import PROTEINS, DataConfig
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.run import Run


def test_prose_is_not_scored_with_the_letters_of_proteins(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Prose.\n")
    run = Run(
        model=ModelConfig(num_layers=1, hidden_size=16, num_heads=2, seq_len=32), data=DataConfig(dataset=PROTEINS)
    )
    there = Datasets(tmp_path / "synthetic")
    assert why_invalid(run, there, Site()) is None
    scored = replace(run, evaluation=EvaluationConfig(texts=(str(tmp_path / "text.txt"),)))
    assert "the tokenizer amino does not have" in str(why_invalid(scored, there, Site()))


def test_pairs_of_texts_need_room() -> None:
    model = ModelConfig(family="bert", num_layers=1, hidden_size=16, num_heads=2, seq_len=4)
    assert Run(model=model).problems() == ["model.seq_len 4 is too short for BERT's pairs; valid: 5 and more"]
    assert not Run(model=replace(model, seq_len=5)).problems()

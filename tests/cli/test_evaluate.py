"""The verb `evaluate`: a checkpoint of any layout, by our own path and by lm-evaluation-harness; bad input."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from impl.checkpoint import Checkpoints
from impl.data.prepare import prepare
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.detokenize import detokenize
from impl.downstream import original_tokens
from impl.evaluation_config import EvaluationConfig
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.harness.calls import call, document, refused
from tests.impl.data.library_files import library_files
from tests.ranks import run_ranks

SEQ_LEN, STEPS = 32, 60
RUN = Run(
    model=ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=SEQ_LEN, dropout=0.1),
    plan=Plan(tp=2),
    train=Recipe(steps=STEPS, global_batch=16, microbatch=16, lr=1e-2, warmup_steps=10),
    seed=3,
)


def trained(run: Run, folder: Path, data: Path) -> list[float | None]:
    """A checkpoint in the folder; word perplexity or accuracy of every evaluation by the ranks that wrote it."""
    one = Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))
    for i in range(run.train.steps):
        one.step(i)
    checkpoints = Checkpoints(folder, one, torch.distributed.new_group(backend="gloo"))  # pyright: ignore
    checkpoints.save(run.train.steps)
    checkpoints.wait()
    return [e.word_perplexity if e.kind == "words" else e.accuracy for e in one.evaluate(final=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its token folder, texts in the language that it has learned, and what its own ranks say of them."""
    here = tmp_path_factory.mktemp("evaluate")
    words = list(np.random.default_rng(0).choice(["yes", "no", "maybe"], 12_000, p=(0.5, 0.3, 0.2)))
    text = " ".join(words)
    (here / "text.txt").write_text(text)
    prepare(str(here / "text.txt"), "byte", here / "tokens")
    (here / "natural.txt").write_text(text[: 40 * SEQ_LEN])  # whole windows: no rule for a last one enters
    (here / "odd.txt").write_text(text[: 60 * SEQ_LEN + 7])
    four = [words[n : n + 4] for n in range(40)]
    marked = "".join(f" = {a} = \n {b} @-@ {c} , <unk> {d} \n" for a, b, c, d in four)
    (here / "marked.txt").write_text(marked + "a" * (-len(detokenize(marked)) % SEQ_LEN))
    passages = [" ".join(words[n : n + 12]) for n in range(0, 600, 12)]
    passages += ["\n\n".join(passage.rsplit(" ", 1)) for passage in passages[:5]]
    (here / "lambada.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    texts = tuple(str(here / name) for name in ("natural.txt", "odd.txt", "marked.txt"))
    evaluation = EvaluationConfig(sequences=None, texts=texts, lambada=str(here / "lambada.jsonl"))
    first, _ = run_ranks(2, trained, replace(RUN, evaluation=evaluation), here / "checkpoints", here / "tokens")
    (here / "own.json").write_text(json.dumps(first))
    return here


Evaluated = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """The rows that the verb prints as JSON."""
    monkeypatch.chdir(folder)

    def rows(*options: str) -> list[dict[str, Any]]:
        words = ["evaluate", "--checkpoint", "checkpoints", "--data", "tokens", "--lambada", "lambada.jsonl"]
        said = document(call(*words, "--texts", "natural.txt", "odd.txt", "marked.txt", *options, "--json").output)
        assert said["step"] == STEPS
        return said["rows"]

    return rows


def test_a_checkpoint_of_two_ranks_is_evaluated_on_one(folder: Path, evaluated: Evaluated) -> None:
    own = json.loads((folder / "own.json").read_text())
    found = evaluated()
    assert [row["name"] for row in found] == ["natural.txt", "odd.txt", "marked.txt", "lambada", "lambada"]
    assert [row["measure"] for row in found] == ["word perplexity"] * 3 + ["accuracy", "word perplexity"]
    assert [row["ours"] for row in found[:4]] == pytest.approx(own, rel=1e-4)
    assert 0 < found[3]["ours"] < 1


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra `eval` is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overlap", [0, SEQ_LEN // 2])
def test_lm_evaluation_harness_agrees(evaluated: Evaluated, overlap: int) -> None:
    natural, odd, marked, accuracy, last_words = evaluated("--lm-eval", "--overlap", str(overlap))
    for row in (natural, marked, last_words):
        assert row["lm_eval"] == pytest.approx(row["ours"], rel=1e-5)
    assert accuracy["lm_eval"] == accuracy["ours"]
    # a last window that is not whole has more context there: it predicts a little better, or as well
    assert odd["lm_eval"] == pytest.approx(odd["ours"], rel=2e-2)


def test_a_llama_is_evaluated_in_its_own_tokens(tmp_path: Path) -> None:
    """Word perplexity is that of the model of transformers on its tokenizer's ids, after the end of text."""
    transformers = pytest.importorskip("transformers")
    folder = library_files(tmp_path / "hf", "llama-2")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    of_model = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **of_model)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("It's the cat. The cat sat, 12345 (\u65e5\u672c\u8a9e) \u00e9\n")
    data, weights = tmp_path / "tokens", tmp_path / "ckpt"
    made = call("prepare", "--text", text, "--valid", text, "--tokenizer", f"hf:{folder}", "--out", data)
    assert made.status == 0, made.errors
    assert call("import-hf", "--weights", folder, "--data", data, "--out", weights).status == 0
    answer = call("evaluate", "--checkpoint", weights, "--data", data, "--texts", text, "--device", "cpu", "--json")
    (row,) = document(answer.output)["rows"]
    ids = torch.tensor([tokenizer.encode(text.read_text(), add_special_tokens=False)])
    ends = torch.full((1, 1), tokenizer.convert_tokens_to_ids("</s>"))
    logits = theirs(torch.cat([ends, ids[:, :-1]], 1)).logits
    nats = torch.nn.functional.cross_entropy(logits[0], ids[0], reduction="sum").item()
    assert len(ids[0]) <= 64
    assert row["ours"] == pytest.approx(math.exp(nats / original_tokens(text.read_text())), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--checkpoint checkpoints --data tokens --lambada lambada.jsonl --lm-eval", "pip install 'lmscale[eval]'"),
        ("--checkpoint nowhere --data tokens --lambada lambada.jsonl", "--checkpoint: no step-* in nowhere"),
        ("--checkpoint checkpoints --data tokens", "nothing to evaluate on; valid: --texts"),
        ("--checkpoint checkpoints --data nowhere --lambada lambada.jsonl", "no token folder nowhere"),
        ("--checkpoint checkpoints --data tokens --texts nowhere.txt", "nowhere.txt"),
        ("--checkpoint checkpoints --data tokens --lambada lambada.jsonl --overlap 32", "evaluation.overlap 32"),
        ("--checkpoint checkpoints --data tokens --lambada lambada.jsonl --batch 0", "--batch 0"),
        ("--checkpoint checkpoints --data others --lambada lambada.jsonl", "is a checkpoint of another model: data"),
    ],
)
def test_bad_input_is_one_line(folder: Path, words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("harness.cli.evaluate.find_spec", lambda _: None)  # as where the extra is not installed
    if "others" in words:
        write_synthetic(folder / "others", SyntheticConfig(train_tokens=2000, valid_tokens=1000))
    assert says in refused("evaluate", *words.split())

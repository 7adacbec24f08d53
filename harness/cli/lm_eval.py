"""A model of ours under lm-evaluation-harness, with its requests, windows, tasks and metrics as for any other model.

Ours are the forward pass and the tokenizer. Imported only where the extra `eval` is installed.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from lm_eval import evaluator  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.task import ConfigurableTask, Task  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from impl.data.text import TextFile
from impl.data.tokenizer import Tokenizer
from impl.detokenize import detokenize, is_word_tokenised
from impl.downstream import original_tokens
from impl.evaluate import Scorer
from impl.run import Run

WORDS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "process_results": lambda doc, results: {"word_perplexity": (results[0], doc["words"])},
    "metric_list": [
        {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
    ],
}
"""Settings of its task `wikitext`, on a file as one document, with the words of the original text."""
LAST_WORD = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.rsplit(none, 1)[0]}}",
    "doc_to_target": "{{' ' + text.rsplit(none, 1)[1]}}",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
    ],
}
"""Settings of its task `lambada_openai`; a last word may be on a line of its own."""
METRICS = {"words": ("word_perplexity,none",), "lambada": ("acc,none", "perplexity,none")}


class OurModel(TemplateLM):
    """Log-likelihoods from a scorer of ours.

    Args:
        overlap: tokens of context that the next window of a long text keeps, unscored.
        batch: sequences in a forward pass.
        is_limited: experts take a share of a sequence, which is then not to be as long as others beside it.
    """

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, *, seq_len: int, overlap: int, batch: int, is_limited: bool
    ) -> None:
        super().__init__()
        self.is_limited = is_limited
        self.scorer, self.encoder = scorer, tokenizer
        self.seq_len, self.overlap, self.batch = seq_len, overlap, batch

    @property
    def eot_token_id(self) -> int:
        return self.encoder.eot

    @property
    def max_length(self) -> int:
        return self.seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encoder.encode(string).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        whole, first = self.tok_encode(context + continuation), self.tok_encode(context)
        return first, whole[len(first) :]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log p of each request's continuation given its context, and True if every token is the likeliest."""
        rows = [np.array([*context, *continuation])[-self.seq_len - 1 :] for _, context, continuation in requests]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            width = self.seq_len + 1 if self.is_limited else len(rows[part[0]])
            padded = np.full((len(part), width), self.encoder.eot, np.int64)
            for line, i in zip(padded, part, strict=True):
                line[: len(rows[i])] = rows[i]
            nats, is_likeliest = self.scorer.next_token(padded[:, :-1], padded[:, 1:])
            for line, i in enumerate(part):
                end = len(rows[i]) - 1
                asked = slice(end - len(requests[i][2]), end)
                found[i] = -nats[line, asked].double().sum().item(), bool(is_likeliest[line, asked].all())
        return [found[i] for i in range(len(rows))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [sum(log_p for log_p, _ in self._loglikelihood_tokens(self._windows(*one.args))) for one in requests]

    def _windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, max_seq_len=self.seq_len, context_len=self.overlap + 1
        )
        return [(None, list(context), list(new)) for context, new in map(make_disjoint_window, windows)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("no text is generated here")


def scores(run: Run, tokenizer: Tokenizer, scorer: Scorer) -> list[float]:
    """Return the scores that lm-evaluation-harness finds.

    These are the word perplexity of each of the run's texts, then accuracy and perplexity of LAMBADA's last words.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    overlap, batch = run.evaluation.overlap, run.train.microbatch
    how = {"overlap": overlap, "batch": batch, "is_limited": run.model.expert_capacity is not None}
    model = OurModel(scorer, tokenizer, seq_len=run.model.seq_len, **how)
    tasks = dict(_tasks(run))
    found = evaluator.evaluate(model, tasks, bootstrap_iters=0, log_samples=False)
    results: dict[str, Any] = (found or {}).get("results", {})
    return [results[name][metric] for name in tasks for metric in METRICS[name.partition("_")[0]]]


def _tasks(run: Run) -> Iterator[tuple[str, Task]]:
    """Yield name and task of every evaluation, with documents from local files; names begin with a key of METRICS."""
    for number, path in enumerate(run.evaluation.texts):
        [text] = TextFile(path, Path(path)).documents()
        natural = detokenize(text) if is_word_tokenised(text) else text
        yield _task(f"words_{number}", WORDS, [{"text": natural, "words": original_tokens(text)}])
    if (path := run.evaluation.lambada) is not None:
        yield _task("lambada", LAST_WORD, [{"text": text} for text in TextFile(path, Path(path)).documents()])


def _task(name: str, config: Mapping[str, Any], documents: list[dict[str, Any]]) -> tuple[str, Task]:
    made = {"task": name, "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)}, "test_split": "test"}
    return name, ConfigurableTask(config={**made, **config})

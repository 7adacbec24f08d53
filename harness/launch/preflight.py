"""Checks of whether a run can be carried out here, before anything is launched."""

import os
from importlib.util import find_spec
from pathlib import Path

import psutil

from harness.launch import texts
from harness.launch.slurm import Site
from harness.predict.memory import by_category, gpu_memory, predicted
from harness.records.printable import several
from harness.records.store import Document
from harness.terminal import shown
from impl.data.config import EMBEDDED, SYNTHETIC
from impl.data.proteins import ProteinConfig, make_families, write_proteins
from impl.data.race import why_no_race
from impl.data.synthetic import SyntheticConfig, make_source, write_synthetic
from impl.data.tokens import SPLITS, TokenFolder
from impl.errors import InputError
from impl.model.config import SPECIAL_TOKENS
from impl.run import Run

RANK_BYTES = 400 * 2**20
"""Resident memory of a rank after the import of PyTorch, measured on Linux."""
ANYWAY = "--allow-oom starts it anyway"
SEGMENTS = {"gpt": 1, "bert": 2}
"""Number of separate pieces of text in a training sequence, at most."""


class Datasets:
    """Token folders by their name in a run; each is checked once, including its hashes."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._opened: dict[str, TokenFolder] = {}

    def open(self, dataset: str) -> TokenFolder:
        """Return a folder's tokens; the embedded synthetic ones are written on first use.

        Raises:
            InputError: missing, damaged, or not a token folder.
            OSError: the language cannot be written.
        """
        if dataset not in self._opened:
            path = self._embedded(dataset) if dataset in EMBEDDED else Path(dataset)
            self._opened[dataset] = TokenFolder.open(path, verify=True)
        return self._opened[dataset]

    def keep_in(self, cache: Path) -> None:
        """Use another folder for the embedded languages; other folders that are open stay open."""
        if cache != self.cache:
            self.cache = cache
            for dataset in EMBEDDED:
                self._opened.pop(dataset, None)

    def _embedded(self, dataset: str) -> Path:
        if dataset == SYNTHETIC:
            config = SyntheticConfig()
            name, rate = f"seed-{config.seed}", make_source(config).nats_per_letter
            write = lambda folder: write_synthetic(folder, config)
        else:
            families = ProteinConfig()
            name, rate = f"proteins-seed-{families.seed}", make_families(families).nats_per_token
            write = lambda folder: write_proteins(folder, families)
        folder = (self.cache / name).resolve()
        try:
            written = TokenFolder.open(folder, verify=True).manifest.entropy
        except InputError:
            written = None
        # a language whose constants have changed since is another one, under the same seed
        if written is None or abs(written.nats_per_token - rate) > 1e-9:
            write(folder)
        return folder


def summary(data: TokenFolder, dataset: str) -> Document:
    """Return the data's summary for a record: identity, tokenizer, counts and, if known, entropy."""
    manifest, rates = data.manifest, None
    if (entropy := manifest.entropy) is not None:
        rates = {name: getattr(entropy, name) for name in ("nats_per_token", "nats_per_word", "nats_per_byte")}
        # the code length of the very text of validation
        valid = {"nats_per_token": entropy.valid_nats_per_token, "standard_error": entropy.valid_standard_error}
        rates |= {"valid": valid}
    return {
        "name": dataset if dataset in EMBEDDED else Path(dataset).name,
        "sha256": data.sha256,
        "tokenizer": manifest.tokenizer,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "split_rule": manifest.split_rule,
        "train_tokens": manifest.train.tokens,
        "valid_tokens": manifest.valid.tokens,
        "entropy": rates,
    }


def why_invalid(run: Run, datasets: Datasets, site: Site) -> str | None:
    """Return the first reason why the run cannot be carried out, in one line; None if it can.

    Raises:
        OSError: the embedded language cannot be written, as on a full disk.
    """
    if problems := run.untrainable():
        return problems[0]
    if run.engine == "deepspeed" and find_spec("deepspeed") is None:
        return "the deepspeed engine is not installed; `pip install deepspeed`, or valid here: native, torch"
    try:
        data = datasets.open(run.data.dataset)
    except InputError as error:
        if run.data.dataset in texts.KNOWN and not Path(run.data.dataset).exists():
            return f"no token folder {run.data.dataset}{texts.where_from(run.data.dataset)}; {texts.substitute(run)}"
        return str(error)
    reason = _vocabulary(run, data) or _files(run) or site.why_invalid(run.plan.world_size)
    return reason or _memory(run, data.manifest.vocab_size, site)


def why_doubtful(run: Run, site: Site) -> str | None:
    """Return why a run's timing on this machine is doubtful, in one line; None if it is not."""
    cores = len(os.sched_getaffinity(0))
    ranks, threads = run.plan.world_size, run.threads
    if (site.on, site.device) != ("local", "cpu") or site.agents or ranks * threads <= cores:
        return None
    shared = f"{several(ranks, 'rank')} x {several(threads, 'thread')} share {several(cores, 'core')}"
    return f"{shared}: no scaling can be read from this"


def _vocabulary(run: Run, data: TokenFolder) -> str | None:
    needed = data.manifest.vocab_size + SPECIAL_TOKENS[run.model.family]
    if run.model.vocab_size is not None and run.model.vocab_size < needed:
        return f"model.vocab_size {run.model.vocab_size} is below the {needed} tokens of {run.data.dataset}"
    if data.manifest.tokenizer == "amino" and (run.evaluation.texts or run.evaluation.lambada):
        return "evaluation.texts and evaluation.lambada need letters and spaces that the tokenizer amino does not have"
    for split in SPLITS:
        # BERT draws its second segment from elsewhere in the text
        tokens, least = data.manifest.split(split).tokens, SEGMENTS[run.model.family] * run.model.seq_len + 1
        if tokens < least:
            return f"{run.data.dataset}: {split} has {tokens} tokens, model.seq_len {run.model.seq_len} needs {least}"
    return None


def _files(run: Run) -> str | None:
    """Return what is wrong with RACE or the texts of evaluation; PyTorch is imported only if there are any."""
    if run.data.race is not None and (reason := why_no_race(run.data.race)):
        return reason
    if not (run.evaluation.texts or run.evaluation.lambada):
        return None
    from impl.downstream import missing_inputs

    missing = (path for path in texts.read_by(run) if path != run.data.dataset and not Path(path).exists())
    if (path := next(missing, None)) is not None:
        return f"no file {path}{texts.where_from(path)}"
    return missing_inputs(run)


def _memory(run: Run, tokenizer_size: int, site: Site) -> str | None:
    """Return why this machine or its GPUs are predicted to have too little memory; a cluster's is not known."""
    if site.on != "local" or site.agents or site.allow_oom:
        return None
    ranks = predicted(run, tokenizer_size, site.device)
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    parts = f"pipeline rank {fullest} ({by_category(ranks[fullest])})"
    if site.device == "cuda":
        most, there = ranks[fullest].total, gpu_memory()
        if there is None or most <= there:
            return None
        return f"{parts} needs {shown(most)}, a GPU here has {shown(there)}; {ANYWAY}"
    copies = run.plan.world_size // run.plan.pp
    needed = sum(copies * (RANK_BYTES + memory.total) for memory in ranks)
    there = psutil.virtual_memory().total
    if needed <= there:
        return None
    which = several(run.plan.world_size, "rank")
    return f"memory of {which}: {shown(needed)}, this machine has {shown(there)}; the most has {parts}; {ANYWAY}"

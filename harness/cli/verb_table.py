"""Table of verbs: the function of each, and a summary, which its docstring begins with."""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple


class Verb(NamedTuple):
    """Verb of the command line."""

    where: str
    """module:function; only the verb that is called is imported."""
    summary: str
    example: str = ""
    """Words of a call, with which its --help opens."""


SIZED = ("train", "memory", "ghost", "predict", "tune")
"""Verbs with `--model SIZE` and `--config FILE`: their options start from the run that these give."""
VERBS = {
    "list": Verb("harness.cli.verbs:list_experiments", "List the experiments", "list megatron"),
    "new": Verb("harness.cli.new:new", "Write a file of your own that runs as it is", "new experiment places"),
    "show": Verb("harness.cli.show:show", "Show a table or figure of a paper", "show PTD-P figure 12"),
    "run": Verb(
        "harness.cli.verbs:run",
        "Run the points of an experiment that have no finished record yet",
        "run quickstart --only norm=post",
    ),
    "status": Verb("harness.cli.status:status", "Show the state of an experiment's points", "status quickstart"),
    "watch": Verb(
        "harness.cli.status:watch",
        "Show the progress of an experiment's points that run elsewhere",
        "watch quickstart --html live.html",
    ),
    "cancel": Verb(
        "harness.cli.status:cancel", "End the jobs of an experiment's points", "cancel quickstart --only norm=post"
    ),
    "table": Verb(
        "harness.cli.verbs:table", "Print the tables of an experiment's records", "table quickstart --format tex"
    ),
    "claims": Verb(
        "harness.cli.claims:claims", "Check the claims of experiments against the records", "claims ptdp2021"
    ),
    "export": Verb(
        "harness.report.archive:export", "Write an experiment as one zip", "export interleaving --out interleaving.zip"
    ),
    "import": Verb(
        "harness.report.inbox:import_archive", "Read an archive that `export` wrote", "import interleaving.zip"
    ),
    "report": Verb("harness.cli.report:report", "Write a report of all records", "report --out site"),
    "certify": Verb(
        "harness.cli.certify:certify", "Compare two certificates of runs, bit for bit", "certify here there"
    ),
    "schema": Verb("harness.cli.verbs:schema", "Print the JSON schema of a record", "schema"),
    "train": Verb("harness.cli.verbs:train", "Train one run", "train --model gpt-0.5m --plan.dp 2 --train.steps 20"),
    "timeline": Verb(
        "harness.cli.timeline:draw_timeline", "Draw a pipeline schedule", "timeline --plan.pp 4 --plan.schedule zb_h1"
    ),
    "memory": Verb(
        "harness.predict.memory:memory",
        "Predict the memory that every pipeline rank of a run needs",
        "memory --model gpt-2.5b --plan.tp 2",
    ),
    "ghost": Verb(
        "harness.predict.ghost:ghost",
        "Execute the ranks of a run without devices, check their order",
        "ghost --model gpt-2.5b --plan.tp 2 --plan.pp 4",
    ),
    "predict": Verb(
        "harness.cli.predict:predict",
        "Predict the time and the memory of a training step",
        "predict --system selene --model gpt-2.5b --plan.tp 4 --precision fp16 --train.global-batch 64",
    ),
    "calibrate": Verb("harness.calibrate.calibrate:calibrate", "Measure this machine", "calibrate --out here.yaml"),
    "tune": Verb(
        "harness.tune.tune:tune",
        "Find the fastest parallel plans for a model",
        "tune --system selene --gpus 64 --model gpt-2.5b",
    ),
    "accuracy": Verb(
        "harness.predict.accuracy:accuracy", "Predict published and measured steps", "accuracy --out results"
    ),
    "evaluate": Verb(
        "harness.cli.evaluate:evaluate",
        "Evaluate a checkpoint of a GPT on texts and LAMBADA",
        "evaluate --checkpoint checkpoints --data tokens",
    ),
    "import-hf": Verb(
        "harness.cli.hugging_face:import_hf",
        "Make a checkpoint of GPT-2, GPT-NeoX, BERT or Llama from transformers",
        "import-hf --weights gpt2 --data tokens --out checkpoints",
    ),
    "export-hf": Verb(
        "harness.cli.hugging_face:export_hf",
        "Write a checkpoint as transformers reads it",
        "export-hf --checkpoint checkpoints --out gpt2",
    ),
    "prepare": Verb(
        "harness.cli.verbs:prepare",
        "Turn text into a token folder that runs can train on",
        "prepare --text corpus.txt --tokenizer byte --out tokens",
    ),
    "bench": Verb(
        "harness.bench.bench:bench",
        "Time the parts, and other engines beside ours",
        "bench --only step_time --compare results/bench/baseline.json",
    ),
    "doctor": Verb("harness.doctor.doctor:doctor", "Check this environment before a sweep", "doctor --ranks 2"),
}


def function_of(name: str) -> Callable[..., int]:
    """Import and return a verb's function."""
    module, _, function = VERBS[name].where.partition(":")
    return getattr(import_module(module), function)

"""What the documents say is so: links, commands, targets, versions, examples, and EXPERIMENTS.md as a whole."""

import csv
import functools
import hashlib
import json
import re
import shlex
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import pre_tokenizers

from harness.cli import main, verb_table
from harness.experiment.claims import in_full
from harness.experiment.experiment import TIERS, Experiment, points
from harness.experiment.loading import experiment_ids, load
from harness.experiment.published import FOLDER
from harness.launch.texts import KNOWN
from harness.records.store import Store
from impl.data.config import EMBEDDED
from impl.data.tokenizer import END_OF_TEXT
from impl.model.norm_placement import PLACEMENTS
from impl.own_code import code_of
from impl.pipeline import optimum
from impl.pipeline.schedule import Schedule
from impl.pipeline.schedules import check
from impl.pipeline.simulate import simulate, uniform
from impl.run import Run
from tests import ten_minutes
from tests.documents import EXPERIMENTS, README, ROOT, alike, experiment_pages, readme
from tests.harness.calls import report_little
from tests.harness.made_up_records import changed, document, record, record_of

DOCUMENTS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), "notebooks/README.md")
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS}
HARNESS = re.compile(r"^(?:\$ )?lmscale (.*)$", re.MULTILINE)
INLINE = re.compile(r"`lmscale ([^`>]*)")
EXECUTED = (
    *("list", "show", "status", "table", "prepare", "timeline", "memory", "ghost"),
    *("predict", "claims", "report", "export", "import", "new", "schema"),
)
DRY = ("run",)
"""With --dry-run: which points would be trained, and with which script on a cluster."""
LOOK = ("list", "status", "claims", "memory", "ghost", "schema")
GIVEN = ("table", "export", "predict", "train")
"""Verbs whose every command another test gives as it is shown, as those of LOOK."""
PARSED = (
    *("train", "evaluate", "import-hf", "export-hf", "watch", "cancel"),
    *("calibrate", "tune", "accuracy", "bench", "doctor", "certify"),
)
"""They train, need a checkpoint, jobs of a cluster or a quiet machine: only their options are looked at, but for one
short training. The commands of EXPERIMENTS.md are parsed too; `make smoke` executes those of tier smoke."""


def fences(text: str, language: str = "") -> Iterator[str]:
    """The contents of the fenced blocks with this language."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if found[1] == language:
            yield found[2]


def said(text: str) -> Iterator[list[str]]:
    """The commands of a document, in blocks and in sentences; an ID in capitals is the reader's."""
    lines = [line for block in fences(text) for line in HARNESS.findall(block)]
    lines += INLINE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\n", " "))
    for line in lines:
        yield ["quickstart" if word in ("EXPERIMENT", "ID") else word for word in shlex.split(line, comments=True)]


READERS_OWN = ("deep.py", "my_schedules")
"""Files that the documents have the reader write."""
FEWER = {"ghost": ["--model.num-layers", "8"]}
"""Layers of a model, for a verb that executes all that it has; 72, as shown, take nine times as long."""
COMMANDS = [list(words) for words in dict.fromkeys(tuple(words) for text in TEXTS.values() for words in said(text))]
PAGES = experiment_pages()
OF_EXPERIMENTS = [command for path in PAGES for command in said(path.read_text())]


@pytest.fixture
def idle_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's verbs with their options, doing nothing."""

    def idle(verb: Callable[..., int]) -> Callable[..., int]:
        return functools.wraps(verb)(lambda *_, **__: 0)

    function_of = verb_table.function_of
    monkeypatch.setattr(verb_table, "function_of", lambda name: idle(function_of(name)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def commands(*words: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[0] in words]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Standard output of a command of this process in an empty folder, which has to end well, or can run no point."""

    def run(command: list[str]) -> str:
        status = main.main(command)
        out, err = capsys.readouterr()
        can_run_none = "--dry-run" in command and "\n0 of " in out  # as texts are not here
        assert status == int(can_run_none), err
        return out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return run


def test_the_index_and_the_pages_of_experiments_are_what_the_registry_and_the_records_say() -> None:
    stale = [path for path, write in PAGES.items() if not (path.exists() and alike(write(), path.read_text()))]
    assert stale == [], "make documents"
    assert set(PAGES) == {EXPERIMENTS, *(path for path in (ROOT / "results").rglob("README.md") if is_page(path))}
    assert len(EXPERIMENTS.read_text().splitlines()) <= 300


def is_page(path: Path) -> bool:
    """Whether this file has the name of an experiment's page, and is not about records that were left out."""
    return path.parent.name != "left_out"


def test_the_tables_of_the_readme_are_what_experiments_markdown_and_the_benchmarks_say() -> None:
    assert README.read_text() == readme(), "make documents"
    assert "reproduced" in README.read_text()


@pytest.mark.parametrize("name", experiment_ids())
def test_every_experiment_says_what_it_is_and_has_all_tiers(name: str) -> None:
    experiment = load(name)
    assert experiment.question.endswith("?")
    assert experiment.source
    assert experiment.expectation
    for tier in TIERS:
        assert experiment.cost[tier]
        assert points(experiment.runs[tier])


@pytest.mark.parametrize("name", [*DOCUMENTS, *(path.relative_to(ROOT).as_posix() for path in PAGES)])
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, fragment = link.partition("#")
        target = document.parent / path if path else document
        assert not link.startswith("http"), f"{link}: documents work offline"
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@functools.cache
def anchors(document: Path) -> set[str]:
    """The fragments by which headings are linked to, as GitHub makes them."""
    anchor = lambda heading: re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)}


def test_every_document_is_linked_to() -> None:
    linked = {path for text in TEXTS.values() for path in re.findall(r"\]\(([^)#\s]+)", text)}
    assert {name for name in DOCUMENTS[1:] if name not in linked} == set()


def test_files_that_the_documents_name_exist() -> None:
    texts = "\n".join(TEXTS.values())
    named_files = re.findall(r"`((?:impl|harness|experiments|results|notebooks|docs)/[a-z0-9_/.]*)`", texts)
    assert len(named_files) > 10
    assert {f for f in named_files if not (ROOT / f).exists()} == {"experiments/batch_size.py"}  # the reader's


def test_the_tutorial_is_what_the_ten_minutes_execute() -> None:
    lines = [line for block in fences(TEXTS["docs/tutorial.md"], "sh") for line in block.splitlines()]
    assert len(lines) > 5
    assert [line for line in lines if line not in ten_minutes.COMMANDS.splitlines()] == []


def test_every_verb_has_an_example() -> None:
    assert {command[0] for command in COMMANDS} == set(verb_table.VERBS)
    assert {command[0] for command in [*COMMANDS, *OF_EXPERIMENTS]} <= {*EXECUTED, *DRY, *PARSED}


@pytest.mark.usefixtures("idle_verbs")
@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in (*LOOK, *GIVEN)], ids=" ".join)
def test_commands_have_these_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(command) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", commands("train"), ids=" ".join)
def test_runs_that_are_trained_are_possible(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    train, asked = verb_table.function_of("train"), list[Run]()
    keep = functools.wraps(train)(lambda config, **_: asked.append(config) or 0)
    monkeypatch.setattr(verb_table, "function_of", lambda _: keep)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # the shortest known table, whose search takes no seconds: other tests hold the search
    monkeypatch.setattr(optimum, "shortest", optimum.shortest.__wrapped__)
    monkeypatch.setattr(optimum, "search", functools.partial(optimum.search, seconds=0.0))
    assert main.main(command) == 0
    [run] = asked
    assert run.problems() == [] or any(name.partition(":")[0] in READERS_OWN for name in code_of(run))


@pytest.mark.usefixtures("idle_verbs")
def test_idle_verbs_have_no_other_options() -> None:
    assert {main.main([*command, "--not-an-option", "1"]) for command in {c[0]: c for c in COMMANDS}.values()} == {2}


@pytest.mark.usefixtures("idle_verbs")
def test_commands_of_experiments_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    full = [words for words in OF_EXPERIMENTS if len(words) > 1]  # a verb alone is spoken of
    kinds = {(words[0], *(word for word in words if word.startswith("-"))): words for words in full}
    for words in kinds.values():
        assert main.main(words) == 0, capsys.readouterr().err
    runs = [words for words in OF_EXPERIMENTS if words[0] == "run"]
    assert {(words[1], option(words, "--tier")) for words in runs} == {(n, t) for n in experiment_ids() for t in TIERS}


@pytest.mark.parametrize("command", commands("run", "status", "table"), ids=" ".join)
def test_experiments_and_points_that_are_named_exist(command: list[str]) -> None:
    experiment, tier = load(command[1]), option(command, "--tier") or "smoke"
    assert points(experiment.runs[tier], option(command, "--only"))  # pyright: ignore[reportArgumentType]


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


@pytest.mark.parametrize("command", commands(*LOOK), ids=" ".join)
def test_commands_that_only_look(command: list[str], here: Callable[..., str], tmp_path: Path) -> None:
    assert here([*command, *FEWER.get(command[0], [])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", commands(*DRY), ids=" ".join)
def test_what_would_be_run(command: list[str], here: Callable[..., str], tmp_path: Path) -> None:
    if folder := option(command, "--data"):
        write_text(tmp_path)
        here(["prepare", "--text", "corpus.txt", "--tokenizer", "byte", "--out", folder])
    [site] = [block for name in DOCUMENTS for block in fences(TEXTS[name], "toml")]
    (tmp_path / "site.toml").write_text(site)
    before = sorted(tmp_path.rglob("*"))
    command = [word for word in command if word != "--ghost"]  # of 64 GPUs they take a minute; tests/predict has others
    told = here([*command, *([] if "--dry-run" in command else ["--dry-run"])])
    assert "nothing was written" in told
    assert ("#SBATCH" in told) == ("slurm" in command)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", commands("table", "export"), ids=" ".join)
def test_tables_and_archives_are_made_of_records(command: list[str], here: Callable[..., str], tmp_path: Path) -> None:
    name, tier = load(command[1]).id, option(command, "--tier") or "smoke"
    Store(tmp_path / "runs", name, tier).write(document(changed(record(tier=tier), experiment=name)))
    assert (option(command, "--out") or name) in here(command)
    for again in commands("import") if command[0] == "export" else ():
        assert "imported: inbox/" in here(again)


def test_a_report_is_written(here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_little(monkeypatch, everywhere=True)
    monkeypatch.setattr("harness.cli.report.experiment_ids", lambda: ["quickstart"])
    Store(tmp_path / "runs", "quickstart", "smoke").write(document(changed(record(), experiment="quickstart")))
    command = max(commands("report"), key=len)  # test_trust makes one without options
    assert here(command)
    assert "quickstart" in (tmp_path / str(option(command, "--out")) / "EXPERIMENTS.html").read_text()


@pytest.mark.parametrize("command", commands("predict"), ids=" ".join)
def test_steps_are_predicted(command: list[str], here: Callable[..., str], tmp_path: Path) -> None:
    if rows := option(command, "--rows"):
        head, *published = (FOLDER / "steps" / "ptdp2021_table1.csv").read_text().splitlines()
        (tmp_path / rows).write_text("\n".join([head, *(row for row in published if "check" in row)]))
    assert here(command)


@pytest.mark.parametrize("command", [c for c in commands("prepare") if "hf:NAME" not in c], ids=" ".join)
def test_text_is_prepared(command: list[str], here: Callable[..., str], tmp_path: Path) -> None:
    write_text(tmp_path)
    assert "vocabulary" in here(command)
    assert (tmp_path / "data").is_dir()


def write_text(folder: Path) -> None:
    """The files that the commands read, each small."""
    text = "the cat sat on the mat and looked at the rain; " * 200
    (folder / "corpus.txt").write_text(text)
    (folder / "held_out.txt").write_text(text[:2000])
    (folder / "proteins.fasta").write_text(">one\nMKTAYIAK\nQRQ\n" * 50)
    documents = '{"text": "one document"}\n' * 50
    (folder / "corpus.jsonl").write_text(documents)
    for split in ("train", "valid"):
        (folder / f"books.{split}.jsonl").write_text(documents)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "on", "ne", END_OF_TEXT]
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\no n\nn e\n")


def test_token_folders_that_runs_ask_for_are_prepared_somewhere() -> None:
    asked = {run.data.dataset for name in experiment_ids() for tier in TIERS[:2] for run in load(name).runs[tier]}
    assert asked - {*EMBEDDED} <= {option(command, "--out") for command in commands("prepare")}


def test_experiments_that_train_on_real_text_are_listed() -> None:
    folders = {name: {run.data.dataset for run in load(name).runs["small"]} - {*EMBEDDED} for name in experiment_ids()}
    begins = TEXTS["docs/texts.md"].partition("| path |")[0].partition("`small` tier:")[2]
    assert sorted(re.findall(r"`(\w+)`", begins)) == sorted(
        name.rpartition("/")[2] for name in folders if folders[name]
    )


def test_every_text_that_experiments_name_is_in_the_table_of_texts() -> None:
    rows = [
        f"| `{path}` | {text.what} | {text.source} | {text.licence} | `{text.sha256}` |" for path, text in KNOWN.items()
    ]
    assert [line for line in TEXTS["docs/texts.md"].splitlines() if line.startswith("| `")] == rows
    # `paper` names texts that no record here is of
    runs = [run for name in experiment_ids() for tier in TIERS[:2] for run in load(name).runs[tier]]
    asked = {path for run in runs for path in (run.data.dataset, *run.evaluation.texts, run.evaluation.lambada)}
    assert asked - {*EMBEDDED, None} == set(KNOWN)
    records = Store(ROOT / "results", "megatron2019/layernorm_placement", "small").records()
    assert {record.resolved.data and record.resolved.data.sha256 for record in records} == {
        KNOWN["data/books-byte"].sha256
    }


def test_the_books_are_found_in_a_clone_in_the_order_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [source] = fences(TEXTS["docs/texts.md"], "python")
    monkeypatch.chdir(tmp_path)
    text = "One\n\nIt rained. # of days: 3"
    with (ROOT / "docs" / "books.csv").open(encoding="utf-8") as listed:
        rows = list(csv.DictReader(listed))
    assert Counter(row["split"] for row in rows) == {"train": 223, "valid": 6}
    assert not {row["author"] for row in rows if row["split"] == "valid"} & {
        row["author"] for row in rows if row["split"] == "train"
    }
    chosen = [rows[5] | {"sha256": hashlib.sha256(text.encode()).hexdigest()}, rows[3], rows[-1], rows[0]]
    for row in chosen[:3]:
        path = tmp_path / "classic-books-markdown" / row["author"] / f"{row['title']} .md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"### One\n\n\n\n{text.partition(chr(10))[2].strip()}\n\n", encoding="utf-8")
    with (tmp_path / "books.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(chosen)
    exec(compile(source, "docs/texts.md", "exec"), {})
    assert capsys.readouterr().out == f"1 of 4 books are the same to the byte; not found: ['{rows[0]['title']}']\n"
    train = [json.loads(line) for line in (tmp_path / "books.train.jsonl").read_text().splitlines()]
    assert [row["title"] for row in train] == [rows[5]["title"], rows[3]["title"]]
    assert {row["text"] for row in train} == {text}
    assert (tmp_path / "books.valid.jsonl").read_text().count("\n") == 1


def test_a_few_steps_are_trained(here: Callable[..., str]) -> None:
    is_short = lambda c: "--train.steps" in c and "--plan.dp" in c and "--certify" not in c  # others train for longer
    [command] = map(list, filter(is_short, commands("train")))
    assert int(option(command, "--train.steps") or 0) <= 20
    command[command.index("--train.steps") + 1] = "2"
    assert "Throughput" in here([*command, "--evaluation.sequences", "8"])


def test_quickstart_ends_with_the_commands_that_the_readme_shows() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    printed = re.findall(r"'  (.*?)' *\\?$", makefile, re.MULTILINE)
    shown = next(block for block in fences(TEXTS["README.md"]) if "activate" in block)
    command = lambda line: line.partition("#")[0].split()
    assert [command(line) for line in printed] == [command(line) for line in shown.splitlines()]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"(?:^|`)make\s(\w+)", "\n".join(TEXTS.values()), re.MULTILINE))
    assert {"quickstart", "test", "bench", "lint", "smoke", "documents"} <= used
    assert used <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


def test_the_citation_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_norm_placement_is_in_the_table() -> None:
    names = re.findall(r"^\| `(\w+)` \|", TEXTS["docs/extending.md"], re.MULTILINE)
    assert names == list(PLACEMENTS)


def test_the_experiment_that_is_shown_is_complete() -> None:
    source, _ = fences(TEXTS["docs/extending.md"], "python")
    module = ModuleType("batch_size")
    exec(compile(source, "docs/extending.md", "exec"), vars(module))
    experiment = module.EXPERIMENT
    assert isinstance(experiment, Experiment)
    assert module.__doc__
    assert module.__doc__.splitlines()[0].endswith("?")
    for tier in TIERS:
        labels = [f"batch={batch} seed={seed}" for seed in range(3) for batch in (8, 16, 32)]
        assert [p.label for p in points(experiment.runs[tier])] == labels
        assert not [problem for run in experiment.runs[tier] for problem in run.problems()]
    [claim] = experiment.claims
    for slope, verdict in ((-0.05, "reproduced"), (0.05, "not reproduced")):
        nats = lambda run, slope=slope: 3 + slope * run.train.global_batch + run.seed / 100
        evidence = claim.check([record_of(run, nats=nats(run)) for run in experiment.runs["smoke"]])
        assert in_full(evidence) == verdict


def test_the_schedule_that_is_shown_is_drawn_so_and_runs(
    here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, source = fences(TEXTS["docs/extending.md"], "python")
    (tmp_path / "my_schedules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    drawn = {" ".join(command): here(command) for command in commands("timeline")}
    assert any("my_schedules:in_groups" in command for command in drawn)
    shown = [block for block in fences(TEXTS["docs/plans.md"]) if block.startswith("zb_h1")]
    assert shown == [text for command, text in drawn.items() if "zb_h1" in command]
    own = vars(ModuleType("my_schedules"))
    exec(compile(source, "docs/extending.md", "exec"), own)
    schedule = Schedule("in_groups", tuple(map(tuple, own["in_groups"](2, 8))))
    check(schedule, 2, 8)
    assert simulate(schedule, uniform()).bubble == Fraction(1, 2)  # (p - 1) / p: that of each group
    assert {path.name for path in tmp_path.iterdir()} >= {"interleaved.png", "interleaved.svg"}


def test_the_ablation_that_is_shown_is_where_it_says() -> None:
    shown = TEXTS["docs/extending.md"]
    [line] = re.findall(r"`(NORMS = \(.*?\))`", shown)
    source = (ROOT / "experiments/megatron2019/layernorm_placement.py").read_text()
    assert line in source
    [line] = re.findall(r"`(models_and_rates\(.*?\)\))`", shown)
    assert line in source

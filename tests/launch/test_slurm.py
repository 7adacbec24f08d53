"""Where ranks can run, what a site file may say, and what Slurm is handed."""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli.sweeps import site_of
from harness.launch.flags import Place
from harness.launch.site_file import Cluster, read_cluster
from harness.launch.slurm import Site, minutes
from harness.rank import slurm_queue
from harness.rank.job import job_of
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_orders import made_up

SITE = """
partition = "gpu"
account = "lab"
constraint = "a100&nvlink"
ranks_per_node = 4
setup = ["module load cuda/12"]
container = ["apptainer", "exec", "--nv", "image.sif"]
interface = "ib0"
memory_per_rank = "16G"
cpus_per_rank = 6
signal_seconds = 120
extra = { exclusive = true, mail-type = "END", hint = "nomultithread" }
"""


def runs(*degrees: int) -> list[Run]:
    return [Run(plan=Plan(dp=dp), train=Recipe(global_batch=dp, microbatch=1)) for dp in degrees]


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (8, True), (9, False), (12, True), (16, True), (17, False)])
def test_ranks_fill_the_nodes_of_a_cluster_evenly(ranks: int, fits: bool) -> None:
    site = Site("slurm", cluster=Cluster(ranks_per_node=8))
    reason = site.why_invalid(ranks)
    assert (reason is None) == fits
    if fits:
        assert site.nodes(ranks) * (ranks // site.nodes(ranks)) == ranks


def test_auto_takes_gpus_only_where_every_point_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device in ((0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")):
        monkeypatch.setattr("harness.cli.sweeps.gpu_count", lambda gpus=gpus: gpus)
        assert site_of(Place(), runs(1, 2)).device == device
    assert site_of(Place(device="cpu"), runs(1, 2)).device == "cpu"


def test_more_ranks_than_gpus_is_invalid_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 1)
    assert Site(device="cuda").why_invalid(1) is None
    reason = Site(device="cuda").why_invalid(2)
    assert reason is not None
    assert "2 GPUs" in reason
    assert "--device cpu" in reason


# Site files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def site_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path | None, **given: Any) -> str:
    with pytest.raises(InputError) as refused:
        read_cluster(path, **given)
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_a_site_file_is_read_and_the_command_line_overrides_it(site_file: Callable[[str], Path]):
    found = read_cluster(site_file(SITE), partition="debug", account=None, ranks_per_node=2)
    assert (found.partition, found.account, found.ranks_per_node, found.qos) == ("debug", "lab", 2, None)
    assert found.container == ("apptainer", "exec", "--nv", "image.sif")
    assert found.extra == {"exclusive": True, "mail-type": "END", "hint": "nomultithread"}
    assert read_cluster() == read_cluster(site_file("")) == Cluster()
    assert "--ranks-per-node 0: must be a whole number from 1 to 4096" in refusal(None, ranks_per_node=0)
    assert "--partition 'a b': must be a name" in refusal(site_file(SITE), partition="a b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('partion = "gpu"', ("'partion' is no setting", "did you mean partition?", "valid: partition, account")),
        ('partition = "gpu\\n#SBATCH --uid=0"', ("partition = ", "a name")),
        ('partition = "a;b"', ("partition = 'a;b'",)),
        ('partition = "--uid=0"', ("partition",)),
        ('account = "$(id)"', ("account",)),
        ('qos = "`id`"', ("qos",)),
        ("qos = 3", ("qos = 3",)),
        ('reservation = ""', ("reservation",)),
        ('constraint = "a b"', ("constraint", "features")),
        ('interface = "../ib0"', ("interface", "ib0")),
        ("ranks_per_node = 0", ("ranks_per_node = 0", "from 1 to 4096")),
        ("ranks_per_node = true", ("ranks_per_node = True",)),
        ("ranks_per_node = 2.0", ("ranks_per_node",)),
        ("ranks_per_node = 0x" + "F" * 9000, ("ranks_per_node",)),
        ("ranks_per_node = " + "9" * 9000, ("not a TOML file",)),
        ("at_once = -1", ("at_once",)),
        ('memory_per_rank = "4 GB"', ("memory_per_rank", "4G")),
        ("signal_seconds = 1979-05-27", ("signal_seconds",)),
        ('setup = "module load x"', ("setup", "list of lines")),
        ('setup = ["a\\nb"]', ("setup",)),
        ('setup = ["true", " #SBATCH --uid=0"]', ("setup", "must not begin with #")),
        ("setup = [1]", ("setup",)),
        ('container = ["a", ""]', ("container", "list of words")),
        ("extra = 1", ("extra", "table")),
        ('extra = { wrap = "id" }', ("wrap cannot be set by a site",)),
        ('extra = { output = "/etc/passwd" }', ("output cannot be set by a site",)),
        ("extra = { partition = 1 }", ("partition has a setting of its own",)),
        ("extra = { cpus-per-rank = 1 }", ("cpus-per-rank has a setting of its own, cpus_per_rank",)),
        ("extra = { cpus-per-task = 1 }", ("cpus-per-task has a setting of its own, cpus_per_rank",)),
        ('extra = { "--uid" = 0 }', ("'--uid' must be a long option",)),
        ('extra = { comment = "a\\nb" }', ("comment must be a word",)),
        ("extra = { exclusive = false }", ("exclusive must be",)),
        ("a = " + "[" * 5000, ("not a TOML file",)),
        ("a = 1\na = 2", ("not a TOML file",)),
        ("x" * 2**17, ("up to 65,536 bytes",)),
        ("\0", ("not a TOML file",)),
    ],
)
def test_what_a_site_file_must_not_say_is_told_in_one_line(
    site_file: Callable[[str], Path], text: str, words: tuple[str, ...]
):
    path = site_file(text)
    told = refusal(path)
    assert told.startswith(f"--site {path}: ")
    for word in words:
        assert word in told


def test_what_is_no_site_file_is_told_in_one_line(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("missing", ".", "pipe", "bytes", "nul\0"):
        assert refusal(tmp_path / name).startswith("--site ")


# What Slurm is handed -----------------------------------------------------------------------------------------------


def options_of(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {name: "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes programs of Slurm's names, of which sbatch runs this shell script; returns the folder where they are."""

    def make(sbatch: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        sinfo = "echo 'main* 2-00:00:00'"
        for name, text in {
            "sbatch": f"cd '{folder}'\n{sbatch}",
            "sinfo": sinfo,
            "srun": "",
            "squeue": "exit 1",
        }.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr("harness.launch.slurm.PAUSE_SECONDS", 0.0)
        return folder

    return make


def attempts(folder: Path, count: int) -> list[Path]:
    found = [folder.resolve() / "attempts" / f"id-{i}" for i in range(count)]
    for path in found:
        path.mkdir(parents=True)
    return found


ACCEPT = 'cat "$1" >> script; n=$(cat n 2>/dev/null || echo 76); echo $((n + 1)) > n; echo Submitted batch job $(cat n)'


def test_points_of_one_shape_are_one_array(slurm: Callable[[str], Path], tmp_path: Path, site_file: Any):
    folder, tries = slurm(ACCEPT), attempts(tmp_path, 3)
    site = Site("slurm", "cuda", cluster=read_cluster(site_file(SITE)))
    assert site.submit(tries, 8, 3000.0, at_once=2) == ["77_0", "77_1", "77_2"]
    for i, attempt in enumerate(tries):
        kept = json.loads((attempt / "job.json").read_text())
        assert (kept["on"], kept["job"], kept["seconds"]) == ("slurm", f"77_{i}", 55 * 60)
        [pickled] = Path(kept["log"]).parent.glob(f"77_{i}_submitted.pkl")
        assert str(attempt).encode() in pickled.read_bytes()
    script = (folder / "script").read_text()
    [name] = (path.name for path in slurm_queue.submissions(tries[0]).iterdir())
    assert script == site.script(8, 3000.0, 3, 2, folder=tries[0].parent).replace("/NAME", f"/{name}")
    told = options_of(script)
    log = f"{slurm_queue.submissions(tries[0])}/{name}/%A_%a_0_log"
    assert told == {
        "array": "0-2%2",
        "partition": "gpu",
        "account": "lab",
        "constraint": "a100&nvlink",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "6",
        "mem": "64G",
        "time": "55",
        "signal": "USR2@120",
        "requeue": "",
        "open-mode": "append",
        "exclusive": "",
        "mail-type": "END",
        "hint": "nomultithread",
        "job-name": "lmscale",
        "output": f"{log}.out",
        "error": f"{log}.err",
        "wckey": "submitit",
    }
    assert "\nmodule load cuda/12\n" in script


def test_one_point_is_a_job_and_many_are_several_arrays(
    slurm: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slurm(ACCEPT)
    monkeypatch.setattr("harness.launch.slurm.ARRAY", 2)
    assert Site("slurm").submit(attempts(tmp_path, 5), 1, 60.0, at_once=4) == ["77_0", "77_1", "78_0", "78_1", "79"]
    script = (tmp_path / "bin" / "script").read_text()
    assert (script.count("--array=0-1%2\n"), script.count("--array=0-1%1\n")) == (1, 1), "four at once, over three"
    assert Site("slurm").submit([], 1, 60.0) == []


def test_a_refusal_is_one_line_and_leaves_nothing(slurm: Callable[[str], Path], tmp_path: Path):
    slurm("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    [attempt] = attempts(tmp_path, 1)
    with pytest.raises(InputError, match="the cluster refuses the job: sbatch: error: invalid partition") as refused:
        Site("slurm").submit([attempt], 1, 60.0)
    assert "\n" not in str(refused.value)
    assert job_of(attempt) is None
    assert list(slurm_queue.submissions(attempt).iterdir()) == []


def test_a_controller_that_restarts_is_asked_again(slurm: Callable[[str], Path], tmp_path: Path):
    busy = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    folder = slurm(f"{ACCEPT}; if mkdir once 2>/dev/null; then echo '{busy}' >&2; exit 1; fi")
    tries = attempts(tmp_path, 2)
    assert Site("slurm").submit(tries, 1, 60.0) == ["78_0", "78_1"]
    first, second = re.findall(r"--output=(.*)/%A", (folder / "script").read_text())
    assert list(slurm_queue.submissions(tries[0]).iterdir()) == [Path(second)]  # the first can write no output
    assert first != second


def test_a_controller_that_does_not_tell_a_limit_is_asked_again(slurm: Callable[[str], Path], tmp_path: Path):
    """A job of a day in a partition of two hours would wait without end."""
    folder = slurm(ACCEPT)
    answer = "if mkdir once 2>/dev/null; then echo 'Unable to contact slurm controller' >&2; exit 1; fi"
    (folder / "sinfo").write_text(f"#!/bin/sh\ncd {folder}; {answer}; echo 'main* 2:00:00'\n")
    tries = attempts(tmp_path, 2)
    assert Site("slurm").submit(tries, 1, 24 * 3600.0) == ["77_0", "77_1"]
    assert "--time=120\n" in (folder / "script").read_text()
    assert len(list(slurm_queue.submissions(tries[0]).iterdir())) == 1


def test_a_controller_that_never_tells_a_limit_is_an_error(slurm: Callable[[str], Path], tmp_path: Path):
    folder = slurm(ACCEPT)
    (folder / "sinfo").write_text("#!/bin/sh\necho 'slurm_load_partitions: Socket timed out' >&2; exit 1\n")
    [attempt] = attempts(tmp_path, 1)
    with pytest.raises(InputError, match="the cluster refuses the job: slurm_load_partitions: Socket timed out"):
        Site("slurm").submit([attempt], 1, 60.0)
    assert "--time=6\n" in Site("slurm").script(1, 60.0)  # which is only shown
    assert not (folder / "script").exists()
    assert list(slurm_queue.submissions(attempt).iterdir()) == []


def test_of_a_harness_killed_while_it_submits_the_next_one_removes_what_would_start(
    slurm: Callable[[str], Path], tmp_path: Path
):
    slurm(f"{ACCEPT}; kill -9 $PPID")
    given, other = attempts(tmp_path, 2)
    if not (harness := os.fork()):
        Site("slurm").submit([given], 1, 60.0)
    os.waitpid(harness, 0)
    assert len(list(slurm_queue.submissions(given).iterdir())) == 1
    slurm_queue.forget(other)
    assert len(list(slurm_queue.submissions(given).iterdir())) == 1
    slurm_queue.forget(given)
    assert list(slurm_queue.submissions(given).iterdir()) == []


def test_a_job_that_submits_hands_nothing_of_its_own_on(
    slurm: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = slurm(f"env | grep ^SLURM_ > variables; {ACCEPT}")
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    Site("slurm").submit(attempts(tmp_path, 1), 1, 60.0)
    assert (folder / "variables").read_text() == "SLURM_CONF=7\n"
    assert os.environ["SLURM_MEM_PER_CPU"] == "7"


def test_what_a_site_says_is_not_overridden_by_variables_of_the_shell(
    slurm: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Slurm prefers SBATCH_PARTITION to a script's own line, and SBATCH_TIMELIMIT likewise."""
    folder = slurm(f"env | grep ^SBATCH_ | sort > variables; {ACCEPT}")
    for name in ("ACCOUNT", "ARRAY_INX", "CORE_SPEC", "MEM_PER_CPU", "OUTPUT", "PARTITION", "TIMELIMIT", "WAIT"):
        monkeypatch.setenv(f"SBATCH_{name}", "7")
    site = Cluster(partition="main", memory_per_rank="1G", extra={"core-spec": 1})
    Site("slurm", cluster=site).submit(attempts(tmp_path, 1), 1, 60.0)
    assert (folder / "variables").read_text() == "SBATCH_ACCOUNT=7\n", "where the site names none"
    [command] = [line for line in (folder / "script").read_text().splitlines() if line.startswith("srun ")]
    assert "--export=ALL" in command.split(), "else a task has nothing of the script where SBATCH_EXPORT is NONE"


@pytest.mark.parametrize("name", ["100%", "a\n#SBATCH --uid=0"])
def test_a_folder_that_slurm_would_read_otherwise_is_refused(name: str, slurm: Callable[[str], Path], tmp_path: Path):
    slurm(ACCEPT)
    with pytest.raises(InputError, match="has a % or a control character"):
        Site("slurm").submit(attempts(tmp_path / name, 1), 1, 60.0)
    with pytest.raises(InputError, match="has a % or a control character"):
        Site("slurm").script(1, 60.0, folder=tmp_path / name)


@pytest.mark.parametrize(
    ("cluster", "needed"),
    [
        (Cluster(), 2 * 24 * 60),
        (Cluster(job_minutes=90), 90),
        (Cluster(partition="short"), 1),
        (Cluster(job_minutes=10_000), 3 * 24 * 60 + 5),
    ],
)
def test_a_job_is_no_longer_than_its_partition_lets_it(slurm: Callable[[str], Path], cluster: Cluster, needed: int):
    bin_folder = slurm(ACCEPT)
    (bin_folder / "sinfo").write_text(
        "#!/bin/sh\ncase \"$*\" in *--partition=short*) echo 'short 1:00';; *) echo 'main* 2-00:00:00'; esac\n"
    )
    assert Site("slurm", cluster=cluster).job_minutes(3 * 24 * 3600.0) == needed
    assert Site("slurm", cluster=cluster).job_minutes(1.0) == min(6, needed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1:00", 1), ("30:00", 30), ("2:00:00", 120), ("1-00:00:00", 1440), ("infinite", None), ("n/a", None), ("", None)],
)
def test_slurm_writes_times_in_its_own_way(text: str, expected: int | None):
    assert minutes(text) == expected


def test_a_rank_has_a_processor_for_each_of_its_threads(slurm: Callable[[str], Path], tmp_path: Path):
    folder, tries = slurm(ACCEPT), attempts(tmp_path, 2)
    for attempt in tries:
        made_up(Run(threads=3)).write(attempt)
    Site("slurm").submit(tries, 2, 60.0)
    script = (folder / "script").read_text()
    assert options_of(script)["cpus-per-task"] == "3"
    assert " --cpus-per-task=3 " in script.splitlines()[-1]
    own = Site("slurm", cluster=Cluster(cpus_per_rank=5)).script(2, 60, threads=3)
    assert options_of(own)["cpus-per-task"] == "5"
    assert "cpus-per-task" not in options_of(Site("slurm").script(2, 60))


def test_gpus_are_asked_for_in_the_words_of_the_site():
    told = options_of(Site("slurm", "cuda", cluster=Cluster(extra={"gres": "gpu:a100:4"})).script(4, 60))
    assert told["gres"] == "gpu:a100:4"
    assert "gpus-per-node" not in told
    assert "gpus-per-node" not in options_of(Site("slurm").script(4, 60))

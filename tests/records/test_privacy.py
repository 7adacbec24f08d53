"""What a record says of a machine: no secrets, no paths, and measured values as they are."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from harness.records import privacy
from harness.records.environment import host_environment
from harness.records.privacy import VARIABLES, cleaned, command, without_paths
from harness.records.store import Store, read_checked
from tests.harness.made_up_records import document, record

KEYS = {"DS_WANDB_API_KEY": "s3cr3t", "TORCH_HUB_TOKEN": "s3cr3t", "CUDA_PASSWORD": "s3cr3t", "NCCL_AUTH": "s3cr3t"}


def test_only_listed_variables_without_keys_and_paths_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_12:1", "CUDA_VISIBLE_DEVICES": "0,1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:16,max_split_size_mb:128",
    }  # fmt: skip
    left_out = {"NCCL_NET": "A3f9" * 5, "NCCL_ALGO": "9f86d081884c7d659a2f", "MKL_CBWR": "/home/alice/x"}
    for name, value in (kept | left_out | KEYS).items():
        monkeypatch.setenv(name, value)
    found = host_environment(["lmscale"])
    assert {name: found["variables"].get(name) for name in (*kept, *left_out)} == kept | dict.fromkeys(left_out)
    assert "s3cr3t" not in str(found)
    assert not [name for name in VARIABLES if re.search("KEY|TOKEN|SECRET|PASS|AUTH|CRED", name)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('  File "/usr/lib/python3.11/threading.py", line 3, in run', 'File "python3.11/threading.py", line 3, in run'),
        ('File "/x/venv/lib/python3.11/site-packages/torch/nn/functional.py"', 'File "torch/nn/functional.py"'),
        (f'File "{privacy.CODE}/impl/train.py", line 2', 'File "impl/train.py", line 2'),
        ("[Errno 13] Permission denied: '/scratch/al ice/x'", "[Errno 13] Permission denied: '.../x'"),
        ("no checkpoint in /home/bob/ck/step-1; /Users/eve", "no checkpoint in $HOME/ck/step-1; $HOME"),
        ("gpt2:/data/vocab.json,/data/merges.txt file:///a/b", "gpt2:.../vocab.json,.../merges.txt file://.../b"),
        ("HERE/runs/a and HERE", "runs/a and ."),
    ],
)
def test_paths_are_shortened(text: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert without_paths(text.replace("HERE", str(tmp_path))).strip() == left
    assert without_paths(left) == left


def test_what_is_no_path_of_a_person_stays() -> None:
    text = "No space left on /dev/shm/x: 25000 Mb/s, 1/2 tokens/s and/or https://a.org/b/c ../x $HOME/y 3 / 4"
    assert without_paths(text) == text


def test_words_of_a_command_may_be_paths_with_spaces() -> None:
    words = ["lmscale", "run", "--out", "/home/alice/my runs", "--data=/data/my texts/tokens", "--plan.tp", "2"]
    assert command(words) == ["lmscale", "run", "--out", "$HOME/my runs", "--data=.../tokens", "--plan.tp", "2"]


def older() -> dict[str, Any]:
    """A record that was written before records were cleaned."""
    full = document(record(data__dataset="/home/alice/tokens"))
    full["environment"] |= {
        "command": ["lmscale", "--out", "/tmp/alice/out"],
        "variables": {**KEYS, "NCCL_ALGO": "Ring"},
    }
    return full | {
        "log": ['File "/home/alice/lmscale/impl/train.py"'],
        "reason": "/home/alice/x is full",
        "tries": [{"reason": "/home/alice/x is full"}],
    }


def test_a_record_is_written_without_them_and_keeps_what_was_measured(tmp_path: Path) -> None:
    full = older()
    given = copy.deepcopy(full)
    path = Store(tmp_path, "made_up", "smoke").write(full)
    assert full == given
    kept: Any = read_checked(path)
    assert kept == cleaned(full) == cleaned(kept)
    assert {name for name in full if kept[name] != full[name]} == {"environment", "log", "reason", "tries"}
    assert kept["environment"]["command"] == ["lmscale", "--out", ".../out"]
    assert kept["environment"]["variables"] == {"NCCL_ALGO": "Ring"}
    assert "alice" not in str({name: value for name, value in kept.items() if name != "config"})

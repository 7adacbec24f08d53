"""A rank that writes down which GPUs it sees, and ends when it is told to."""

import json
import os
import sys
import time
from pathlib import Path

from harness.records.store import write_atomically

if __name__ == "__main__":
    attempt, rank = Path(sys.argv[1]), sys.argv[2]
    seen = {name: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
    write_atomically(attempt / f"rank-{rank}.seen.json", json.dumps(seen))
    while not (attempt / "stop").exists():
        time.sleep(0.01)

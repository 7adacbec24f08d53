"""A rank that does what `act.json` beside its orders says, and starts at once: it imports no PyTorch."""

import json
import os
import sys
import time
from pathlib import Path

from harness.rank.heartbeat import Heartbeat

if __name__ == "__main__":
    act = json.loads((Path(sys.argv[1]) / "act.json").read_text())
    heart = Heartbeat.of_this_rank()
    heart.enter("training", 5)
    heart.begin("0F1")
    print("a line of its log", flush=True)
    if "exit" in act:
        sys.exit(act["exit"])
    if "kill" in act:
        os.kill(os.getpid(), act["kill"])
    while not heart.is_end_requested():  # or until it is killed
        time.sleep(0.01)
    sys.exit(act["saved"])

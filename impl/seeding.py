"""Seeds derived from one seed, one for each purpose."""

import hashlib
import json


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for a purpose: equal parts give equal seeds on every machine, others unrelated ones."""
    parts = json.dumps([seed, *purpose]).encode()
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "big") >> 1

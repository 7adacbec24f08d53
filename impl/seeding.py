"""Seeds derived from one seed, one for each purpose."""

import hashlib
import json


def derive(seed: int, *purpose: str | int) -> int:
    """63-bit seed for a purpose: the same parts give the same seed on every machine, other parts an unrelated one."""
    parts = json.dumps([seed, *purpose]).encode()
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "big") >> 1

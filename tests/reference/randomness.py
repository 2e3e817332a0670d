"""Random numbers, as docs/reliability.md says where they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from reference.model import Array


def philox(counter: Sequence[Any], key: Sequence[int]) -> list[Array]:
    """Philox 4x32-10 of Salmon et al. (2011): four words of a counter to four random words."""
    x, k = [np.asarray(word, dtype=np.uint64) for word in counter], list(key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (second >> np.uint64(32)) ^ x[1] ^ np.uint64(k[0]),
            second & low,
            (first >> np.uint64(32)) ^ x[3] ^ np.uint64(k[1]),
            first & low,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def uniform(seed: int, stream: str, epoch: int, slot: Any, sample: Any, position: Any) -> Array:
    """A number in (0, 1) for each address: the top 52 bits of the first two words, in the middle of their cell."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    key = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")]
    words = philox(np.broadcast_arrays(epoch, slot, sample, position), key)
    bits = (words[0] * np.uint64(2**32) + words[1]) // np.uint64(2**12)
    return np.asarray((bits.astype(float) + 0.5) / 2.0**52)


def shuffled(seed: int, stream: str, epoch: int, count: int) -> list[int]:
    """0 … count−1 in the order of their numbers."""
    return list(map(int, np.argsort(uniform(seed, stream, epoch, np.arange(count), 0, 0), kind="stable")))


def drawn_contexts(seed: int, epoch: int, count: int, total: int) -> list[int]:
    """The contexts of an epoch (from 1): the next ``count`` of an endless row of seeded permutations."""
    wanted = range((epoch - 1) * count, epoch * count)
    orders = {}
    for number in {position // total for position in wanted}:
        raw = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(number,))).random_raw(total)
        orders[number] = np.argsort(raw, kind="stable")
    return [int(orders[position // total][position % total]) for position in wanted]

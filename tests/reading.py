"Reads the batches of a plan and writes their digests: here, and in a process that is killed."
import hashlib
import sys
import time

from fake_dvae import Fake
from xtts_nb.data.cache import Cache
from xtts_nb.data.native import BatchPlan, cached_batches

KINDS = 'memory', 'streamed', 'runtime'


def digests(folder, kind: str, first: int, last: int):
    "The digest of each batch of a cache that is held in memory, streamed from its files, or holds no codes."
    cache = Cache(folder, in_memory=kind != 'streamed')
    plan = BatchPlan(cache, cache.config.data, dvae=Fake() if kind == 'runtime' else None)
    for batch in cached_batches(plan, first, last):
        yield hashlib.sha256(b''.join(batch[k].numpy().tobytes() for k in sorted(batch))).hexdigest()


def main():
    "Write a line for each batch, slowly enough to be killed in the middle."
    folder, kind, last, out = sys.argv[1:]
    with open(out, 'w') as file:
        for line in digests(folder, kind, 0, int(last)):
            print(line, file=file, flush=True)
            time.sleep(0.005)

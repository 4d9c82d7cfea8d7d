"""What rank 0 says arrives as it was said."""

from __future__ import annotations

import numpy as np

from distkv.engine.handoff import Handoff, NewRequest, News
from distkv.engine.sampling import Sampling
from distkv.testing.processes import run_ranks

REQUESTS = (
    NewRequest(id="r1", tokens=np.arange(5, dtype=np.int32), output_limit=3),
    NewRequest(
        id='é"\n', tokens=np.array([2**31 - 1, 0], np.int32), output_limit=1, salt="s", adapter=("lora", 2),
        conversation="c", read=False, write=False, priority=-1, matched_cap=4,
        sampling=Sampling(temperature=0.1 + 0.2, top_k=3, top_p=1 / 3, seed=2**64 - 1),
    ),
    NewRequest(id="r3", tokens=np.arange(100_000, dtype=np.int32), output_limit=9),
)  # fmt: skip
MESSAGES = [
    News(),
    News(aborts=("a", "b"), weights_version="2", reset=True),
    News(requests=REQUESTS[:2]),
    News(requests=REQUESTS, aborts=("x",)),
    News(),
    News(shutdown=True),
    News(shutdown=True, failed=True),
]


def same(a: News, b: News) -> bool:
    plain = [{**vars(n), "requests": [{**vars(r), "tokens": r.tokens.tolist()} for r in n.requests]} for n in (a, b)]
    return plain[0] == plain[1]


def test_a_message_survives_its_encoding() -> None:
    for news in MESSAGES:
        assert same(News.decode(news.encode()), news)


def test_alone_nothing_is_sent() -> None:
    assert Handoff(None).exchange(None) == News()
    assert Handoff(None).exchange(MESSAGES[1]) is MESSAGES[1]


def ranks_case(rank: int, world_size: int) -> int:
    import torch.distributed as dist

    handoff = Handoff(dist.new_group())
    for news in MESSAGES:
        got = handoff.exchange(news if rank == 0 else None)
        assert same(got, news)
        assert all(r.tokens.dtype == np.int32 for r in got.requests)
    return len(MESSAGES)


def test_every_rank_gets_every_message_in_order() -> None:
    assert run_ranks(ranks_case, 3, timeout_s=240.0) == [len(MESSAGES)] * 3

from __future__ import annotations

from saga_sim.cluster.routers import (
    Affinity,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    Router,
    WorkerLoad,
)


def loads(*in_flight: int) -> list[WorkerLoad]:
    return [WorkerLoad(number, count, 0, 0.0) for number, count in enumerate(in_flight)]


def place(router: Router, session: str, *in_flight: int) -> int:
    return router.place(session, [], loads(*in_flight), 0.0)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [place(router, "a", 9, 0, 0) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_spreads_ties() -> None:
    router = LeastLoaded()
    assert [place(router, "a", 1, 0, 0) for _ in range(4)] == [1, 2, 1, 2]
    assert place(router, "a", 0, 1, 1) == 0
    assert WorkerLoad(0, 2, 3, 0.5).in_flight == 5


def test_a_session_stays_whatever_the_load() -> None:
    router = Affinity()
    assert place(router, "a", 3, 0, 3) == 1
    assert place(router, "a", 0, 99, 0) == 1
    router.ended("a")
    assert place(router, "a", 0, 99, 1) == 0


def test_a_session_leaves_a_worker_with_a_long_queue_and_stays_with_the_new_one() -> None:
    router = Affinity(max_ratio=2.0)

    def place_at(running: int, waiting: int, other: int) -> int:
        workers = [WorkerLoad(0, running, waiting, 0.5), WorkerLoad(1, other, 0, 0.5)]
        return router.place("a", [], workers, 0.0)

    assert place_at(0, 0, 3) == 0
    assert place_at(1, 1, 0) == 0  # The least loaded one counts as having one.
    assert place_at(9, 0, 2) == 0  # Nothing waits.
    assert place_at(3, 1, 2) == 0
    assert place_at(4, 1, 2) == 1
    assert place_at(0, 0, 2) == 1


def test_a_session_whose_worker_is_down_finds_another_one_and_stays_there() -> None:
    router = Affinity()
    assert place(router, "a", 1, 0, 3) == 1
    up = [WorkerLoad(0, 5, 0, 0.0), WorkerLoad(2, 1, 0, 0.0)]
    assert router.place("a", [], up, 0.0) == 2
    assert place(router, "a", 0, 0, 9) == 2


def prompt(length: int, name: str = "p") -> list[bytes]:
    return [b"%s %d" % (name.encode(), block) for block in range(length)]


def test_the_worker_that_was_sent_half_of_the_prompt_gets_it() -> None:
    router = PrefixAware(100)

    def at(blocks: list[bytes], *in_flight: int) -> int:
        return router.place("s", blocks, loads(*in_flight), 0.0)

    assert at(prompt(10), 5, 0) == 1
    assert at(prompt(20), 0, 5) == 1
    assert at([*prompt(8), *prompt(12, "other")], 0, 5) == 0  # Less than half.
    assert at([], 5, 0) == 1
    assert at(prompt(20), 0, 33) == 0  # Too much to do.
    assert at(prompt(20), 33, 32) == 1  # Both have it now.


def test_prefixes_are_forgotten_with_their_worker_and_for_want_of_room() -> None:
    router = PrefixAware(10)
    both = loads(0, 9)
    assert router.place("a", prompt(8), both, 0.0) == 0
    assert router.place("a", prompt(8), loads(9, 0)[:1], 0.0) == 0
    assert router.place("b", prompt(8), loads(9, 0)[1:], 0.0) == 1
    assert router.place("a", prompt(8), loads(9, 0), 0.0) == 1  # That of 0 went with it.
    assert router.place("c", prompt(8, "q"), loads(9, 0), 0.0) == 1
    # 2 of the 10 blocks of room are left for the beginning of the first prompt.
    assert router.place("a", prompt(8), loads(0, 9), 0.0) == 0

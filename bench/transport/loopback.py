"""All candidates on loopback, interleaved: what disturbs the machine for a while disturbs each of them.

The namespace uses cubic: what paces itself for a long line is slow on a short one.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from bench.transport import compare, fetch, limits, ours
from bench.transport.rate import Rate, median
from tools.wan.rig import Wan

#: iperf3 and the C loop are run with one connection and with two; the better one counts.
_CONNECTIONS = (1, 2)
RIVALS = ("mooncake", "nixl")
#: As the table lists them.
_ORDER = ("iperf3", "c_loop", "ours", "ours_aes", "ours_busy_engine", "ours_busy_elsewhere", *RIVALS)
Candidate = Callable[[], Rate]


def measure(rounds: int) -> dict[str, Rate]:
    """Medians by candidate. One that cannot be had, or does not run, is left out and told on standard error."""
    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(Wan(congestion="cubic"))
        plain = stack.enter_context(ours.loopback_pair(wan, "crc32c"))
        sealed = stack.enter_context(ours.loopback_pair(wan, "aes-gcm"))
        candidates: dict[str, Candidate] = {
            **_foreign(wan),
            **{f"c_loop x{count}": partial(limits.c_loop, wan, count) for count in _CONNECTIONS},
            "ours": partial(ours.measure, plain),
            "ours_aes": partial(ours.measure, sealed),
            "ours_busy_engine": partial(ours.measure_beside_busy_engine, plain),
            "ours_busy_elsewhere": partial(ours.measure_beside_busy_stranger, plain),
        }
        return _best_of_each({name: median(rates) for name, rates in _interleaved(candidates, rounds).items()})


def _foreign(wan: Wan) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    with _missing_is_told():
        iperf3 = fetch.iperf3()
        for count in _CONNECTIONS:
            found[f"iperf3 x{count}"] = partial(limits.iperf3, wan, iperf3, count)
    with _missing_is_told():
        python = fetch.rivals()
        for name in RIVALS:
            found[name] = partial(compare.rival, wan, python, name)
    return found


def _interleaved(candidates: Mapping[str, Candidate], rounds: int) -> dict[str, list[Rate]]:
    rates: dict[str, list[Rate]] = {name: [] for name in candidates}
    for number in range(rounds):
        print(f"loopback: round {number + 1} of {rounds}", file=sys.stderr)
        for name in list(rates):
            try:
                rates[name].append(candidates[name]())
            except fetch.Missing as missing:
                print(f"{name}: left out: {missing}", file=sys.stderr)
                del rates[name]
    return rates


def _best_of_each(rates: Mapping[str, Rate]) -> dict[str, Rate]:
    best: dict[str, Rate] = {}
    for variant, rate in rates.items():
        name = variant.partition(" ")[0]
        if name not in best or rate.gbytes_per_s > best[name].gbytes_per_s:
            best[name] = rate
    return {name: best[name] for name in _ORDER if name in best}


@contextlib.contextmanager
def _missing_is_told() -> Iterator[None]:
    try:
        yield
    except fetch.Missing as missing:
        print(f"left out: {missing}", file=sys.stderr)

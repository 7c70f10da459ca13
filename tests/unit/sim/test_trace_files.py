"""Published traces: each format is read as it is published, and replayed as arrivals with keys."""

import tarfile
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.sim.replay import BlockKeys, replayed
from prfaas.sim.trace_files import Traced, TraceFormat, read, seconds_of
from prfaas.sim.workload import Trace
from services.sim_cli import sim_run

MOONCAKE = """{"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0319600,3180,8
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "output_length": 132,
 "type": "text", "turn": 1, "hash_ids": [3, 4, 5]}
""".replace("\n ", " ")
REQUEST_LOG = """{"time": 1002.5, "prompt_tokens": 130, "output_tokens": 9, "prefix": "AAAAAAAAAAEAAAAAAAAAAg=="}
{"time": 1001.0, "prompt_tokens": null, "output_tokens": 0, "prefix": "", "status": 429}
{"time": 1000.5, "prompt_tokens": 70, "output_tokens": 7, "prefix": "AAAAAAAAAAE=", "status": 200}
{"time": 1003.0, "prompt_tokens": 70, "output_tokens": 0, "prefix": "AAAAAAAAAAE=", "status": 499}
"""
LENGTHS = '{"0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{0.5: 1}"}}'
CLIENT = "0,0.5,1.0,Gamma,1.0,2.0\n600,0,0,,0,0\n1200,1.0,2.0,Weibull,0.7,1.0\n"


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake(tmp_path):
    """Milliseconds, out of order, with blocks."""
    found = read(written(tmp_path, MOONCAKE), TraceFormat.MOONCAKE, seed=1)
    assert found == [Traced(0.0, 600, 7, (0, 9)), Traced(2.0, 1100, 5, (0, 1, 2))]


def test_our_own_request_log(tmp_path):
    """Seconds, names of 64 tokens each, and requests that never got to a token, which do not count."""
    found = read(written(tmp_path, REQUEST_LOG), TraceFormat.REQUEST_LOG, seed=1)
    assert found == [Traced(0.0, 70, 7, (1,)), Traced(2.0, 130, 9, (1, 2))]


def test_every_format_can_be_named_on_the_command_line():
    [choices] = [option.type.choices for option in sim_run.params if option.name == "trace_format"]
    assert set(choices) == {each.value for each in TraceFormat}


def test_azure(tmp_path):
    """Times of day to the tenth of a microsecond."""
    found = read(written(tmp_path, AZURE), TraceFormat.AZURE, seed=1)
    assert [each[1:3] for each in found] == [(4808, 10), (3180, 8)]
    assert [each.at_s for each in found] == pytest.approx([0.0, 1.052], abs=1e-5)


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("1970-01-01 00:00:00", 0.0),
        ("2000-02-29 12:00:00.5", 951825600.5),
        ("2024-05-10 00:00:00.009930+00:00", 1715299200.00993),
    ],
)
def test_seconds_since_1970(stamp, seconds):
    """Leap years and offsets of zero."""
    assert seconds_of(stamp) == pytest.approx(seconds)


def test_burstgpt(tmp_path):
    """Failed requests, which have no response, are left out."""
    found = read(written(tmp_path, BURSTGPT), TraceFormat.BURSTGPT, seed=1)
    assert found == [Traced(0.0, 472, 18), Traced(113.0, 417, 276)]


def test_bailian(tmp_path):
    """Seconds, and blocks of 16 tokens."""
    assert read(written(tmp_path, BAILIAN), TraceFormat.BAILIAN, seed=1) == [Traced(0.0, 40, 132, (3, 4, 5))]


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_servegen_draws_requests_from_what_a_client_does(tmp_path, packed):
    """At the client's rate while it has one, with its lengths; the same for the same seed."""
    written(tmp_path, CLIENT, "chunk-0-trace.csv")
    written(tmp_path, LENGTHS, "chunk-0-dataset.json")
    path = tmp_path
    if packed:
        path = tmp_path / "clients.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in ("chunk-0-trace.csv", "chunk-0-dataset.json"):
                tar.add(tmp_path / name, f"data/{name}")
    found = read(path, TraceFormat.SERVEGEN, seed=1)
    assert found == read(path, TraceFormat.SERVEGEN, seed=1) != read(path, TraceFormat.SERVEGEN, seed=2)
    assert {each[1:3] for each in found} == {(100, 7), (300, 7)}
    busy = sum(each.at_s < 601 for each in found), sum(each.at_s >= 1190 for each in found)
    assert sum(busy) == len(found)
    assert busy == (pytest.approx(300, rel=0.25), pytest.approx(600, rel=0.4))


@pytest.mark.parametrize(
    ("trace_format", "text", "line"),
    [
        (TraceFormat.MOONCAKE, MOONCAKE + "{}\n", 3),
        (TraceFormat.MOONCAKE, "not json\n", 1),
        (TraceFormat.MOONCAKE, "[1, 2]\n", 1),
        (TraceFormat.MOONCAKE, MOONCAKE.replace("1100", "1e999"), 1),
        (TraceFormat.MOONCAKE, MOONCAKE.replace("2000", "NaN"), 1),
        (TraceFormat.BAILIAN, BAILIAN.replace("61.1", "Infinity"), 1),
        (TraceFormat.AZURE, AZURE + "yesterday,1,2\n", 4),
        (TraceFormat.BURSTGPT, AZURE, 2),
    ],
)
def test_what_does_not_fit_is_named_by_its_line(tmp_path, trace_format, text, line):
    """A trace of another format is not taken for an empty one."""
    with pytest.raises(ConfigError, match=f":{line}:"):
        read(written(tmp_path, text), trace_format, seed=1)


@pytest.mark.parametrize("trace_format", TraceFormat)
@pytest.mark.parametrize("kind", ["missing", "other", "latin"])
def test_what_cannot_be_read_is_named(tmp_path, trace_format, kind):
    """A path that is not there, one that is of the wrong kind, and bytes that are no text."""
    path = tmp_path / "trace"
    match kind:
        case "missing":
            pass
        case "other":
            path.write_text("no tar") if trace_format is TraceFormat.SERVEGEN else path.mkdir()
        case "latin":
            folder = trace_format is TraceFormat.SERVEGEN
            path.mkdir() if folder else None
            (path / "chunk-0-trace.csv" if folder else path).write_bytes(b"Timestamp,\xff\n")
    with pytest.raises(ConfigError, match=str(path)):
        read(path, trace_format, seed=1)


@pytest.mark.parametrize(
    ("client", "dataset"),
    [
        (CLIENT, "[1]"),
        (CLIENT, '{"0": [1]}'),
        (CLIENT, LENGTHS.replace("{7: 1.0}", "{7: 0.0}")),
        (CLIENT, LENGTHS.replace("{7: 1.0}", "[7]")),
        (CLIENT.replace("0.5", "1e300"), LENGTHS),
        (CLIENT.replace("1.0", "nan"), LENGTHS),
        (CLIENT.replace("0.5", "nan"), LENGTHS),
    ],
)
def test_a_client_that_makes_no_sense_is_named(tmp_path, client, dataset):
    """Neither a traceback nor requests without end."""
    written(tmp_path, client, "chunk-0-trace.csv")
    written(tmp_path, dataset, "chunk-0-dataset.json")
    with pytest.raises(ConfigError, match=r"chunk-0-trace\.csv: not a ServeGen client"):
        read(tmp_path, TraceFormat.SERVEGEN, seed=1)


def test_a_trace_of_which_nothing_fits_is_an_error(tmp_path):
    """As one without requests is."""
    written(tmp_path, AZURE)
    with pytest.raises(ConfigError, match="no prompt fits 100 tokens"):
        replayed(Trace(path="trace", format=TraceFormat.AZURE), tmp_path, 1, 100)


def test_a_trace_without_requests_is_an_error(tmp_path):
    """A study of nothing is no study."""
    with pytest.raises(ConfigError, match="no requests"):
        read(written(tmp_path, AZURE.splitlines()[0]), TraceFormat.AZURE, seed=1)


def test_a_replay_is_scaled_jittered_and_cut(tmp_path):
    """Twice as fast, a little later each, and only what fits the context."""
    written(tmp_path, AZURE)
    trace = Trace(path="trace", format=TraceFormat.AZURE, rate_scale=2.0, jitter_s=0.1)
    found = replayed(trace, tmp_path, 1, 100_000)
    assert [each[1:3] for each in found] == [(4808, 10), (3180, 8)]
    for arrival, exact in zip(found, (0.0, 0.526), strict=True):
        assert exact <= arrival.at_s <= exact + 0.1
    assert found != replayed(trace, tmp_path, 2, 100_000)
    assert [each.prompt_tokens for each in replayed(trace, tmp_path, 1, 4000)] == [3180]


def test_equal_blocks_are_equal_keys():
    """A block of 512 tokens is eight units; the last one, which is not full, has none."""
    keys = BlockKeys(512)
    one, other = keys.of(Traced(0.0, 1100, 5, (0, 1, 2))), keys.of(Traced(0.0, 1024, 5, (0, 9)))
    assert len(one) == len(other) == 16 * KEY_BYTES
    assert one[: 8 * KEY_BYTES] == other[: 8 * KEY_BYTES]
    assert one[8 * KEY_BYTES : 9 * KEY_BYTES] != other[8 * KEY_BYTES : 9 * KEY_BYTES]
    assert len({one[at : at + KEY_BYTES] for at in range(0, len(one), KEY_BYTES)}) == 16


def test_small_blocks_make_up_a_unit():
    """Four blocks of 16 tokens; what does not fill a unit has no key."""
    keys = BlockKeys(16)
    one = keys.of(Traced(0.0, 130, 5, tuple(range(9))))
    assert len(one) == 2 * KEY_BYTES
    assert keys.of(Traced(0.0, 64, 5, (0, 1, 2, 3))) == one[:KEY_BYTES]
    assert keys.of(Traced(0.0, 64, 5, (0, 1, 2, 99))) != one[:KEY_BYTES]


def test_the_trace_that_ships_is_whole():
    """All of its requests, and most of what they have in common."""
    trace = Trace(path="mooncake_conversation.jsonl", format=TraceFormat.MOONCAKE, jitter_s=3.0)
    found = replayed(trace, Path(__file__).parents[3] / "bench" / "traces", 1, 1 << 18)
    assert len(found) == 12_031
    assert 3500 < found[-1].at_s < 3600

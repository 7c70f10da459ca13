"""Traces of ServeGen: no requests, but what each client of a service does: per ten minutes its rate and how bursty it
is, per quarter of a day the distribution of its lengths. Requests are drawn from that.

Burstiness is taken as a renewal process with gamma gaps of the client's coefficient of variation, whatever law was
fitted: rate and burstiness are the trace's, the shape of the gaps is ours.
"""

import ast
import csv
import io
import json
import lzma
import math
import random
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from prfaas.errors import ConfigError

Request = tuple[float, int, int]

#: Of one client: more is no rate, and would not come to an end.
MOST_PER_S, MOST_CV = 1e5, 100.0
#: What is raised where files are not what they should be.
WRONG = (LookupError, TypeError, ValueError, SyntaxError, AttributeError, OverflowError, RecursionError, csv.Error)


class Window(NamedTuple):
    start_s: float
    rate_per_s: float
    cv: float


class Lengths(NamedTuple):
    """Lengths and their cumulative weights."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, chance: random.Random) -> int:
        place = bisect_right(self.weights, chance.random() * self.weights[-1])
        return self.tokens[min(place, len(self.tokens) - 1)]


def requests(path: Path, seed: int) -> Iterator[Request]:
    """(seconds, prompt tokens, output tokens), client after client."""
    files = _files(path)
    names = sorted(name for name in files if name.endswith("-trace.csv"))
    if not names:
        raise ConfigError(str(path), "no chunk-*-trace.csv in there")
    for name in names:
        client = name.removesuffix("-trace.csv")
        try:
            windows = [
                Window(float(row[0]), float(row[1]), float(row[2]))
                for row in csv.reader(io.StringIO(files[name]))
                if float(row[1]) != 0
            ]
            if not all(
                math.isfinite(w.start_s) and 0 < w.rate_per_s <= MOST_PER_S and w.cv <= MOST_CV for w in windows
            ):
                raise ValueError(f"times are finite, rates up to {MOST_PER_S:g} per second, cv up to {MOST_CV:g}")
            if windows:
                yield from _client(
                    windows, _datasets(files[f"{client}-dataset.json"]), random.Random(f"{seed}/{client}")
                )
        except WRONG as error:
            raise ConfigError(f"{path}:{name}", f"not a ServeGen client: {error!r}") from error


def _client(
    windows: list[Window], datasets: list[tuple[float, Lengths, Lengths]], chance: random.Random
) -> Iterator[Request]:
    starts = [start for start, _, _ in datasets]
    for window, following in zip(windows, [*windows[1:], None], strict=True):
        end_s = window.start_s + 600.0
        if following is not None:
            end_s = min(end_s, following.start_s)
        shape = 1.0 / max(window.cv, 0.05) ** 2
        at_s = window.start_s + chance.random() / window.rate_per_s
        while at_s < end_s:
            _, prompts, outputs = datasets[max(0, bisect_right(starts, at_s) - 1)]
            yield at_s, prompts.draw(chance), outputs.draw(chance)
            at_s += chance.gammavariate(shape, 1.0 / (shape * window.rate_per_s))


def _datasets(text: str) -> list[tuple[float, Lengths, Lengths]]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the dataset is not a JSON object")
    return sorted(
        (float(start), _lengths(each["input_tokens"]), _lengths(each["output_tokens"])) for start, each in found.items()
    )


def _lengths(text: str) -> Lengths:
    """Of a Python dict in text: {tokens: share}."""
    shares: Mapping[int, float] = ast.literal_eval(text)
    tokens = tuple(map(int, sorted(shares)))
    if not all(math.isfinite(share) and share >= 0 for share in shares.values()) or not sum(shares.values()) > 0:
        raise ValueError("shares of lengths are from 0 on, and one is above it")
    return Lengths(tokens, tuple(accumulate(shares[each] for each in sorted(shares))))


def _files(path: Path) -> dict[str, str]:
    """File names without folders, and what is in them. Raises ConfigError."""
    try:
        if path.is_dir():
            return {file.name: file.read_text(encoding="utf-8") for file in sorted(path.glob("chunk-*"))}
        return _unpacked(path)
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable") from error
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(str(path), f"neither a folder nor a tar of one: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"not a text: {error}") from error


def _unpacked(path: Path) -> dict[str, str]:
    texts = {}
    with tarfile.open(path) as tar:
        for member in tar:
            name = Path(member.name).name
            if name.startswith("chunk-") and (file := tar.extractfile(member)) is not None:
                texts[name] = file.read().decode()
    return texts

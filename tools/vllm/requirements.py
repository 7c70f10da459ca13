"""What a vLLM wheel needs to serve text: `python tools/vllm/requirements.py WHEEL` prints one requirement a line.

The list is the wheel's own metadata, less the packages that only its image, video and audio models import. It runs
before anything is installed, so it reads the metadata with the standard library alone and leaves markers to pip.
"""

import re
import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

# torch's companions: hundreds of megabytes, and only multi-modal models import them.
NOT_FOR_TEXT = frozenset({"torchvision", "torchaudio", "torchcodec"})


def requirements_of(metadata: str) -> list[str]:
    """The requirements that a plain install has (no extras), without those that text does not need."""
    listed: list[str] = HeaderParser().parsestr(metadata).get_all("Requires-Dist", [])
    return [line for line in listed if "extra ==" not in line and _name(line) not in NOT_FOR_TEXT]


def metadata_of(wheel: Path) -> str:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        return archive.read(name).decode()


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if found is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


if __name__ == "__main__":
    print("\n".join(requirements_of(metadata_of(Path(sys.argv[1])))))

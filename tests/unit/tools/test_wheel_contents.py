"""A wheel is looked through before it is installed."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from prfaas.version import VERSION
from tools.wheel_test import complaints, package_files

WANTED = {"prfaas/a.py", "services/live.html"}
INFO = f"prfaas-{VERSION}.dist-info"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*WANTED, f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"], []),
        (["prfaas/a.py", f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"], ["services/live.html is missing"]),
        (
            [*WANTED, "tests/test_a.py", f"{INFO}/METADATA", f"{INFO}/licenses/LICENSE"],
            ["tests/test_a.py does not belong there"],
        ),
        ([*WANTED], ["it has no LICENSE", f"it is not of version {VERSION}"]),
    ],
)
def test_what_is_missing_or_too_much_is_told(tmp_path: Path, names: list[str], expected: list[str]):
    """Data that was not declared, tests that came along, a licence or version that is not there."""
    wheel = tmp_path / "prfaas.whl"
    with ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    assert [*complaints(wheel, WANTED)] == expected


def test_what_belongs_there_is_all_of_the_packages(tmp_path: Path):
    """Data and stubs as well, but no caches."""
    for name in ("prfaas/a.py", "prfaas/__pycache__/a.pyc", "services/live.html", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert package_files(tmp_path) == WANTED

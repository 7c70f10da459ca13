"""How commands end: what is ours is a line and an exit code, wherever in a group of tasks it came from."""

import asyncio

import click
import pytest

from prfaas.errors import ConfigError, PrfaasError
from services.running import run_to_end


async def fails(*errors: Exception) -> None:
    async def one(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer:
        for error in errors:
            outer.create_task(one(error), name="one")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("error", "code"), [(ConfigError("kv.port", "is taken"), 2), (PrfaasError("no luck"), 1)])
def test_an_error_of_ours_is_a_line_and_an_exit_code(error: PrfaasError, code: int, alone: bool):
    """Never a group, which click does not know and Python prints as a traceback."""

    async def bare() -> None:
        raise error

    with pytest.raises(click.ClickException) as ended:
        run_to_end(bare() if alone else fails(error))
    assert (ended.value.exit_code, ended.value.message) == (code, str(error))


def test_of_several_errors_one_is_told():
    with pytest.raises(click.ClickException) as ended:
        run_to_end(fails(PrfaasError("no luck"), ConfigError("kv.port", "is taken")))
    assert ended.value.message in ("no luck", "kv.port: is taken")


def test_what_is_not_ours_stays_as_it_is():
    """A bug is to be seen with its traceback."""
    with pytest.raises(ExceptionGroup) as ended:
        run_to_end(fails(ZeroDivisionError()))
    assert ended.group_contains(ZeroDivisionError)


def test_the_result_is_the_storys():
    async def story() -> int:
        return 7

    assert run_to_end(story()) == 7

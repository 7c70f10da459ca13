"""The store that the configuration names: addresses as people write them, refused when they cannot work."""

import pytest

from prfaas.config import StoreConfig
from prfaas.errors import ConfigError
from prfaas.stores import open_store


@pytest.mark.parametrize("endpoint", ["127.0.0.1:2379", "http://127.0.0.1:2379", "http://127.0.0.1:2379/"])
async def test_an_endpoint_may_be_written_as_a_url(endpoint: str):
    """etcd's own tools take both forms."""
    await open_store(StoreConfig(endpoints=(endpoint,))).close()


@pytest.mark.parametrize("endpoint", ["nonsense", "host:", ":", "ftp://host:1", "https://host:1", "host:port"])
async def test_an_endpoint_that_cannot_work_is_refused(endpoint: str):
    """At once and by name, instead of after a time-out. TLS needs to know whom to trust."""
    with pytest.raises(ConfigError, match=r"store\.endpoints"):
        open_store(StoreConfig(endpoints=(endpoint,)))


async def test_half_a_key_pair_is_refused():
    """A certificate without its key would fail at the first connection only."""
    with pytest.raises(ConfigError, match=r"store\.cert"):
        open_store(StoreConfig(endpoints=("h:1",), ca="ca.pem", cert="cert.pem"))

"""The configuration: precedence, refusals that name the path, secrets that stay secret."""

from pathlib import Path

import pytest

from prfaas import config
from prfaas.errors import ConfigError


def written(directory: Path, text: str) -> Path:
    path = directory / "prfaas.toml"
    path.write_text(text)
    return path


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path):
    """Each source wins over the ones behind it, setting by setting."""
    path = written(tmp_path, "[router]\nport = 1\nhost = 'file'\nmax_attempts = 9\n")
    environ = {"PRFAAS_ROUTER_PORT": "2", "PRFAAS_ROUTER_HOST": "environment"}
    router = config.load(path, {("router", "port"): 3}, environ).router
    assert (router.port, router.host, router.max_attempts) == (3, "environment", 9)
    assert router.reserve_timeout_s == config.RouterConfig().reserve_timeout_s


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[router]\nprt = 1\n", "router"),
        ("[routr]\nport = 1\n", "configuration"),
        ("[router]\nport = 'eight'\n", "router.port"),
        ("[router]\nport = 70000\n", "router.port"),
        ("[worker]\nrole = 'both'\n", "worker.role"),
        ("[kv]\npool_bytes = -1\n", "kv.pool_bytes"),
        ("[kv]\ncongestion = 'fast'\n", "kv.congestion"),
        ("[kv]\nmin_lanes = 8\nmax_lanes = 4\n", "kv.min_lanes"),
        ("router = 1\n", "router"),
        ("[kv]\nno_progress_s = inf\n", "kv.no_progress_s"),
        ("[kv]\nconnect_s = nan\n", "kv.connect_s"),
        ("[worker]\nitl_slo_s = inf\n", "worker.itl_slo_s"),
        ("[routing.lines]\na = inf\n", "routing.lines"),
        ("[kv.advertise]\na = ''\n", "kv.advertise"),
        ("[kv.advertise]\na = 'relay'\n", "kv.advertise"),
        ("[kv.advertise]\na = ':7000'\n", "kv.advertise"),
        ("[kv.advertise]\na = '10.0.0.7:0'\n", "kv.advertise"),
        ("[kv.advertise]\na = '10.0.0.7:99999'\n", "kv.advertise"),
        ("[worker]\nrpc_advertise = 'here'\n", "worker.rpc_advertise"),
        ("[worker]\nlink_advertise = 'here'\n", "worker.link_advertise"),
        ("[http]\nmax_headers = 0\n", "http.max_headers"),
        ("[http]\nidle_timeout_s = 0\n", "http.idle_timeout_s"),
        ("[http]\nwrite_timeout_s = inf\n", "http.write_timeout_s"),
        ("[http]\nmax_bodies_bytes = 1048576\n", "http.max_bodies_bytes"),
        ("[router]\nworkers = 0\n", "router.workers"),
        ("[router]\nworkers = 2\n", "router.metrics_port"),
        ("[router]\nmetrics_port = 65536\n", "router.metrics_port"),
        ("[router]\nworkers = 2\nmetrics_port = 65535\n", "router.metrics_port"),
        ("[router]\nworkers = 2\nmetrics_port = 1\nadmin_port = 65535\n", "router.admin_port"),
        ("[router]\ntls_cert = 'cert.pem'\n", "router.tls_key"),
        ("[router]\ntls_key = 'cert.key'\n", "router.tls_cert"),
        ("[admission]\nmax_in_flight_tokens = 0\n", "admission.max_in_flight_tokens"),
        ("[admission]\nageing_s = inf\n", "admission.ageing_s"),
        ("[pool]\nstore = 'disk'\ndisk_dir = 'd'\ndisk_bytes = 1073741823\n", "pool.disk_bytes"),
        ("[pool]\nstore = 'mooncake'\nmooncake_segment_bytes = 1048576\n", "pool.mooncake_segment_bytes"),
        (
            "[pool]\nstore = 'mooncake'\nmooncake_segment_bytes = 0\ndisk_bytes = 1048576\n",
            "pool.disk_bytes",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_path(tmp_path: Path, text: str, path: str):
    """Unknown keys, wrong types and values out of range are errors that say where."""
    with pytest.raises(ConfigError) as caught:
        config.load(written(tmp_path, text), environ={})
    assert caught.value.path == path


@pytest.mark.parametrize("content", ["router = [", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None):
    """Neither a missing file nor broken TOML is taken for an empty configuration."""
    path = tmp_path / "broken.toml"
    if content:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        config.load(path, environ={})


def test_lists_and_tables_fit_into_the_environment():
    """Endpoints are comma-separated; addresses per region are pairs, the bare one is for all other regions."""
    environ = {"PRFAAS_STORE_ENDPOINTS": "a:1, b:2", "PRFAAS_KV_ADVERTISE": "a=relay:1,own:2"}
    loaded = config.load(environ=environ)
    assert loaded.store.endpoints == ("a:1", "b:2")
    assert loaded.kv.advertise == {"a": "relay:1", "": "own:2"}


ADDRESSES = ["PRFAAS_KV_ADVERTISE", "PRFAAS_WORKER_RPC_ADVERTISE", "PRFAAS_POOL_KV_ADVERTISE"]


@pytest.mark.parametrize("name", [*ADDRESSES, "PRFAAS_POOL_RPC_ADVERTISE"])
def test_an_address_in_the_environment_is_checked_too(name: str):
    """A name without a port leads nowhere, wherever it was written; brackets and names are addresses."""
    with pytest.raises(ConfigError, match="is not host:port"):
        config.load(environ={name: "relay"})
    for address in ("relay:65535", "[::1]:1"):
        config.load(environ={name: address})


def test_a_dump_masks_secrets():
    """What operators paste into tickets holds no password."""
    loaded = config.load(overrides={("store", "password"): "hunter2", ("router", "admin_key"): "salt"}, environ={})
    tree = config.dump(loaded)
    assert (tree["store"]["password"], tree["router"]["admin_key"]) == (config.MASK, config.MASK)
    assert "hunter2" not in str(tree) and "salt" not in str(tree)
    assert "hunter2" not in str(config.dump(config.load(overrides={("cache", "secret"): "hunter2"}, environ={})))


@pytest.mark.parametrize(
    ("section", "values", "path"),
    [
        ("cache", {"checkpoint_tokens": 100}, "cache.checkpoint_tokens"),
        ("pool", {"store": "disk"}, "pool.disk_dir"),
        ("pool", {"rpc_host": "0.0.0.0"}, "pool.rpc_host"),
        ("pool", {"kv_host": "0.0.0.0"}, "pool.kv_host"),
    ],
)
def test_a_cache_that_could_not_work_is_refused(section: str, values: dict[str, object], path: str):
    """What the types let through."""
    with pytest.raises(ConfigError) as refused:
        config.load(overrides={(section, name): value for name, value in values.items()}, environ={})
    assert refused.value.path == path


def test_every_setting_says_what_it_is():
    """The description is what `--help` and the reference show."""
    for section, field in config.fields():
        described = [meta for meta in getattr(field.type, "__metadata__", ()) if meta.description]
        assert described, f"{section}.{field.name}"


def test_an_unknown_variable_is_named():
    """A slip in a variable's name must not be silence."""
    with pytest.raises(ConfigError, match="PRFAAS_ROUTER_PRT"):
        config.load(environ={"PRFAAS_ROUTER_PRT": "1"})
    config.load(environ={"PRFAAS_LAUNCHED": "1", "HOME": "x"})


def test_an_empty_table_in_the_environment_is_empty():
    """A variable that is set to nothing sets nothing."""
    assert config.load(environ={"PRFAAS_KV_ADVERTISE": ""}).kv.advertise == {}

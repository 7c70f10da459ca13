"""The tier below a shard's memory that its configuration names."""

from pathlib import Path

from prfaas.blockstore.disk import DiskBlockStore
from prfaas.blockstore.mooncake import MooncakeBlockStore
from prfaas.blockstore.mooncake_calls import MooncakeSettings
from prfaas.blockstore.port import BlockStore, StoreFailed
from prfaas.config import PoolConfig
from prfaas.errors import ConfigError

#: Of what the tier may take, the part that is for objects as the index counts them; what is around them needs some.
OBJECTS_SHARE = 0.95


def lower_bytes(own: PoolConfig) -> int | None:
    """How much of the objects the tier has room for; None without a tier. What others give to a Mooncake cluster is
    bounded as a disk is."""
    match own.store:
        case "none":
            return None
        case "disk":
            return int(OBJECTS_SHARE * own.disk_bytes)
        case "mooncake":
            return int(OBJECTS_SHARE * (own.mooncake_segment_bytes or own.disk_bytes))


async def open_tier(own: PoolConfig, namespace: str, max_object_bytes: int) -> BlockStore | None:
    """Raises ConfigError naming the setting that cannot work."""
    match own.store:
        case "none":
            return None
        case "disk":
            try:
                return await DiskBlockStore.open(Path(own.disk_dir), namespace, own.disk_bytes)
            except StoreFailed as error:
                raise ConfigError("pool.disk_dir", error.detail) from error
        case "mooncake":
            settings = MooncakeSettings(
                master=own.mooncake_master,
                admin=own.mooncake_admin,
                host=own.mooncake_host,
                max_object_bytes=max_object_bytes,
                segment_bytes=own.mooncake_segment_bytes,
                metadata=own.mooncake_metadata,
            )
            try:
                return await MooncakeBlockStore.open(settings, namespace, own.id)
            except StoreFailed as error:
                raise ConfigError("pool.mooncake_master", error.detail) from error

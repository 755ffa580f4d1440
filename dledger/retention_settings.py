"""From the configuration of a broker to what its retention goes by."""

from __future__ import annotations

from dledger.config import BrokerConfig
from dledger.services.retention import RetentionSettings, force_ratio_of


def retention_settings(config: BrokerConfig) -> RetentionSettings:
    """Return how much is kept, as the configuration says."""
    store = config.store
    return RetentionSettings(
        segment_bytes=store.mapped_file_size_commit_log,
        reserved_hours=store.file_reserved_time,
        delete_hours=store.delete_when,
        keep_bytes=store.keep_bytes,
        check_interval_s=store.retention_interval_ms / 1000,
        expire_anytime_ratio=store.disk_max_used_space_ratio / 100,
        force_ratio=force_ratio_of(
            store.disk_space_clean_forcibly_ratio, is_enabled=store.clean_file_forcibly_enable
        ),
    )

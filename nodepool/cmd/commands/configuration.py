"""``config-validate`` (config.md section 12): neither ZooKeeper nor a cloud is asked."""

from __future__ import annotations

from nodepool.cmd.commands.context import Context, Subparsers, add_command


def register(subparsers: Subparsers) -> None:
    add_command(subparsers, "config-validate", config_validate, "check the configuration file")


def config_validate(context: Context) -> int:
    from nodepool.cmd.config_validator import ConfigValidator

    return ConfigValidator(context.args.config).validate()

"""``config-validate`` and ``config-schema`` (CFG-12), and ``plan``.

The first two use neither ZooKeeper nor a cloud.
"""

from __future__ import annotations

import json

from nodepool.cmd.commands.context import Context, Subparsers, add_command, add_format, add_listing
from nodepool.process.program import load_config


def register(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers, "config-validate", config_validate, "check the configuration file"
    )
    # Not "strict": the default would override the option of the same name before the subcommand.
    parser.add_argument(
        "--strict", action="store_true", dest="strict_warnings", help="treat warnings as errors"
    )
    add_format(parser, ("text", "json"), "text", "(default: %(default)s, to the log)")
    parser = add_listing(
        subparsers, "plan", plan_change, "preview the effects of a changed configuration"
    )
    # The option before the subcommand names the configuration in force, which contains the
    # ZooKeeper servers.
    parser.add_argument(
        "-c", "--new", dest="new", metavar="FILE", required=True, help="the changed configuration"
    )
    add_command(
        subparsers,
        "config-schema",
        config_schema,
        "print the JSON schema of the configuration file, for editors",
    )


def config_validate(context: Context) -> int:
    from nodepool.cmd.config_validator import ConfigValidator

    args = context.args
    validator = ConfigValidator(args.config, args.secure)
    validator.strict = args.strict or args.strict_warnings
    if args.format == "text":
        return validator.validate()
    validator.check()
    print(json.dumps(validator.report(), indent=1))
    return 0 if validator.good else 1


def plan_change(context: Context) -> int:
    """Print the effects of a changed configuration; status 1: the file is invalid."""
    from nodepool.cmd.config_validator import ConfigValidator
    from nodepool.status.once import Once
    from nodepool.status.plan import plan

    args = context.args
    if ConfigValidator(args.new, args.secure).validate():
        return 1
    found = plan(Once(context.zk), context.whole_config, load_config(args.new, args.secure))
    if not found.rows and args.format == "table":
        print("nothing would change")
    else:
        context.show(found)
    return 0


def config_schema(context: Context) -> None:
    from nodepool.config import jsonschema

    print(json.dumps(jsonschema.document(), indent=1))

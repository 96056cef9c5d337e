#!/bin/sh
# mcp 2.3.0 (PyPI), its MCPServer: a text for an argument of the type "str | None" is parsed as JSON before it is validated.
# The text "null" becomes None, which for most tools is the default: all instead of the item named null. A text that is a
# JSON object or array, such as the notes of a lease or a file's content, is refused as no valid string. With the type str,
# both arrive as they were sent. The schema that clients get says that any string is valid for both.
# Seen: "str: null 'null', {"a": 1} '{"a": 1}'; str | None: null None, {"a": 1} refused".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check mcp==2.3.0
cat >"$work/run.py" <<'END'
import asyncio
import logging

from mcp import Client
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def plain(text: str) -> str:
    return repr(text)


@server.tool()
def optional(text: str | None = None) -> str:
    return repr(text)


async def main():
    async with Client(server) as client:

        async def answers(tool):
            found = []
            for text in ("null", '{"a": 1}'):
                result = await client.call_tool(tool, {"text": text})
                found.append(f"{text} {'refused' if result.is_error else result.content[0].text}")
            return ", ".join(found)

        print(f"str: {await answers('plain')}; str | None: {await answers('optional')}")


logging.disable(logging.CRITICAL)
asyncio.run(main())
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qxF "str: null 'null', {\"a\": 1} '{\"a\": 1}'; str | None: null None, {\"a\": 1} refused" "$work/seen"

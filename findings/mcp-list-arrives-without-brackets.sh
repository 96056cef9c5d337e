#!/bin/sh
# mcp 2.3.0 (PyPI), its MCPServer: a tool that returns a list sends one block of text for each element, not the list as
# JSON. An empty list is no content at all, as is None, so that an agent that asks which machines wait gets an empty answer
# instead of [], and a list of one object cannot be told from an object. The structured content has the list, but only if
# the type of the result is declared, and clients from before it read the text. The specification advises to send the
# structured content as JSON in a block of text, too, which the server does for a dictionary.
# Seen: "dict with []: text { "machines": [] }; []: nothing; None: nothing; [1]: text 1; [{"a": 1}] and {"a": 1}: the same
# text; structured: {"result": []}" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check mcp==2.3.0
cat >"$work/run.py" <<'END'
import asyncio
import json
from typing import Any

from mcp import Client
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")
RESULTS = {"dict": {"machines": []}, "empty": [], "none": None, "one": [1], "objects": [{"a": 1}], "object": {"a": 1}}


@server.tool()
def of_list(name: str) -> list[Any]:
    return RESULTS[name]


@server.tool()
def of_any(name: str) -> Any:
    return RESULTS[name]


@server.tool()
def of_dict(name: str) -> dict[str, Any]:
    return RESULTS[name]


async def main():
    async with Client(server) as client:

        async def text(tool, name):
            result = await client.call_tool(tool, {"name": name})
            return "text " + " ".join(result.content[0].text.split()) if len(result.content) == 1 else "nothing"

        same = await text("of_list", "objects") == await text("of_dict", "object")
        structured = (await client.call_tool("of_list", {"name": "empty"})).structured_content
        print(
            f"dict with []: {await text('of_dict', 'dict')}; []: {await text('of_list', 'empty')}; None: "
            f"{await text('of_any', 'none')}; [1]: {await text('of_list', 'one')}; [{{\"a\": 1}}] and {{\"a\": 1}}: "
            f"{'the same text' if same else 'other texts'}; structured: {json.dumps(structured)}"
        )


asyncio.run(main())
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
first='dict with []: text { "machines": [] }; []: nothing; None: nothing; [1]: text 1'
grep -qxF "$first; [{\"a\": 1}] and {\"a\": 1}: the same text; structured: {\"result\": []}" "$work/seen"

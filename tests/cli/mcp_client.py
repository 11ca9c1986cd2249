"""A client that speaks only the protocol, from init to export. It keeps nothing: killed, it is started again and goes
on from what the server answers. Each call is printed before it is sent.

Arguments: the folder of the server.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

WANTED = [(0.02, 1), (0.03, 2), (0.01, 1)]
"""Learning rates, and how often each is run; the first is today's, which the study runs by itself."""


class Refused(Exception):
    """A tool's refusal."""


class Agent:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, name: str, **arguments: object) -> Any:
        print(name, flush=True)
        done = await self._client.call_tool(name, arguments)
        text = done.content[0].text  # type: ignore[union-attr]
        assert len(text) < 8000
        if done.is_error:
            raise Refused(text)
        return json.loads(text)

    async def begin(self) -> None:
        """A study of which nothing is left to decide."""
        try:
            await self.call("study", study="mine")
        except Refused:
            try:
                command = ["python", "plain_step_loss.py", "--lr", "0.02"]
                written = await self.call("init", study="mine", command=command, log="earlier.log")
            except Refused:
                written = await self.call("init", study="mine")
            text = re.sub(r"# EDIT: .*", "# it is an eval's", written["text"])
            text = re.sub(r"target = \S+", 'metric = "loss"', text).replace("trials = 20", "trials = 8")
            text = text.replace("[search]", '[search]\nsampler = "requests"')
            await self.call("init", study="mine", text=text)

    async def settled(self) -> list[dict[str, Any]]:
        """The trials once nothing runs and no request waits."""
        while True:
            try:
                status = await self.call("status", wait=20)
            except Refused:  # it has not begun
                await self.call("start")
                continue
            if status["state"] == "unattended" or status["requests_waiting"]:
                await self.call("start")
            elif status["state"] != "running":
                return list((await self.call("history"))["trials"])

    async def run(self) -> None:
        await self.begin()
        for rate, times in WANTED:
            while True:
                trials = await self.settled()
                there = [t["trial"] for t in trials if f"LR={rate:g}" in t["values"].replace(" ", "")]
                if len(there) >= times:
                    break
                if there:
                    await self.call("propose", again=there[-1])
                else:
                    await self.call("propose", values={"LR": rate, "BATCH_SIZE": 8})
        await self.call("verdict")
        print(f"done {(await self.call('export'))['parameters']}", flush=True)


async def main(folder: str) -> None:
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "lora_tune.mcp"], cwd=folder, env=dict(os.environ)
    )
    async with Client(stdio_client(server)) as client:
        await Agent(client).run()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])

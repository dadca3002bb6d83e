"""The scripted harness's program: asks a model, runs the tools that it calls, until it calls none.

Runs alone in a sandbox with any Python from 3.8 on; nothing of slime is there. Prints one JSON line per answer and per
tool result. Exit code: 0 the model has ended, 3 it called tools in its last turn allowed, 1 the server refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

SYSTEM = "You work in a shell on the task that the user gives. Call the tools, then say what you have done."
TOOLS = {
    "shell": ("Run a bash command line and return its output.", ["command"]),
    "write_file": ("Write a text to a file.", ["path", "content"]),
}


def schema(names: list[str]) -> dict[str, Any]:
    """JSON schema of arguments that are all texts."""
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


class Remote:
    """The tools of an MCP server over HTTP, as far as this agent needs the protocol."""

    def __init__(self, url: str) -> None:
        self.url, self.num_sent = url, 0
        self.schemas: dict[str, tuple[str, dict[str, Any]]] = {}
        if url:
            about = {"protocolVersion": "2025-06-18", "capabilities": {}}
            self.send("initialize", {**about, "clientInfo": {"name": "scripted", "version": "1"}})
            tools = self.send("tools/list", {})["tools"]
            self.schemas = {tool["name"]: (tool["description"], tool["inputSchema"]) for tool in tools}

    def send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a message, return its result."""
        self.num_sent += 1
        message = {"jsonrpc": "2.0", "id": self.num_sent, "method": method, "params": params}
        answer = post(self.url, message, 3600)
        return answer.get("result") or {"content": [{"text": "error: " + answer["error"]["message"]}]}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Make a call, return what its tool says."""
        result = self.send("tools/call", {"name": name, "arguments": arguments})
        return "\n".join(part.get("text", "") for part in result["content"])


def run_tool(name: str, arguments: dict[str, Any], options: argparse.Namespace, remote: Remote) -> str:
    """Run a tool; what goes wrong is told to the model."""
    if name in remote.schemas:
        return remote.call(name, arguments)
    if name not in TOOLS:
        return f"error: there is no tool {name!r}, only {', '.join([*TOOLS, *remote.schemas])}"
    if missing := [key for key in TOOLS[name][1] if not isinstance(arguments.get(key), str)]:
        return f"error: {name} needs the text {missing[0]!r}"
    try:
        if name == "write_file":
            with open(arguments["path"], "w") as file:
                file.write(arguments["content"])
            return "written"
        done = subprocess.run(
            ["bash", "-c", arguments["command"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=options.tool_timeout,
        )
        text = done.stdout.decode(errors="replace")
        code = f"\n(exit code {done.returncode})" if done.returncode else ""
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    most = options.max_output
    cut = text if len(text) <= most else f"{text[: most // 2]}\n... cut ...\n{text[-(most // 2) :]}"
    return cut + code


class Chat:
    """A conversation in OpenAI's Chat Completions; subclasses speak other protocols."""

    path = "/v1/chat/completions"

    def __init__(self, prompt: str, remote: Remote) -> None:
        own = {name: (text, schema(parameters)) for name, (text, parameters) in TOOLS.items()}
        self.tools = [(name, text, parameters) for name, (text, parameters) in {**own, **remote.schemas}.items()]
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]

    def body(self) -> dict[str, Any]:
        """Return the next request."""
        functions = [{"name": n, "description": d, "parameters": p} for n, d, p in self.tools]
        return {"messages": self.messages, "tools": [{"type": "function", "function": f} for f in functions]}

    def take(self, answer: dict[str, Any]) -> list[Any]:
        """Keep an answer; return its calls: id, tool, arguments."""
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        calls = message.get("tool_calls") or []
        return [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]

    def give(self, results: list[tuple[str, str]]) -> None:
        """Keep the results of calls: id, text."""
        self.messages += [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]


class Responses(Chat):
    """OpenAI's Responses."""

    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in self.tools]
        return {"input": self.messages, "tools": tools}

    def take(self, answer: dict[str, Any]) -> list[Any]:
        self.messages += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(c["call_id"], c["name"], json.loads(c["arguments"])) for c in calls]

    def give(self, results: list[tuple[str, str]]) -> None:
        self.messages += [{"type": "function_call_output", "call_id": i, "output": text} for i, text in results]


class Messages(Chat):
    """Anthropic's Messages."""

    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        tools = [{"name": n, "description": d, "input_schema": p} for n, d, p in self.tools]
        return {"system": SYSTEM, "messages": self.messages[1:], "tools": tools, "max_tokens": 8192}

    def take(self, answer: dict[str, Any]) -> list[Any]:
        self.messages.append({"role": "assistant", "content": answer["content"]})
        return [(b["id"], b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"]

    def give(self, results: list[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results]
        self.messages.append({"role": "user", "content": blocks})


PROTOCOLS = {"openai": Chat, "responses": Responses, "anthropic": Messages}


def post(url: str, value: Any, timeout: float) -> Any:
    """Send JSON to the server under the session's key, return its answer."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["SLIME_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # nosec B310: our own server
        return json.load(answer)


def ask(conversation: Chat, options: argparse.Namespace) -> Any:
    """Send the conversation, return the answer."""
    url, body = options.url + conversation.path, conversation.body()
    return post(url, {"model": options.model, **body}, options.turn_timeout)


def main() -> int:
    """Work on the task of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="slime-actor", help="name of the model")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="openai", help="what the server is asked by")
    parser.add_argument("--max-turns", type=int, default=30, help="answers of the model")
    parser.add_argument("--tool-timeout", type=float, default=60, help="seconds of a command")
    parser.add_argument("--turn-timeout", type=float, default=3600, help="seconds of an answer")
    parser.add_argument("--max-output", type=int, default=8000, help="characters of a tool's result")
    parser.add_argument("--mcp", default="", help="address of an MCP server with more tools")
    parser.add_argument("prompt", help="the task")
    options = parser.parse_args()
    remote = Remote(options.mcp)
    conversation = PROTOCOLS[options.protocol](options.prompt, remote)
    for _ in range(options.max_turns):
        try:
            answer = ask(conversation, options)
        except urllib.error.HTTPError as error:
            print(json.dumps({"error": error.code, "body": error.read().decode(errors="replace")[:1000]}), flush=True)
            return 1
        print(json.dumps({"answer": answer}), flush=True)
        calls = conversation.take(answer)
        if not calls:
            return 0
        results = [(call, run_tool(name, arguments, options, remote)) for call, name, arguments in calls]
        print(json.dumps({"results": results}), flush=True)
        conversation.give(results)
    return 3


if __name__ == "__main__":
    sys.exit(main())

"""The tools of a request for a response, as the daemon takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import limits
from ..custom_tools import CUSTOM_PARAMETERS, form_told
from ..failure import bad_field, bad_value
from ..fields import add_unread, check_count, check_fields, check_list
from .fields import NAMESPACE_FIELDS, TOOL_FIELDS

READ = ("function", "custom", "namespace")
"""The types of tools that the model may call; others run at OpenAI."""


class Called(NamedTuple):
    """A function as the client calls it.

    Attributes:
        name: of the function.
        namespace: to which it belongs; empty for none.
    """

    name: str
    namespace: str = ""


@dataclass(slots=True)
class Tools:
    """What the model may call.

    Attributes:
        functions: in the form that chat templates know.
        names: of functions that have another name there, by the function that the client knows.
        customs: the names, there, of those that stand for a custom tool, which takes one text.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    names: dict[Called, str] = field(default_factory=dict)
    customs: set[str] = field(default_factory=set)

    @property
    def called(self) -> dict[str, Called]:
        """Return what each of these names stands for."""
        return {name: called for called, name in self.names.items()}

    def shown(self, called: Called) -> str:
        """Return the name under which the model knows a function."""
        return self.names.get(called, called.name)


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of a request as its response repeats it."""
    if tool["type"] != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}


def read_tools(given: Any, unread: list[str]) -> Tools:
    """Return the functions and custom tools, those in namespaces too, without tools that run
    elsewhere.

    Chat templates know no namespaces: a function has its own name there, unless another one has
    the same.
    """
    check_list(given, "tools", "tools", limits.MAX_TOOLS)
    found = [
        one
        for place, tool in enumerate(given)
        for one in _functions(tool, f"tools[{place}]", unread)
    ]
    check_count(found, "tools", "functions", limits.MAX_TOOLS)
    count = Counter(called.name for called, _, _ in found)
    tools = Tools()
    for called, function, is_custom in found:
        is_alone = count[called.name] == 1 or not called.namespace
        name = called.name if is_alone else f"{called.namespace}__{called.name}"
        tools.functions.append({"name": name, **function})
        if called != Called(name):
            tools.names[called] = name
        if is_custom:
            tools.customs.add(name)
    return tools


def _functions(
    tool: Any, path: str, unread: list[str], namespace: str = ""
) -> Iterator[tuple[Called, dict[str, Any], bool]]:
    """Yield the functions that a tool stands for, what is known of each, and if it is custom."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise bad_field(path, f"{path} must be an object with a type")
    if kind == "namespace" and not namespace:
        read = check_fields(tool, NAMESPACE_FIELDS, unread, within=path)
        inner = read.get("tools", [])
        if not isinstance(inner, list):
            raise bad_value(f"{path}.tools", "a list of tools", inner)
        for place, one in enumerate(inner):
            yield from _functions(one, f"{path}.tools[{place}]", unread, _name(read, path))
        return
    if kind not in READ or kind == "namespace":
        add_unread(unread, f"{path} ({kind[:64]})")
        return
    read = check_fields(tool, TOOL_FIELDS, unread, within=path)
    description = read.get("description", "")
    if not isinstance(description, str):
        raise bad_value(f"{path}.description", "text", description)
    if kind == "custom":
        parameters: Any = CUSTOM_PARAMETERS
        form = form_told(read.get("format"))
        description += form
        if form:
            add_unread(unread, f"{path}.format")
    else:
        parameters = read.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        raise bad_value(f"{path}.parameters", "a JSON schema", parameters)
    function: dict[str, Any] = {"description": description} if description else {}
    if "strict" in read:
        function["strict"] = read["strict"]
    yield (
        Called(_name(read, path), namespace),
        {**function, "parameters": parameters},
        kind == "custom",
    )


def _name(read: dict[str, Any], path: str) -> str:
    name = read.get("name")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{path}.name", f"{path}.name must be text")
    return name

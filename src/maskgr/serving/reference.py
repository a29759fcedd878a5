"""/docs: the OpenAPI document as a page without scripts, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid; padding-top: 1rem; font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid; border-radius: .3rem; }
code { font-size: .95em; overflow-wrap: anywhere; }
"""
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CSP = f"default-src 'none'; style-src 'sha256-{DIGEST}'; base-uri 'none'; frame-ancestors 'none'"
EXAMPLES = {
    "/v1/recommend": {"history": ["A", "B"], "top": 10},
    "/v1/recommend/batch": {"requests": [{"history": ["A"]}, {"history": ["B"]}]},
    "/v1/sessions": {"history": ["A", "B"], "items": 2},
    "/v1/explain": {"history": ["A", "B"], "steps": 3},
    "/v1/admin/reload": {"path": "shop-2"},
}


def reference_page(document: dict[str, Any]) -> HTMLResponse:
    info, parts = document["info"], document["components"]["schemas"]
    content = "".join(
        _operation(path, method, operation, parts)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(_schema(name, schema) for name, schema in sorted(parts.items()))
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}: API</title><style>{STYLE}</style>"
        f"<main><h1>{escape(info['title'])} {escape(info['version'])}: API</h1>"
        f"<p>{escape(info['description'])} Machines read "
        '<a href="openapi.json">openapi.json</a>; errors are application/problem+json.</p>'
        f"{content}<h2>Shapes</h2>{schemas}</main></html>"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": CSP})


def _operation(path: str, method: str, operation: dict[str, Any], parts: dict[str, Any]) -> str:
    verb = method.upper()
    said = "".join(
        f"<p>{escape(part)}</p>" for part in operation.get("description", "").split("\n\n")
    )
    rows = [
        (p["name"], _kind(p["schema"]), _default(p["schema"]), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if reference := body.get("schema", {}).get("$ref"):
        rows += _rows(parts[_name(reference)])
    answers = ", ".join(sorted(operation["responses"]))
    return (
        f'<h2 id="{escape(operation["operationId"])}"><code>{verb} {escape(path)}</code></h2>{said}'
        f"<pre>{escape(_curl(path, method))}</pre>{_table(rows)}"
        f"<p>Answers: {answers}; {_shapes(operation)}</p>"
    )


def _curl(path: str, method: str) -> str:
    if method == "get":
        return f"curl localhost:8000{path}"
    example = json.dumps(EXAMPLES.get(path, {}))
    return f"curl localhost:8000{path} -H 'Content-Type: application/json' -d '{example}'"


def _shapes(operation: dict[str, Any]) -> str:
    content = operation["responses"]["200"].get("content", {})
    found = [_kind(kind["schema"]) for kind in content.values() if "schema" in kind]
    return "200 is " + " or ".join(found)


def _schema(name: str, schema: dict[str, Any]) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    heading = f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
    return f"{heading}{about}{_table(_rows(schema))}"


def _rows(schema: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (name, _kind(own), _default(own), own.get("description", ""))
        for name, own in schema.get("properties", {}).items()
    ]


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    if not rows:
        return ""
    body = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(default)}</td>"
        f"<td>{escape(said)}</td></tr>"
        for name, kind, default, said in rows
    )
    head = "<tr><th>name</th><th>type</th><th>default</th><th></th></tr>"
    return f"<table>{head}{body}</table>"


def _default(schema: dict[str, Any]) -> str:
    return json.dumps(schema["default"]) if "default" in schema else ""


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words of HTML."""
    return " or ".join(dict.fromkeys(_kinds(schema)))


def _kinds(schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        name = escape(_name(schema["$ref"]))
        yield f'<a href="#{name}">{name}</a>'
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _kinds(one)
    elif "enum" in schema or "const" in schema:
        yield ", ".join(escape(str(v)) for v in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "array":
        most = f" (at most {schema['maxItems']:,})" if "maxItems" in schema else ""
        yield f"list of {_kind(schema.get('items', {}))}{most}"
    else:
        low, high = schema.get("minimum"), schema.get("maximum")
        bounds = f" {low} to {high}" if low is not None and high is not None else ""
        yield escape(str(schema.get("type", "anything"))) + bounds


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]

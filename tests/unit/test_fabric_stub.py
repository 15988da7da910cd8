"""The native module's signatures are those of its stub, which stubtest cannot compare: nanobind hides them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from shared.errors import FabricError
from shared.transfer import _native, interface
from shared.transfer.faults import ERRORS, OK

STUB = ast.parse(Path(interface.__file__).with_name("_native.pyi").read_text())


def signature(text: str) -> tuple[list[str], list[str], str]:
    """Positional names, keyword-only names, and the result's type without its module."""
    node = ast.parse(f"{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return of_node(node)


def of_node(node: ast.FunctionDef) -> tuple[list[str], list[str], str]:
    assert node.returns is not None
    result = ast.unparse(node.returns).replace("shared.transfer._native.", "")
    annotated = [argument.arg for argument in node.args.args]
    return annotated, [argument.arg for argument in node.args.kwonlyargs], result


def stub_functions() -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def test_every_function_of_the_stub_is_as_it_says() -> None:
    for name, node in stub_functions().items():
        owner, _, member = name.rpartition(".")
        holder = getattr(_native, owner) if owner else _native
        found = inspect.getattr_static(holder, member)
        if isinstance(found, property):
            signatures = found.fget.__nb_signature__  # type: ignore[union-attr]
            text = signatures[0][0].replace("def (", f"def {member}(")
            assert signature(text)[2] == of_node(node)[2], name
        else:
            [(text, _, _)] = found.__nb_signature__
            assert signature(text) == of_node(node), name


def test_everything_native_is_in_the_stub() -> None:
    stubbed = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {name for name in dir(_native) if not name.startswith("_")} == stubbed


def test_the_statuses_are_all_mapped() -> None:

    assert sorted([OK, *ERRORS]) == list(range(8))
    assert all(issubclass(error, FabricError) for error in ERRORS.values())

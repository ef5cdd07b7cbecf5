"""``tpserve env``: what a bug report needs to say of the machine and the installation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tpserve.cli.common import command_app, print_json, print_table
from tpserve.cli.plugins import plugin_rows
from tpserve.plugins.registry import Registry
from tpserve.settings import unknown_variables

app = command_app()

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "msgspec",
    "pluggy",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "pynng",
    "triton",
    "flashinfer-python",
)


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Describe this machine and installation, for a bug report."""
    registry = Registry.discover()
    plugins = plugin_rows(registry, registry.entries())
    report = {
        "machine": _machine(),
        "versions": _versions(plugins),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TPSERVE_")},
        "warnings": unknown_variables(os.environ),
        "plugins": plugins,
    }
    if as_json:
        print_json(report)
    else:
        _print_report(report)


def _machine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory.total / 2**30, 1),
        "free_memory_gib": round(memory.available / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """One line for each NVIDIA GPU, or why there is none to see."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi failed: {error}"]
    if answer.returncode != 0:
        return [f"nvidia-smi failed: {' '.join((answer.stderr or answer.stdout).split())}"]
    return answer.stdout.strip().splitlines()


def _versions(plugins: list[dict[str, Any]]) -> dict[str, str | None]:
    providers = sorted({row["distribution"] for row in plugins} | {"tpserve"})
    versions: dict[str, str | None] = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in [*providers, *LIBRARIES]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _print_report(report: dict[str, Any]) -> None:
    machine = {name: value for name, value in report["machine"].items() if name != "gpus"}
    gpus = {f"gpu {index}": gpu for index, gpu in enumerate(report["machine"]["gpus"])} or {"gpu": "none seen"}
    variables = report["environment"]
    for facts in ({**machine, **gpus}, report["versions"], variables):
        if facts:
            print_table([(name, str(value if value is not None else "not installed")) for name, value in facts.items()])
            typer.echo("")
    for warning in report["warnings"]:
        typer.echo(f"warning: {warning}")
    columns = ("kind", "name", "distribution", "version", "status", "reason")
    print_table([columns, *([str(row[column] or "-") for column in columns] for row in report["plugins"])])

"""The course of a run: JSON lines that grow, and a plot of them where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from mlx_spec.convert.train.storage import write_text

FILE, PLOT = "curve.jsonl", "curve.svg"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


class Curve:
    """``points`` of a run so far; those after ``step`` belong to a course that a kill ended, and are dropped."""

    def __init__(self, run: Path, step: int = 0) -> None:
        self.run = run
        self.points = [point for point in read(run / FILE) if point["step"] <= step]
        write_text(run / FILE, "".join(json.dumps(point) + "\n" for point in self.points))

    def add(self, point: dict[str, Any]) -> None:
        self.points.append(point)
        with (self.run / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")

    def plot(self) -> None:
        if can_plot():
            draw(self.points, self.run / PLOT)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a curve; one that a kill cut short is passed over."""
    if not path.is_file():
        return []
    points = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            points.append(json.loads(line))
        except ValueError:
            break
    return [point for point in points if isinstance(point, dict) and "step" in point]


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Loss and held-out acceptance length over updates, as SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    FigureCanvasSVG(figure)
    left = figure.subplots()
    right = left.twinx()
    losses = [(p["step"], p["loss"]) for p in points if p.get("loss") is not None]
    lengths = [(p["step"], p["held_out"]["acceptance_length"]) for p in points if p.get("held_out")]
    for axis, pairs, colour, name in (
        (left, losses, "tab:blue", "loss"),
        (right, lengths, "tab:red", "acceptance length"),
    ):
        if pairs:
            axis.plot(*zip(*pairs, strict=True), color=colour)
        axis.set_ylabel(name, color=colour)
    left.set_xlabel("updates")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="svg")
    temporary.replace(path)

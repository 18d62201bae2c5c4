"""One colour for each algorithm, the same in every chart, for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from iris.results import COMPARATORS


@dataclass(frozen=True)
class Tone:
    """A colour on a light background, its counterpart on a dark one, and its name as a CSS variable; for algorithms and
    numbers of ranks also the marker of their points."""

    name: str
    light: str
    dark: str
    marker: str = ""


INK = Tone("ink", "#1b2230", "#e8ebf0")
MUTED = Tone("muted", "#5c6675", "#9ba5b4")
RULE = Tone("rule", "#dde2e9", "#343c49")
PAPER = Tone("paper", "#ffffff", "#151920")
LOSS = Tone("loss", "#b3261e", "#ff8f85")
WIN = Tone("win", "#1b6e3c", "#74d39a")
GROUND = (INK, MUTED, RULE, PAPER, LOSS, WIN)

ALGORITHMS = (
    Tone("auto", "#1f4fd1", "#86a8ff", "o"),
    Tone("untuned", "#5b6bb5", "#a9b4ea", "*"),
    Tone("copy_engine", "#0f857a", "#42c7b8", "s"),
    Tone("push", "#cc6a08", "#f2a34f", "D"),
    Tone("pull", "#8438b4", "#c996f0", "^"),
    Tone("hbm_buffer", "#c4205f", "#f47aa8", "v"),
    Tone("split", "#5a8600", "#a9d153", "^"),
    Tone("streams", "#0a7ca6", "#5cc8ea", "v"),
    Tone("relay", "#00695c", "#4fd1b5", "X"),
    Tone("atomic", "#c93a2e", "#fa8d7e", "<"),
    Tone("one_shot", "#8f6a14", "#dcbb5f", "^"),
    Tone("two_shot", "#2c7a4b", "#70d199", "X"),
    Tone("decomposed", "#8a6d00", "#d9b84a", "p"),
    Tone("ring", "#9c4f7c", "#e3a0c8", "v"),
    Tone("low_latency", "#3d5a80", "#98c1d9", "P"),
    Tone("low_latency_two_shot", "#2f6f6f", "#8fd0d0", "D"),
    Tone("baseline", "#6b5a86", "#b3a2d0", "*"),
    Tone("local", "#3a6ea5", "#8db8e8", "s"),
    Tone("stream_k_one_tile", "#7a3e9d", "#c79be0", "^"),
    Tone("stream_k_two_tiles", "#a3561f", "#dea177", "v"),
    Tone("kernel", "#4b7f52", "#93c99a", "D"),
    Tone("nccl", "#7d8896", "#8f9aa9", ">"),
    Tone("torch_symm_mem", "#a5afbb", "#6c7786", "h"),
    Tone("matmul", "#c9d0d9", "#4a5462", "d"),
)
"""Tones of algorithms, in the order of charts: Iris first, comparators in greys last. Algorithms of one op have
different markers."""

_RANKS = (
    Tone("ranks-0", "#7b61d6", "#b3a1f5", "o"),
    Tone("ranks-1", "#1473b8", "#6fbdf0", "s"),
    Tone("ranks-2", "#0d8a66", "#57cfa8", "D"),
    Tone("ranks-3", "#b0661a", "#e8ab62", "^"),
)
"""Tones of curves that differ in the number of ranks: up to 2, up to 4, up to 8, more."""

_SPARE = (
    ("#5566aa", "#a3b1ee", "P"),
    ("#b0478a", "#e69aca", "X"),
    ("#7a4988", "#c79bd3", "*"),
    ("#9a7d0a", "#d9c15a", "<"),
    ("#35707a", "#84bfca", "p"),
)


class Palette:
    """Tones, markers and order of the algorithms of one study; unknown algorithms get spare tones."""

    def __init__(self, algorithms: Iterable[str]) -> None:
        known = {tone.name: tone for tone in ALGORITHMS}
        strange = sorted(set(algorithms) - known.keys())
        spare = {
            name: Tone(f"other-{index}", *_SPARE[index]) if index < len(_SPARE) else replace(MUTED, marker="H")
            for index, name in enumerate(strange)
        }
        ours = {name: tone for name, tone in known.items() if name not in COMPARATORS}
        theirs = {name: known[name] for name in COMPARATORS}
        self.tones = {**ours, **spare, **theirs}

    def ordered(self, algorithms: Iterable[str]) -> list[str]:
        """Algorithms in the order in which charts and tables show them."""
        wanted = set(algorithms)
        return [name for name in self.tones if name in wanted]

    def of_ranks(self, world_size: int) -> Tone:
        """The tone of a number of ranks."""
        return _RANKS[min(len(_RANKS) - 1, max(0, (world_size - 1).bit_length() - 1))]

    @property
    def variables(self) -> dict[str, str]:
        """The CSS variable of each colour for a light background."""
        return {tone.light: f"var(--{tone.name})" for tone in (*GROUND, *_RANKS, *self.tones.values())}

    def css(self, dark: bool) -> str:
        """The CSS declarations of all variables."""
        tones = {tone.name: tone for tone in (*GROUND, *_RANKS, *self.tones.values())}
        return "".join(f"--{tone.name}:{tone.dark if dark else tone.light};" for tone in tones.values())

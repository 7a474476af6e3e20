"""Coloured shapes on a plain ground, with captions and questions: something to see and say, made in a moment.

Colour, shape and place say it all: 8 x 5 x 5 = 200 scenes with a caption of its own each. How exactly one is drawn
(shade, size, place to a pixel, noise) depends on a seed, so there are as many different images as one likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 40),
    "blue": (40, 60, 220),
    "yellow": (235, 220, 40),
    "purple": (140, 40, 170),
    "orange": (245, 140, 20),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
PLACES = {
    "in the middle": (0.5, 0.5),
    "at the top": (0.5, 0.25),
    "at the bottom": (0.5, 0.75),
    "on the left": (0.25, 0.5),
    "on the right": (0.75, 0.5),
}
QUESTIONS = {
    "colour": "what colour is the shape?",
    "shape": "which shape is it?",
    "place": "where is the shape?",
}
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # with the numbers 0, 1, 2, 3


@dataclass(frozen=True)
class Scene:
    """One shape of one colour in one place."""

    colour: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} {self.place}"

    @property
    def captions(self) -> list[str]:
        """Several that say the same."""
        return [self.caption, f"there is a {self.shape} {self.place} and it is {self.colour}"]

    @property
    def questions(self) -> list[tuple[str, str]]:
        """Questions, each with its answer."""
        return [(question, getattr(self, what)) for what, question in QUESTIONS.items()]

    def draw(self, seed: int = 0, side: int = 32) -> Image.Image:
        """An image of it: the seed decides on everything that the words leave open."""
        rng = np.random.default_rng([seed, *self.caption.encode()])
        ground = rng.uniform(95, 150) + np.zeros(3)
        across, down = np.array(PLACES[self.place]) + rng.uniform(-0.04, 0.04, 2)
        radius = rng.uniform(0.15, 0.2)
        rows, columns = (np.mgrid[:side, :side] + 0.5) / side
        inside = _inside(self.shape, (columns - across) / radius, (rows - down) / radius)
        colour = np.array(COLOURS[self.colour]) + rng.uniform(-12, 12, 3)
        pixels = np.where(inside[..., None], colour, ground) + rng.normal(0, 6, (side, side, 3))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    distance = np.hypot(x, y)
    if shape == "circle":
        return distance <= 1
    if shape == "ring":
        return (distance <= 1) & (distance >= 0.55)
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 1)
    return (y <= 0.8) & (y >= 2 * abs(x) - 1)


def scenes(colours: Iterable[str] = tuple(COLOURS), shapes: Iterable[str] = SHAPES) -> list[Scene]:
    """All scenes of these colours and shapes, each once."""
    shapes = tuple(shapes)
    return [Scene(colour, shape, place) for colour in colours for shape in shapes for place in PLACES]


class Pairs:
    """Images and captions in memory, as in `ImageTextDataset`: each scene `times` times, at different positions."""

    in_memory = True

    def __init__(self, of: Sequence[Scene] | None = None, *, times: int = 1, seed: int = 0, side: int = 32) -> None:
        self.scenes = [scene for scene in (scenes() if of is None else of) for _ in range(times)]
        self.images = [scene.draw(seed * 1_000_003 + number, side) for number, scene in enumerate(self.scenes)]

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "text": self.scenes[index].caption}


class Questions(Pairs):
    """Images with one question each, and its answer: `prompt` and `completion`. The questions take turns."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        asked = self.scenes[index].questions
        question, answer = asked[index % len(asked)]
        return {"image": self.images[index], "prompt": question, "completion": answer}


def write_images(folder: Path, of: Sequence[Scene], *, seed: int = 0, side: int = 32) -> list[str]:
    """Draw scenes into files; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:05d}.png" for number in range(len(of))]
    for number, (name, scene) in enumerate(zip(names, of, strict=True)):
        scene.draw(seed * 1_000_003 + number, side).save(folder / name)
    return names


def write_jsonl(folder: Path, of: Sequence[Scene], *, questions: bool = False, side: int = 32) -> Path:
    """Images and a JSONL file of captions, or of questions and answers, beside them; the file."""
    names = write_images(folder, of, side=side)
    records: list[dict[str, Any]] = []
    for number, (name, scene) in enumerate(zip(names, of, strict=True)):
        question, answer = scene.questions[number % len(QUESTIONS)]
        said = {"question": question, "answer": answer} if questions else {"text": scene.caption}
        records.append({"image": name, **said})
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return file


def vocabulary() -> list[str]:
    """Every word of captions, questions and answers, in order."""
    said = [text for scene in scenes() for text in (*scene.captions, *(" ".join(pair) for pair in scene.questions))]
    return sorted({word for text in said for word in text.replace("?", " ?").split()})


def word_tokenizer(more: Sequence[str] = (), **options: Any) -> Any:
    """A tokenizer with one token per word, after the `SPECIAL` ones; `more` are further words or special tokens.

    Texts get <s> before and </s> behind them, as CLIP's do, unless ``add_special_tokens=False``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys([*SPECIAL, *more, *vocabulary()]))
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(name, words.index(name)) for name in ("<s>", "</s>")]
    plain.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    names = ("pad_token", "unk_token", "bos_token", "eos_token")
    return PreTrainedTokenizerFast(tokenizer_object=plain, **dict(zip(names, SPECIAL, strict=True)), **options)

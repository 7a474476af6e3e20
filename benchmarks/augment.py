"""What random views cost: images per second of the SimCLR recipe, ours against kornia and torchvision.

All make one normalised view of each image of a uint8 batch: random resized crop, flip, colour jitter (p = 0.8), grey
(0.2), Gaussian blur (0.5), with draws of its own for every sample. kornia does so on batches (`same_on_batch=False`),
torchvision image by image, as in the workers of a data loader. They take turns, and ratios are taken within a round of
turns, so that what else the machine does meets all alike. Without `antialias`, torchvision's crop does the same work as
the others'.

    python benchmarks/augment.py
    python benchmarks/augment.py --only ours kornia --rounds 50
    python benchmarks/augment.py --device cuda --json augment.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import turns
from rich.table import Table
from torch import Tensor
from turns import console

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CASES = {32: 256, 224: 32}  # side of the images, and how many are in a batch
TURN = 0.15  # minimum seconds of a turn, for fast contestants

View = Callable[[Tensor], Tensor]


# -- contestants -------------------------------------------------------------------------------------------


def ours(size: int, blur: int) -> View:
    """The library's own preset, one of its two views."""
    from trainformer.data.augment import simclr
    from trainformer.data.augment.ops import blur_size

    assert blur == blur_size(size), "all contestants blur with the same kernel"
    return simclr(size, mean=MEAN, std=STD).views[0]


def kornia(size: int, blur: int) -> View:
    """Whole batches, every sample for itself."""
    import kornia.augmentation as K

    transform = torch.nn.Sequential(
        K.RandomResizedCrop((size, size), scale=(0.08, 1.0), same_on_batch=False),
        K.RandomHorizontalFlip(same_on_batch=False),
        K.ColorJitter(0.8, 0.8, 0.8, 0.2, p=0.8, same_on_batch=False),
        K.RandomGrayscale(p=0.2, same_on_batch=False),
        K.RandomGaussianBlur((blur, blur), (0.1, 2.0), p=0.5, same_on_batch=False),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )
    return lambda images: transform(images.float() / 255)


def torchvision(size: int, blur: int) -> View:
    """Image by image, and a batch of the results."""
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(0.08, 1.0), antialias=False),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(blur, (0.1, 2.0))], p=0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    return lambda images: torch.stack([transform(image) for image in images])


CONTESTANTS: dict[str, Callable[[int, int], View]] = {"ours": ours, "kornia": kornia, "torchvision": torchvision}
TITLES = {"ours": "trainformer", "kornia": "kornia, per sample", "torchvision": "torchvision v2, image by image"}


# -- measuring ---------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One size of image: who takes part, and the images per second of every turn."""

    size: int
    images: Tensor
    views: dict[str, View]
    batches: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def warm_up(self, clock: Callable[[], float]) -> None:
        """Check that everybody does what is asked, and find how many batches fill a turn."""
        for key, view in self.views.items():
            check(key, view, self.images)
            began = clock()
            view(self.images)
            self.batches[key] = max(1, round(TURN / max(clock() - began, 1e-6)))
            self.speeds[key] = []

    def take_turn(self, key: str, clock: Callable[[], float]) -> None:
        """Let one contestant make views while the others wait."""
        view, batches = self.views[key], self.batches[key]
        view(self.images)  # not timed: caches are cold after the wait
        began = clock()
        for _ in range(batches):
            view(self.images)
        self.speeds[key].append(batches * len(self.images) / (clock() - began))


def check(key: str, view: View, images: Tensor) -> None:
    """Nobody is fast by doing something else: normalised floats, and other views of equal images."""
    same = images[:1].expand(len(images), -1, -1, -1)
    views = view(same)
    if views.shape != images.shape or views.dtype != torch.float32 or not 0.2 < views.std() < 3:
        raise SystemExit(f"{TITLES[key]} does not return normalised views: {views.shape}, {views.dtype}.")
    distances = torch.cdist(views.flatten(1), views.flatten(1)).fill_diagonal_(float("inf"))
    if distances.min() < 1e-3:
        raise SystemExit(f"{TITLES[key]} gives two equal images the same view.")


def measure(chosen: Sequence[str], args: argparse.Namespace) -> list[Case]:
    """All rounds of all sizes."""
    clock = turns.make_clock(args)
    cases = []
    with console.status("") as status:
        for size, count in CASES.items():
            status.update(f"warming up at {size} pixels")
            generator = torch.Generator().manual_seed(0)
            images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
            blur = max(3, size // 10 // 2 * 2 + 1)
            case = Case(size, images.to(args.device), {key: CONTESTANTS[key](size, blur) for key in chosen})
            case.warm_up(clock)
            cases.append(case)
            for key in turns.in_turn(chosen, args.rounds, status, f"{size} pixels"):
                case.take_turn(key, clock)
    return cases


# -- figures -----------------------------------------------------------------------------------------------


def figures(case: Case, key: str) -> dict[str, float]:
    """Medians of the turns. How many times faster ours is, is taken per round, then summarised."""
    low, middle, high = turns.ratio_quartiles(case.speeds["ours"], case.speeds[key])
    return {
        "images_per_s": statistics.median(case.speeds[key]),
        "best_images_per_s": max(case.speeds[key]),
        "ours_is_faster_by": middle,
        "low": low,
        "high": high,
    }


def report(cases: Sequence[Case], args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "what": "images per second through the SimCLR augmentation, one view each",
        **turns.circumstances(args),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "torchvision", "kornia") if has(name)
        },
        "cases": [
            {
                "size": case.size,
                "batch": len(case.images),
                "contestants": {key: {"title": TITLES[key], **figures(case, key)} for key in case.views},
            }
            for case in cases
        ],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"SimCLR views on {turns.where(result)}, {result['rounds']} rounds, {result['clock']} clock")
    table.add_column("images", no_wrap=True)
    table.add_column("augmentation", no_wrap=True)
    for heading in ("images/s, median", "images/s, best", "ours is faster by", "quartiles"):
        table.add_column(heading, justify="right")
    for case in result["cases"]:
        rows = list(case["contestants"].values())
        for number, row in enumerate(rows):
            table.add_row(
                f"{case['batch']} x {case['size']} px" if number == 0 else "",
                row["title"],
                f"{row['images_per_s']:,.0f}",
                f"{row['best_images_per_s']:,.0f}",
                f"{row['ours_is_faster_by']:.1f}×" if number else "",
                f"{row['low']:.1f} – {row['high']:.1f}" if number else "",
                style="bold green" if row["title"] == TITLES["ours"] else None,
                end_section=number == len(rows) - 1,
            )
    console.print(table)


# -- command line ------------------------------------------------------------------------------------------


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def available(key: str) -> bool:
    """Whether a contestant's package is installed."""
    if key == "ours" or has(key):
        return True
    console.print(f"[yellow]{TITLES[key]} is left out: {key} is not installed[/]")
    return False


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = turns.make_parser(__doc__, list(CONTESTANTS), rounds=20)
    args = parser.parse_args(argv)
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    turns.refuse_bad_device(parser, args)
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    chosen = [key for key in CONTESTANTS if args.only is None or key in ("ours", *args.only)]
    result = report(measure([key for key in chosen if available(key)], args), args)
    show(result)
    turns.write(result, args.json)


if __name__ == "__main__":
    main()

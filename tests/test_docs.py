"""The documentation: every example runs, every link leads somewhere, every setting is in its table.

The python blocks of a page are executed in order in one module, in an empty folder that holds only the pictures of
`_pictures`. A block that cannot run here is fenced as ```python notest.
"""

import ast
import dataclasses
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from trainformer.run import RunSettings
from trainformer.tasks import (
    CausalLM,
    ImageClassification,
    MetricLearning,
    ObjectDetection,
    SemanticSegmentation,
    TabularRegression,
    TimeSeriesForecasting,
)

ROOT = Path(__file__).parents[1]
EXAMPLES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*EXAMPLES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SLOW = {
    "README.md",
    "cli.md",
    "deploy.md",
    "detection.md",
    "getting-started.md",
    "image-classification.md",
    "jax-language.md",
    "jax-models.md",
    "jax.md",
    "language.md",
    "multimodal.md",
    "post-training.md",
    "segmentation.md",
    "sweep.md",
    "text-tasks.md",
}  # pages that take more than some five seconds
BLOCK = re.compile(r"^(?P<indent> *)```python(?P<flags>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
ROW = re.compile(r"^\| `(\w+)` \| `([^`]*)` \|", re.M)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """(line, code) of every block that is to run; the line is that of its first statement."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if "notest" not in match["flags"].split():
            yield text.count("\n", 0, match.start("code")) + 1, textwrap.dedent(match["code"])


def program_of(page, line, code):
    """The block as code that knows its place in the page. A `try` in an example is there to show an error: without one
    it fails."""
    tree = ast.increment_lineno(ast.parse(code), line - 1)
    for node in tree.body:
        if isinstance(node, ast.Try):
            quiet = ast.parse("raise AssertionError('the example shows an error that does not happen')").body[0]
            node.body.append(ast.copy_location(quiet, node.body[-1]))
    return compile(ast.fix_missing_locations(tree), str(page), "exec")


def execute(page, module):
    for line, code in blocks(page):
        try:
            exec(program_of(page, line, code), vars(module))
        except Exception as error:
            where = f"{name_of(page)}, block at line {line}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


@pytest.fixture
def _pictures():
    """data/train, data/val and data/test with two classes each, and photos/ without any."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for folder, count in (("train", 8), ("val", 4), ("test", 4)):
        for number, kind in enumerate(("cat", "dog")):
            place = Path("data", folder, kind)
            place.mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(100 * number, 100 * number + 100, (40, 48, 3), generator=generator)
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{i}.png")
    Path("photos").mkdir()
    for i in range(3):
        Image.new("RGB", (48, 40), (80 * i, 0, 0)).save(f"photos/{i}.png")


@pytest.mark.usefixtures("_pictures")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in EXAMPLES
        if any(blocks(page))
    ],
)
def test_examples_run(page, monkeypatch):
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    execute(page, module)
    assert vars(module).keys() - {"__name__", "__doc__", "__builtins__"}, "the page's examples define nothing"


def test_a_failing_example_names_page_and_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\nx = 1\n```\n\n```python notest\nx = 0\n```\n\n```python\n\nassert x == 2\n```\n"
    )
    with pytest.raises(AssertionError, match=r"page\.md, block at line 12") as caught:
        execute(page, types.ModuleType("page"))
    assert caught.value.__cause__.__traceback__.tb_next.tb_lineno == 13
    page.write_text("```python\ntry:\n    x = 1\nexcept ValueError:\n    pass\n```\n")
    with pytest.raises(AssertionError, match="an error that does not happen"):
        execute(page, types.ModuleType("page"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = (page.parent / match["file"]).resolve() if match["file"] else page
        assert target.exists(), f"{name_of(page)} links to {match['file']}, which does not exist"
        if match["anchor"]:
            assert match["anchor"] in anchors(target), f"{name_of(page)}: no heading for {match[0]}"


def anchors(page):
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("page", "record"),
    [
        ("trainer.md", RunSettings),
        ("image-classification.md", ImageClassification),
        ("metric-learning.md", MetricLearning),
        ("segmentation.md", SemanticSegmentation),
        ("detection.md", ObjectDetection),
        ("tabular.md", TabularRegression),
        ("forecasting.md", TimeSeriesForecasting),
        ("language.md", CausalLM),
    ],
)
def test_every_setting_is_in_the_table_with_its_default(page, record):
    written = {name: ast.literal_eval(text) for name, text in ROW.findall((ROOT / "docs" / page).read_text())}
    defaults = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(record)
        if f.init
    }
    assert written == defaults


@pytest.mark.parametrize(
    ("page", "kinds"),
    [
        ("jax.md", ["TrainingArguments"]),
        (
            "jax-language.md",
            ["SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "DistillationConfig", "LoRAConfig"],
        ),
        ("jax-models.md", ["MaskedLMConfig", "SequenceClassificationConfig", "Seq2SeqConfig"]),
    ],
)
def test_every_argument_on_jax_is_described(page, kinds):
    package = pytest.importorskip("trainformer.jax")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shared = {f.name for f in dataclasses.fields(package.TrainingArguments)} if page != "jax.md" else set()
    if page == "jax-models.md":
        shared |= {f.name for f in dataclasses.fields(package.DPOConfig)} - {"label_smoothing"}
    for kind in kinds:
        names = {f.name for f in dataclasses.fields(getattr(package, kind)) if f.init} - shared
        missing = [name for name in sorted(names) if f"`{name}`" not in text and f"`{name}=" not in text]
        assert not missing, f"docs/{page} says nothing about {missing} of {kind}"

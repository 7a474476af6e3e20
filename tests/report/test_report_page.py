"""The page in a real browser. Every test also fails if the page asks for anything, or writes to the console."""

import html
import json
import math
import re

import pytest
from run_folders import CONFIG, EVIL, happened, png, training, write_run

from trainformer.loggers import read_jsonl
from trainformer.report import write_report
from trainformer.report.writing import render

EMPTY = {"title": "t", "written": 0, "version": "0", "points": 5000, "plots": [], "runs": []}
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"


def logged(path, name):
    """Step and value of a metric, as the run wrote them."""
    return {record["step"]: record[name] for record in read_jsonl(path / "metrics.jsonl") if name in record}


def draw_all(page):
    """Plots are drawn when they come into sight."""
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")


# -- curves ------------------------------------------------------------------------------------------------


def test_every_metric_has_a_plot_and_train_and_val_share_one(visit, rich):
    page = visit(rich).page
    draw_all(page)
    titles = [box.get_attribute("data-title") for box in page.locator("#curves .chart").all()]
    assert titles == ["loss", "accuracy", "lr", "grad_norm", "samples_per_second", "memory_gb"]
    assert page.locator("#curves canvas").count() == len(titles)
    assert page.locator("figure[data-title=loss] .key").all_inner_texts() == ["train", "val"]
    sections = page.locator("section h2").all_inner_texts()
    assert sections == [
        "Run", "Curves", "Confusion matrix", "Images", "Texts", "Learning rate test", "Configuration", "Events", "Log",
    ]  # fmt: skip


def test_hovering_shows_what_was_logged(visit, rich):
    seen = visit(rich)
    values = logged(rich.parent, "train/loss")
    for step in (10, 100, 200):
        seen.hover("loss", step)
        assert float(seen.tooltip("loss")["everything", "train/loss"]) == pytest.approx(values[step], rel=1e-5)
    seen.hover("loss", 100)
    assert float(seen.tooltip("loss")["everything", "val/loss"]) == pytest.approx(values[100] + 0.05, rel=1e-5)
    assert "resumed at step 100" in seen.page.locator("figure[data-title=loss] .tip").inner_text()


def test_validation_sets_share_a_plot_with_a_curve_each(visit, tmp_path):
    def named(record, name):
        return {key.replace("val/", f"val/{name}/"): value for key, value in record.items()}

    metrics = [
        {**named(record, "clean"), **named({**record, "val/loss": 2.5}, "shifted")} if "val/loss" in record else record
        for record in training()
    ]
    write_run(tmp_path / "sets", metrics, config={**CONFIG, "val_sets": (["clean", "shifted"], "data")})
    seen = visit(write_report(tmp_path / "sets"))
    draw_all(seen.page)
    titles = [box.get_attribute("data-title") for box in seen.page.locator("#curves .chart").all()]
    assert titles[:2] == ["loss", "accuracy"]
    keys = [seen.page.locator(f"figure[data-title={title}] .key").all_inner_texts() for title in titles[:2]]
    assert keys == [["train", "val clean", "val shifted"], ["val clean", "val shifted"]]
    seen.hover("loss", 100)
    values = {name: float(value) for (_, name), value in seen.tooltip("loss").items()}
    assert values["val/shifted/loss"] == 2.5
    assert values["val/clean/loss"] == pytest.approx(logged(tmp_path / "sets", "val/clean/loss")[100], rel=1e-5)


def test_all_plots_share_a_cursor(visit, rich):
    seen = visit(rich)
    draw_all(seen.page)
    seen.hover("loss", 100)
    assert seen.plot("lr", "u.data[0][u.cursor.idx]") == 100
    assert not seen.page.locator("figure[data-title=lr] .tip").is_visible()


def test_the_keys_move_the_cursor(visit, rich):
    seen = visit(rich)
    plot = seen.page.locator("figure[data-title=loss] .canvas")
    plot.focus()
    for _ in range(3):
        plot.press("ArrowRight")
    assert float(seen.tooltip("loss")["everything", "train/loss"]) == pytest.approx(
        logged(rich.parent, "train/loss")[6], rel=1e-5
    )


def test_a_nonfinite_value_is_marked_and_shown(visit, rich):
    seen = visit(rich)
    [step] = [step for step, value in logged(rich.parent, "train/loss").items() if math.isnan(value)]
    assert "1 value not finite" in seen.page.locator("figure[data-title=loss] .note").inner_text()
    seen.hover("loss", step)
    assert "NaN" in seen.page.locator("figure[data-title=loss] .tip").inner_text()
    assert None in seen.plot("loss", "u.data[1]")
    assert seen.tone("accuracy", BLUE, step) == 0  # no curve there yet
    seen.page.locator("#log-scale").check()
    assert seen.tone("loss", BLUE, step) > seen.tone("loss", BLUE, step + 8)  # the sign below the curve


def test_a_resume_is_a_line_in_every_plot(visit, rich):
    seen = visit(rich)
    draw_all(seen.page)
    for title in ("loss", "memory_gb"):
        assert seen.tone(title, "#555555", 100) > 20
        assert seen.tone(title, "#555555", 150) == 0


def test_a_hidden_run_disappears_from_plots_and_tables(visit, three):
    seen = visit(three)
    page = seen.page
    for title in ("loss", "lr"):
        assert seen.tone(title, VERMILION) > 20
        assert seen.tone(title, GREEN) > 20
    page.get_by_role("button", name="second", exact=True).click()
    for title in ("loss", "lr"):
        assert seen.tone(title, VERMILION) == 0
        assert seen.tone(title, GREEN) > 20
    assert not page.locator("#run-1").is_visible()
    assert page.locator("#run-2").is_visible()
    seen.hover("loss", 60)
    assert {run for run, _ in seen.tooltip("loss")} == {"first", "third"}
    page.get_by_role("button", name="second", exact=True).click()
    assert seen.tone("loss", VERMILION) > 20
    page.get_by_role("button", name="third", exact=True).click(modifiers=["Shift"])
    assert page.locator(".bar-top .chip[aria-pressed=true]").all_inner_texts() == ["third"]


def test_runs_with_different_steps_show_their_nearest_values(visit, three):
    seen = visit(three)
    seen.hover("loss", 60)
    shown = seen.tooltip("loss")
    for run in ("first", "second", "third"):
        expected = logged(three.parent / run, "train/loss")[60]
        assert float(shown[run, "train/loss"]) == pytest.approx(expected, rel=1e-5)
    seen.hover("loss", 33)  # the first has values at 32 and 34, the third at 35
    shown = seen.tooltip("loss")
    assert float(shown["second", "train/loss"]) == pytest.approx(
        logged(three.parent / "second", "train/loss")[33], 1e-5
    )
    assert float(shown["third", "train/loss"]) == pytest.approx(logged(three.parent / "third", "train/loss")[35], 1e-5)
    assert ("first", "train/loss") in shown
    seen.hover("loss", 160)
    assert {run for run, _ in seen.tooltip("loss")} == {"first"}


def test_smoothing_changes_the_line_and_not_the_data(visit, rich):
    seen = visit(rich)
    before, pixels = seen.plot("loss", "u.data[1]"), seen.tone("loss", BLUE)
    seen.page.locator("#smoothing").fill("0.9")
    assert seen.plot("loss", "u.data[1]") == before
    assert seen.tone("loss", BLUE) != pixels
    drawn = seen.plot("loss", "u.data[2]")
    values = [(x, y) for x, y in zip(seen.plot("loss", "u.data[0]"), before, strict=True) if y is not None]
    unit, average, weight, at = (200 - 2) / 200, 0.0, 0.0, values[0][0] - (200 - 2) / 200
    for x, y in values:
        kept = 0.9 ** ((x - at) / unit)
        average, weight, at = kept * average + (1 - kept) * y, kept * weight + 1 - kept, x
    assert [v for v in drawn if v is not None][-1] == pytest.approx(average / weight)
    seen.hover("loss", 100)
    raw = logged(rich.parent, "train/loss")[100]
    shown = seen.page.locator("figure[data-title=loss] .tip tr", has_text="train").inner_text()
    assert float(re.search(r"raw ([\d.]+)", shown)[1]) == pytest.approx(raw, rel=1e-5)
    assert float(seen.tooltip("loss")["everything", "train/loss"]) != pytest.approx(raw, rel=1e-3)
    seen.page.locator("#smoothing").fill("0")
    assert seen.tone("loss", BLUE) == pixels


def test_a_drag_zooms_all_plots_and_a_double_click_resets(visit, rich):
    seen = visit(rich)
    draw_all(seen.page)
    box = seen.page.locator("figure[data-title=loss] .u-over").bounding_box()
    left, right = (box["x"] + seen.plot("loss", f"u.valToPos({step}, 'x')") for step in (50, 150))
    seen.page.mouse.move(left, box["y"] + 50)
    seen.page.mouse.down()
    seen.page.mouse.move(right, box["y"] + 60, steps=4)
    seen.page.mouse.up()
    for title in ("loss", "lr"):
        assert seen.plot(title, "u.scales.x.min") == pytest.approx(50, abs=1)
        assert seen.plot(title, "u.scales.x.max") == pytest.approx(150, abs=1)
    assert seen.page.locator("#unzoom").is_visible()
    seen.page.locator("figure[data-title=lr] .u-over").dblclick()
    assert [seen.plot("loss", f"u.scales.x.{end}") for end in ("min", "max")] == [2, 200]


def test_the_axis_can_be_steps_epochs_or_training_time(visit, rich):
    seen = visit(rich)
    assert seen.plot("loss", "u.scales.x.max") == 200
    seen.page.get_by_role("radio", name="epoch").check()
    assert seen.plot("loss", "u.scales.x.max") == 4
    seen.page.get_by_role("radio", name="time").check()
    # 200 s of training and the half seconds of two evaluations; the 3999.5 s between the processes do not count.
    assert seen.plot("loss", "u.scales.x.max") == pytest.approx(201)


def test_the_log_scale(visit, rich):
    seen = visit(rich)
    low, high = (seen.plot("loss", f"u.valToPos({value}, 'y')") for value in (0.2, 2))
    middle = seen.plot("loss", "u.valToPos(Math.sqrt(0.4), 'y')")
    assert middle != pytest.approx((low + high) / 2, abs=5)
    seen.page.locator("#log-scale").check()
    low, high = (seen.plot("loss", f"u.valToPos({value}, 'y')") for value in (0.2, 2))
    assert seen.plot("loss", "u.valToPos(Math.sqrt(0.4), 'y')") == pytest.approx((low + high) / 2, abs=1)
    assert 0 <= high < low <= 200


# -- the look ----------------------------------------------------------------------------------------------


def test_dark_mode_follows_the_system_until_it_is_switched(visit, rich):
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = visit(rich, scheme="dark")
    assert seen.page.evaluate(ground) == "rgb(20, 23, 27)"
    assert seen.tone("loss", BLUE) == 0
    seen.page.locator("#theme").click()
    assert seen.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert seen.tone("loss", BLUE) > 20
    assert visit(rich, scheme="light").page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_printed_page_is_light_and_complete(visit, rich):
    seen = visit(rich, scheme="dark", height=500)
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert seen.tone("memory_gb", BLUE) > 20
    seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert seen.tone("memory_gb", BLUE) == 0
    assert len(seen.page.pdf()) > 20_000


def test_nothing_overflows_on_a_phone(visit, three):
    page = visit(three, width=390, height=800).page
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = {round(box.bounding_box()["width"]) for box in page.locator("#curves .chart").all()}
    assert len(widths) == 1
    assert 300 < widths.pop() <= 390


def test_everything_clickable_is_reachable_by_keyboard(visit, three):
    page = visit(three).page
    unreachable = page.locator("button, a, input, summary, .canvas").evaluate_all(
        "all => all.filter(node => node.tabIndex < 0).map(node => node.outerHTML)"
    )
    page.locator(".chip").first.focus()
    page.keyboard.press("Space")
    assert not unreachable
    assert page.locator(".chip").first.get_attribute("aria-pressed") == "false"


# -- the other parts ---------------------------------------------------------------------------------------


def test_settings_show_their_source(visit, rich):
    page = visit(rich).page
    row = page.locator(".settings tr", has_text="total_steps")
    assert row.locator("code").inner_text() == "200"
    assert row.locator(".badge").get_attribute("title") == "computed from other values: num_samples, epochs"
    assert not page.locator(".settings tr", has_text="epochs").first.is_visible()
    page.locator("#all-settings").check()
    names, badges = (page.locator(f".settings tbody {part}").all_inner_texts() for part in ("th", ".badge"))
    assert dict(zip(names, badges, strict=True)) == {key: entry[1] for key, entry in CONFIG.items()}


def test_several_runs_show_only_differing_settings(visit, three):
    page = visit(three).page
    visible = [row.locator("th").inner_text() for row in page.locator(".settings tbody tr").all() if row.is_visible()]
    assert visible == ["lr", "epochs", "dropout"]
    cells = page.locator(".settings tbody tr", has_text="dropout").locator("td").all_inner_texts()
    assert [cell.split()[0] for cell in cells] == ["–", "0.1", "–"]
    page.locator("#all-settings").check()
    assert page.locator(".settings tbody tr:visible").count() == len(CONFIG) + 1


def test_the_confusion_matrix_in_rates_and_counts(visit, rich):
    page = visit(rich).page
    cells = page.locator(".matrix tbody tr").first.locator("td")
    assert cells.all_inner_texts() == ["85", "13", "3", "85.0 %"]
    page.locator(".normalise").uncheck()
    assert cells.all_inner_texts() == ["34", "5", "1", "85.0 %"]
    page.get_by_label("step of val").fill("0")
    assert cells.all_inner_texts()[0] == "32"


def test_images_texts_lr_test_events_and_log(visit, rich):
    page = visit(rich).page
    assert page.locator("#images img").evaluate_all("all => all.map(i => i.naturalWidth)") == [8, 8, 8]
    assert page.locator("#texts p").last.inner_text() == "Once upon a time at step 200."
    page.get_by_label("step of story").fill("0")
    assert page.locator("#texts p").last.inner_text() == "Once upon a time at step 100."
    assert "suggestion: 0.002" in page.locator("#lr-finder").inner_text()
    kinds = page.locator("#events tbody .badge").all_inner_texts()
    assert kinds == ["began", "split", "skipped", "saved", "began", "resumed", "off", "ended"]
    page.get_by_role("button", name="began 2").click()
    assert page.locator("#events tbody tr:visible").count() == 6
    page.locator("#log summary").click()
    assert "saved step_00000100" in page.locator("#log pre").inner_text()


def test_the_name_of_a_run_is_never_executed(visit, tmp_path):
    """Names, metrics, settings, texts, errors: all appear as they are written."""
    metrics = [{**record, f"val/{EVIL}": 0.5} for record in training(8)]
    records = [
        {"time": 1.0, "step": 2, "kind": "text", "key": EVIL, "samples": [{"prompt": EVIL, "text": EVIL}]},
        {"time": 1.0, "step": 2, "kind": "confusion_matrix", "key": EVIL, "labels": [EVIL], "matrix": [[1]]},
        {"time": 1.0, "step": 2, "kind": "images", "key": EVIL, "images": [{"png": png(9), "caption": EVIL},
                                                                           {"png": f'"{EVIL}', "caption": "not one"}]},
        {"time": 1.0, "step": 2, "kind": EVIL, EVIL: EVIL},
        {"time": 1.0, "step": 2, "kind": "ended", "status": "failed", "error": EVIL},
    ]  # fmt: skip
    config = {EVIL: (EVIL, EVIL, [EVIL]), "task_type": (EVIL, "user")}
    run = write_run(tmp_path / "run", metrics, records, status=EVIL, config=config, log=EVIL)
    path = write_report(run, title=EVIL)
    assert path.read_text().count("</script") == 2  # those of the page itself
    page = visit(path).page
    assert page.title() == EVIL
    assert page.locator("h1").inner_text() == EVIL
    for where in ("#curves", "#texts p", "#settings", "#events", ".error"):
        assert EVIL in page.locator(where).last.inner_text()
    assert page.locator("#images img").count() == 1
    assert page.locator("#page script").count() == 0


def test_no_url_in_the_file(rich):
    text = rich.read_text()
    assert set(re.findall(r"https?://[^\s\"'<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|src=[\"'](?!data:)", text)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', text)[1])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["script-src"])


# -- odd runs ----------------------------------------------------------------------------------------------


def test_sparse_and_damaged_runs_are_shown_as_far_as_possible(visit, tmp_path):
    old = write_run(tmp_path / "old", list(training(20)), status=None)
    empty = write_run(tmp_path / "empty", status="running")
    damaged = write_run(tmp_path / "damaged", list(training(20)), happened(20)[:3], status="failed")
    with (damaged / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "tr\n[1]\n{"step": "x", "train/loss": 1}\n{"step": 22}\n{"step": 23, "train/lo')
    with (damaged / "records.jsonl").open("a") as file:
        file.write('{"kind": 7}\n{"step": 3}\n{"kind": "saved"}\n{"kind": "text"}\n{"kind": "lr_finder", "lrs": 3}\n')
        file.write('{"kind": "confusion_matrix", "matrix": [[1], 2]}\n{"kind": "images", "images": [3]}\n')
    (damaged / "config.json").write_text('{"lr": 3, "epochs": {"value": 1}')
    page = visit(write_report([old, empty, damaged], tmp_path)).page
    draw_all(page)
    assert page.locator(".overview .badge").all_inner_texts() == ["unknown", "killed", "failed"]
    assert (
        page.locator("#runs .note").inner_text() == "damaged: 3 lines of metrics.jsonl cannot be read and are skipped."
    )
    assert page.locator("#curves canvas").count() == 6
    assert page.locator("#settings, #checkpoints, #images").count() == 0
    page = visit(write_report(empty)).page
    assert page.locator("section").count() == 1
    assert page.locator(".bar-top").count() == 0


def test_names_of_builtin_properties_and_a_best_value_that_is_not_a_number(visit, tmp_path):
    """One of two runs has metrics and settings called like what JavaScript gives to all objects."""
    names = ["constructor", "toString", "val/__proto__"]
    metrics = [{"step": step, "time": 1.0 + step, "val/loss": "Infinity"} for step in (1, 2)]
    config = dict.fromkeys(names, (1, "user"))
    first = write_run(tmp_path / "first", [{**one, **dict.fromkeys(names, 0.5)} for one in metrics], config=config)
    page = visit(write_report([first, write_run(tmp_path / "second", metrics)], tmp_path)).page
    draw_all(page)
    titles = [box.get_attribute("data-title") for box in page.locator("#curves .chart").all()]
    assert sorted(titles) == ["__proto__", "constructor", "loss", "toString"]
    assert page.locator("#settings tbody tr td:last-child").all_inner_texts() == ["–"] * 3
    assert page.locator(".overview td:nth-child(6)").all_inner_texts() == ["Infinity at 1"] * 2


def test_a_single_point_makes_a_plot(visit, tmp_path):
    metrics = [{"step": 5, "time": 1.0, "train/loss": 0.5, "val/zero": 0.0, "val/odd": "Infinity"}]
    seen = visit(write_report(write_run(tmp_path / "one", metrics)))
    draw_all(seen.page)
    seen.page.locator("#log-scale").check()
    seen.page.get_by_role("radio", name="time").check()
    seen.page.locator("#smoothing").fill("0.5")
    seen.page.get_by_role("radio", name="step").check()
    seen.hover("loss", 5)
    assert seen.tooltip("loss") == {("one", "train/loss"): "0.5"}
    assert seen.page.locator("#curves .chart").count() == 3


# -- sweeps ------------------------------------------------------------------------------------------------


def sweep_content(runs=()):
    """A sweep as `trainformer.report.reading` reads it; its second trial has the first run of the page."""
    trials = [
        {"number": n, "config": {"lr": 10 ** -(n + 1), "kind": "ab"[n % 2]}, "metric": 0.9 - n / 10, "error": None,
         "status": "pruned" if n == 3 else "completed", "seconds": 1.5, "attempt": 1, "run": None, "page": None,
         "intermediate": [[1, 0.1], [2, 0.9 - n / 10]]}
        for n in range(4)
    ]  # fmt: skip
    trials.append({**trials[0], "number": 4, "metric": None, "status": "failed", "error": EVIL, "intermediate": []})
    trials[1]["page"] = 0 if runs else None
    return {
        "name": "search", "path": "sweeps/search", "direction": "maximize", "method": "bayes", "seed": 3,
        "spaces": {"lr": "log_uniform(1e-5, 0.1)", "kind": "choice('a', 'b')"},
        "importances": {"lr": 0.75, "kind": 0.25}, "trials": trials,
    }  # fmt: skip


def test_a_sweep_in_plots_and_in_a_table(visit, rich, tmp_path):
    content = json.loads(re.search(r'id="data">(.*?)</script>', rich.read_text(), re.S)[1])
    path = tmp_path / "sweep.html"
    path.write_text(render({**content, "sweeps": [sweep_content(runs=[rich])]}))
    page = visit(path).page
    sweep = page.locator(".sweep")
    assert sweep.locator(".parallel path.trial").count() == 5
    assert sweep.locator(".parallel .kind").all_text_contents() == ["log"]
    assert sweep.locator(".bars .number").all_inner_texts() == ["75 %", "25 %"]
    titles = [box.get_attribute("data-title") for box in sweep.locator(".chart").all()]
    assert titles == ["best so far", "intermediate values", "importance", "lr", "kind"]
    assert sweep.locator(".chart[data-title=lr] circle").count() == 4
    # On a log axis, decades are equally far from each other.
    across = sweep.locator(".chart[data-title=lr] circle").evaluate_all("all => all.map(c => +c.getAttribute('cx'))")
    assert across[0] - across[1] == pytest.approx(across[1] - across[2], abs=0.2)
    assert EVIL in sweep.locator("tr.failed").inner_text()
    sweep.locator(".trials tbody tr").nth(2).hover()
    assert sweep.locator("path.pointed").first.get_attribute("data-trial") == "2"
    sweep.get_by_role("button", name="metric").click()
    assert sweep.locator(".trials tbody tr td:nth-child(1)").all_inner_texts() == ["3", "2", "1", "0", "4"]
    sweep.get_by_role("link", name="everything").click()
    assert page.evaluate("location.hash") == "#run-0"


def test_a_choice_of_none_is_shown(visit, tmp_path):
    path, sweep = tmp_path / "sweep.html", sweep_content()
    for trial in sweep["trials"][1::2]:
        trial["config"]["kind"] = None
    path.write_text(render({**EMPTY, "sweeps": [sweep]}))
    page = visit(path).page
    plot = page.locator(".chart[data-title=kind]")
    across = plot.locator("circle").evaluate_all("all => all.map(c => +c.getAttribute('cx'))")
    labels = plot.locator("text").all_text_contents()
    assert {"a", "null"} <= set(labels)
    assert len(set(across)) == 2
    assert min(across) > 60  # beside the axis, not on its labels
    assert page.locator(".parallel").bounding_box()["width"] < 900  # of two parameters


def test_a_range_of_an_axis_can_be_selected(visit, tmp_path):
    path = tmp_path / "sweep.html"
    path.write_text(render({**EMPTY, "sweeps": [sweep_content()]}))
    page = visit(path).page
    axis = page.locator(".parallel .brushing").last.bounding_box()
    middle = axis["x"] + axis["width"] / 2
    page.mouse.move(middle, axis["y"] + 1)
    page.mouse.down()
    page.mouse.move(middle, axis["y"] + axis["height"] / 2, steps=3)
    page.mouse.up()
    kept = page.locator(".parallel path.trial:not(.left-out)").evaluate_all("all => all.map(p => p.dataset.trial)")
    assert sorted(kept) == ["0", "1"]
    page.mouse.click(middle, axis["y"] + 40)
    assert page.locator(".left-out").count() == 0

"""The report page is complete by itself and says what `check --json` says; the model card keeps the
source's front matter.  With NARROWFLOAT_SCREENSHOT=FILE.png headless Chromium takes a picture."""

import html.parser
import os
import re
import shutil
import subprocess

import pytest
from conftest import DONE, FINDINGS, TINY_MOE, USAGE, run, run_json, run_ok

VOID = {"meta", "br", "line", "circle", "rect", "polyline"}


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and gathers text, and what a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.loads, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


@pytest.fixture(scope="module", name="made")
def make_report(tmp_path_factory, quantized):
    """A quantized model, a page about it, and its text."""
    root = tmp_path_factory.mktemp("report")
    model = root / "tiny-moe-nvfp4"
    shutil.copytree(quantized, model)
    run_ok("report", model, "--against", TINY_MOE, "--html", root / "report.html")
    return model, root / "report.html"


def test_the_page_is_complete_by_itself(made):
    text = made[1].read_text()
    page = Page(text)
    assert page.loads == [] and "script" not in page.tags and "url(" not in text
    assert page.tags.count("svg") > 6 and text.startswith("<!DOCTYPE html>")
    assert not re.search(r"[^a-z]nan[^a-z]|[^a-z]inf[^a-z]", text)


def test_the_page_has_the_figures_of_check(made):
    model, path = made
    text = Page(path.read_text()).text
    document = run_json("check", model, "--against", TINY_MOE)
    assert f"{document['figures']['sqnr_db']:.2f} dB" in text
    assert f"{document['figures']['cosine']:.5f}" in text
    assert "208 of 208" in text and "check passed" in text
    for heading in ("Size", "Error", "SQNR over depth", "Distribution of SQNR", "SQNR by type",
                    "Worst tensors", "nvfp4-ct: codes", "nvfp4-ct: block scales",
                    "Global scales over depth", "Kept as it was", "How it was made"):
        assert heading in text, heading
    worst = max((tensor for tensor in document["tensors"] if tensor["figures"]),
                key=lambda tensor: tensor["figures"]["relative_error"])
    assert worst["name"] in text and f"{worst['figures']['sqnr_db']:.2f}" in text
    for value in document["metadata"].values():
        assert value in text
    assert "mlp.experts.gate_proj" in text and "lm_head" in text
    # The same files give the same page.
    other = path.with_name("other.html")
    run_ok("report", model, "--against", TINY_MOE, "--html", other)
    assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("convention", ["nvfp4-modelopt", "mxfp4", "mxfp8", "fp8-block"])
def test_every_convention_has_a_page(tmp_path, convention):
    run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", convention)
    run_ok("report", tmp_path / "out", "--html", tmp_path / "page.html")
    text = Page((tmp_path / "page.html").read_text()).text
    assert any(f"{convention}" in part and "codes" in part for part in text)
    assert "compares with the plain checkpoint." in text
    run_ok("report", TINY_MOE, "--html", tmp_path / "plain.html")
    Page((tmp_path / "plain.html").read_text())


def test_findings_are_on_the_page(tmp_path, quantized):
    model = tmp_path / "<b>model"
    shutil.copytree(quantized, model)
    (model / "config.json").write_text("{}")
    result = run("report", model, "--html", tmp_path / "page.html")
    assert result.returncode == DONE
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert "NF-C002" in page.text and "1 errors, 0 warnings" in page.text
    assert "<b>model" not in text and "&lt;b&gt;model" in text


def test_nothing_is_overwritten(tmp_path, made):
    page = tmp_path / "page.html"
    page.write_text("mine")
    for arguments in (["--html", page], []):
        assert run("report", made[0], *arguments).returncode == USAGE
    assert page.read_text() == "mine"
    run_ok("report", made[0], "--html", page, "--force")
    assert page.read_text() != "mine"
    assert run("report", made[0] / "model.safetensors", "--model-card").returncode == USAGE


def test_model_card(tmp_path):
    source, model = tmp_path / "Base Model", tmp_path / "model"
    shutil.copytree(TINY_MOE, source)
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: other/one\n"
                                      "tags:\n- moe\n---\n# Old text\n")
    run_ok("quantize", source, model, "--to", "nvfp4")
    # The copy of the source's card is replaced, one that somebody wrote is not.
    run_ok("report", model, "--against", source, "--model-card")
    card = (model / "README.md").read_text()
    assert card.startswith('---\nlicense: apache-2.0\ntags:\n- moe\nbase_model: "Base Model"\n'
                           "base_model_relation: quantized\n---\n\n# model\n")
    assert "Old text" not in card and "other/one" not in card
    document = run_json("check", model, "--against", source)
    assert f"SQNR {document['figures']['sqnr_db']:.2f} dB" in card
    assert "`narrowfloat check` | passed" in card and "weights without calibration data" in card
    for value in document["metadata"].values():
        assert value in card
    assert "| `self_attn.q_proj` | 4 |" in card and "| `lm_head` | BF16 | 1 |" in card
    assert '"format": "nvfp4-pack-quantized"' in card
    assert run("report", model, "--against", source, "--model-card").returncode == USAGE
    run_ok("report", model, "--against", source, "--model-card", "--force")
    assert (model / "README.md").read_text() == card
    assert run("check", model, "--against", source).returncode != FINDINGS


@pytest.mark.skipif("NARROWFLOAT_SCREENSHOT" not in os.environ,
                    reason="NARROWFLOAT_SCREENSHOT names no file")
def test_a_picture_of_the_page(made):
    """The picture is for people; here it must not be empty."""
    picture = os.environ["NARROWFLOAT_SCREENSHOT"]
    subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    "--window-size=1280,4200", f"--screenshot={picture}", made[1].as_uri()],
                   check=True, capture_output=True, timeout=120)
    assert os.path.getsize(picture) > 100_000

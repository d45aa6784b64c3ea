"""`narrowfloat moe place`: loads of experts in, places of each rank out."""

import json

from conftest import DONE, INPUT, USAGE, run, run_json, run_ok


def test_places_from_loads(tmp_path):
    loads, target = tmp_path / "loads.json", tmp_path / "places.json"
    # Ranks of two places: 9 + 1, 7 + 3, and 6 + 4 are even.
    loads.write_text(json.dumps({"loads": {"3": [9, 7, 6, 4, 3, 1], "10": [5] * 6}}))
    document = run_json("moe", "place", "--loads", loads, "--ranks", "3", "--out", target)
    assert list(document) == ["schema_version", "command", "loads", "experts", "ranks", "redundant",
                              "target", "layers"]
    layers = {layer["layer"]: layer for layer in document["layers"]}
    assert layers["10"]["imbalance"] == 1 and layers["3"]["imbalance"] == 1
    assert layers["3"]["imbalance_before"] == 1.6
    pairs = {tuple(layers["3"]["places"][i:i + 2]) for i in (0, 2, 4)}
    assert pairs == {(0, 5), (1, 4), (2, 3)}
    written = json.loads(target.read_text())
    assert written["ranks"] == 3 and written["places"]["3"] == layers["3"]["places"]

    text = run_ok("moe", "place", "--loads", loads, "--ranks", "3", "--redundant", "3").stdout
    assert "6 experts and 3 copies on 3 ranks" in text and "1.600" in text


def test_errors_name_what_is_wrong(tmp_path):
    loads, target = tmp_path / "loads.json", tmp_path / "places.json"
    target.write_text("kept")
    loads.write_text('{"loads": {"0": [1, 2]}}')
    place = ["moe", "place", "--loads", loads]
    for arguments, code, words in [
            ([*place, "--ranks", "3"], USAGE, "ranks: expected 1 to the 2 experts"),
            ([*place, "--ranks", "0"], USAGE, "--ranks"),
            ([*place, "--ranks", "2", "--redundant", "9"], USAGE, "redundant: expected 0 to 2"),
            ([*place, "--ranks", "2", "--out", target], USAGE, "exists; --force replaces it"),
            (["moe", "place", "--loads", tmp_path / "none", "--ranks", "2"], INPUT, "none")]:
        result = run(*arguments)
        assert result.returncode == code and words in result.stderr, result.stderr
    assert target.read_text() == "kept"
    assert run(*place, "--ranks", "2", "--out", target, "--force").returncode == DONE

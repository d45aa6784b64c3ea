"""`narrowfloat-bench experts` on CPU ranks; no test looks at a time."""

from conftest import UNSUPPORTED, USAGE, run, run_json, run_ok

QUICK = ["--min-time", "0", "--tokens", "1,3"]


def test_sums_are_checked():
    document = run_json("experts", "--ranks", "2", "--shape", "128,128,8,2", "--mode", "fp8_block",
                        *QUICK)
    assert (document["ranks"], document["mode"]) == (2, "fp8_block")
    assert [(case["tokens"], case["payload"], case["order"]) for case in document["cases"]] == [
        (tokens, payload, order) for tokens in (1, 3) for payload in ("bf16", "fp8_1x128")
        for order in ("rank", "topk")]
    for case in document["cases"]:
        assert case["correct"] and case["message"] == "" and 1 <= case["rows_per_token"] <= 2
        assert case["exchange_us"] > 0 and case["layer_us"] > 0
        assert case["transport"] == "peer_memory"
        assert case["nccl_all_reduce_us"] is None


def test_without_a_layer():
    text = run_ok("experts", "--ranks", "3", "--shape", "64,32,4,2", "--no-layer", "--csv",
                  "--transport", "all_gather", *QUICK).stdout
    rows = [line.split(",") for line in text.splitlines()]
    assert rows[0][3:7] == ["transport", "exchange_us", "layer_us", "nccl_all_reduce_us"]
    assert [row[3:4] + row[5:7] + row[8:] for row in rows[1:]] == [
        ["all_gather", "-", "-", "exact"]] * 4


def test_errors():
    few = run("experts", "--ranks", "8", "--shape", "64,32,4,2", *QUICK)
    assert few.returncode == USAGE and "8 ranks" in few.stderr
    odd = run("experts", "--ranks", "3", "--shape", "64,32,4,2", *QUICK)
    assert odd.returncode == USAGE and "--ranks: a layer with 4 experts" in odd.stderr
    none = run("experts", "--ranks", "2", "--shape", "64,32,4,2", "--transport", "all_to_all", *QUICK)
    assert none.returncode == UNSUPPORTED and "no all_to_all function was given" in none.stderr
    gpus = run("experts", "--ranks", "8", "--shape", "64,32,8,2", "--on", "gpus", *QUICK,
               env={"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.returncode == UNSUPPORTED

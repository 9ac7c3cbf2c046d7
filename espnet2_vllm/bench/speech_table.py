"""Markdown of what ``speech.SpeechBench`` measured."""

from __future__ import annotations

from typing import Any


def speech_tables(report: dict[str, Any]) -> str:
    """Markdown of what ``SpeechBench`` measured."""
    lines = [f"## Speech on {report['device']['name']}"]
    for entry in report["speech"]:
        how = [entry["dtype"], *(word for key, word in (("tf32", "TF32"), ("tuned", "tuned")) if entry[key])]
        how += [] if entry["share"] == "1" else [f"share {entry['share']}"]
        how += ["engine in a process of its own"] if entry["engine_process"] else []
        lines += ["", f"### {entry['codec']} beside {entry['model']} ({', '.join(how)})", ""]
        if "error" in entry:
            lines.append(entry["error"])
            continue
        lines += _codec_lines(entry)
        lines += [
            "",
            "| streams | rows to first chunk | first p50 ms | first p99 ms | step p50 ms | step p99 ms | RTF |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for name, one in entry["figures"].items():
            if name.startswith("stream"):
                shown = (one["first_p50_s"], one["first_p99_s"], one["steps"]["p50"], one["steps"]["p99"])
                cells = " | ".join(f"{value * 1e3:.1f}" for value in shown)
                lines.append(
                    f"| {name.removeprefix('stream ')} | {one['rows_until_first']} | {cells} | {one['rtf']:.5f} |"
                )
    return "\n".join(lines)


def _codec_lines(entry: dict[str, Any]) -> list[str]:
    figures, reach = entry["figures"], entry["reach"]
    lines = [
        f"- reach {reach['left']} frames back, {reach['right']} ahead, {reach['features_right']} before the recurrent part; "
        f"{entry['graphs']} CUDA graphs, {entry['device_bytes'] / 2**30:.2f} GiB of the device, started in {entry['start_s']:.0f} s"
    ]
    if "codec" in figures:
        one = figures["codec"]
        lines.append(
            f"- codec: one clip of {one['clip_s']:g} s {one['one_s'] * 1e3:.1f} ms; {one['together']} together "
            f"{one['together_s'] * 1e3:.1f} ms ({one['together_s'] / one['one_s']:.1f} times one; one by one as it is "
            f"{one['one_by_one_s'] * 1e3:.0f} ms); real-time factor {one['rtf']:.6f}; largest difference from the whole "
            f"{one['largest_difference']:.1g}, streamed {one['streamed_difference']:.1g}"
        )
    if "memory" in figures:
        one = figures["memory"]
        resident = (one["resident_late"] - one["resident_early"]) / 2**20
        device = (
            ""
            if one["device_late"] is None
            else f", device {(one['device_late'] - one['device_early']) / 2**20:+.1f} MiB"
        )
        lines.append(
            f"- memory over {one['clips']} clips, from the first fifth on: resident {resident:+.1f} MiB{device}"
        )
    for name, one in figures.items():
        if name.startswith("stall") and one["busy"]["steps"]:
            lines.append(_stall_line(one, entry["sample_rate"] / entry["hop"]))
    return lines


def _stall_line(one: dict[str, Any], frame_rate: float) -> str:
    clean, busy = one["clean"], one["busy"]
    rows = [f"{name} {clean[name] * 1e3:.2f} and {busy[name] * 1e3:.2f} ms" for name in ("mean", "p50", "p99")]
    makes = one["in_flight"] / busy["mean"] / frame_rate
    return (
        f"- engine steps with {one['in_flight']} in flight, alone and while {one['clips']} clips are decoded with share "
        f"{one['share']}: {', '.join(rows)} ({busy['mean'] / clean['mean'] - 1:+.1%} in the mean, "
        f"{busy['p99'] / clean['p99'] - 1:+.1%} at p99); {busy['steps']} steps, {one['burst_s'] * 1e3:.0f} ms a burst; p99 of all "
        f"steps {one['all']['p99'] / clean['p99'] - 1:+.1%}; decodes {one['sound_per_s']:.0f} s of sound a second, the engine "
        f"makes {makes:.0f}"
    )

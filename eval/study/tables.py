"""The tables of an evaluation, in Markdown: pure functions of its results."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.study import runs
from ptxflow.eval.study.metrics import MODES_IN
from ptxflow.eval.study.runs import AT, BUDGETS

Results = Mapping[str, Any]
Row = Sequence[str]
KINDS = {"trained": "trained", "held_out": "held out", "unseen": "unseen"}
MAIN = ("policy", "policy top-k", "own reward top-k", "nearest workload", "surrogate top-k",
        "model top-k", "Gaussian process", "TPE", "uniform random")  # fmt: skip
FEW = str(runs.FEW)  # as results say it
HELD_OUT = ", held out"  # after a family in the name of a group
NOT_PLAYED = "Not played in the run that made this page."


def tables(results: Results) -> dict[str, str]:
    """Every table by name; groups of workloads name theirs `gap-GROUP` and `reach-GROUP`."""
    out = {
        "spaces": spaces(results),
        "claims": claims(results),
        "families": families(results),
        "each": each(results),
        "distances": distances(results),
        "training": training(results),
        "kernels": kernels(results),
        "floors": floors(results),
        "sharpness": sharpness(results),
        "bico": bico(results),
        "costs": costs(results),
        "decisions": decisions(results),
        "sources": sources(results),
    }
    devices = {w["device"] for w in results["workloads"]}
    home = [t for name, t in results["training"].items() if name in devices]
    spent = sum(n for t in home for n, _ in t["measured"].values())
    budget = results["about"]["budget"]
    for group, held in results["groups"].items():
        name = re.sub(r"\W+", "-", group)
        out[f"gap-{name}"] = gaps(held["methods"], budget)
        out[f"reach-{name}"] = reach(held["methods"], budget)
        out[f"match-{name}"] = matches(held["methods"], spent, budget)
    tuned = [f"{t['group'].capitalize()}, {t['policy']}:\n\n{tuning(t)}\n\n{standing(t)}"
             for t in results.get("tuning", ())]  # fmt: skip
    out["tuning"] = "\n\n".join(tuned)
    out["ablation"] = "\n\n".join(map(taken_apart, results.get("ablation", ())))
    return {name: text or NOT_PLAYED for name, text in out.items()}


def percent(value: float | None) -> str:
    """Three digits at most; a dash for what is not finite."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 0.00995 else 1 if abs(value) < 0.9995 else 0
    return f"{100 * value:.{digits}f}%"


def counted(most: int) -> Callable[[float | None], str]:
    """Shows a number of measurements, which may be a median of two, and of which none is above
    `most`."""
    return lambda value: f"> {most}" if value is None else f"{value:g}"


def span(figure: Sequence[float | None], show: Any = percent) -> str:
    """A median with its interval, or alone where nothing varies."""
    middle, low, high = figure
    return show(middle) if low == high else f"{show(middle)} ({show(low)} to {show(high)})"


def ordered(methods: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Methods by what their best of 8 loses."""
    return sorted(methods.items(), key=lambda item: (item[1]["gap"][FEW][0], item[0]))


def spaces(results: Results) -> str:
    head = ("workload", "in training", "strategies", "policy's mass", "within 1%",
            "median over optimum", "optimum, us", "sub-space of all strategies with")  # fmt: skip
    rows = [
        (
            w["name"], KINDS[w["kind"]], f"{w['strategies']:,}", share(w.get("mass")),
            str(w["within_1_percent"]),
            f"{w['median_over_optimum']:.2f}", f"{w['optimum_us']:.1f}",
            ", ".join(f"{k} {' or '.join(map(str, v))}" for k, v in w["choices"].items()),
        )
        for w in results["workloads"]
    ]  # fmt: skip
    return markdown(head, rows, 2)


def share(value: float | None) -> str:
    """Of probability, two digits however small."""
    if value is None:
        return "-"
    return percent(value) if value >= 1e-4 or not value else f"{value:.0e}"


def gaps(methods: Mapping[str, Any], budget: int) -> str:
    """What is lost by the number of measurements; at FEW the intervals over seeds, over workloads,
    and of how much slower than the policy's the strategy found is, on the same workloads."""
    at = [str(b) for b in BUDGETS if b <= budget]
    beside = any("over_policy" in f for f in methods.values())
    head = ["method", *at, f"at {FEW}: 95% over seeds", "over workloads"]
    rows = []
    for name, f in ordered(methods):
        shown = [percent(f["gap"][b][0]) if b in f["gap"] else "" for b in at]
        spans = [f["gap"][FEW][1:], f["places"], *([f["over_policy"]] if beside else [])]
        rows.append((name, *shown, *map(band, spans)))
    return markdown([*head, "over the policy, paired"] if beside else head, rows)


def band(ends: Sequence[float | None], show: Callable[[float | None], str] = percent) -> str:
    """An interval; a dash where nothing varies."""
    low, high = ends
    return "-" if low == high else f"{show(low)} to {show(high)}"


def reach(methods: Mapping[str, Any], budget: int) -> str:
    later = [b for b in ("32", "128") if int(b) <= budget]
    head = ("method", "to 90%", "to 95%", "to 99%", f"solved in {FEW}",
            *(f"in {b}" for b in later), f"modes in {min(MODES_IN, budget)}")  # fmt: skip
    rows = []
    for name, f in ordered(methods):
        to = [span(f["reach"][level], counted(budget)) for level in ("90%", "95%", "99%")]
        shares = [f["solved"].get(b) for b in (FEW, *later)]
        within = ["" if s is None else span(s, lambda v: f"{v:.0%}") for s in shares]
        rows.append((name, *to, *within, span(f["modes"], lambda v: f"{v:.1f}")))
    return markdown(head, rows)


def matches(methods: Mapping[str, Any], spent: int, budget: int) -> str:
    """What others need to be as good as the policy's best of 8, and after how many workloads the
    measurements `spent` on the policy's reward have paid."""
    if "policy" not in methods:
        return ""
    head = (
        "method",
        "measurements to match the policy's best of 8",
        "policy pays after, workloads",
    )
    rows = []
    for name, _ in ordered(methods):
        figure = methods["policy"]["to_match"][name]
        if name != "policy":
            needed = figure[0] or budget
            more = spent / (needed - int(FEW)) if needed > int(FEW) else None
            after = "never" if more is None else f"{'at most ' * (figure[0] is None)}{more:,.0f}"
            rows.append((name, span(figure, counted(budget)), after))
    return markdown(head, rows)


def claims(results: Results) -> str:
    """What the project promises of held-out workloads, and whether it holds."""
    if not results["claims"]:
        return ""
    shows = {
        "loss": percent,
        "share": lambda value: f"{value:.2f}",
        "measurements": counted(results["about"]["budget"]),
    }
    held = results["groups"]["held out"]["workloads"]
    rows = []
    for claim in results["claims"]:
        show = shows[claim["kind"]]
        span = band((claim["low"], claim["high"]), show)
        holds = "yes" if claim["holds"] else "no"
        rows.append((claim["text"], show(claim["figure"]), span, holds))
    head = f"the policy on {len(held)} held-out workloads", "measured", "95% over workloads"
    held_out = f"Held out here: {', '.join(held)}."
    return "\n\n".join(filter(None, [markdown((*head, "holds"), rows), mass(results), held_out]))


def mass(results: Results) -> str:
    """How much of the policy's probability is where it is judged."""
    held = [w for w in results["workloads"] if w["kind"] != "trained" and w.get("mass") is not None]
    if not held:
        return ""
    least, middle = min(held, key=lambda w: w["mass"]), median(w["mass"] for w in held)
    return (
        f"In these sub-spaces is {share(middle)} of the policy's probability in the median, "
        f"{share(least['mass'])} at the least ({least['family']}); only its draws there are judged."
    )


def families(results: Results) -> str:
    """What the best of 8 loses on the held-out workloads of each family."""
    names = ("policy", "own reward top-k", "nearest workload", "surrogate top-k", "policy b200",
             "uniform random", "TPE")  # fmt: skip
    held = {g.partition(",")[0]: h for g, h in results["groups"].items() if g.endswith(HELD_OUT)}
    shown = [m for m in names if any(m in h["methods"] for h in held.values())]
    masses = {w["name"]: w.get("mass") for w in results["workloads"]}
    rows = []
    for family, h in held.items():
        own = [m for name in h["workloads"] if (m := masses[name]) is not None]
        lost = [percent(h["methods"][m]["gap"][FEW][0]) if m in h["methods"] else "" for m in shown]
        rows.append((family, str(len(h["workloads"])), share(median(own) if own else None), *lost))
    return markdown(("best of 8 loses", "workloads", "policy's mass", *shown), rows)


def each(results: Results) -> str:
    present = {m for found in results["each"].values() for m in found}
    methods = [m for m in MAIN if m in present]
    rows = []
    for w in results["workloads"]:
        found = results["each"][w["name"]]
        gap = [percent(found[m]["gap"][0]) if m in found else "" for m in methods]
        rows.append((w["name"], KINDS[w["kind"]], *gap))
    return markdown(("best of 8 loses", "in training", *methods), rows, 2)


def distances(results: Results) -> str:
    if not results["beliefs"]:
        return ""
    names = list(dict.fromkeys(n for found in results["beliefs"].values() for n in found))
    head = ["workload", "in training", "to its reward: TV", "JS", "its reward to measured: TV",
            *(f"{n} to measured: {d}" for n in names for d in ("TV", "JS"))]  # fmt: skip
    rows = []
    for w in results["workloads"]:
        found = results["beliefs"][w["name"]]
        own: dict[str, Any] = next((f for f in found.values() if "own_tv" in f), {})
        cells = [own.get(k) for k in ("own_tv", "own_js", "reward_tv")]
        cells += [found.get(n, {}).get(d) for n in names for d in ("tv", "js")]
        shown = ("" if c is None else f"{c:.3f}" for c in cells)
        rows.append((w["name"], KINDS[w["kind"]], *shown))
    return markdown(head, rows, 2)


def training(results: Results) -> str:
    head = ("policy", "reward", "steps", "strategies drawn", "minutes on a core",
            "workloads trained", "kernels measured for the reward")  # fmt: skip
    rows = []
    for name, t in results["training"].items():
        measured = "; ".join(f"{f} {n:,} of {w} workloads" for f, (n, w) in t["measured"].items())
        rows.append((name, t["reward"], f"{t['steps']:,}", f"{t['strategies']:,}",
                     f"{t['minutes']:.1f}", str(t["workloads"]), measured or "none"))  # fmt: skip
    return markdown(head, rows, 2)


def kernels(results: Results) -> str:
    head = ("op type", "ValidRate", "workloads", "mean", "geometric mean", "median", "min", "max",
            "above 1x", "below 1x")  # fmt: skip
    rows = []
    for kind, k in results["kernels"].items():
        rate = f"{k['right'] / k['kernels']:.1%} ({k['right']} of {k['kernels']})"
        speed: Row = ("-",) * 7
        if k["compared"]:
            figures = (k[n] for n in ("mean", "geometric_mean", "median", "min", "max"))
            shares = (f"{k[n]:.0%}" for n in ("above", "below"))
            speed = (*(f"{v:.3f}" for v in figures), *shares)
        rows.append((kind, rate, str(k["compared"]), *speed))
    return markdown(head, rows)


def floors(results: Results) -> str:
    """By family: how far its best kernels are from what limits them."""
    head = ("family", "workloads", "over compute", "over memory", "over a launch",
            "of attainable: least", "median", "most")  # fmt: skip
    held: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["roofline"]:
        held.setdefault(row["family"], []).append(row)
    rows = []
    for family, own in held.items():
        over = [median(r["over"][n] for r in own) for n in ("compute", "memory", "launch")]
        shares = sorted(r["attainable"] for r in own)
        cells = (f"{s:.0%}" for s in (shares[0], median(shares), shares[-1]))
        rows.append((family, str(len(own)), *(f"{v:,.2f}x" for v in over), *cells))
    return markdown(head, rows) if rows else ""


def sharpness(results: Results) -> str:
    """What the best of 8 draws lose, by the power to which the policy's probabilities are taken."""
    held = results.get("sharpness") or {}
    if not held:
        return ""
    powers = list(next(iter(held.values())))
    rows = [(group, *(span(found[b]) for b in powers)) for group, found in held.items()]
    table = markdown(("best of 8 loses, drawn to the power", *powers), rows)
    if not {"held out", "trained"} <= held.keys():
        return table
    best = min(powers, key=lambda b: held["trained"][b][0])
    level = [b for b in powers if held["trained"][b][1] <= held["trained"][best][0]]
    lost = " and ".join(f"{percent(held['held out'][b][0])} at {b}" for b in level)
    return f"{table}\n\nLeast on trained workloads, or level with it: {lost} on the held-out ones."


def decisions(results: Results) -> str:
    head = ("family", "decision", "workloads", "best other choice", "worst other choice",
            "worst of all", "indifferent in")  # fmt: skip
    if not results["attribution"]:
        return ""
    rows = [
        (family, r["decision"], str(r["workloads"]), percent(r["other"]), percent(r["worst"]),
         percent(r["largest"]), str(r["indifferent"]))
        for family, held in results["attribution"].items()
        for r in sorted(held, key=lambda r: -(r["worst"] or 0))
    ]  # fmt: skip
    return markdown(head, rows, 2)


def tuning(item: Mapping[str, Any]) -> str:
    """What is lost after some measurements, by a policy that learns from them and by others."""
    head = ["method", *(f"after {n}" for n in AT), f"95% interval at {AT[-1]}"]
    rows = []
    for name, figures in sorted(item["curves"].items(), key=lambda c: (c[1][1][0], c[0])):
        rows.append([name, *(percent(f[0]) for f in figures), band(figures[-1][1:])])
    return markdown(head, rows) + f"\n\nPlayed on {', '.join(item['workloads'])}."


def standing(item: Mapping[str, Any]) -> str:
    """The policy itself, before and after it was tuned."""
    held = item["standing"]
    head = (f"{item['policy']} itself", *(f"after {n}" for n in held))
    rows = [
        ("one draw loses", *(percent(s["draw"]) for s in held.values())),
        ("TV to the measured target", *(f"{s['tv']:.3f}" for s in held.values())),
    ]
    return markdown(head, rows)


def taken_apart(item: Mapping[str, Any]) -> str:
    """A chosen strategy, decision by decision; those at their default in a line below."""
    if item["refused"]:
        return f"{item['workload']}: strategy {item['key']} is refused today: {item['refused']}"
    changed = [s for s in item["steps"] if s["other"] is not None]
    rest = [f"{s['decision']} {s['chosen']}" for s in item["steps"] if s["other"] is None]
    source = "the policy's best of 8" if item["by"] == "policy" else "the fastest"
    return (
        f"{ablation(changed)}\n\n{item['workload']} on {item['device'].upper()}: strategy "
        f"{item['key']}, {source}, {percent(item['gap'])} from the optimum. At their default, or "
        f"without another choice that is valid alone: {', '.join(rest) or 'none'}."
    )


def ablation(steps: Sequence[Mapping[str, Any]]) -> str:
    """The steps of one strategy, as `eval.ablation` makes them."""
    head = ("decision", "chosen", "default", "what differs", "the decision is", "default's time")
    rows = [
        (s["decision"], str(s["chosen"]), "-" if s["other"] is None else str(s["other"]),
         "; ".join(s["evidence"]), s["verdict"],
         "-" if s["change"] is None else f"{100 * s['change']:+.1f}%")
        for s in steps
    ]  # fmt: skip
    return markdown(head, rows, 5)


def costs(results: Results) -> str:
    """Tokens of methods that ask a model, and how often it was of no use."""
    head = ("method", "workload", "tokens told", "tokens answered", "failed")
    rows = [
        (c["method"], c["workload"], f"{c['tokens']['prompt']:,}",
         f"{c['tokens']['completion']:,}", str(len(c["failed"])))
        for c in results.get("costs", ())
    ]  # fmt: skip
    return markdown(head, rows, 2) if rows else ""


def bico(results: Results) -> str:
    rows = [
        (name, "never" if b["plateau"] is None else f"{b['plateau']:g}",
         percent(b["lost_at_plateau"])) for name, b in results["bico"].items()
    ]  # fmt: skip
    return markdown(("workload", "plateau after", "lost there"), rows) if rows else ""


def sources(results: Results) -> str:
    about = results["about"]
    rows = [("measurements", f"`{f}`", d) for f, d in about["measurements"].items()]
    rows += [("kernels of policies", f"`{f}`", d) for f, d in about["kernels"].items()]
    rows += [(f"policy {n}", f"`{f}`", d) for n, (f, d) in about["policies"].items()]
    lines = [markdown(("what", "file", "SHA-256, first 16"), rows, 3)]
    lines += [f"Without {name}: {why}." for name, why in about["absent"].items()]
    lines += [
        f"Left out of {family}: {count:,} measurements of {places} workloads, whose decisions or "
        "choices there are no more."
        for family, (count, places) in about.get("outdated", {}).items()
    ]
    return "\n\n".join(lines)

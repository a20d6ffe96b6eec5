"""A trained policy tuned to one workload: `train.py --init ... --definition ... --axes ...`."""

import argparse
from functools import partial

from ptxflow.command import BadInput
from ptxflow.compiler.backend.runtime import RuntimeUnavailable
from ptxflow.compiler.device import device
from ptxflow.env.observations import Observations
from ptxflow.env.reward import TAU, CachedReward, ModelReward, Reward
from ptxflow.env.reward_source import build, describe
from ptxflow.env.space import Codes, Space, enumerate_space
from ptxflow.env.tasks.arguments import find_problem, parse_axes
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench import live_reward
from ptxflow.eval.bench.live_reward import Live
from ptxflow.gfn.options import known_device, require_there, require_writable


def prior(
    args: argparse.Namespace, name: str, definition: Definition, space: Space
) -> tuple[Reward | None, Live]:
    """The reward of a workload before it is measured (None: the policy's own), and what measures
    it; BadInput where that cannot be."""
    base: Reward | None = None
    if args.reward != "policy":
        asked = None if args.reward == "replay" else args.reward
        built, _ = build(describe(asked, name, args.surrogate or ()), name)
        base = CachedReward(built)
    try:
        gpus = live_reward.count_gpus(space.device) if args.measure else 0
    except RuntimeUnavailable as error:
        raise BadInput(str(error)) from None
    if args.measure and args.definition.endswith(".json"):
        raise BadInput("--measure records by name: give a definition of env/tasks/definitions")
    path = args.export.with_name(f"{args.export.stem}-{live_reward.MEASUREMENTS}")
    files = args.measurements or ()
    return base, Live([definition], [space], path, ModelReward(), files, gpus)


def timed(live: Live, codes: Codes) -> Observations:
    """All that is measured of the one workload, these codes too."""
    live.measure({0: codes})
    observed = live.observed(0)
    assert observed is not None
    return observed


def one_workload(args: argparse.Namespace) -> tuple[Definition, dict[str, int], Space]:
    """The workload that --definition, --axes and --device name; BadInput where there is none."""
    if not args.export:
        raise BadInput("--definition tunes a policy: say by --export FILE where it goes")
    require_writable(args.export.parent)
    require_there(args.init)
    name = known_device(args.device)
    try:
        definition = load(args.definition)
        axes = {axis: values[0] for axis, values in parse_axes(args.axes).items()}
        return definition, axes, enumerate_space(*find_problem(definition, axes), device(name))
    except (ValueError, KeyError) as error:
        raise BadInput(str(error.args[0])) from None


def tune(args: argparse.Namespace) -> int:
    """Tune a trained policy to one workload: by a reward, by measurements, by measuring."""
    definition, axes, space = one_workload(args)
    from ptxflow.gfn.checkpoint import Checkpoint, write  # torch, once the input makes sense
    from ptxflow.gfn.fine_tuning import distance, fine_tune, tune_by_measuring
    from ptxflow.gfn.inference import load_policy
    from ptxflow.gfn.walks import family_shape

    name = space.device.name
    policy = load_policy(args.init)
    if other := policy.trained_elsewhere(name):
        print(other, flush=True)
    base, live = prior(args, name, definition, space)
    tau = float(policy.about.get("train", {}).get("tau", TAU))
    seed = args.seed or 0
    known = live.observed(0)
    print(f"{space.problem.definition} {axes} on {name}: {len(space)} strategies, "
          f"{0 if known is None else len(known)} measured before", flush=True)  # fmt: skip
    if family_shape(space) not in policy.network.config.families:
        print(f"{args.init} has no part for this space of {space.family.name}: it gets a new one")
    if args.measure:
        rounds = tune_by_measuring(
            policy, space, partial(timed, live), args.measure, known, base, seed=seed
        )
        for tuned, known in rounds:
            best = 1e6 * known.seconds.min()
            count = tuned.about["tuned"]["measured"]
            print(f"{count:4} measured, the best {best:.2f} us", flush=True)
    else:
        tuned = fine_tune(policy, space, known, base, seed=seed)
    if base:
        before, after = (distance(p, space, base, tau) for p in (policy, tuned))
        print(f"distance to what {base.name} alone asks for: {before:.3f} before, {after:.3f} now")
    write(args.export, Checkpoint(tuned.network.config, tuned.about, {
        f"policy.{k}": v for k, v in tuned.network.state_dict().items()}))  # fmt: skip
    print(f"wrote {args.export}")
    return 0

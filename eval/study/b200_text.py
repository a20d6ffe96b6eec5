"""The words of the page on B200; figures and tables are put in by `b200_page`."""

PAGE = """\
# B200 without a B200

Made by `python -m ptxflow.eval.study.b200_page --into eval/results/b200.md` from committed files,
without a GPU. **Nothing here was run on a B200**: what is of one is modelled, counted or somebody
else's.

## What is known, and what is not

- **Known**: the kernels below are valid, assemble for sm_100a without a spill, show in the machine
  code the instructions that they claim, and are right in the emulator on a small problem; how many
  others are is on the page of [verification](verification.md).
- **Modelled**: every time, by [the analytic model](../../env/cost.py). Of its B200 constants peaks,
  bandwidth and cycles of an MMA are published; efficiencies, L2's rate and latencies are estimates.
- **Not known**: any time of ours; latencies of L2 and DRAM under load; what loads of tensor memory
  cost; clocks under power; whether hardware does what the emulator does of tcgen05.
- Families whose MMA below is mma.sync leave most of the tensor cores unused; the model says so.

## Each family beside published figures

The model's best of all strategies, the kernel alone. Published figures are of other people's
kernels. Where sizes are not told there is no ratio: such figures give an order of magnitude.

{published}

## GEMM beside nvMatmulHeuristics

NVIDIA's own model of a B200, nvidia-matmul-heuristics 0.1.0.27, is an optional peer, asked once
([its numbers](nvmatmulheuristics.tsv)), here the *judge*, over {count} products. *rho*: Spearman's,
of the best by tile of a CTA, operands not swapped, K whole, clusters of one or two CTAs. Times are
the best of all that either side has, the kernel alone; *ratio*: ours over the judge's. The bars are
a median rho of 0.9 and a median distance of 15%, over all.

| products | median rho | median ratio | median distance from 1 | within 15% |
| --- | --: | --: | --: | --: |
| all | {all} |
| of 1,024 rows and more | {large} |
| all, calibrated | {after} |
| of 1,024 rows and more, calibrated | {large_after} |

*Calibrated* by published figures alone means with the sustained share of the tensor peak by which
the two GEMMs above come out right in the geometric mean: {share:.2f} instead of {rate:.2f}. Nothing
published tells of the constants that small products hang on. Rewards keep {rate:.2f}, by which the
policies were trained.

How good the judge is can be seen on an H200, where the same products were measured. Its estimates
for an H200 are {told:.2f} times the fastest kernel there, ours or cuBLAS', in the median
({least:.2f} to {most:.2f}); our model, fitted there, is {fit:.0%} off. With the best by tile of the
{ranked} products that have 1,000 kernels or more its rho is {their_rho:.2f} in the median, our
model's {our_rho:.2f}. On {slower} of the {count} products it gives a B200 more time than an H200
took; our model does so on {ours_slower}, of {latest:.0f} us at most. So the judge's longer times
are no evidence that our model is hopeful, and of small products neither says anything certain.
(With float16 accumulation the judge's H200 is 1.7 times as fast at 4096 x 4096 x 4096, its B200 is
not.)

{table}

## What the kernels are made of

The fastest by the model for the workloads above, of the GEMMs the first. *KiB* of shared memory;
*MMA* to *spills* are instructions in the machine code, *waits* those of mbarriers; *stalls* the
cycles of stall in its control words, in the mean, *scoreboards* the share that waits for one, too.
The next four are how often warps ran such in the emulator, on the family's small problem, each try
of a wait; *wavefronts* those of an access to shared memory there (1: no bank conflict).

{static}

## Schedules

Ours for 4096 x 4096 x 4096 and for 16,384 tokens beside those of DeepGEMM (June 2026) and of
FlashAttention-4 (causal, head size 128), from their sources.

{schedules}
"""

"""Meanings of the recipe's keys, for docs/recipe.md (a test compares them) and the schema's descriptions."""

from __future__ import annotations

MEANINGS = {
    "name": ("of the run; default: the recipe's file name"),
    "seed": (
        "or `{model: 0, cohort: 0, batches: 0}`; `seeds: [0, 1, 2]` in its place runs each, in "
        "`<output>/seed-0` and so on"
    ),
    "data": ("the federation file"),
    "verify_data": (
        "`true`: all data are read and their hash compared at each start. Without it that is done where a "
        "run goes on and the file's size, time of change or inode has changed"
    ),
    "data_access": (
        "`memory`: ordinary reads; `stage`: a copy on each host's local scratch ($TMPDIR), made at the start"
    ),
    "model": (
        "`{name: linear, bias: true}`, `logistic`, `quadratic`, `{name: mlp, hidden: [200, 100]}`, "
        "`{name: emnist-cnn}`, `cifar-cnn`, `{name: feddyn-cnn, hidden: 384}`, `{name: femnist-cnn, "
        "hidden: 512}`, `{name: resnet18-gn, groups: 2}` (`stem: 7x7` with max-pool as for ImageNet, `pool: 3` "
        "averages the 3 × 3 corner of the last map), `{name: lstm, embedding: 8, hidden: 100, "
        'layers: 2}`, or `{factory: "module:function", args: {}}`; `init: weights.safetensors`'
    ),
    "parameters": (
        '`{private: ["head.*"], frozen: ["features.*"], buffers: averaged}`, by patterns of the names of the '
        "module's parameters and buffers: `private` ones are each client's own, neither sent nor averaged "
        '(FedBN: `["*bn*"]`), `frozen` ones stay as they are, and `buffers` says what becomes of the other '
        "buffers, such as BatchNorm's running statistics: `averaged`, `private`, or `fixed`; see "
        "docs/own-project.md"
    ),
    "loss": (
        "`{name: auto, reduction: mean}`: `cross-entropy`, `binary-cross-entropy`, `squared` (½‖·‖²), `cox`"
        " (partial likelihood of a minibatch, for targets of event and time); `weights: balanced` (n / (C "
        "n_c) of all training samples), `balanced-by-site` (of each client's own, in training alone) or "
        "`[1, 3]` multiply each class's; or your own `{factory: "
        '"module:function", args: {}}`, which returns a function (output, target) → one loss per sample; '
        "`reduction: sum`"
    ),
    "dtype": ("`float64` for verification"),
    "device": ("`cpu`, `cuda`; `auto`: a GPU, but for models too small for one (docs/gpu.md)"),
    "precision": ("of the local solve's products alone: `tf32` on GPUs, `bf16-mixed`"),
    "deterministic": (
        "`false`: a GPU's kernels may add in any order, which is faster (docs/gpu.md); the record then says `bitwise: "
        "false`"
    ),
    "bits": (
        "`portable`: linear models with the same bits on every processor, with one version of torch and NumPy, by "
        "operations that IEEE 754 rounds in one way and sums in a stated order; slower (docs/bits.md)"
    ),
    "threads": ("threads of torch in each rank; part of the result, like the seed"),
    "rounds": ("how many; each trains a cohort"),
    "cohort": (
        "all clients; or `{size: 20}`, `{fraction: 0.1}`, with `sampling: uniform` or `bernoulli`; or "
        "`{schedule: cohorts.json}` or `{schedule: [[0], [1], [2]]}`, repeated (a model that travels; "
        "`[[2]]`: client 2 alone); `stream: authors` draws Bernoulli cohorts as FedDyn's code does. "
        "`without: [hospital-3]`: as if these clients had never taken part (docs/checking.md); or `without: {clients: "
        "[3], cohorts: empty, evaluate: others}`; `cohorts: redrawn` draws among the others, `evaluate: all` measures "
        "on all clients' data"
    ),
    "weights": ("`samples` (n_i/n) or `uniform`; default: the method's own (table below)"),
    "local": (
        "`steps` or `epochs`; `batch_size: 50` or `full`; `lr: 0.1`, `lr_decay: 1` or `lr_schedule: "
        "[{round: 51, lr: 0.05}]` (from that round on), `weight_decay: 0`, `momentum: 0`, `clip_norm`, "
        "`clip: all` (of gradient and method's term together) or `linear` (its μ y is "
        "added after); `optimizer: sgd`, `adam` or `yogi` with `beta1`, `beta2`, `eps` and, for guesses, "
        "`guess_moments: first` or `all` (the second one decays, too); "
        "`augment: {crop: 4, crop_probability: 1, flip: 0.5, per: sample}` or `per: batch`; `engine: "
        "batched` trains clients together, in tiles of `tile: auto` or so many slots (part of the result: "
        "docs/bits.md), `sequential` one after another, `auto` is batched for "
        "linear models and perceptrons; `matmul: onednn` computes their large products by oneDNN, "
        "`blas` by MKL, `auto` by oneDNN on AMD's processors from Zen 5 on (`hpcfed bench "
        "calibrate RECIPE` measures both choices); `compile: true` has torch compile the model; "
        "`graphs: auto` has a GPU take recorded steps, `off` step by step, to the same bits (docs/gpu.md); "
        '`step: "module:function"` takes a step of your own in place of all that, with `step_args: {}` '
        '(README.md, "Add a method")'
    ),
    "budget": ("`{low: 4, high: 20}` steps drawn for each client and round, or `{schedule: budgets.json}`"),
    "guess": (
        "`remaining`: after its τ_i steps a client guesses the rest of `local.steps` (GeL); `10`: so "
        "many; `limit`: infinitely many; needs `momentum`, Adam or Yogi"
    ),
    "algorithm": (
        "`{name: fedexp, eps: 1e-3}`; a combination `{local: prox, normalize: steps, server: yogi, mu: 0.1}`; "
        'or your own `{factory: "module:function"}` (README.md, "Add a method")'
    ),
    "evaluate": (
        "`{every: 1, model: auto, batch_size: 1000, train: {every: 0}}`; `auto` is the method's own; `model: last`, "
        "`last-two`, `cohort-average`, `client-average`, or `step-average` of all iterates by η_g; "
        "`statistics: training` estimates its averaged running statistics anew on all training samples; `metrics: "
        "[auroc, f1-macro]` on the test set, the training sets and each client: `auroc`, `average-precision` (of two "
        "classes, of the second), `f1-macro`, `balanced-accuracy`, `confusion-matrix`, `calibration-error`, "
        "`brier`, `dice`, `mae`, `rmse`, `r2`, `concordance`; and your own, "
        '`{top3: "module:function", kappa: {whole: "module:function", better: higher}}`:'
        " functions (output, target) → (sum, count) of a batch (`sum`), or → a number of all samples (`whole`); "
        "`better: higher` or `lower` lets `study` and `sweep` choose by it, and `stop` end by it; recorded as "
        "`test_auroc`, `test_top3`"
    ),
    "evaluate.clients": (
        "`{every: 0, models: [global]}`: the measures of `evaluate` on each client's own samples, a row a client "
        "in `clients.csv`; their mean, worst decile and variance in the record. `models: [global, last, "
        "fine-tuned]` measures clients' last models too (kept with `model: client-average`), and the "
        "global one after `fine_tune: {steps: 5, lr: 0.01, batch_size: 50}`"
    ),
    "stop": (
        "`{test_accuracy: 0.96, for: 1, patience: 20, max_hours: 11}`: ends the run early (`for` and "
        "`patience` count evaluations); `{metric: auroc, target: 0.9, patience: 20}`: by one of `evaluate.metrics`, "
        "`accuracy` or `loss` on the test set"
    ),
    "checkpoint": (
        "`{every: 10min, keep: even}`: in rounds (`every: 50`) or in time; 0: only when the run is stopped early. "
        "`even` keeps two and, for `verify` and `replay`, 20 at equal distances, while they take less than 1 GiB; "
        "`spaced` ten a decade of rounds; `2` two"
    ),
    "update_hashes": (
        "`true`: a 64-bit hash of each client's update, 8 bytes a client and round in `update-hashes.bin`"
    ),
    "observers": (
        "called after each round, on rank 0, without any effect on the result: `[tensorboard, wandb]` "
        "(events and an offline run in `logs/`; `{name: wandb, args: {project: mine, mode: online}}`), or "
        'your own `{factory: "module:Class", args: {}}` with one or more of `start(run)`, `round(row)`, '
        "`end(status)`"
    ),
    "sentinel": (
        "`on`: of the tiles trained, at most 1 % are trained once more in other slots, alone or on another rank, and "
        "both updates compared; `strict` ends the run where they differ (exit code 4); without effect on the result"
    ),
    "on_bad_client": ("`skip`: a round goes on without a client whose training failed or whose update is not finite"),
    "watchdog": (
        "how long one client's training may take, or a rank be silent outside of the rounds, before the run counts as "
        "stuck; 0: for ever"
    ),
    "reduction": ("`fast`: float32 sums, half the bytes; the record then says `bitwise: false`"),
    "gpu_reduce": (
        "`mpi`: a CUDA-aware MPI reduces the GPU's own memory; `host`: through pinned host memory; "
        "`nccl`: from GPU to GPU by NCCL, a rank a GPU"
    ),
    "client_state": (
        "where clients' states lie between rounds: `device`, then `host` where it is full, then `disk` ($TMPDIR); "
        "without effect on the result, so a run may go on with another"
    ),
    "placement": (
        "`balanced`: spreads each round's cohort over the ranks by the measured costs of samples, steps and "
        "clients and the measured speeds of ranks; client states move along. `static`: clients stay on their "
        "home rank, the default of methods whose clients have a state. Without effect on the result"
    ),
    "output": ("the run folder; default: `runs/<name>`"),
}
"""Key, dotted in a subsection → its meaning, as Markdown."""

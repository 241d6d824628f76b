"""Other programs' and papers' names for methods, keys and values of a recipe, with the remedy that a message names."""

from __future__ import annotations

METHODS = {
    "fedopt": "FedOpt is a family: fedadam, fedyogi, fedadagrad and, with momentum alone, fedavgm",
    "fedavgcm": "FedAvgCM is fedavg with local.momentum=0.9",
    "localsgd": "local SGD is fedavg",
    "fedsgd": "one gradient a round is dsgd",
    "sgd": "one gradient a round is dsgd, several local steps are fedavg",
    "fedbn": 'FedBN goes with any method: parameters.private=["*bn*"]',
    "fedrep": 'FedRep is fedavg with parameters={private: ["head.*"], private_first: 5}',
    "fedper": 'private layers go with any method: parameters.private=["head.*"]',
    "fedmedian": "a robust mean goes with most methods: means=[median]",
    "fedtrimmedavg": "a robust mean goes with most methods: means=[{trimmed-mean: {fraction: 0.2}}]",
    "krum": "a robust mean goes with most methods: means=[{krum: {attackers: 1}}]",
    "multikrum": "a robust mean goes with most methods: means=[{krum: {attackers: 1, selected: 3}}]",
    "rfa": "a robust mean goes with most methods: means=[geometric-median]",
    "dpfedavg": "noise goes with most methods: docs/privacy.md",
    "local": "clients that train alone are a baseline of hpcfed study; client 3 alone is cohort.schedule=[[3]]",
    "centralized": "all data in one place are a baseline of hpcfed study (docs/own-project.md has the recipe)",
    "moon": "MOON is a local step: docs/methods.md",
    "fedsam": "FedSAM is a client rule of three lines: docs/methods.md",
    "fedbuff": "rounds are synchronous: a slow client has fewer steps (budget)",
    "gel": "GeL goes with any method but dsgd: guess=remaining, with local.momentum, Adam or Yogi",
}
"""Names that are no method here (see `letters_of`) → what to use."""

_PLACES = {
    "algorithm": "aggregatefit aggregation aggregator federatedoptimizer method server strategy",
    "algorithm.alpha": "al",
    "algorithm.mu": "proximalmu",
    "algorithm.server_lr": "centrallearningrate centrallr etag globallearningrate globallr serverlearningrate slr",
    "checkpoint.every": "checkpointevery checkpointinterval saveevery saveinterval",
    "cohort.fraction": (
        "clientfraction eligibleperc fractionfit fractiontrain joinratio jr participation participationrate samplerate"
    ),
    "cohort.size": (
        "clientnumperround clientsperround cohortsize minclients minfitclients mintrainnodes numclientsperround "
        "traincohortsize usersperround"
    ),
    "data": "datacachedir dataset datasets testdata traindata",
    "device": "cuda deviceid gpu gpuid usecuda usinggpu",
    "evaluate.every": (
        "eg evalepochfrequency evalevery evalgap evalinterval evaluateevery evaluationfrequency frequencyofthetest "
        "testevery"
    ),
    "evaluate.clients.every": "fractionevaluate minevaluateclients minevaluatenodes valcohortsize",
    "local": "client",
    "local.augment": "transform transforms",
    "local.batch_size": "bs lbs localbatchsize minibatch minibatchsize",
    "local.clip_norm": "clipgradnorm gradclip gradientclipping localmaxgradnorm maxgradnorm maxnorm",
    "down": "bidirectional broadcastcompression downlink downlinkcompression servercompression",
    "local.epochs": "clientepochs localepochs localnumepochs ls numepochs",
    "local.lr": "clientlearningrate clientlr etal learningrate locallearningrate locallr stepsize",
    "local.lr_decay": "ld ldg learningratedecay",
    "local.lr_schedule": "lrscheduler scheduler",
    "local.optimizer": "clientoptimizer localoptimizer localoptimizercreate",
    "local.steps": "iterations localiterations localsteps numsteps",
    "local.weight_decay": "l2 wd",
    "loss": "criterion lossfn lossfunction",
    "means": "byzantine geometricmedian krum median robust robustaggregation trimmedmean",
    "model": "architecture net network",
    "model.init": "initialmodel initialparameters pretrained",
    "observers": "callback callbacks enablewandb logger loggers mlflow tensorboard wandb",
    "on_bad_client": "acceptfailures",
    "output": "logdir outdir savedir",
    "parameters.private": "head personalization personalized",
    "precision": "amp bf16 fp16 mixedprecision",
    "rounds": (
        "centralnumiterations commround commrounds communicationrounds globalrounds gr maxrounds nrounds numrounds "
        "numserverrounds"
    ),
    "seed": "randomseed randomstate rngseed",
    "seeds": "t times",
    "secure_aggregation": "masking masks secagg",
    "updates": "attack clipping compression compressor errorfeedback postprocessors quantization sparsification",
    "stop.max_hours": "maxtime timelimit walltime",
    "stop.patience": "earlystopping",
    "weights": "weighted weightedbykey",
}
"""Key → names of it elsewhere (see `letters_of`)."""
_OUTSIDE = {
    "a method steps at the server, as algorithm=fedadam": "centraloptimizer serveroptimizer",
    "clients are made as data are prepared: hpcfed prepare … --clients N": (
        "clientnumintotal clients nc nclients numclients numsupernodes"
    ),
    "data are partitioned as they are prepared: hpcfed prepare … --partition SCHEME": (
        "distribution partition partitionalpha partitioner partitionmethod split"
    ),
    "noise is a part of updates or means, or local.noise: docs/privacy.md": (
        "differentialprivacy dp epsilon noise noisemultiplier sigma targetepsilon"
    ),
    "all clients are in the file, and none is waited for": "minavailableclients minavailablenodes",
    "what changes by the round is local.lr_schedule, or a method of yours: docs/methods.md": (
        "onevaluateconfigfn onfitconfigfn"
    ),
    "the launcher says how many: mpiexec -n 4 hpcfed run …": (
        "clientresources gpumappingfile gpus nprocs numgpus numworkers processes ranks workernum workers"
    ),
    "clients' own test sets are held out as data are prepared: hpcfed prepare … --test-fraction 0.2": "clientsplit",
    "the loop over minibatches is hpcfed's; a step of yours is local.step: docs/methods.md": "clientfn trainscript",
    "the same command goes on from the last checkpoint": "resume resumefrom restart restartfrom",
}
"""Remedy → names elsewhere of what is said outside a recipe."""
PLACES = {word: key for key, words in _PLACES.items() for word in words.split()}
"""Names that are no key here (see `letters_of`) → the key that is meant."""
KEYS = {word: f"did you mean {key!r}?" for word, key in PLACES.items()} | {
    word: remedy for remedy, words in _OUTSIDE.items() for word in words.split()
}
"""The same, and names of what is said outside a recipe → what to write or do."""
SHORT_OPTIONS = {"n": "ranks", "np": "ranks", "o": "output"}
"""Short options elsewhere → what they stand for."""

PARAMETERS = {
    "server_lr": "eta etag learningrate lr serverlearningrate",
    "beta": "momentum servermomentum",
    "beta1": "b1 beta",
    "mu": "lamda lambda proximalmu",
}
"""Parameter of a method → names of it elsewhere (see `letters_of`)."""
OPTIMIZERS = "adadelta", "adagrad", "adamax", "adamw", "lamb", "lars", "lbfgs", "lion", "nadam", "radam", "rmsprop"
"""Optimizers of clients that are not built in."""
VALUES = {
    "device": {"gpu": "cuda"},
    "guess": {"no": "none", "off": "none"},
    "loss.name": {"bce": "binary-cross-entropy", "ce": "cross-entropy"},
    "sentinel": {"no": "off", "yes": "on"},
}
"""Key → words that are no value of it here (see `letters_of`) → the value."""


def letters_of(name: str) -> str:
    """Return a name's letters and digits in lower case: spellings that differ in ``-``, ``_`` and capitals alone."""
    return "".join(filter(str.isalnum, name.lower()))

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
    "gel": "GeL goes with any method but dsgd: guess=remaining, with local.momentum, Adam or Yogi",
}
"""Names that are no method here (see `letters_of`) → what to use."""

_PLACES = {
    "algorithm": "aggregation aggregator method strategy",
    "algorithm.alpha": "al",
    "algorithm.server_lr": "etag globallearningrate globallr serverlearningrate slr",
    "checkpoint.every": "checkpointevery checkpointinterval saveevery saveinterval",
    "cohort.fraction": (
        "clientfraction fractionfit fractiontrain joinratio jr participation participationrate samplerate"
    ),
    "cohort.size": "clientsperround cohortsize mintrainnodes numclientsperround traincohortsize",
    "data": "dataset datasets",
    "evaluate.every": "eg evalevery evalgap evalinterval evaluateevery testevery",
    "evaluate.clients.every": "fractionevaluate valcohortsize",
    "local.batch_size": "lbs localbatchsize minibatch minibatchsize",
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
    "observers": "logger loggers mlflow tensorboard wandb",
    "output": "logdir outdir savedir",
    "precision": "amp bf16 fp16 mixedprecision",
    "rounds": "centralnumiterations commrounds communicationrounds globalrounds gr maxrounds numrounds",
    "seeds": "t times",
    "secure_aggregation": "masking masks secagg",
    "updates": "attack clipping compression compressor errorfeedback quantization sparsification",
    "stop.max_hours": "maxtime timelimit walltime",
    "stop.patience": "earlystopping",
    "weights": "weightedbykey",
}
"""Key → names of it elsewhere (see `letters_of`)."""
_OUTSIDE = {
    "a method steps at the server, as algorithm=fedadam": "centraloptimizer serveroptimizer",
    "clients are made as data are prepared: hpcfed prepare … --clients N": "clients nc nclients numclients",
    "data are partitioned as they are prepared: hpcfed prepare … --partition SCHEME": "partition partitioner split",
    "the launcher says how many: mpiexec -n 4 hpcfed run …": (
        "clientresources gpus nprocs numgpus numworkers processes ranks workers"
    ),
    "the same command goes on from the last checkpoint": "resume resumefrom restart restartfrom",
}
"""Remedy → names elsewhere of what is said outside a recipe."""
KEYS = {word: f"did you mean {key!r}?" for key, words in _PLACES.items() for word in words.split()} | {
    word: remedy for remedy, words in _OUTSIDE.items() for word in words.split()
}
"""Names that are no key here (see `letters_of`) → what to write or do."""

VALUES = {"device": {"gpu": "cuda"}}
"""Key → words that are no value of it here (see `letters_of`) → the value."""


def letters_of(name: str) -> str:
    """Return a name's letters and digits in lower case: spellings that differ in ``-``, ``_`` and capitals alone."""
    return "".join(filter(str.isalnum, name.lower()))

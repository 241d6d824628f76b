"""``hpcfed submit`` without a cluster: the script it shows, what it refuses, and the scripts of ``jobs/slurm``."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpcfed
from hpcfed.cli.job_step import command as job_step
from hpcfed.cli.reproduce import command as reproduce
from hpcfed.cli.scale import command as scale
from hpcfed.cli.study import command as study
from hpcfed.cli.submit import command
from hpcfed.cli.sweep import command as sweep
from hpcfed.cluster.doctor.launch import Mpi, find_mpi
from hpcfed.cluster.step.run import saved
from hpcfed.cluster.step.scheduler import SCHEDULERS as SCHEDULERS_OF_JOBS
from hpcfed.cluster.submit.site import SCHEDULERS
from hpcfed.config import registry
from hpcfed.errors import InputError
from hpcfed.ranks.code import python_options
from tests.launch import ROOT, launcher
from tests.mpi.recipes import write_recipe

SCRIPTS = sorted((ROOT / "jobs" / "slurm").glob("*.sbatch"))
JOB = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "1"}
"""Variables of a script that is started without SLURM."""
TOY = ROOT / "jobs" / "recipes" / "fedexp" / "toy.yaml"
SHARING = {"sweep": sweep, "study": study, "reproduce": reproduce}
"""Commands whose runs an array of jobs may share."""
REQUEUED = [script for script in SCRIPTS if script.stem != "scaling"]


@pytest.fixture(autouse=True)
def site_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site file, in place of this machine's; the working folder is the recipe's."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    place = folder / "config" / "hpcfed" / "site.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("launch: srun")  # else every script asks the MPI what it wants
    return place


def shown(*arguments: str) -> str:
    """The script that the command shows and does not submit; it leaves no file."""
    before = sorted(Path().iterdir())
    done = CliRunner().invoke(command, ["recipe.yaml", "--time", "4:00:00", "--dry-run", *arguments])
    if done.exception is not None:
        raise done.exception
    assert sorted(Path().iterdir()) == before
    assert subprocess.run(["bash", "-n"], input=done.output, text=True).returncode == 0
    return done.output


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]


def words(script: str) -> list[str]:
    """The words of the array `run`, as bash reads them."""
    (line,) = [line for line in script.splitlines() if line.startswith("run=(")]
    said = subprocess.run(["bash", "-c", f'{line}; printf "%s\\0" "${{run[@]}}"'], capture_output=True, text=True)
    return said.stdout.split("\0")[:-1]


def step(script: str) -> list[str]:
    """The options of the script's last command, as bash reads them."""
    _, _, last = script.partition(" -P -m hpcfed job-step ")
    said = subprocess.run(["bash", "-c", f'run=(); printf "%s\\0" {last}'], capture_output=True, text=True)
    return said.stdout.split("\0")[:-2]


def test_the_script_says_what_was_asked_for(folder: Path, site_file: Path) -> None:
    site_file.unlink()
    size = ("--nodes", "2", "--ranks-per-node", "8", "--account", "p7", "--partition", "cpu", "-o", "exclusive")
    script = shown(*size, "rounds=50", "threads=2", "-o", "qos=long")
    told = directives(script)
    wanted = {"nodes=2", "ntasks-per-node=8", "cpus-per-task=2", "time=4:00:00", "account=p7", "partition=cpu"}
    assert wanted | {
        "exclusive",
        "mem=0",
        "hint=nomultithread",
        "qos=long",
        "requeue",
        "open-mode=append",
        "signal=B:USR1@120",
    } <= set(told)
    assert f'output="{folder}/run-%j.log"' in told
    srun = f"--mpi={'pmix' if launcher(sys.executable).mpi == 'Open MPI' else 'pmi2'}"
    program = ["srun", srun, "--cpu-bind=cores", "--wait=30", sys.executable, "-P", "-m", "hpcfed", "run"]
    arguments = [f"{folder}/recipe.yaml", "rounds=50", "threads=2", f'output="{folder}/run"']
    assert words(script) == program + arguments
    assert "\nexport OMP_NUM_THREADS=2\n" in script
    own = [line for line in script.splitlines() if not line.startswith("#")]
    assert len(own) == 10
    assert own[-1] == '    -- "${run[@]}"'
    digest = hashlib.sha256((folder / "recipe.yaml").read_bytes()).hexdigest()
    assert step(script) == [f"--output={folder}/run", "--unchanged", f"{folder}/recipe.yaml", digest]


def test_ranks_follow_gpus() -> None:
    assert {"gpus-per-node=4", "ntasks-per-node=4"} <= set(directives(shown("--gpus-per-node", "4", "device=cuda")))
    assert {"ntasks-per-node=8"} <= set(directives(shown("--gpus-per-node", "4", "--ranks-per-node", "8")))
    with pytest.raises(InputError, match="device: cuda: expected GPUs, got none; add --gpus-per-node"):
        shown("device=cuda")


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("gres=gpu:4", 4),
        ("gres=gpu:a100:4", 4),
        ("gres=nvme:9,gpu:a100:2,gpu:h100:1", 3),
        ("gres=gpu", 1),
        ("gres=nvme:9", 1),
        ("gpus=a100:4", 4),
        ("gpus=8 nodes=2", 4),
        ("gpus-per-node=a100:2,h100:2", 4),
        ("gpus-per-node=4 gpus-per-task=1", 4),
        ("gpus-per-node=4 gpus-per-task=2", 2),
        ("gpus-per-task=1", 1),
    ],
)
def test_ranks_follow_gpus_however_they_are_asked_for(options: str, ranks: int) -> None:
    typed = [word for option in options.split() for word in ("-o", option)]
    assert f"ntasks-per-node={ranks}" in directives(shown(*typed, "device=cuda"))


def test_what_a_job_leaves_open_is_chosen_and_what_it_says_counts() -> None:
    """Cores, memory, and GPUs that all ranks of a node see; of ranks that share GPUs, the service that lets them."""
    plain, gpus = shown(), shown("--gpus-per-node", "4", "--mem", "64G", "-o", "exclusive")
    assert not any(line.startswith(("mem", "gpu", "distribution")) for line in directives(plain))
    assert {"gpu-bind=none", "distribution=block:cyclic", "mem=64G", "hint=nomultithread"} <= {*directives(gpus)}
    own = ("gpus-per-task=1", "gpus-per-node=4", "threads-per-core=2", "exclusive=user")
    told = directives(shown(*(word for option in own for word in ("-o", option))))
    assert not any(line.startswith(("mem", "gpu-bind", "distribution", "hint")) for line in told)
    assert "hint=multithread" in directives(shown("-o", "hint=multithread"))
    assert "--mps" not in step(plain) + step(gpus)
    assert "--mps" in step(shown("-o", "gpus-per-node=a100:4", "--ranks-per-node", "8"))


def test_ranks_of_several_nodes_share_all_gpus_of_the_job() -> None:
    assert "ntasks-per-node=2" in directives(shown("--nodes", "2", "-o", "gpus=4"))


def test_scale_takes_ranks_by_gpus_as_submit_does() -> None:
    asked = ["recipe.yaml", "--slurm", "--time", "10", "--dry-run", "--ranks", "4"]
    done = CliRunner().invoke(scale, [*asked, "-o", "gres=gpu:a100:2"])
    assert done.exit_code == 0, done.exception
    assert {"nodes=2", "ntasks-per-node=2"} <= set(directives(done.output))
    done = CliRunner().invoke(scale, [*asked[:-1], "1", "-o", "gres=gpu:a100:2"])
    assert {"nodes=1", "ntasks-per-node=1"} <= set(directives(done.output))


@pytest.mark.parametrize(("options", "alone"), [((), 1), (("exclusive=user",), 0), (("oversubscribe",), 0)])
def test_scale_has_its_nodes_to_itself_unless_an_option_says_otherwise(options: tuple[str, ...], alone: int) -> None:
    asked = ["recipe.yaml", "--slurm", "--time", "10", "--dry-run", "--ranks", "2"]
    done = CliRunner().invoke(scale, [*asked, *(word for option in options for word in ("-o", option))])
    assert directives(done.output).count("exclusive") == alone


def test_a_doubt_is_said_once(folder: Path, site_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site_file.write_text("")
    monkeypatch.setattr("hpcfed.cluster.submit.schedulers.slurm._mpi", lambda: Mpi("MPI of nobody", None, None, None))
    asked = ["recipe.yaml", "--time", "10"]
    many = CliRunner().invoke(scale, [*asked, "--slurm", "--dry-run", "--ranks", "1,2,4"])
    assert many.stderr.count("MPI of nobody is the MPI here, so the script leaves the PMI to srun") == 1
    assert many.stdout.count("\nrun=(srun ") == 3
    hpcfed.run("recipe.yaml", quiet=True)
    finished = CliRunner().invoke(command, asked)
    assert finished.stdout.startswith("recipe: finished already, see ")
    assert finished.stderr == ""
    site_file.write_text("launch: srun --mpi=pmix")
    monkeypatch.setattr("hpcfed.cluster.submit.schedulers.slurm._mpi", lambda: Mpi("MPICH 4.2", "MPICH", None, None))
    warned = CliRunner().invoke(command, [*asked, "--dry-run"]).stderr
    assert warned.endswith(
        "MPICH is the MPI here, which wants srun --mpi=pmi2; the site file's launch has --mpi=pmix\n"
    )


def test_options_of_sbatch_count_wherever_they_stand(folder: Path) -> None:
    (folder / "gpus.yaml").write_text(
        "{launch: srun, options: {gpus-per-node: 'a100:4', exclusive: true, oversubscribe: false}}"
    )
    told = directives(shown("--site", "gpus.yaml", "device=cuda"))
    assert {"gpus-per-node=a100:4", "ntasks-per-node=4", "exclusive"} <= set(told)
    assert not any("oversubscribe" in line for line in told)
    script = shown("-o", "--no-requeue", "-o", "cpus-per-task=4")
    assert "--no-requeue" in step(script)
    assert [line for line in directives(script) if "requeue" in line] == ["no-requeue"]
    (folder / "never.yaml").write_text("{requeue: false, launch: srun}")
    assert "--no-requeue" not in step(shown("-o", "requeue", "--site", "never.yaml"))
    with pytest.raises(InputError, match="-o requeue: expected no value, got requeue=false; -o no-requeue"):
        shown("-o", "requeue=false")
    with pytest.raises(InputError, match="option signal: expected none"):
        shown("-o", "signal=USR2@5")
    with pytest.raises(InputError, match="-o requeue: expected none with --chain"):
        shown("-o", "requeue", "--chain", "2")


def test_variables_of_the_site_file_expand_in_the_job(folder: Path) -> None:
    """And nothing else does, nor what a shell would leave: a ``$`` in single quotes or after a backslash."""
    (folder / "site.yaml").write_text(
        'launch: run --bind "$ROOT/a b,${ROOT}" $(touch hacked) `x` \'\' \'$ROOT "$@"\' \\$ROOT "\\$ROOT"\n'
        "python: $ROOT/python\n"
    )
    script = shown("--site", "site.yaml")
    (line,) = [line for line in script.splitlines() if line.startswith("run=(")]
    said = subprocess.run(
        ["bash", "-c", f'ROOT="/r s"; {line}; printf "%s\n" "${{run[@]}}"'], capture_output=True, text=True, cwd=folder
    )
    assert said.stdout.splitlines()[:11] == [
        "run",
        "--bind",
        "/r s/a b,/r s",
        "$(touch",
        "hacked)",
        "`x`",
        "",
        '$ROOT "$@"',
        "$ROOT",
        "$ROOT",
        "/r s/python",
    ]
    assert not (folder / "hacked").exists()


def test_the_home_folder_of_the_site_file_expands_in_the_job(folder: Path, site_file: Path) -> None:
    site = {"launch": "A=~/x ~/bin/run --at ~/b '~/c' \"~/d\" ~user/e f~/ ~", "python": "~/f/python"}
    site_file.write_text(json.dumps(site))
    (line,) = [line for line in shown().splitlines() if line.startswith("run=(")]
    show = f'HOME="/h s"; {line}; printf "%s\n" "${{run[@]}}"'
    found = subprocess.run(["bash", "-c", show], capture_output=True, text=True).stdout.splitlines()
    assert found[:7] == ["env", "A=~/x", "/h s/bin/run", "--at", "/h s/b", "~/c", "~/d"]
    assert found[7:11] == ["~user/e", "f~/", "~", "/h s/f/python"]


def test_variables_set_before_a_command_of_the_site_file_are_its_environment(folder: Path, site_file: Path) -> None:
    site_file.write_text(json.dumps({"launch": "A=1 B='2 3' env", "python": "C=4 bash -c 'echo $A $B $C'"}))
    (folder / "job.sh").write_text(shown())
    done = subprocess.run(["bash", "job.sh"], env=JOB, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1 2 3 4\n"), done.stderr


def test_a_run_folder_behind_a_link_is_looked_into(folder: Path, site_file: Path) -> None:
    """And the job has the name that it has without the link."""
    (folder / "scratch").mkdir()
    (folder / "linked").symlink_to("scratch")
    scripts = [shown(f"output={name}") for name in ("scratch", "linked")]
    names = [line for script in scripts for line in directives(script) if line.startswith("job-name=")]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("name", "what"), [("sweep", "recipe.yaml"), ("study", "recipe.yaml"), ("reproduce", "fedexp-toy")]
)
def test_options_of_a_job_without_an_array_run_nothing_here(name: str, what: str) -> None:
    with pytest.raises(InputError, match="expected --array and --time, got --nodes; give both, or no option of a job"):
        raise CliRunner().invoke(SHARING[name], [what, "--nodes", "1"]).exception or AssertionError


def test_only_jobs_of_an_array_take_themselves_for_its_tasks() -> None:
    """The last task has the array's own number, which means all tasks; a single job may have been submitted by one."""
    done = CliRunner().invoke(sweep, ["recipe.yaml", "--array", "2", "--time", "10", "--dry-run"])
    assert "--array" in step(done.output)
    assert "--array" not in step(shown())
    for script in REQUEUED:
        assert ("job-step --array" in script.read_text(encoding="utf-8")) == (script.stem == "sweep")


def test_chained_jobs_do_not_requeue_themselves() -> None:
    script = shown("--chain", "3")
    assert "no-requeue" in directives(script)
    (name,) = [line.partition("=")[2] for line in directives(script) if line.startswith("job-name=")]
    assert {"--no-requeue", f"--chain={name}"} <= set(step(script))
    assert not any(word.startswith("--chain") for word in step(shown()))


def test_an_experiment_is_submitted_as_an_array(folder: Path) -> None:
    (folder / "own.yaml").write_text(TOY.read_text().replace("\nrecipe:\n", "\nrecipe:\n  threads: 2\n"))

    def asked(name: str, *options: str, output: str = "out") -> str:
        array = ["--array", "3", "--time", "4:00:00", "--dry-run", "--output", output]
        done = CliRunner().invoke(reproduce, [name, *array, *options])
        if done.exception is not None:
            raise done.exception
        return done.output

    script = asked("own.yaml", "--method", "fedavg", "--seeds", "2", "--to-targets", "--gpus-per-node", "4")
    assert {"array=1-3", "cpus-per-task=2", "ntasks-per-node=4"} <= set(directives(script))
    assert f'output="{folder}/out/own-%A_%a.log"' in directives(script)
    assert words(script)[-7:] == ["reproduce", f"{folder}/own.yaml", "--scale=full", f"--output={folder}/out",
                                  "--method=fedavg", "--seeds=2", "--to-targets"]  # fmt: skip
    assert not (folder / "out").exists()
    assert words(asked("fedexp-figure2"))[-3] == "fedexp-figure2"
    assert "--unchanged" not in step(asked("fedexp-figure2"))
    with pytest.raises(InputError, match="gel-figure3 trains nothing: got gel-coefficients; leave --array out"):
        asked("gel-figure3")
    with pytest.raises(InputError, match=r"fedexp-figure12: expected one experiment, got fedexp-\S+, fedexp-\S+"):
        asked("fedexp-figure12")


def test_a_study_is_submitted_as_an_array(folder: Path) -> None:
    asked = ["recipe.yaml", "local.lr=0.2", "output=other", "--methods", "fedavg,fedexp:eps=0.1", "--bootstrap", "100",
             "--tune", "local.lr=0.1,1", "--tune", "fedexp:eps=1,2", "--test-fraction", "0.4"]  # fmt: skip
    done = CliRunner().invoke(study, [*asked, "--array", "3", "--time", "1:00:00", "--dry-run"])
    assert done.exit_code == 0, done.exception
    assert "array=1-3" in directives(done.output)
    job = words(done.output)
    (at,) = (place for place, word in enumerate(job) if word == "study")
    assert job[at + 1 : at + 3] == [f"{folder}/recipe.yaml", "local.lr=0.2"]
    assert {
        "--methods=fedavg,fedexp:eps=0.1", "--bootstrap=100", "--tune=local.lr=0.1,1", "--tune=fedexp:eps=1,2",
        "--test-fraction=0.4", "--kind=holdout", f"--output={folder}/other-study",
    } <= {*job[at:]}  # fmt: skip
    assert not (folder / "other-study").exists()
    with pytest.raises(InputError, match="expected --array and --time"):
        raise CliRunner().invoke(study, [*asked, "--array", "3"]).exception or AssertionError


def test_the_name_is_not_for_the_taking() -> None:
    with pytest.raises(InputError, match="option job-name: expected none"):
        shown("-o", "job-name=mine")


def test_the_job_is_named_after_its_folder() -> None:
    def name(*arguments: str) -> str:
        return directives(shown(*arguments))[0]

    assert name() == name("rounds=9") != name("output=other")
    assert name().startswith("job-name=recipe-")


def test_seeds_share_a_folder(folder: Path) -> None:
    assert words(shown("seeds=[1, 2]"))[-1] == f'output="{folder}/run"'


SITE = """
modules: [gcc/13, openmpi/5.0]
setup: |
  source ~/env/bin/activate
launch: mpirun -x 'A B' --map-by core
python: python3
options: {partition: milan, account: p1, exclusive: null, mem: 0}
"""


def test_the_site_file_is_read_from_its_place_or_from_anywhere(folder: Path, site_file: Path) -> None:
    site_file.write_text(SITE)
    (folder / "other.yaml").write_text("{requeue: false, launch: srun}")
    script = shown("--account", "p7")
    assert re.findall(r"^(?:module load \S+|source .*)", script, flags=re.MULTILINE) == [
        "module load gcc/13",
        "module load openmpi/5.0",
        "source ~/env/bin/activate",
    ]
    assert words(script)[:9] == ["mpirun", "-x", "A B", "--map-by", "core", "python3", "-P", "-m", "hpcfed"]
    assert {"partition=milan", "account=p7", "exclusive", "mem=0"} <= set(directives(script))
    (folder / "other.yaml").write_text("{requeue: false, launch: numactl -m 0, python: $PYTHON -u -m mpi4py}")
    script = shown("--site", "other.yaml")
    assert "no-requeue" in directives(script)
    assert '(numactl -m 0 "$PYTHON" -P -u -m mpi4py -m hpcfed ' in script


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("modules: gcc", "modules: expected a list, got 'gcc'; did you mean ['gcc']?"),
        ("modules: ['gcc; rm -rf x']", "modules.0: expected one word without quotes or white space"),
        ("modul: [gcc]", "unknown key 'modul'; did you mean 'modules'"),
        ("launch: srun 'x", "launch: expected No closing quotation"),
        ("[gcc]", "expected a mapping of keys, got list"),
        ("a: [", "site file cannot be read"),
    ],
)
def test_a_site_file_that_is_wrong_is_refused(folder: Path, site: str, message: str) -> None:
    (folder / "site.yaml").write_text(site)
    with pytest.raises(InputError, match=r"site\.yaml") as refused:
        shown("--site", "site.yaml")
    assert message in str(refused.value)


NASTY = ["$(touch hacked)", "`touch hacked`", "a b", "x; touch hacked", "it's", "a\nb", '"', "\\"]


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("option", ["--account", "--partition", "-o"])
def test_nothing_typed_reaches_a_shell_as_anything_but_itself(option: str, text: str) -> None:
    with pytest.raises(InputError, match="expected one word without quotes or white space"):
        shown(option, f"qos={text}" if option == "-o" else text)


@pytest.mark.parametrize("name", ["`touch hacked`", "a b", "x; touch hacked", "it's", "50%", "a: #b"])
def test_a_folder_may_be_called_anything(folder: Path, name: str) -> None:
    script = shown(f"output={json.dumps(name)}")
    assert words(script)[-1] == f'output="{folder}/{name}"'
    (told,) = [line for line in directives(script) if line.startswith("output=")]
    assert told == f'output="{folder}/{name.replace("%", "%%")}-%j.log"'
    assert step(script)[0] == f"--output={folder}/{name}"
    assert not (folder / "hacked").exists()


def test_a_link_to_nothing_is_no_output(folder: Path) -> None:
    (folder / "purged").symlink_to("scratch")
    with pytest.raises(
        InputError, match="/purged: output: expected a folder, got a link to a file that does not exist"
    ):
        shown("output=purged")


@pytest.mark.parametrize("text", ['say "x"', "back\\slash"])
def test_a_folder_that_sbatch_cannot_take_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="output: expected a path without quotes"):
        shown(f"output='{text}'")


def test_a_time_limit_is_one_that_sbatch_takes() -> None:
    assert "#SBATCH --time=2-12:30" in shown("--time=2-12:30")
    with pytest.raises(
        InputError, match="--time: expected minutes, 4:00:00 for hours, or 2-12 for days-hours, got '4h'"
    ):
        shown("--time=4h")


@pytest.mark.parametrize("limit", ["0", "0:00", "0-0", "1:99", "1:99:99", "1-24", "1-2:60", "", "1:2:3:4"])
def test_a_time_limit_out_of_range_is_refused(limit: str) -> None:
    with pytest.raises(InputError, match="--time: expected"):
        shown(f"--time={limit}")


def test_a_time_limit_leaves_time_before_the_notice() -> None:
    """SLURM may send its signal a minute early; a job with less would stop as it starts, again and again."""
    least = "--time: expected more than 180 s, the notice of 120 s and 60 s by which SLURM may be early, got '3', 180 s"
    with pytest.raises(InputError, match=least):
        shown("--time=3", "--notice=120")
    with pytest.raises(InputError, match="got '1', 60 s"):
        shown("--time=60", "--notice=10", "-o", "time=1")
    with pytest.raises(SystemExit):  # the most that sbatch takes
        shown("--time=UNLIMITED", "--notice=65536")
    for limit in ("3:01", "0:3:1", "0-0:4", "UNLIMITED", "90"):
        shown(f"--time={limit}", "--notice=120")
    for limit, notice in (("INFINITE", 120), ("5", 120), ("3", 60), ("1", 10)):
        assert f"signal=B:USR1@{notice}" in directives(shown(f"--time={limit}"))


def test_an_option_does_not_replace_the_script() -> None:
    with pytest.raises(InputError, match="option wrap: expected none"):
        shown("-o", "wrap=ls")


def test_a_run_is_no_array() -> None:
    with pytest.raises(InputError, match=r"option array: expected none, .*; hpcfed sweep --array N has jobs share"):
        shown("-o", "array=1-4")
    asked = ["recipe.yaml", "--array", "4", "--time", "10", "--dry-run", "-o", "array=1-4%2"]
    assert "array=1-4%2" in directives(CliRunner().invoke(sweep, asked).output)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({"modules": ["gcc/13"]}, "module load gcc/13"),
        ({"setup": "cd /nowhere/at/all"}, "setup: cd /nowhere/at/all"),
        ({"setup": ": $UNSET\nsource ./env.sh"}, None),
    ],
)
def test_a_job_whose_start_fails_does_not_run(folder: Path, site_file: Path, site: dict, said: str | None) -> None:
    """Scripts that the site's lines source may use unset variables, and have commands that fail."""
    site_file.write_text(json.dumps({**site, "launch": "env", "python": "bash -c 'touch began'"}))
    (folder / "env.sh").write_text(": $UNSET\nfalse\ntrue\n")
    (folder / "job.sh").write_text(shown())
    done = subprocess.run(["bash", "job.sh"], env=JOB, capture_output=True, text=True, timeout=60)
    assert (folder / "began").exists() == (said is None)
    if said is not None:
        assert done.returncode == 4
        assert done.stderr.splitlines()[-1] == f"hpcfed: the job ends, since its start failed: {said}"


def test_no_file_of_the_working_folder_runs_in_the_place_of_a_library(folder: Path, site_file: Path) -> None:
    """Neither where `submit` asks for the MPI, nor in the job, which Python starts in a stranger's folder, too."""
    for name in ("mpi4py", "numpy", "hpcfed"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    assert find_mpi({}).vendor == launcher(sys.executable).mpi
    site_file.write_text("{launch: env}")
    script = CliRunner().invoke(command, ["recipe.yaml", "--time", "10", "--dry-run"]).stdout
    (folder / "job.sh").write_text(script.replace("recipe.yaml", "no-recipe.yaml", 1))
    job = subprocess.run(["bash", "job.sh"], env=JOB, capture_output=True, text=True, timeout=60, cwd=folder)
    assert "hpcfed: " in job.stderr
    assert not (folder / "ran").exists()


def test_a_clone_that_is_not_installed_is_imported_from_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = [place for place in sys.path if place and Path(place).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(ROOT), *installed])
    monkeypatch.chdir(ROOT)
    assert python_options() == ()
    monkeypatch.setattr(sys, "path", [str(ROOT), *installed, str(ROOT)])
    assert python_options() == ("-P",)
    monkeypatch.chdir(tmp_path)
    assert python_options() == ("-P",)


@pytest.mark.parametrize("name", ["submit", "scale", *SHARING])
def test_a_job_whose_recipe_has_changed_does_not_run(folder: Path, site_file: Path, name: str) -> None:
    site_file.write_text("{launch: env, python: 'echo began'}")
    asked = {"submit": [], "scale": ["--slurm", "--ranks", "1"]}.get(name, ["--array", "2"])
    recipe = folder / "my own.yaml"
    original = TOY if name == "reproduce" else folder / "recipe.yaml"
    recipe.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    every = {"submit": command, "scale": scale, **SHARING}
    done = CliRunner().invoke(every[name], ["my own.yaml", *asked, "--time", "10", "--dry-run"])
    assert done.exit_code == 0, done.exception
    (folder / "job.sh").write_text(done.stdout)

    def job() -> subprocess.CompletedProcess[str]:
        task = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}
        return subprocess.run(["bash", "job.sh"], env=JOB | task, capture_output=True, text=True, timeout=60)

    first, requeued = job(), job()
    assert first.stdout.startswith("began -P -m hpcfed "), first.stderr
    assert requeued.stdout == first.stdout
    with recipe.open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    edited = job()
    assert (edited.returncode, edited.stdout) == (2, "")
    why = "has changed since the job was submitted, or cannot be read; submit it again"
    assert f"hpcfed: {recipe}: {why}" in edited.stderr.splitlines()


def test_a_recipe_that_is_a_pipe_is_not_submitted(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    writer = subprocess.Popen(["bash", "-c", "cat recipe.yaml > pipe.yaml"])
    done = CliRunner().invoke(command, ["pipe.yaml", "--time", "10", "--dry-run"])
    writer.wait(timeout=60)
    assert isinstance(done.exception, InputError)
    assert str(done.exception).endswith("/pipe.yaml: recipe: expected a file, since the job reads it when it starts")


def test_modules_are_loaded_where_only_login_shells_have_them(folder: Path, site_file: Path) -> None:
    """With ``--export=NONE`` a job has no function `module`; ``/etc/profile`` defines it."""
    site_file.write_text("{modules: [gcc/13], launch: env, python: 'bash -c \"echo $LOADED\"'}")
    profile = folder / "profile"
    profile.write_text("module() { export LOADED=$2; }\n")
    script = shown()
    assert script.count(" /etc/profile ") == 1
    (folder / "job.sh").write_text(script.replace("/etc/profile", str(profile)))
    done = subprocess.run(["bash", "job.sh"], env=JOB, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "gcc/13\n"), done.stderr


def test_a_signal_before_the_step_is_forwarded_to_it(folder: Path, site_file: Path) -> None:
    """SLURM's signal comes while the site's own lines are at work."""
    (folder / "step.py").write_text(
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "print(signal.sigwait([signal.SIGUSR1]).name)\n"
    )
    site = {"setup": "kill -USR1 $$", "launch": "env", "python": f"{sys.executable} step.py"}
    site_file.write_text(json.dumps(site))
    (folder / "job.sh").write_text(shown())
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN, "left ignored: no shell can trap it"
    job = subprocess.run(["timeout", "50", "bash", "job.sh"], env=JOB, capture_output=True, text=True, timeout=60)
    assert (job.returncode, job.stdout) == (0, "SIGUSR1\n"), job.stderr


def test_a_recipe_that_cannot_run_is_not_submitted() -> None:
    with pytest.raises(InputError, match="did you mean 'rounds'"):
        shown("round=3")


def test_without_slurm_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    done = CliRunner().invoke(command, ["recipe.yaml", "--time", "10"])
    assert isinstance(done.exception, InputError)
    assert "squeue is not on the PATH; submit from a login node" in str(done.exception)
    assert not (folder / "run.sbatch").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_ready_made_scripts_are_sound(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    told = directives(text)
    assert "open-mode=append" in told
    assert any(line.startswith("time=") for line in told)


@pytest.mark.parametrize("script", REQUEUED, ids=lambda script: script.name)
def test_the_ready_made_scripts_requeue_as_those_written_do(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert {"requeue", "signal=B:USR1@120"} <= set(directives(text))
    own = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(own) <= 8
    assert own[-2].startswith("exec hpcfed job-step ")


STOPS = "import signal,sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [10])\nsignal.sigwait([10])\nsys.exit(75)"
"""A rank that waits for SIGUSR1 as a run does."""


def test_a_job_of_a_script_of_ones_own_passes_a_signal_on(folder: Path) -> None:
    """From its first moment on; SLURM's commands are missing here: nothing goes back into the queue."""
    ranks = ["bash", "-c", f"touch began; exec {sys.executable} -c '{STOPS}'"]
    command = [sys.executable, "-m", "hpcfed", "job-step", "--output=run", "--", *ranks]
    job = subprocess.Popen(command, env=JOB)
    while not (folder / "began").exists():
        time.sleep(0.05)
    time.sleep(1)
    job.send_signal(signal.SIGTERM)  # which SLURM has sent to the ranks as well
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 75


def test_ranks_that_cannot_be_started_are_named(folder: Path) -> None:
    done = CliRunner().invoke(job_step, ["--output=run", "--", "nothing/such", "run"])
    assert str(done.exception) == "nothing/such cannot be started: got No such file or directory"
    done = CliRunner().invoke(job_step, ["--scheduler=lsf", "--output=run", "--", "true"])
    assert str(done.exception) == "--scheduler: expected flux or pbs or slurm, got lsf"
    assert registry.names(SCHEDULERS) == registry.names(SCHEDULERS_OF_JOBS)


PROGRAM = """#!/bin/bash
# Stands for a command of PBS: it notes how it was called.
echo "${0##*/} $*" >> called
[[ ${0##*/} != qselect ]] || cat waiting
"""


@pytest.mark.parametrize(
    ("deed", "options", "called"),
    [
        ("touch run/checkpoints/round-2.json; exit 75", [], ["qsub job.pbs"]),
        ("exit 75", [], []),  # nothing new is on disk
        ("touch run/checkpoints/round-2.json; kill -KILL $$", [], ["qsub job.pbs"]),
        ("touch run/checkpoints/round-2.json; echo 3 > run.deaths; kill -KILL $$", [], []),
        # cancelled, for which PBS sends TERM
        ("trap : USR1; kill -TERM $PPID; sleep 1 & wait; touch run/checkpoints/round-2.json; exit 75", [], []),
        ("exit 3", ["--chain=mine"], ["qselect -u {user} -N mine -s HQW", "qdel 7 8"]),
        # another job of the array has submitted it again
        ("touch run/checkpoints/round-2.json; exit 75", ["--array"], ["qselect -u {user} -N mine -s HQW"]),
    ],
)
def test_a_job_of_pbs_is_submitted_again_where_it_can_go_on(
    folder: Path, deed: str, options: list[str], called: list[str]
) -> None:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "waiting").write_text("7\n8\n")
    (folder / "bin").mkdir()
    for name in ("qsub", "qdel", "qselect"):
        (folder / "bin" / name).write_text(PROGRAM)
        (folder / "bin" / name).chmod(0o755)
    step = [sys.executable, "-m", "hpcfed", "job-step", "--scheduler=pbs", "--script=job.pbs", "--output=run", *options]
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PBS_JOBNAME": "mine"}
    done = subprocess.run([*step, "--", "bash", "-c", deed], env=JOB | path, capture_output=True, text=True, timeout=60)
    noted = (folder / "called").read_text().splitlines() if (folder / "called").exists() else []
    assert noted == [line.format(user=getpass.getuser()) for line in called], done.stderr
    assert (folder / "run.deaths").exists() == ("KILL" in deed and called != [])


def test_checkpoints_behind_a_link_are_looked_for(folder: Path) -> None:
    (folder / "scratch" / "seed-1" / "checkpoints").mkdir(parents=True)
    (folder / "scratch" / "seed-1" / "checkpoints" / "round-1.json").touch()
    (folder / "scratch" / "seed-1" / "checkpoints" / "round-1.safetensors").touch()
    (folder / "linked").symlink_to("scratch")
    assert saved(folder / "linked") == {folder.resolve() / "scratch/seed-1/checkpoints/round-1.json"}


def test_the_page_on_clusters_shows_a_site_file_that_is_one(folder: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "site.yaml").write_text(block)
    assert {"partition=cpu", "account=p7"} <= set(directives(shown("--site", "site.yaml")))
    for name in re.findall(r"`(jobs/[\w./-]+)`", page):
        assert (ROOT / name).exists()
    assert set(re.findall(r"start from `jobs/slurm/`: `([\w-]+)`", page)) <= {script.stem for script in SCRIPTS}


LINGERING = """
import time
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)
"""


@pytest.fixture
def lingering(folder: Path) -> dict[str, object]:
    """A model whose training waits more than it computes, so that a job is stopped in the middle."""
    (folder / "lingering.py").write_text(LINGERING)
    return {"factory": "lingering:Net", "args": {"in_features": 12, "out_features": 4}}


def test_a_script_of_pbs_asks_for_what_was_asked(folder: Path, site_file: Path) -> None:
    write_recipe(folder, rounds=2, device="cpu")
    site_file.write_text("{scheduler: pbs, launch: env, options: {account: p7, queue: small, place: scatter}}")
    size = ("--nodes", "2", "--ranks-per-node", "8", "threads=2", "--gpus-per-node", "4", "-o", "filesystems=home")
    size += ("--mem", "64G")
    told = [line.removeprefix("#PBS ") for line in shown(*size).splitlines() if line.startswith("#PBS ")]
    assert {
        "-l select=2:ncpus=16:mpiprocs=8:ompthreads=2:ngpus=4:mem=64gb",
        "-l walltime=4:00:00",
        "-j oe",
        "-r n",
    } <= set(told)
    assert {"-A p7", "-q small", "-l place=scatter", "-l filesystems=home", f"-o {folder}/run.log"} <= set(told)
    site_file.write_text("{scheduler: pbs, launch: env, options: {exclusive: true}}")
    placed = [[line for line in shown(*size).splitlines() if "place" in line] for size in ((), ("--nodes", "2"))]
    assert placed == [["#PBS -l place=exclhost"], ["#PBS -l place=scatter:exclhost"]]
    assert "#PBS -l place=pack:excl\n" in shown("-o", "place=pack:excl")
    assert "exclusive" not in shown("--nodes", "2")
    site_file.write_text("{scheduler: pbs, launch: env}")
    script = shown()
    assert "place=" not in script
    head = script[: script.index("set -u")]
    for id, log in (("12.host", "run-12.log"), ("12[3].host", "run-12_3.log")):
        for said in ("one", "two"):  # a job that is submitted again under PBS adds to no other job's log
            subprocess.run(["bash", "-c", f"{head}\necho {said}"], env=os.environ | {"PBS_JOBID": id}, check=True)
        assert (folder / log).read_text() == "one\ntwo\n"
    assert {"--scheduler=pbs", f"--script={folder}/run.pbs", "--signal-after=14280"} <= set(step(script))
    assert "--no-requeue" in step(shown("-o", "no-requeue"))
    with pytest.raises(InputError, match="qselect is not on the PATH; submit from a login node"):
        command.main(["recipe.yaml", "--time", "1:00:00"], standalone_mode=False)
    with pytest.raises(InputError, match="--time: expected a limit, which PBS needs"):
        command.main(["recipe.yaml", "--time", "UNLIMITED"], standalone_mode=False)
    site_file.write_text("scheduler: lsf")
    with pytest.raises(InputError, match="scheduler: expected flux or pbs or slurm"):
        command.main(["recipe.yaml", "--time", "1:00:00"], standalone_mode=False)


@pytest.mark.soak
def test_a_script_of_pbs_trains(folder: Path, site_file: Path, lingering: dict[str, object]) -> None:
    """Started here, without PBS: to its end, and to a stop at its own notice."""
    write_recipe(folder, rounds=2, device="cpu")
    site_file.write_text("{scheduler: pbs, launch: env}")
    done = subprocess.run(["bash", "-c", shown()], capture_output=True, text=True, cwd=folder)
    assert (done.returncode, (folder / "run" / "model.safetensors").exists()) == (0, True), done.stderr
    write_recipe(folder, rounds=10**6, device="cpu", output="long", model=lingering)
    soon = shown("-o", "no-requeue").replace("14280", "12")
    assert subprocess.run(["bash", "-c", soon], capture_output=True, cwd=folder).returncode == 75
    assert list((folder / "long" / "checkpoints").glob("round-*.json"))


FLUX = """#!/bin/bash
# Stands for Flux's commands, as its manual has them, with one rank.
case "$*" in
"run "*) shift; while [[ $1 == --* ]]; do shift; done; echo $$ > job; exec "$@" ;;
"job last") cat job ;;
"job kill --signal=SIGUSR1 "*) kill -USR1 "$4" ;;
"--parent batch "*) echo "$3" > again ;;
*) echo "flux: $*?" >&2; exit 1 ;;
esac
"""


def test_a_script_of_flux_asks_for_what_was_asked_and_trains(
    folder: Path, site_file: Path, lingering: dict[str, object]
) -> None:
    """Started here, with a program in place of Flux's: it stops at its own notice, and is submitted again."""
    write_recipe(folder, rounds=10**6, device="cpu", output="it's mine", model=lingering)
    site_file.write_text("{scheduler: flux, options: {account: p7}}")
    size = ("--nodes", "2", "--ranks-per-node", "8", "threads=2", "--gpus-per-node", "4", "--partition", "pbatch")
    script = shown(*size, "-o", "exclusive")
    told = [shlex.split(line.removeprefix("# flux: ")) for line in script.splitlines() if line.startswith("# flux: ")]
    assert all(len(words) == 1 for words in told)
    assert {"--nodes=2", "--nslots=2", "--cores-per-slot=16", "--gpus-per-slot=4", "--time-limit=14400s"} <= {
        words[0] for words in told
    }
    assert {"--setattr=bank=p7", "--queue=pbatch", "--exclusive", f"--output={folder}/it's mine-{{{{id}}}}.log"} <= {
        words[0] for words in told
    }
    sized = ["flux", "run", "--nodes=2", "--tasks-per-node=8", "--cores=32", "--gpus-per-node=4"]
    assert words(script)[:6] == sized  # else Flux hides the GPUs from the ranks
    assert words(shown())[:5] == ["flux", "run", "--nodes=1", "--ntasks=1", "--cores-per-task=1"]
    with pytest.raises(InputError, match="--mem: expected none, since Flux deals out no memory, got 1G"):
        shown("--mem", "1G")
    with pytest.raises(InputError, match="--time: expected a limit"):
        shown("--time", "UNLIMITED")
    (folder / "bin").mkdir()
    (folder / "bin" / "flux").write_text(FLUX)
    (folder / "bin" / "flux").chmod(0o755)
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    soon = shown().replace("14280", "12")
    done = subprocess.run(["bash", "-c", soon], capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 75, done.stderr
    assert (folder / "again").read_text() == f"{folder}/it's mine.flux\n"
    with pytest.raises(InputError, match="flux is not on the PATH; submit from a login node"):
        command.main(["recipe.yaml", "--time", "1:00:00"], standalone_mode=False)

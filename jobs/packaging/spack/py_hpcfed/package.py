# Spack's package of hpcfed; written, not run (no Spack where it was written).
#
#     spack repo create ~/hpcfed-repo hpcfed_repo                                       # in a clone
#     cp -r jobs/packaging/spack/py_* ~/hpcfed-repo/spack_repo/hpcfed_repo/packages/    # the folder that it has made
#     spack repo add ~/hpcfed-repo/spack_repo/hpcfed_repo
#     spack dev-build --source-path "$PWD" py-hpcfed@0.2.0
#
# Spack's packages of July 2026 have all that it depends on, but ijson, which is beside it, and dp-accounting, for
# privacy, which pip adds. Repositories of Spack before 1.0 name the folders py-hpcfed and py-ijson, and import
# PythonPackage from spack.package, too.

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcfed(PythonPackage):
    """Federated learning on HPC clusters: an MPI simulator whose result does not depend on the number of ranks."""

    license("Apache-2.0")

    version("0.2.0")  # from a clone, by dev-build; hpcfed is not published

    depends_on("python@3.11:3.14", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-click@8.2:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-ijson@3.4:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-pandas@2.1:", type=("build", "run"))
    depends_on("py-pillow@11.1:", type=("build", "run"))
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-pyarrow@15:", type=("build", "run"))
    depends_on("py-pydantic@2.11:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-ruamel-yaml@0.18:", type=("build", "run"))
    depends_on("py-safetensors@0.7:", type=("build", "run"))
    depends_on("py-scipy@1.10:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.2:", type=("build", "run"))
    depends_on("py-torch@2.4:2", type=("build", "run"))
    depends_on("py-xxhash@3.4.1:", type=("build", "run"))
